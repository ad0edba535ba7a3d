"""Simulators: a reference that reads like the paper."""
