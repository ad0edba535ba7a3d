"""One record instead of many: all that a message holds, as bytes in a single ConfigRecord.

Flower makes an object with requests of its own of every record. So the app's small records, and
what stands for its arrays, travel in one; docs/reference/frame-format.md has it byte by byte.
"""

from __future__ import annotations

import base64
import json
import logging
import zlib
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from aqg import __version__
from aqg.errors import MessageError, WireError
from aqg.wire.varint import read_varint, write_varint

RECORD = "aqg"
"""The name of our record."""
LARGE_BYTES = 4 << 20
"""Payloads above this length are sent as arrays, which Flower sends in pieces."""
_WITH_VERSION, _WITHOUT = 0xA2, 0xA3
_WORDS = (
    b'"train_acc":"eval_acc":"eval_loss":"accuracy":"loss":0.{"partition-id":"p","h",null]'
    b'["metrics","m",{"train_loss":,"num-examples":[["arrays","x"["arrays","f"'
    b'["",[["arrays","a"],["config","c",{"lr":0.0,"server-round":1}]]]'
)
"""What heads are likely to hold, the likeliest last."""
_MOST_HEAD_BYTES = 1 << 28
_CRC_BYTES = 4
_BYTES = "bytes"
_SMALL = ("c", "m")  # ConfigRecord, MetricRecord
COMPRESSED, FULL, BESIDE = "a", "f", "x"  # arrays: FULL are beside it and have an order in it
HELLO, ON_DISK, ENDED = "h", "d", "e"  # which partition is it?; it remembers; it may forget
_WITH_PART = (COMPRESSED, FULL)
_FAILED = 6
"""Flower's code for a mod whose conditions are not met."""
_logger = logging.getLogger("flwr.aqg")


@dataclass
class Envelope:
    """What a message holds."""

    # name, kind and, for small ones, content of each record, in order
    records: list[tuple[str, str, Any]] = field(default_factory=list)
    # what stands for the array records of kinds ``a`` and ``f``, in order
    parts: list[bytes] = field(default_factory=list)
    version: str = __version__  # of the ``aqg`` that wrote it
    says_version: bool = True  # else both sides are known to have the same

    def add(self, name: str, record: ConfigRecord | MetricRecord) -> None:
        kind = "c" if isinstance(record, ConfigRecord) else "m"
        self.records.append((name, kind, {key: _plain(value) for key, value in record.items()}))

    def add_model(self, name: str, kind: str, part: bytes) -> None:
        self.records.append((name, kind, None))
        self.parts.append(part)

    def to_bytes(self) -> bytes:
        rows = [
            [name, kind] if rest is None else [name, kind, rest]
            for name, kind, rest in self.records
        ]
        said = self.version if self.says_version else ""
        coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, zdict=_WORDS)
        head = coder.compress(json.dumps([said, rows], separators=(",", ":")).encode())
        head += coder.flush()
        mark = _WITH_VERSION if self.says_version else _WITHOUT
        pieces = [bytes([mark]), write_varint(len(head)), head]
        for part in self.parts:
            pieces += [write_varint(len(part)), part]
        body = b"".join(pieces)
        return body + _checksum(body)

    @staticmethod
    def from_bytes(data: bytes) -> Envelope:
        """Read it; raise `WireError` where it is damaged or of another version."""
        if len(data) <= _CRC_BYTES:
            raise WireError(f"{len(data)} bytes are no envelope")
        body = data[:-_CRC_BYTES]
        if body[0] not in (_WITH_VERSION, _WITHOUT):
            raise WireError(
                f"byte {body[0]:#04x} does not begin an envelope of aqg {__version__}; both sides "
                "need the same version of aqg"
            )
        if _checksum(body) != data[-_CRC_BYTES:]:
            other = "" if body[0] == _WITH_VERSION else f", or not of aqg {__version__}"
            raise WireError(f"the checksum of the envelope is wrong: it is damaged{other}")
        head, position = _part(body, 1)
        envelope = _read_head(head)
        for _, kind, _ in envelope.records:
            if kind in _WITH_PART:
                part, position = _part(body, position)
                envelope.parts.append(part)
        if position != len(body):
            raise WireError(f"{len(body) - position} bytes follow the last part")
        return envelope

    def small(self, kind: str, content: Any) -> ConfigRecord | MetricRecord:
        values = {key: _rich(value) for key, value in content.items()}
        try:
            return ConfigRecord(values) if kind == "c" else MetricRecord(values)
        except (TypeError, ValueError) as error:
            raise MessageError(f"a record of the message cannot be read: {error}") from None


def pack(envelope: Envelope) -> ConfigRecord | ArrayRecord:
    data = envelope.to_bytes()
    if len(data) <= LARGE_BYTES:
        return ConfigRecord({_BYTES: data})
    return ArrayRecord({_BYTES: Array("uint8", (len(data),), _BYTES, data)})


def unpack(content: RecordDict) -> Envelope:
    """Return the envelope in a message.

    Raises `MessageError` or `WireError` where there is none, and where another version of ``aqg``
    wrote it.
    """
    record = content.get(RECORD)
    if not isinstance(record, ConfigRecord | ArrayRecord) or list(record) != [_BYTES]:
        raise MessageError(f"the message has no record {RECORD!r} with bytes alone")
    value: Any = record[_BYTES]
    data = value.data if isinstance(value, Array) else value
    if not isinstance(data, bytes):
        raise MessageError(f"record {RECORD!r} holds {type(data).__name__}, not bytes")
    envelope = Envelope.from_bytes(data)
    if envelope.version != __version__:
        raise MessageError(
            f"the other side has aqg {envelope.version}, this one {__version__}; both need the "
            "same version of aqg"
        )
    return envelope


def answer(message: Message, envelope: Envelope) -> Message:
    """Return the reply that is an envelope alone."""
    return Message(RecordDict({RECORD: pack(envelope)}), reply_to=message)


def refusal(message: Message, error: Exception) -> Message:
    """Return a node's reply to what it cannot use: it says what is wrong."""
    _logger.error("%s", error)
    return Message(Error(_FAILED, f"aqg {__version__}: {error}"), reply_to=message)


def num_bytes(content: RecordDict) -> int:
    """Return the length of what is handed to Flower: envelope, arrays and other values."""
    total = 0
    for record in content.values():
        for value in record.values():
            data = value.data if isinstance(value, Array) else value
            total += len(data) if isinstance(data, bytes) else len(str(data))
    return total


def _checksum(body: bytes) -> bytes:
    key = zlib.crc32(__version__.encode()) if body[0] == _WITHOUT else 0
    return zlib.crc32(body, key).to_bytes(_CRC_BYTES, "little")


def _read_head(head: bytes) -> Envelope:
    try:
        decoder = zlib.decompressobj(-zlib.MAX_WBITS, zdict=_WORDS)
        version, rows = json.loads(decoder.decompress(head, _MOST_HEAD_BYTES))
        records = []
        for name, kind, *rest in rows:
            content = rest[0] if rest else None
            is_right = isinstance(name, str) and (kind in _SMALL) == isinstance(content, dict)
            if not is_right or kind not in (*_SMALL, *_WITH_PART, BESIDE, HELLO, ON_DISK, ENDED):
                raise ValueError(f"record {name!r}")
            records.append((name, kind, content))
    except (ValueError, TypeError, RecursionError, zlib.error) as error:
        raise WireError(f"the head of the envelope cannot be read: {error}") from None
    return Envelope(records, [], str(version) or __version__, bool(version))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        try:
            return base64.b64decode(value[_BYTES], validate=True)
        except (KeyError, TypeError, ValueError):
            raise MessageError("a record of the message holds bytes that cannot be read") from None
    return [_rich(item) for item in value] if isinstance(value, list) else value


def _part(data: bytes, position: int) -> tuple[bytes, int]:
    length, position = read_varint(data, position)
    if length > len(data) - position:
        raise WireError(f"a part claims {length} bytes; {len(data) - position} are left")
    return data[position : position + length], position + length
