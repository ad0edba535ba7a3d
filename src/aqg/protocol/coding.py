"""Orders and replies as bytes.

====================== =====================================================================
byte 0                 ``0x82``: an order, version 2; ``0x91``: a reply, version 1
fields                 one after the other, in the order in which the class names them:
                       integers as varints, truths as a byte, floats as 8 bytes,
                       texts (UTF-8) and bytes behind their length, a varint
last four bytes        CRC-32 of all before
====================== =====================================================================
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from aqg.errors import WireError
from aqg.protocol.messages import Order, Reply
from aqg.wire.varint import read_varint, write_varint

if TYPE_CHECKING:
    from collections.abc import Callable

_Message = TypeVar("_Message", Order, Reply)

_MARKS: dict[type[Any], int] = {Order: 0x82, Reply: 0x91}
_CRC_BYTES = 4
_FLOAT_BYTES = 8


def to_bytes(message: Order | Reply) -> bytes:
    """Write an order or a reply."""
    kind = type(message)
    types = get_type_hints(kind)
    parts = [_WRITERS[types[f.name]](getattr(message, f.name)) for f in fields(message)]
    body = b"".join([bytes([_MARKS[kind]]), *parts])
    return body + zlib.crc32(body).to_bytes(_CRC_BYTES, "little")


def order_from_bytes(data: bytes) -> Order:
    """Return the order that `to_bytes` wrote; raise `WireError` or `MessageError` otherwise."""
    return _read(Order, data)


def reply_from_bytes(data: bytes) -> Reply:
    """Return the reply that `to_bytes` wrote; raise `WireError` or `MessageError` otherwise."""
    return _read(Reply, data)


def _read(kind: type[_Message], data: bytes) -> _Message:
    name = kind.__name__.lower()
    if len(data) <= _CRC_BYTES:
        raise WireError(f"{len(data)} bytes are too few for an {name} or a reply")
    body = data[:-_CRC_BYTES]
    if body[0] != _MARKS[kind]:
        raise WireError(f"byte {body[0]:#04x} does not begin the {name} of this version of aqg")
    if zlib.crc32(body).to_bytes(_CRC_BYTES, "little") != data[-_CRC_BYTES:]:
        raise WireError(f"the checksum of the {name} is wrong: it is damaged")
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    position = 1
    for field in fields(kind):
        values[field.name], position = _READERS[types[field.name]](body, position)
    if position != len(body):
        raise WireError(f"{len(body) - position} bytes follow the last field of the {name}")
    return kind.from_fields(values)


def _write_bytes(value: bytes) -> bytes:
    return write_varint(len(value)) + value


def _read_bytes(body: bytes, position: int) -> tuple[bytes, int]:
    length, position = read_varint(body, position)
    if length > len(body) - position:
        raise WireError(f"a field claims {length} bytes; {len(body) - position} are left")
    return body[position : position + length], position + length


def _read_text(body: bytes, position: int) -> tuple[str, int]:
    data, position = _read_bytes(body, position)
    try:
        return data.decode(), position
    except UnicodeDecodeError:
        raise WireError(f"the text that ends at byte {position} is not UTF-8") from None


def _read_truth(body: bytes, position: int) -> tuple[bool, int]:
    if position >= len(body) or body[position] > 1:
        raise WireError(f"byte {position} is not 0 or 1")
    return bool(body[position]), position + 1


def _read_float(body: bytes, position: int) -> tuple[float, int]:
    end = position + _FLOAT_BYTES
    if end > len(body):
        raise WireError(f"the message ends at byte {len(body)}, inside a number")
    return struct.unpack("<d", body[position:end])[0], end


_WRITERS: dict[type[Any], Callable[[Any], bytes]] = {
    int: write_varint,
    bool: lambda value: bytes([value]),
    float: lambda value: struct.pack("<d", value),
    str: lambda value: _write_bytes(value.encode()),
    bytes: _write_bytes,
}
_READERS: dict[type[Any], Callable[[bytes, int], tuple[Any, int]]] = {
    int: read_varint,
    bool: _read_truth,
    float: _read_float,
    str: _read_text,
    bytes: _read_bytes,
}
