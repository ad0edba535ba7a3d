"""Orders, replies and metrics of our own strategy in Flower's messages, and back.

Each is an envelope of a single record, as the drop-in's are (`aqg.flower.envelope`). Beside it are
the model, where it travels whole, and the starting model, where a client has none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from aqg.errors import MessageError
from aqg.flower.envelope import (
    BESIDE,
    COMPRESSED,
    RECORD,
    SERVED,
    Envelope,
    answer,
    pack,
    pack_payload,
    unpack,
    unpack_payload,
)
from aqg.flower.forms import Form
from aqg.protocol.coding import order_from_bytes, reply_from_bytes, to_bytes
from aqg.protocol.messages import MAX_FAULT_LENGTH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flwr.app import Message

    from aqg.core.types import FloatArray
    from aqg.flower.envelope import Payload
    from aqg.protocol.messages import Order, Reply

MODEL, METRICS, EVALUATED, HELLO = "model", "metrics", "evaluated", "hello"
CONFIG, START, FORM = "config", "start", "form"
_BYTES = "bytes"
_MOVEMENT_BYTES = 8
_HEAD_BYTES = 16_384
"""More than a reply needs around its frame and its statistics."""
_LONGEST_NAME = 80
_LONGEST_ERROR = 200
_RAISED = 2
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


def pack_order(
    order: Order,
    model: Payload | None = None,
    config: ConfigRecord | None = None,
    start: ArrayRecord | None = None,
    form: Form | None = None,
) -> RecordDict:
    """Return the content of a message to a client.

    Args:
        order: what the client is told.
        model: all parameters, where they travel whole.
        config: for the client's handler.
        start: all tensors that the run started from, for a client without a model of its own.
        form: what these are.

    """
    envelope = Envelope()
    envelope.add_model(MODEL, SERVED, to_bytes(order))
    if config:
        envelope.add(CONFIG, config)
    content: dict[str, Any] = {}
    if model is not None:
        content[MODEL] = model
    if start is not None and form is not None:
        envelope.add(FORM, ConfigRecord({"json": form.to_json()}))
        envelope.records.append((START, BESIDE, None))
        content[START] = start
    return RecordDict({RECORD: pack(envelope), **content})


def carried_bytes(order: Order, model: Payload | None, start: ArrayRecord | None = None) -> int:
    """Return the length of what an order carries: its payloads and, with a model, the movement.

    The rest of the order is not counted, just as the head of a reply is not.
    """
    size = len(order.log) + len(order.snapshot) + len(order.statistics)
    if start is not None:
        size += sum(len(array.data) for array in start.values())
    if model is None:
        return size
    value: Any = model[_BYTES]
    return size + _MOVEMENT_BYTES + len(value.data if isinstance(value, Array) else value)


class Given(NamedTuple):
    """What an order brings a client, beside the model.

    Attributes:
        order: what it is told.
        config: for its handler.
        start: all tensors that the run started from, and what they are; None where not sent.

    """

    order: Order
    config: ConfigRecord
    start: tuple[ArrayRecord, Form] | None = None


def is_order(envelope: Envelope) -> bool:
    """Tell whether an envelope is of our own strategy."""
    return any(kind == SERVED for _, kind, _ in envelope.records)


def unpack_given(content: RecordDict, envelope: Envelope) -> Given:
    """Return what is in a message of our own strategy."""
    if [kind for _, kind, _ in envelope.records].count(SERVED) != 1 or len(envelope.parts) != 1:
        raise MessageError("the message does not have just one order")
    small = {name: (kind, values) for name, kind, values in envelope.records if values is not None}
    found = {name: envelope.small(*row) for name, row in small.items()}
    config, form, start = found.get(CONFIG), found.get(FORM), content.get(START)
    whole = None
    if isinstance(form, ConfigRecord) and isinstance(start, ArrayRecord):
        whole = start, Form.from_json(str(form.get("json")))
    own = config if isinstance(config, ConfigRecord) else ConfigRecord()
    return Given(order_from_bytes(envelope.parts[0]), own, whole)


class Answer(NamedTuple):
    """What a client answers to an order.

    Attributes:
        reply: of the protocol.
        metrics: that the client measured as it trained, by name.
        evaluated: that it measured of the model of the order.
        wants_start: whether it needs the starting model.

    """

    reply: Reply
    metrics: dict[str, float]
    evaluated: dict[str, float]
    wants_start: bool = False


def pack_reply(
    message: Message,
    reply: Reply,
    metrics: Mapping[str, float] | None = None,
    evaluated: Mapping[str, float] | None = None,
    wants_start: bool = False,
) -> Message:
    """Return the message that answers another with a reply: one record."""
    envelope = Envelope()
    envelope.add_model(MODEL, COMPRESSED, to_bytes(reply))
    if metrics:
        envelope.add(METRICS, MetricRecord(dict(metrics)))
    if evaluated:
        envelope.add(EVALUATED, MetricRecord(dict(evaluated)))
    if wants_start:
        envelope.add(START, ConfigRecord())
    return answer(message, envelope)


def unpack_reply(
    content: RecordDict, max_frame_bytes: int, max_statistics_bytes: int = 0
) -> Answer:
    """Return the reply in a message, after checking all that can be checked by itself."""
    if RECORD not in content:
        raise MessageError("it answers without the mod; write ClientApp(mods=[aqg_mod]) in its app")
    if set(content) != {RECORD}:
        raise MessageError(f"a reply has the record {RECORD!r} alone, not {sorted(content)}")
    envelope = unpack(content, max_frame_bytes + max_statistics_bytes + _HEAD_BYTES)
    return _answer_in(envelope, max_frame_bytes, max_statistics_bytes)


def _answer_in(envelope: Envelope, max_frame_bytes: int, max_statistics_bytes: int) -> Answer:
    kinds = {(name, kind) for name, kind, _ in envelope.records}
    if (MODEL, COMPRESSED) not in kinds or len(envelope.parts) != 1:
        raise MessageError(f"the message is about {sorted(kinds)!r:.80}, not about one model")
    reply = _checked(envelope.parts[0], max_frame_bytes, max_statistics_bytes)
    metrics, evaluated = _metrics_in(envelope), _metrics_in(envelope, EVALUATED)
    return Answer(reply, metrics, evaluated, (START, "c") in kinds)


def _checked(part: bytes, max_frame_bytes: int, max_statistics_bytes: int) -> Reply:
    reply = reply_from_bytes(part)
    for name, limit in (("frame", max_frame_bytes), ("statistics", max_statistics_bytes)):
        length = len(getattr(reply, name))
        if length > limit:
            raise MessageError(f"{name} has {length} bytes; {limit} are the most")
    return replace(reply, fault=plain(reply.fault), lost=plain(reply.lost))


def pack_metrics(message: Message, metrics: Mapping[str, float]) -> Message:
    """Return the message that answers another with metrics of a model: one record."""
    envelope = Envelope()
    envelope.add(METRICS, MetricRecord(dict(metrics)))
    return answer(message, envelope)


def unpack_metrics(content: RecordDict) -> dict[str, float] | Answer:
    """Return the metrics that a client measured, or the reply of one that is lost."""
    if RECORD not in content:
        raise MessageError("it answers without the mod; write ClientApp(mods=[aqg_mod]) in its app")
    envelope = unpack(content, _HEAD_BYTES)
    if envelope.parts:
        return _answer_in(envelope, 0, 0)
    names = [name for name, _, _ in envelope.records]
    if names != [METRICS]:
        raise MessageError(f"the reply has records {names!r:.80}, not metrics")
    return _metrics_in(envelope)


def _metrics_in(envelope: Envelope, wanted: str = METRICS) -> dict[str, float]:
    found = {}
    for record_name, kind, values in envelope.records:
        if record_name != wanted:
            continue
        for name, value in envelope.small(kind, values).items():
            if not isinstance(value, float | int):
                raise MessageError(f"metric {plain(name, 40)!r} is {value!r:.80}, not a number")
            found[plain(name, _LONGEST_NAME)] = float(value)
    return found


def pack_hello(message: Message, **values: int) -> Message:
    """Return a node's introduction, in answer to `ask_hello`."""
    envelope = Envelope()
    envelope.add(HELLO, ConfigRecord({**values}))
    return answer(message, envelope)


def ask_hello() -> RecordDict:
    """Return the content of a message that asks a node to introduce itself.

    It is a message for training, which the mod answers: every app has a handler for those.
    """
    envelope = Envelope()
    envelope.add(HELLO, ConfigRecord({"wanted": True}))
    return RecordDict({RECORD: pack(envelope)})


def is_hello(envelope: Envelope) -> bool:
    """Tell whether an envelope asks for an introduction."""
    return [name for name, _, _ in envelope.records] == [HELLO]


def unpack_hello(content: RecordDict, *keys: str) -> list[int]:
    """Return whole numbers of a node's introduction."""
    if RECORD not in content:
        raise MessageError("it answers without the mod; write ClientApp(mods=[aqg_mod]) in its app")
    envelope = unpack(content, _HEAD_BYTES)
    if not is_hello(envelope):
        raise MessageError("the reply is no introduction")
    _, kind, values = envelope.records[0]
    record: Mapping[str, Any] = envelope.small(kind, values)
    numbers = [v for v in (record.get(key) for key in keys) if type(v) is int]
    if len(numbers) < len(keys):
        raise MessageError(f"the introduction has {dict(record)!r:.80}, not integers for {keys}")
    return numbers


class ClientError(MessageError):
    """Flower reports that a client failed.

    Attributes:
        is_unreachable: whether the node itself is gone, or did not pick up its order.
        is_raised: whether its app raised an exception.

    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"code {code}: {plain(reason, _LONGEST_ERROR)}")
        self.is_unreachable = code in _UNREACHABLE
        self.is_raised = code == _RAISED


def content_of(reply: Message | None, problem: str) -> RecordDict:
    """Return what a reply holds, or raise what it says went wrong."""
    if reply is None:
        raise MessageError(plain(problem))
    if reply.has_error():
        raise ClientError(reply.error.code, reply.error.reason or "")
    if not reply.has_content():
        raise MessageError("the reply is empty")
    return reply.content
