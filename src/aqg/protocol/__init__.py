"""The protocol that keeps client and server in step on any transport: bytes in, bytes out.

`ServerSession` and `ClientSession` are all that a transport needs; ``examples/http`` is one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aqg.protocol.client import ClientSession
    from aqg.protocol.server import Receipt, ServerSession

_HOMES = {
    "ClientSession": "aqg.protocol.client",
    "Receipt": "aqg.protocol.server",
    "ServerSession": "aqg.protocol.server",
}

__all__ = ["ClientSession", "Receipt", "ServerSession"]


def __getattr__(name: str) -> object:
    """Import on first use: the parts import each other."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
