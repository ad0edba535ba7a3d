"""Orders, replies and models as Flower's records, and back.

Small payloads travel as bytes in a `ConfigRecord`; large ones as an `ArrayRecord`, which Flower
sends in pieces.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from aqg.errors import MessageError
from aqg.protocol.messages import MAX_FAULT_LENGTH, Order, Reply

if TYPE_CHECKING:
    from flwr.app import Message

    from aqg.core.types import FloatArray

ORDER, MODEL, REPLY, FRAME, HELLO, LOSS = "order", "model", "reply", "frame", "hello", "loss"
STATISTICS, LOG, SNAPSHOT = "statistics", "log", "snapshot"
LARGE_BYTES = 4 << 20
"""Payloads above this length are sent as arrays."""
_BYTES = "bytes"
_MOVEMENT_BYTES = 8
_MOST_BYTES = 1 << 40
_LONGEST_ERROR = 200
_UNREACHABLE = (3, 4, 5)
"""Flower's codes: order expired, reply expired, node unavailable."""

Payload = ConfigRecord | ArrayRecord


def plain(text: str, max_length: int = MAX_FAULT_LENGTH) -> str:
    r"""Make a text of a node fit for logs and terminals: one line, every character visible.

    >>> plain("lost\n\x1b[2J  the\u202e end")
    'lost \\x1b[2J the\\u202e end'
    """
    line = " ".join(text[:max_length].split())
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return "".join(shown)[:max_length]


def pack_payload(data: bytes) -> Payload:
    """Return the record that carries ``data``."""
    if len(data) <= LARGE_BYTES:
        return ConfigRecord({_BYTES: data})
    return ArrayRecord({_BYTES: Array("uint8", (len(data),), _BYTES, data)})


def unpack_payload(content: RecordDict, name: str, max_bytes: int) -> bytes:
    """Return the bytes of the record called ``name``; more than ``max_bytes`` are refused."""
    record = content.get(name)
    if not isinstance(record, ConfigRecord | ArrayRecord) or list(record) != [_BYTES]:
        raise MessageError(f"the message has no record {name!r} with bytes alone")
    value: Any = record[_BYTES]
    data = value.data if isinstance(value, Array) else value
    if not isinstance(data, bytes):
        raise MessageError(f"record {name!r} holds {type(data).__name__}, not bytes")
    if len(data) > max_bytes:
        raise MessageError(f"record {name!r} has {len(data)} bytes; {max_bytes} are the most")
    return data


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


def pack_order(order: Order, model: Payload | None, statistics: bytes = b"") -> RecordDict:
    """Return the content of a message to a client.

    Log and snapshot are part of the order itself, unless they are large: every record costs
    Flower some requests of its own.
    """
    frames = {LOG: order.log, SNAPSHOT: order.snapshot}
    large = {name: data for name, data in frames.items() if len(data) > LARGE_BYTES}
    head = replace(
        order,
        log=b"" if LOG in large else order.log,
        snapshot=b"" if SNAPSHOT in large else order.snapshot,
    )
    content = RecordDict({ORDER: ConfigRecord({**head.to_fields()})})
    if model is not None:
        content[MODEL] = model
    for name, data in large.items():
        content[name] = pack_payload(data)
    if statistics:
        content[STATISTICS] = pack_payload(statistics)
    return content


def carried_bytes(content: RecordDict) -> int:
    """Return the length of what an order carries: its payloads and, with a model, the movement.

    The rest of the order is not counted, just as the head of a reply is not.
    """
    order: Any = content[ORDER]
    size = len(order[LOG]) + len(order[SNAPSHOT]) + (_MOVEMENT_BYTES if MODEL in content else 0)
    for name, record in content.items():
        if name != ORDER and isinstance(record, ConfigRecord | ArrayRecord):
            value: Any = record[_BYTES]
            size += len(value.data if isinstance(value, Array) else value)
    return size


def unpack_statistics(content: RecordDict, max_bytes: int) -> bytes:
    """Return the statistics in a message; empty where it has none."""
    return unpack_payload(content, STATISTICS, max_bytes) if STATISTICS in content else b""


def unpack_order(content: RecordDict) -> Order:
    """Return the order in a message."""
    order = Order.from_fields(_config(content, ORDER))
    if LOG in content:
        order = replace(order, log=unpack_payload(content, LOG, _MOST_BYTES))
    if SNAPSHOT in content:
        order = replace(order, snapshot=unpack_payload(content, SNAPSHOT, _MOST_BYTES))
    return order


def pack_reply(reply: Reply) -> RecordDict:
    """Return the content of a message to the server."""
    head = replace(reply, frame=b"", statistics=b"").to_fields()
    content = RecordDict({REPLY: ConfigRecord({**head}), FRAME: pack_payload(reply.frame)})
    if reply.statistics:
        content[STATISTICS] = pack_payload(reply.statistics)
    return content


def unpack_reply(content: RecordDict, max_frame_bytes: int, max_statistics_bytes: int = 0) -> Reply:
    """Return the reply in a message, after checking all that can be checked by itself."""
    if set(content) - {STATISTICS} != {REPLY, FRAME}:
        raise MessageError(f"a reply has records {REPLY!r} and {FRAME!r}, not {sorted(content)}")
    head = Reply.from_fields(_config(content, REPLY))
    return replace(
        head,
        fault=plain(head.fault),
        lost=plain(head.lost),
        frame=unpack_payload(content, FRAME, max_frame_bytes),
        statistics=unpack_statistics(content, max_statistics_bytes),
    )


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


def unpack_loss(content: RecordDict) -> float | Reply:
    """Return the loss that a client measured, or the reply of one that is lost."""
    if REPLY in content:
        return unpack_reply(content, 0)
    loss = _config(content, LOSS).get("loss")
    if type(loss) is not float:
        raise MessageError(f"the loss is {loss!r:.80}, not a number")
    return loss


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
