"""A client's end for one model: from an order to the model, and from the trained model to a reply.

What a client remembers is its copy of the model and the mirror of its updates. Both are found out
to be old, damaged or missing by their digests, and repaired: neither needs to be in step with
anything else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from aqg import __version__
from aqg.channel.server import FORGETTING, MOVING, OPEN
from aqg.channel.tensors import (
    Kind,
    PublicCopy,
    Schema,
    Tensor,
    Values,
    decode_first,
    give_back,
    is_finite,
    is_same,
    placed,
    vector_dtype,
)
from aqg.core.downlink import DIGEST_BYTES, xor
from aqg.core.recipe import Recipe
from aqg.core.types import FloatArray
from aqg.errors import AqgError, MessageError, RunError, WireError
from aqg.objectives.layout import TensorSpec
from aqg.protocol.client import agree, intact_base, log_reply, short
from aqg.protocol.log import Holding, LostError, Parcel, Terms, follow
from aqg.protocol.messages import Base, Order, Reply, Snapshot, UnknownTermsError, fingerprint
from aqg.protocol.store import ClientStore, KeyedStore, Vault
from aqg.start import OtherModelError
from aqg.wire.entry import encode_log
from aqg.wire.varint import Reader

_logger = logging.getLogger("aqg.channel")

_LARGE = 1 << 25
"""Bytes of tensors that are let go of, after which giving them back is worth its time."""


class Memory:
    """What a client remembers; subclasses say where, in `runs` and `vault`."""

    def runs(self) -> Iterable[str]:
        """Return the names of what is held, the likeliest first."""
        raise NotImplementedError

    def vault(self, run: str, name: str) -> Vault:
        """Return the place for a part of what is remembered of a run, by its own name."""
        raise NotImplementedError

    def terms(self) -> Iterator[Order]:
        """Yield the terms of the models that are held, the likeliest first."""
        return filter(None, (self.copies(run).terms() for run in self.runs()))

    def copies(self, run: str) -> CopyStore:
        """Return the place for the copy of a model."""
        return CopyStore(self.vault(run, run), run)

    def mirrors(self, run: str, fingerprint: bytes, layout: bytes) -> ClientStore:
        """Return the place for the mirror of the updates to some of its tensors."""
        choice = hashlib.blake2b(layout, key=fingerprint, digest_size=DIGEST_BYTES)
        name = f"{run}-{choice.hexdigest()}"
        return ClientStore(self.vault(run, name), name)

    def own(self, run: str) -> OwnTensors:
        """Return the place for tensors that the client keeps to itself."""
        name = f"{run}-own"
        return OwnTensors(self.vault(run, name), name)


class OutOfReachError(Exception):
    """The model of an order cannot be reached; ``reply`` asks for the whole one."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.lost)
        _logger.warning("version %d: the model is out of reach: %s", reply.round, self)
        self.reply = reply.to_bytes()


class Held(NamedTuple):
    """A model as it came."""

    order: Order  # what the server said of it
    schema: Schema  # its tensors
    values: Values  # what is trained
    recipe: Recipe  # the compressor

    @property
    def is_trained(self) -> bool:
        return not self.order.evaluate

    @property
    def is_stepping(self) -> bool:
        """Whether the server makes the model from the updates themselves."""
        return bool(self.order.constants)

    @property
    def is_forgotten(self) -> bool:
        """Whether nothing of it is to be held when it was answered."""
        return bool(self.order.layout[0] & FORGETTING)

    @property
    def is_completed(self) -> bool:
        """Whether some tensors are others than the order led to."""
        return bool(self.beside().own or self.beside().aliases)

    def beside(self) -> Beside:
        """Return what our own server says of the tensors beside the vector."""
        if not self.is_stepping:
            return Beside(frozenset(), frozenset(), {})
        reader, schema = Reader(self.order.constants), self.schema
        parts = [reader.take(schema.bitmap_bytes, "a choice of tensors") for _ in range(2)]
        travels, own = (frozenset(s.name for s in schema.chosen(p.tobytes())) for p in parts)
        names, places = list(schema.places), list[int]()
        while reader.left:
            places.append(reader.varint())
        if len(places) % 2 or any(place >= len(names) for place in places):
            raise MessageError(f"second names are given as tensors {places}")
        pairs = zip(places[::2], places[1::2], strict=True)
        return Beside(travels, own, {names[place]: names[first] for place, first in pairs})


class Beside(NamedTuple):
    """What becomes of tensors that are not part of the vector."""

    travels: frozenset[str]  # are sent where they have changed
    own: frozenset[str]  # the client's own
    aliases: dict[str, str]  # second names, and the first ones

    @property
    def policy(self) -> str:
        """What becomes of statistics (`aqg.objectives.layout.POLICIES`)."""
        return "local" if self.own else "average" if self.travels else "frozen"


def receive(
    part: bytes,
    whole: Values | None,
    memory: Memory,
    version: str = __version__,
    recipe: Recipe | None = None,
    start: Callable[[], Values | None] = lambda: None,
) -> Held:
    """Return the model that an order is about, and remember it where the order allows that.

    Args:
        part: the order.
        whole: the model, where it came with the order.
        memory: the client's.
        version: of the server's `aqg`, for messages.
        recipe: in place of the one that the server names.
        start: returns the node's own first model, where it has one.

    Raises `OutOfReachError` where the whole model is needed, and `ConfigError`, `MessageError` or
    `WireError` where the order cannot be used.
    """
    try:
        order = Order.from_bytes(part, memory.terms())
    except UnknownTermsError as error:
        raise OutOfReachError(error.reply()) from None
    store = None if order.layout[0] & FORGETTING else memory.copies(order.run)
    try:
        whole = decode_first(order.first, start) if order.first else whole
    except OtherModelError as error:
        raise _out_of_reach(order, error) from None
    copy, schema, made = _open(order, whole, store, version, recipe)
    if store is not None:
        store.save(copy, schema, order)
    if copy.vector.nbytes > _LARGE:
        give_back()  # before the caller makes tensors of its own
    values = copy.values(schema)
    movement = made.movement.of(copy.public.history)
    held = Held(replace(order, movement=movement), schema, values, made)
    beside = held.beside()
    values |= {name: values[first] for name, first in beside.aliases.items()}
    values |= memory.own(order.run).load() if beside.own else {}
    return held


def _out_of_reach(order: Order, why: object) -> OutOfReachError:
    return OutOfReachError(order.lost_reply(Holding(), str(why)))


def _open(
    order: Order, whole: Values | None, store: CopyStore | None, version: str, recipe: Recipe | None
) -> tuple[PublicCopy, Schema, Recipe]:
    """Return the copy that an order leads to; that before it is not held any more."""
    found = None if whole is not None or store is None else store.load()
    if whole is None and found is None:
        raise _out_of_reach(order, "no model is held here")
    schema = found[1] if found is not None else Schema.of(whole or {})
    versions = f" of aqg {__version__}, the server has {version}"
    made = agree(order, recipe, schema.fingerprint, versions)
    try:
        copy = _follow(order, whole, None if found is None else found[0], schema, made)
    except (LostError, WireError) as error:
        raise _out_of_reach(order, error) from None
    return copy, schema, made


def _follow(
    order: Order, whole: Values | None, held: PublicCopy | None, schema: Schema, recipe: Recipe
) -> PublicCopy:
    """Return the copy that an order leads to, from one that is held or a model that came."""
    layout = order.layout[1:]
    if whole is not None:
        copy, public = PublicCopy.of(whole, schema, layout), None
        copy = copy.without(Held(order, schema, {}, recipe).beside().aliases)  # not followed
    else:
        assert held is not None
        copy = held.with_layout(schema, layout)
        public = copy.public
    if order.statistics:
        changed = schema.decode(order.statistics)
        if unknown := sorted(set(changed) - set(copy.kept)):
            raise WireError(f"tensor {unknown[0]!r} is compressed; it does not come as it is")
        copy = copy.with_kept(changed)
    log = order.log or encode_log(order.round, [])
    parcel = Parcel(order.round, xor(order.public, copy.beside_digest()), log, order.snapshot)
    moves = bool(order.layout[0] & MOVING)
    terms = Terms(recipe, order.num_params, order.dtype, is_at_rest=not moves)
    public = follow(terms, parcel, public, lambda: copy.vector, in_place=True)
    return copy._replace(public=public, digest=order.public)


def reply_to(
    held: Held,
    after: Values,
    memory: Memory,
    *,
    is_update: bool = False,
    loss: float = math.nan,
    seconds: float = 0.0,
) -> bytes:
    """Return what stands for a trained model.

    Tensors are let go of as soon as they are read: who holds neither model needs memory for two.

    Args:
        held: the model as it came.
        after: the same tensors after training.
        memory: the client's.
        is_update: those that are compressed are what the server is to go against, such as
            gradients, and not the trained model.
        loss: of training, where it is known.
        seconds: that training took.
    """
    order, schema, before, after = held.order, held.schema, dict(held.values), dict(after)
    held = held._replace(values={})
    kinds = schema.kinds()
    beside = held.beside()
    chosen = schema.chosen(order.layout[1:])
    inside = schema.names(order.layout[1:])
    changed = {
        name
        for name, tensor in after.items()
        if (is_update and name in inside)
        or (
            (kinds[name] is not Kind.STILL or name in beside.travels)
            and not is_same(tensor, before[name])
            and is_finite(before[name])
        )
    }
    if held.is_stepping:
        stays = changed - inside - beside.travels
        for name in sorted(stays - beside.own - set(beside.aliases)):
            if kinds[name] is Kind.VECTOR:
                _logger.warning("%r was trained, but does not travel: the change is lost", name)
        changed -= stays
    bad = next((n for n in sorted(changed | beside.own) if not is_finite(after[n])), None)
    if bad is not None:
        fault = f"tensor {bad[:200]!r} holds NaN or infinity after training"
        _logger.warning("version %d: nothing sent: %s", order.round, fault)
        return order.idle_reply(fault=fault).to_bytes(order.stamp)
    if order.layout[0] & OPEN:  # the client may choose among the tensors
        chosen = [spec for spec in chosen if spec.name in changed]
    layout = schema.bitmap(spec.name for spec in chosen)
    kept = changed - {spec.name for spec in chosen}
    beside_frame = layout + schema.encode(after, kept, kinds) if kept else layout
    if beside_frame == order.layout[1:]:
        beside_frame = b""
    update = _update(before, after, is_update, chosen) if chosen else None
    reply = _respond(held, update, layout, loss, memory)
    if beside.own and not reply.stale:
        memory.own(order.run).save({name: after[name] for name in beside.own})
    reply = replace(reply, statistics=beside_frame, held_round=order.round)
    if held.is_stepping:
        reply = replace(reply, work_seconds=short(seconds))
    return reply.to_bytes(order.stamp)


def _update(
    before: dict[str, Tensor], after: dict[str, Tensor], is_update: bool, specs: list[TensorSpec]
) -> FloatArray:
    """Return an update as one vector; its tensors are taken out of the dictionaries."""
    update = np.empty(sum(spec.size for spec in specs), vector_dtype(specs))
    read = 0
    for spec, place in placed(specs):
        part = update[place]
        old, new = before.pop(spec.name).reshape(-1), after.pop(spec.name).reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            if is_update:
                part[:] = new
            else:
                np.subtract(old, new, out=part)
        read += old.nbytes + new.nbytes
        del old, new
        if read > _LARGE:
            give_back()
            read = 0
    return update


def _respond(
    held: Held, update: FloatArray | None, layout: bytes, loss: float, memory: Memory
) -> Reply:
    """Return the reply for the tensors that are compressed, and remember it."""
    order, schema, recipe = held.order, held.schema, held.recipe
    if update is None:
        return order.idle_reply()
    if layout != order.layout[1:]:  # the server lets clients choose, and has no mirror yet
        size, dtype = schema.vector_of(layout)
        zero = Snapshot.zero(recipe, size, dtype).stamp
        order = replace(
            order,
            num_params=size,
            dtype=dtype,
            **zero._asdict(),
            fingerprint=fingerprint(recipe, size, dtype, order.seed, schema.fingerprint),
        )
    if held.is_forgotten:
        nothing = Base(Snapshot.zero(recipe, order.num_params, order.dtype))
        return nothing.answer(recipe, order, update, loss)[1]
    store = memory.mirrors(order.run, order.fingerprint, layout)
    if order.serial <= store.answered:
        return order.stale_reply()
    base = intact_base(recipe, store, order)
    mirror, reply = base.answer(recipe, order, update, loss)
    store.save(mirror)  # before the reply leaves: a crash from here on is a lost upload
    log_reply(order, reply)
    return reply


class OwnTensors(KeyedStore):
    """Keeps tensors that a client has for itself."""

    def load(self) -> dict[str, Tensor]:
        """Return the tensors; none where there are none that can be read."""
        values: dict[str, Tensor] = {}
        with self._readable("own tensors"):
            own = self._read_index().get("own", {})
            values = {name: self._arrays.read(cell) for name, cell in own.items()}
        return values

    def save(self, values: Values) -> None:
        """Write the tensors, whole or not at all."""
        self.load()  # numbers in use are not used again
        own = {name: self._arrays.write(tensor) for name, tensor in values.items()}
        self._arrays.commit({"key": self._key, "own": own})


class CopyStore(KeyedStore):
    """Keeps a `PublicCopy` in a vault."""

    def terms(self) -> Order | None:
        """Return what was said of the model when it first came; None where that is not known."""
        try:
            return Order.from_bytes(bytes.fromhex(self._read_index()["terms"]))
        except (AqgError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _read_index(self) -> dict[str, Any]:
        index = super()._read_index()
        if index and index.pop("checksum") != _checksum(index):
            raise RunError("its checksum is wrong")
        return index

    def load(self) -> tuple[PublicCopy, Schema] | None:
        """Return the copy and its tensors; None where there is none, or none that can be read."""
        found = None
        with self._readable("saved model"):
            index = self._read_index()
            if not index:
                return None
            self._arrays.reserve(index)
            copy = PublicCopy(
                bytes.fromhex(index["layout"]),
                self._arrays.read_public(index["public"]),
                {name: self._arrays.read(cell) for name, cell in index["kept"].items()},
                {name: bytes.fromhex(digest) for name, digest in index["digests"].items()},
                bytes.fromhex(index["digest"]),
            )
            found = copy, Schema(index["schema"])
        return found

    def save(self, copy: PublicCopy, schema: Schema, order: Order) -> None:
        """Write the copy and the terms of its order, whole or not at all."""
        index: dict[str, Any] = {
            "key": self._key,
            "terms": order.terms_of_run().to_bytes().hex(),
            "schema": schema.rows(),
            "layout": copy.layout.hex(),
            "public": self._arrays.write_public(copy.public),
            "kept": {name: self._arrays.write(tensor) for name, tensor in copy.kept.items()},
            "digests": {name: digest.hex() for name, digest in copy.digests.items()},
            "digest": copy.digest.hex(),
        }
        index["checksum"] = _checksum(index)
        self._arrays.commit(index)


def _checksum(index: dict[str, Any]) -> int:
    """Return the CRC-32 of an index; large arrays have checksums of their own."""
    return zlib.crc32(json.dumps(index, sort_keys=True).encode())
