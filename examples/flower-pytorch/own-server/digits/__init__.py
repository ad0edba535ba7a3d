"""Handwritten digits, learned by several clients that keep their images."""
