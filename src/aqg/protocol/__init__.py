"""The protocol that keeps client and server in step on any transport: bytes in, bytes out.

`ServerSession` and `ClientSession` are all that a transport needs; ``examples/http`` is one.
"""

from aqg.protocol.client import ClientSession
from aqg.protocol.server import Receipt, ServerSession

__all__ = ["ClientSession", "Receipt", "ServerSession"]
