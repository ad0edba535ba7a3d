"""Orders, replies and metrics of our own app in Flower's messages, and back.

Each is an envelope of a single record, as the drop-in's are (`aqg.flower.envelope`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ConfigRecord, MetricRecord, RecordDict

from aqg.errors import MessageError
from aqg.flower.envelope import (
    COMPRESSED,
    FULL,
    RECORD,
    Envelope,
    answer,
    pack,
    pack_payload,
    unpack,
    unpack_payload,
)
from aqg.protocol.coding import order_from_bytes, reply_from_bytes, to_bytes
from aqg.protocol.messages import MAX_FAULT_LENGTH

if TYPE_CHECKING:
    from flwr.app import Message

    from aqg.core.types import FloatArray
    from aqg.flower.envelope import Payload
    from aqg.protocol.messages import Order, Reply

MODEL, METRICS, HELLO = "model", "metrics", "hello"
_BYTES = "bytes"
_MOVEMENT_BYTES = 8
_HEAD_BYTES = 16_384
"""More than a reply needs around its frame and its statistics."""
_LONGEST_NAME = 80
_LONGEST_ERROR = 200
_UNREACHABLE = (3, 4, 5)
"""Flower's codes: order expired, reply expired, node unavailable."""


def plain(text: str, max_length: int = MAX_FAULT_LENGTH) -> str:
    r"""Make a text of a node fit for logs and terminals: one line, every character visible.

    >>> plain("lost\n\x1b[2J  the\u202e end")
    'lost \\x1b[2J the\\u202e end'
    """
    line = " ".join(text[:max_length].split())
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return "".join(shown)[:max_length]


def pack_model(parameters: FloatArray) -> Payload:
    """Return the record of a model; made once, it can be part of many messages."""
    return pack_payload(parameters.astype(parameters.dtype.newbyteorder("<"), copy=False).tobytes())


def unpack_model(content: RecordDict, num_params: int, dtype: str) -> FloatArray:
    """Return the model that came with an order; a copy, which training may change."""
    wanted = np.dtype(dtype).newbyteorder("<")
    data = unpack_payload(content, MODEL, num_params * wanted.itemsize)
    if len(data) != num_params * wanted.itemsize:
        raise MessageError(
            f"the model has {len(data)} bytes; {num_params} parameters in {dtype} take "
            f"{num_params * wanted.itemsize}"
        )
    parameters: FloatArray = np.frombuffer(data, wanted).astype(dtype)
    return parameters


def take_model(content: RecordDict, num_params: int, dtype: str) -> FloatArray:
    """Return what `unpack_model` does, and take the model out of the message: it may be large."""
    parameters = unpack_model(content, num_params, dtype)
    del content[MODEL]
    return parameters


def pack_order(order: Order, model: Payload | None = None) -> RecordDict:
    """Return the content of a message to a client: one record, and the model where it is whole."""
    envelope = Envelope()
    envelope.add_model(MODEL, COMPRESSED if model is None else FULL, to_bytes(order))
    content = RecordDict({RECORD: pack(envelope)})
    if model is not None:
        content[MODEL] = model
    return content


def carried_bytes(order: Order, model: Payload | None) -> int:
    """Return the length of what an order carries: its payloads and, with a model, the movement.

    The rest of the order is not counted, just as the head of a reply is not.
    """
    size = len(order.log) + len(order.snapshot) + len(order.statistics)
    if model is None:
        return size
    value: Any = model[_BYTES]
    return size + _MOVEMENT_BYTES + len(value.data if isinstance(value, Array) else value)


def unpack_order(content: RecordDict) -> Order:
    """Return the order in a message."""
    return order_from_bytes(_part_of(unpack(content)))


def pack_reply(message: Message, reply: Reply) -> Message:
    """Return the message that answers another with a reply: one record."""
    envelope = Envelope()
    envelope.add_model(MODEL, COMPRESSED, to_bytes(reply))
    return answer(message, envelope)


def unpack_reply(content: RecordDict, max_frame_bytes: int, max_statistics_bytes: int = 0) -> Reply:
    """Return the reply in a message, after checking all that can be checked by itself."""
    if set(content) != {RECORD}:
        raise MessageError(f"a reply has the record {RECORD!r} alone, not {sorted(content)}")
    most = max_frame_bytes + max_statistics_bytes + _HEAD_BYTES
    return _checked(_part_of(unpack(content, most)), max_frame_bytes, max_statistics_bytes)


def _checked(part: bytes, max_frame_bytes: int, max_statistics_bytes: int) -> Reply:
    reply = reply_from_bytes(part)
    for name, limit in (("frame", max_frame_bytes), ("statistics", max_statistics_bytes)):
        length = len(getattr(reply, name))
        if length > limit:
            raise MessageError(f"{name} has {length} bytes; {limit} are the most")
    return replace(reply, fault=plain(reply.fault), lost=plain(reply.lost))


def _part_of(envelope: Envelope) -> bytes:
    kinds = [(name, kind) for name, kind, _ in envelope.records]
    if kinds not in ([(MODEL, COMPRESSED)], [(MODEL, FULL)]):
        raise MessageError(f"the message is about {kinds!r:.80}, not about one model")
    return envelope.parts[0]


def pack_metrics(message: Message, **values: float) -> Message:
    """Return the message that answers another with metrics of a model: one record."""
    envelope = Envelope()
    envelope.add(METRICS, MetricRecord({name.replace("_", "-"): v for name, v in values.items()}))
    return answer(message, envelope)


def unpack_metrics(content: RecordDict) -> dict[str, float] | Reply:
    """Return the metrics that a client measured, or the reply of one that is lost."""
    envelope = unpack(content, _HEAD_BYTES)
    if envelope.parts:
        return _checked(_part_of(envelope), 0, 0)
    names = [name for name, _, _ in envelope.records]
    if names != [METRICS]:
        raise MessageError(f"the reply has records {names!r:.80}, not metrics")
    _, kind, values = envelope.records[0]
    found = {}
    for name, value in envelope.small(kind, values).items():
        if not isinstance(value, float | int):
            raise MessageError(f"metric {plain(name, 40)!r} is {value!r:.80}, not a number")
        found[plain(name, _LONGEST_NAME)] = float(value)
    return found


def pack_fields(name: str, **values: int | float) -> RecordDict:
    """Return a message of a few numbers."""
    return RecordDict({name: ConfigRecord({**values})})


def unpack_integers(content: RecordDict, name: str, *keys: str) -> list[int]:
    """Return whole numbers that `pack_fields` wrote."""
    record = _config(content, name)
    numbers = [v for v in (record.get(key) for key in keys) if type(v) is int]
    if len(numbers) < len(keys):
        raise MessageError(f"record {name!r} holds {dict(record)!r:.80}, not integers for {keys}")
    return numbers


class ClientError(MessageError):
    """Flower reports that a client failed.

    Attributes:
        is_unreachable: whether the node itself is gone, or did not pick up its order.

    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"code {code}: {plain(reason, _LONGEST_ERROR)}")
        self.is_unreachable = code in _UNREACHABLE


def content_of(reply: Message | None, problem: str) -> RecordDict:
    """Return what a reply holds, or raise what it says went wrong."""
    if reply is None:
        raise MessageError(plain(problem))
    if reply.has_error():
        raise ClientError(reply.error.code, reply.error.reason or "")
    if not reply.has_content():
        raise MessageError("the reply is empty")
    return reply.content


def _config(content: RecordDict, name: str) -> ConfigRecord:
    record = content.get(name)
    if not isinstance(record, ConfigRecord):
        raise MessageError(f"the message has no record {name!r}")
    return record
