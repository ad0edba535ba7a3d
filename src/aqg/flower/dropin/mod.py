"""The client's line: ``ClientApp(mods=[aqg_mod])``.

Before the app's handler runs, the mod puts the whole model into the message; after it, the mod
replaces the arrays of the reply by what the server does not know yet. The handler stays as it is.
The mod answers both ``Compressed(...)`` around a strategy and our own strategy, ``AQG``
(`aqg.flower.handlers`).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from aqg import __version__
from aqg.core.recipes import make_recipe
from aqg.errors import AqgError, ConfigError, MessageError
from aqg.flower.dropin.channel import OPEN, agreement
from aqg.flower.dropin.copies import PublicCopy, follow_log
from aqg.flower.dropin.tensors import (
    Kind,
    Schema,
    Spec,
    encode_kept,
    flatten,
    is_same,
    kinds_of,
    record_of,
    subtract,
    values_of,
    vector_dtype,
)
from aqg.flower.envelope import (
    BESIDE,
    COMPRESSED,
    FULL,
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
from aqg.protocol.client import intact_base, log_reply
from aqg.protocol.coding import order_from_bytes, to_bytes
from aqg.protocol.follower import Holding
from aqg.protocol.mirrors import Snapshot, answer, lost_reply, stale_reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from flwr.app import Context
    from flwr.clientapp.typing import ClientAppCallable

    from aqg.core.recipe import Recipe
    from aqg.flower.dropin.tensors import Tensor
    from aqg.flower.serving import Host
    from aqg.protocol.messages import Order, Reply

    Mod = Callable[[Message, Context, ClientAppCallable], Message]

_logger = logging.getLogger("flwr.aqg")


class _LostError(Exception):
    """The model of an order cannot be reached from what is held here."""


class _Model(NamedTuple):
    """A model as it came.

    Attributes:
        order: what the server said of it.
        schema: its tensors.
        copy: the public copy.
        values: what the handler receives.

    """

    order: Order
    schema: Schema
    copy: PublicCopy
    values: dict[str, Tensor]


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
            return call_next(message, context)
        try:
            envelope = unpack(message.content)
            if is_order(envelope) or is_hello(envelope):
                memory = Memory(context, directory, follows_node=False)
                host = host_of(context, call_next)
                return serve(message, context, envelope, memory, host, recipe)
            memory = Memory(context, directory)
            models = _receive(message, envelope, memory)
        except AqgError as error:
            return refusal(message, error)
        except FailedError as failed:
            return failed.reply
        if isinstance(models, Envelope):  # what the server must know before anything can be done
            return reply_with(message, models)
        reply = call_next(message, context)
        if not reply.has_content():
            return reply
        try:
            reply.content = _pack_reply(reply.content, models, memory)
        except AqgError as error:
            return refusal(message, error)
        return reply

    return mod


aqg_mod = make_mod()


def _receive(message: Message, envelope: Envelope, memory: Memory) -> dict[str, _Model] | Envelope:
    """Put the app's records into the message; return the models, or a reply that asks for one."""
    models: dict[str, _Model] = {}
    content: dict[str, ArrayRecord | ConfigRecord | MetricRecord] = {}
    parts = iter(envelope.parts)
    lost = Envelope()
    for name, kind, values in envelope.records:
        if kind in (COMPRESSED, FULL):
            order = order_from_bytes(next(parts))
            beside = message.content.get(name) if kind == FULL else None
            try:
                models[name] = model = _follow(order, beside, memory)
            except _LostError as error:
                _logger.warning("version %d: the model is out of reach: %s", order.round, error)
                reply = lost_reply(order, Holding(), str(error))
                lost.add_model(name, COMPRESSED, to_bytes(reply))
                continue
            _agree(order, model.schema, envelope.version)
            whole = beside if isinstance(beside, ArrayRecord) else None
            content[name] = whole or record_of(model.values, model.schema)
        elif kind == BESIDE:
            content[name] = message.content[name]
        else:
            content[name] = envelope.small(kind, values)
    if lost.records:
        return lost
    message.content = RecordDict(content)
    return models


def _follow(order: Order, beside: object, memory: Memory) -> _Model:
    """Return the model that an order is about, after comparing digests, and remember it."""
    store = memory.copies(order.run)
    if isinstance(beside, ArrayRecord):
        schema = Schema.of(beside)
        if schema is None:
            raise MessageError("the model holds arrays that are not NumPy's")
        values = values_of(beside)
        copy = PublicCopy.of(values, schema, order.layout[1:], order.round)
    else:
        found = store.load()
        if found is None:
            raise _LostError("no model is held here")
        held, schema = found
        try:
            copy = follow_log(held, order.log, schema)
        except AqgError as error:
            raise _LostError(str(error)) from None
        values = copy.values(schema)
    if copy.digest() != order.public:
        raise _LostError(f"version {copy.version} has another digest here than at the server")
    store.save(copy, schema)
    return _Model(order, schema, copy, values)


def _agree(order: Order, schema: Schema, version: str) -> None:
    """Raise `ConfigError` unless both sides mean the same."""
    recipe = make_recipe(order.recipe, order.bits, order.max_staleness)
    ours = agreement(recipe, order.num_params, order.dtype, order.seed, schema)
    if ours != order.fingerprint:
        raise ConfigError(
            f"client and server do not agree on recipe {order.recipe!r}: the server has aqg "
            f"{version}, this node {__version__}; both need the same version"
        )


def _pack_reply(content: RecordDict, models: dict[str, _Model], memory: Memory) -> RecordDict:
    """Return the content of a reply, with all that can be in one record there."""
    envelope = Envelope()
    packed: dict[str, ArrayRecord | ConfigRecord | MetricRecord] = {}
    for name, record in content.items():
        model = models.get(name)
        if not isinstance(record, ArrayRecord):
            envelope.add(name, record)
        elif model is not None and not model.order.evaluate and _fits(record, model.schema):
            envelope.add_model(name, COMPRESSED, _answer(record, model, memory))
        else:
            envelope.records.append((name, BESIDE, None))
            packed[name] = record
    return RecordDict({RECORD: pack(envelope), **packed})


def _fits(record: ArrayRecord, schema: Schema) -> bool:
    other = Schema.of(record)
    return other is not None and other.fingerprint == schema.fingerprint


def _answer(record: ArrayRecord, model: _Model, memory: Memory) -> bytes:
    """Return what stands for a trained model."""
    order, schema, before = model.order, model.schema, model.values
    after = values_of(record)
    kinds = kinds_of(schema, (), ())
    changed = {
        name
        for name, tensor in after.items()
        if kinds[name] is not Kind.STILL and not is_same(tensor, before[name])
    }
    chosen = schema.chosen(order.layout[1:])
    if order.layout[:1] == OPEN:
        chosen = [spec for spec in chosen if spec.name in changed]
    layout = schema.bitmap(spec.name for spec in chosen)
    kept = changed - {spec.name for spec in chosen}
    rest = encode_kept(after, kept, schema, kinds) if kept else b""
    reply = _respond(model, chosen, layout, after, memory)
    return to_bytes(replace(reply, statistics=layout + rest, held_round=order.round))


def _respond(
    model: _Model, chosen: list[Spec], layout: bytes, after: dict[str, Tensor], memory: Memory
) -> Reply:
    """Return the reply for the tensors that are compressed, and remember it."""
    order, schema = model.order, model.schema
    if not chosen:
        return replace(stale_reply(order), stale=False)
    recipe = make_recipe(order.recipe, order.bits, order.max_staleness)
    if layout != order.layout[1:]:  # the server lets clients choose, and has no mirror yet
        size, dtype = sum(spec.size for spec in chosen), vector_dtype(chosen)
        zero = Snapshot.zero(recipe, size, dtype).stamp
        order = replace(
            order,
            num_params=size,
            dtype=dtype,
            epoch=zero.epoch,
            uploads=zero.uploads,
            digest=zero.digest,
            fingerprint=agreement(recipe, size, dtype, order.seed, schema),
        )
    update = flatten(model.values, chosen)
    subtract(update, after, chosen)
    store = memory.mirrors(order.run, order.fingerprint, layout)
    if order.serial <= store.answered:
        return stale_reply(order)
    mirror, reply = answer(recipe, intact_base(recipe, store, order), order, update)
    store.save(mirror)  # before the reply leaves: a crash from here on is a lost upload
    log_reply(order, reply)
    return reply
