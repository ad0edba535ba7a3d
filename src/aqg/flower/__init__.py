"""Deployments with Flower: the same client and server as in the simulator, on a real network."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aqg.flower.compressed import Buffered, Compressed
    from aqg.flower.mod import aqg_mod, make_mod
    from aqg.flower.strategy import AQG, make_server_app
    from aqg.flower.task import FlowerTask, flatten, load_flat, make_client_app

_HOMES = {
    "compressed": ("Buffered", "Compressed"),
    "mod": ("aqg_mod", "make_mod"),
    "strategy": ("AQG", "make_server_app"),
    "task": ("FlowerTask", "flatten", "load_flat", "make_client_app"),
}

__all__ = [
    "AQG",
    "Buffered",
    "Compressed",
    "FlowerTask",
    "aqg_mod",
    "flatten",
    "load_flat",
    "make_client_app",
    "make_mod",
    "make_server_app",
]


def __getattr__(name: str) -> object:
    """Import on first use: the protocol alone needs no Flower."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
