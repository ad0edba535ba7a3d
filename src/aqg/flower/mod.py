"""The client's line: ``ClientApp(mods=[aqg_mod])``.

Before the app's handler runs, the mod puts the whole model into the message; after it, the mod
replaces the arrays of the reply by what the server does not know yet. The handler stays as it is.
The mod answers both ``Compressed(...)`` around a strategy and our own strategy, ``AQG``
(`aqg.flower.handlers`).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from aqg.channel.client import Held, OutOfReachError, receive, reply_to
from aqg.errors import AqgError, MessageError
from aqg.flower.arrays import is_readable, record_of, values_of
from aqg.flower.envelope import (
    BESIDE,
    COMPRESSED,
    ENDED,
    FULL,
    ON_DISK,
    RECORD,
    Envelope,
    pack,
    refusal,
    unpack,
)
from aqg.flower.envelope import answer as reply_with
from aqg.flower.handlers import FailedError, HandlerHost
from aqg.flower.memory import Memory
from aqg.flower.records import is_hello, is_order
from aqg.flower.serving import serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from flwr.app import Context
    from flwr.clientapp.typing import ClientAppCallable

    from aqg.core.recipe import Recipe
    from aqg.flower.serving import Host

    Mod = Callable[[Message, Context, ClientAppCallable], Message]

_logger = logging.getLogger("flwr.aqg")
_SAID = "aqg-said"
"""A record of the node's context: that nothing is compressed was said before."""


def make_mod(state_dir: Path | str | None = None, recipe: Recipe | None = None) -> Mod:
    """Return the mod with settings of your own.

    Args:
        state_dir: where a node remembers; by default see `aqg.flower.memory`.
        recipe: of your own, where the strategy `AQG` has one.

    """
    return mod_with(lambda _, call_next: HandlerHost(call_next), state_dir, recipe)


def mod_with(
    host_of: Callable[[Context, ClientAppCallable], Host],
    state_dir: Path | str | None = None,
    recipe: Recipe | None = None,
) -> Mod:
    """Return the mod with something else than the handler to train for our own strategy."""
    directory = None if state_dir is None else Path(state_dir)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if not message.has_content() or RECORD not in message.content:
            _say_once(message, context)
            return call_next(message, context)
        try:
            envelope = unpack(message.content)
            if is_order(envelope) or is_hello(envelope):
                memory = Memory(context, directory, follows_node=False)
                host = host_of(context, call_next)
                return serve(message, context, envelope, memory, host, recipe)
            memory = Memory(context, directory)
            if ended := [name for name, kind, _ in envelope.records if kind == ENDED]:
                for run in ended:
                    memory.forget(run)
                return reply_with(message, Envelope())
            models = _receive(message, envelope, memory)
        except AqgError as error:
            return refusal(message, error)
        except FailedError as failed:
            return failed.reply
        if isinstance(models, Envelope):  # what the server must know before anything can be done
            return reply_with(message, models)
        is_first = any(kind == FULL for _, kind, _ in envelope.records)
        del envelope
        reply = call_next(message, context)
        if not reply.has_content():
            return reply
        try:
            envelope = _pack_reply(reply, models, memory)
            if is_first and memory.directory is not None:
                envelope.records.append(("", ON_DISK, None))
            reply.content[RECORD] = pack(envelope)
        except AqgError as error:
            return refusal(message, error)
        return reply

    return mod


aqg_mod = make_mod()


def _say_once(message: Message, context: Context) -> None:
    """Say that the server sends whole models, once on each node."""
    if not message.has_content() or not message.content.array_records or _SAID in context.state:
        return
    context.state[_SAID] = ConfigRecord({"whole-models": True})
    _logger.warning(
        "aqg: nothing is compressed: the server sends whole models; "
        "write Compressed(...) around its strategy"
    )


def _receive(message: Message, envelope: Envelope, memory: Memory) -> dict[str, Held] | Envelope:
    """Put the app's records into the message; return the models, or a reply that asks for one."""
    models: dict[str, Held] = {}
    content: dict[str, ArrayRecord | ConfigRecord | MetricRecord] = {}
    parts = iter(envelope.parts)
    lost = Envelope()
    for name, kind, values in envelope.records:
        if kind in (COMPRESSED, FULL):
            record = message.content.get(name) if kind == FULL else None
            if kind == FULL and not (isinstance(record, ArrayRecord) and is_readable(record)):
                raise MessageError(f"the message has no model {name!r} of NumPy arrays")
            whole = values_of(record) if isinstance(record, ArrayRecord) else None
            try:
                model = receive(next(parts), whole, memory, envelope.version)
            except OutOfReachError as error:
                lost.add_model(name, COMPRESSED, error.reply)
                continue
            if not isinstance(record, ArrayRecord):
                record = record_of(model.values.items())
            content[name] = record
            models[name] = model._replace(values=values_of(record))
        elif kind == BESIDE:
            content[name] = message.content[name]
        else:
            content[name] = envelope.small(kind, values)
    if lost.records:
        return lost
    message.content = RecordDict(content)
    return models


def _pack_reply(reply: Message, models: dict[str, Held], memory: Memory) -> Envelope:
    """Take all that can be in one record out of a reply, and return it."""
    envelope = Envelope()
    packed: dict[str, ArrayRecord | ConfigRecord | MetricRecord] = {}
    for name, record in reply.content.items():
        model = models.get(name)
        if not isinstance(record, ArrayRecord):
            envelope.add(name, record)
            continue
        if model is not None and model.is_trained and is_readable(record):
            after = values_of(record)
            if [(n, t.shape, str(t.dtype)) for n, t in after.items()] == model.schema.rows():
                envelope.add_model(name, COMPRESSED, reply_to(model, after, memory))
                continue
        envelope.records.append((name, BESIDE, None))
        packed[name] = record
    reply.content = RecordDict(packed)
    return envelope
