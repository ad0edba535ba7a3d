"""Recipes side by side: bytes uploaded until a task's target is reached."""
