"""Federated learning that uploads only what the server does not know yet."""

__version__ = "0.1.0"
