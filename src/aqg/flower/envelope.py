"""What is in a message: one record instead of many, arrays as NumPy's, and numbers by name.

Flower makes an object with requests of its own of every record. So the app's small records, and
what stands for its arrays, travel as bytes in one; docs/reference/frame-format.md has it byte by
byte. Arrays are read and written here with fewer copies than Flower makes of them.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from aqg import __version__
from aqg.channel.tensors import Tensor, bits_of
from aqg.errors import ConfigError, MessageError, WireError
from aqg.wire.varint import CRC_BYTES, Reader, seal, write_part

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
_BYTES = "bytes"
_SMALL = ("c", "m")  # ConfigRecord, MetricRecord
_FAILED = 6
"""Flower's code for a mod whose conditions are not met."""
logger = logging.getLogger("flwr.aqg")

_NUMPY = "numpy.ndarray"
TRAINED, EVALUATED = "train_", "eval_"
"""Begin the names of fields with what clients measured while they trained, and of the model."""
EXAMPLES = "num-examples"
"""The metric by which others are weighted, under Flower's name for it."""
_LONGEST_NAME = 80
_LOSSES = ("loss", "train_loss", "train-loss", "eval_loss", "eval-loss")


@dataclass
class Envelope:
    """What a message holds."""

    COMPRESSED, FULL, BESIDE = "a", "f", "x"  # arrays: FULL are beside it and have an order in it
    HELLO, ON_DISK, ENDED = "h", "d", "e"  # which partition is it?; it remembers; it may forget
    KINDS = (COMPRESSED, FULL, BESIDE, HELLO, ON_DISK, ENDED)
    WITH_PART = KINDS[:2]

    # name, kind and content of each record, in order: fields of small ones, and of kinds ``a`` and
    # ``f`` the bytes that stand for arrays
    records: list[tuple[str, str, Any]] = field(default_factory=list)
    version: str = __version__  # of the ``aqg`` that wrote it
    says_version: bool = True  # else both sides are known to have the same

    def add(self, name: str, kind: str, content: bytes | None = None) -> None:
        self.records.append((name, kind, content))

    def add_small(self, name: str, record: ConfigRecord | MetricRecord) -> None:
        kind = "c" if isinstance(record, ConfigRecord) else "m"
        self.records.append((name, kind, dict(record)))

    def to_bytes(self) -> bytes:
        rows = [[*row] if row[1] in _SMALL else [*row[:2]] for row in self.records]
        parts = [content for _, kind, content in self.records if kind in Envelope.WITH_PART]
        said = self.version if self.says_version else ""
        coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, zdict=_WORDS)
        text = json.dumps([said, rows], separators=(",", ":"), default=_plain)
        head = coder.compress(text.encode())
        head += coder.flush()
        mark = bytes([_WITH_VERSION if self.says_version else _WITHOUT])
        return _seal(mark + b"".join(map(write_part, (head, *parts))))

    @staticmethod
    def from_bytes(data: bytes) -> Envelope:
        """Read it; raise `WireError` where it is damaged or of another version."""
        if len(data) <= CRC_BYTES:
            raise WireError(f"{len(data)} bytes are no envelope")
        body = data[:-CRC_BYTES]
        if body[0] not in (_WITH_VERSION, _WITHOUT):
            raise WireError(
                f"byte {body[0]:#04x} does not begin an envelope of aqg {__version__}; both sides "
                "need the same version of aqg"
            )
        if _seal(body) != data:
            other = "" if body[0] == _WITH_VERSION else f", or not of aqg {__version__}"
            raise WireError(f"the checksum of the envelope is wrong: it is damaged{other}")
        reader = Reader(body[1:], "the envelope")
        envelope = _read_head(reader.part("a part").tobytes())
        for place, (name, kind, _) in enumerate(envelope.records):
            if kind in Envelope.WITH_PART:
                envelope.records[place] = name, kind, reader.part("a part").tobytes()
        reader.finish("the last part")
        return envelope

    def small(self, kind: str, content: Any) -> ConfigRecord | MetricRecord:
        values = {key: _rich(value) for key, value in content.items()}
        try:
            return ConfigRecord(values) if kind == "c" else MetricRecord(values)
        except (TypeError, ValueError) as error:
            raise MessageError(f"a record of the message cannot be read: {error}") from None

    def pack(self) -> ConfigRecord | ArrayRecord:
        data = self.to_bytes()
        if len(data) <= LARGE_BYTES:
            return ConfigRecord({_BYTES: data})
        return ArrayRecord({_BYTES: Array("uint8", (len(data),), _BYTES, data)})

    @staticmethod
    def unpack(content: RecordDict) -> Envelope:
        """Return the envelope in a message.

        Raises `MessageError` or `WireError` where there is none, and where another version of
        ``aqg`` wrote it.
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

    def reply_to(self, message: Message) -> Message:
        """Return the reply to a message that is this alone."""
        return Message(RecordDict({RECORD: self.pack()}), reply_to=message)


def refusal(message: Message, error: Exception) -> Message:
    """Return a node's reply to what it cannot use: it says what is wrong."""
    logger.error("%s", error)
    return Message(Error(_FAILED, f"aqg {__version__}: {error}"), reply_to=message)


def num_bytes(content: RecordDict) -> int:
    """Return the length of what is handed to Flower: envelope, arrays and other values."""
    total = 0
    for record in content.values():
        for value in record.values():
            data = value.data if isinstance(value, Array) else value
            total += len(data) if isinstance(data, bytes) else len(str(data))
    return total


def _seal(body: bytes) -> bytes:
    return seal(body, __version__.encode() if body[0] == _WITHOUT else b"")


def _read_head(head: bytes) -> Envelope:
    try:
        decoder = zlib.decompressobj(-zlib.MAX_WBITS, zdict=_WORDS)
        version, rows = json.loads(decoder.decompress(head, _MOST_HEAD_BYTES))
        records = []
        for name, kind, *rest in rows:
            content = rest[0] if rest else None
            is_right = isinstance(name, str) and (kind in _SMALL) == isinstance(content, dict)
            if not is_right or kind not in (*_SMALL, *Envelope.KINDS):
                raise ValueError(f"record {name!r}")
            records.append((name, kind, content))
    except (ValueError, TypeError, RecursionError, zlib.error) as error:
        raise WireError(f"the head of the envelope cannot be read: {error}") from None
    return Envelope(records, str(version) or __version__, bool(version))


def _plain(value: bytes) -> dict[str, str]:
    return {_BYTES: base64.b64encode(value).decode()}


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        try:
            return base64.b64decode(value[_BYTES], validate=True)
        except (KeyError, TypeError, ValueError):
            raise MessageError("a record of the message holds bytes that cannot be read") from None
    return [_rich(item) for item in value] if isinstance(value, list) else value


def tensor_of(array: Array) -> Tensor:
    """Return the tensor of an array; it lies in the array's own bytes, and cannot be written to."""
    if array.stype != _NUMPY:
        raise MessageError(f"an array is {array.stype!r}; {_NUMPY!r} can be read")
    stream = BytesIO(array.data)
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0}
    reader = readers.get(version, np.lib.format.read_array_header_2_0)
    shape, is_fortran, dtype = reader(stream)
    if dtype.hasobject:
        raise MessageError("an array holds Python objects; numbers can be read")
    size = int(np.prod(shape, dtype=np.int64))
    if not size:
        return np.zeros(shape, dtype)
    flat = np.frombuffer(array.data, dtype, size, stream.tell())
    return flat.reshape(shape, order="F" if is_fortran else "C")


def array_of(tensor: Tensor) -> Array:
    """Return the array of a tensor, as `flwr.app.Array` makes it, with a single copy of it."""
    tensor = np.asarray(tensor, order="C")
    head = BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(tensor))
    data = b"".join([head.getvalue(), bits_of(tensor).data])
    return Array(str(tensor.dtype), tuple(tensor.shape), _NUMPY, data)


def is_readable(record: ArrayRecord) -> bool:
    return all(array.stype == _NUMPY for array in record.values())


def values_of(record: ArrayRecord) -> dict[str, Tensor]:
    """Return the tensors of a record, without a copy (`tensor_of`)."""
    return {name: tensor_of(array) for name, array in record.items()}


def record_of(values: Iterable[tuple[str, Tensor]]) -> ArrayRecord:
    return ArrayRecord({name: array_of(tensor) for name, tensor in values})


def numbers_in(content: RecordDict) -> dict[str, float]:
    """Return the numbers in all metrics of a reply; lists are left out."""
    return {
        plain(name, _LONGEST_NAME): float(value)
        for record in content.metric_records.values()
        for name, value in record.items()
        if isinstance(value, int | float)
    }


def loss_in(metrics: Mapping[str, float]) -> float:
    """Return the loss among a client's metrics; NaN where there is none.

    >>> loss_in({"accuracy": 0.5, "train_loss": 0.25})
    0.25
    """
    return next((metrics[name] for name in _LOSSES if name in metrics), math.nan)


def as_metrics(said: float | Mapping[str, Any] | None, single: str) -> dict[str, float]:
    """Return what a user's function measured, by name; one number alone is ``single``.

    >>> as_metrics({"loss": 0.5, "accuracy": 0.75}, "loss"), as_metrics(0.5, "loss")
    ({'loss': 0.5, 'accuracy': 0.75}, {'loss': 0.5})
    """
    if said is None:
        return {}
    metrics = {}
    for name, value in (said if isinstance(said, Mapping) else {single: said}).items():
        try:
            metrics[str(name)] = float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"metric {name!r} is {value!r:.80}; it must be a number") from None
    return metrics


def plain(text: str, max_length: int = 500) -> str:
    r"""Make a text of a node fit for logs and terminals: one line, every character visible.

    >>> plain("lost\n\x1b[2J  the\u202e end")
    'lost \\x1b[2J the\\u202e end'
    """
    line = " ".join(text[:max_length].split())
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return "".join(shown)[:max_length]
