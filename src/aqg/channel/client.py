"""A client's end for one model: from an order to the model, and from the trained model to a reply.

What a client remembers is its copy of the model and the mirror of its updates. Both are found out
to be old, damaged or missing by their digests, and repaired: neither needs to be in step with
anything else.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aqg import __version__
from aqg.channel.copies import PublicCopy, follow_log
from aqg.channel.server import OPEN, agreement
from aqg.channel.tensors import (
    Kind,
    Schema,
    encode_kept,
    flatten,
    is_finite,
    is_same,
    kinds_of,
    subtract,
    vector_dtype,
)
from aqg.core.recipes import make_recipe
from aqg.errors import AqgError, ConfigError, RunError
from aqg.protocol.client import intact_base, log_reply
from aqg.protocol.coding import order_from_bytes, to_bytes
from aqg.protocol.follower import Holding
from aqg.protocol.mirrors import Snapshot, answer, lost_reply, stale_reply
from aqg.protocol.store import ArrayStore

if TYPE_CHECKING:
    from aqg.channel.tensors import Values
    from aqg.objectives.layout import TensorSpec
    from aqg.protocol.messages import Order, Reply
    from aqg.protocol.store import ClientStore, Vault

_logger = logging.getLogger("aqg.channel")
_UNREADABLE = (RunError, ValueError, KeyError, TypeError, AttributeError)


class Memory(Protocol):
    """Where a client remembers."""

    def copies(self, run: str) -> CopyStore:
        """Return the place for the copy of a model."""

    def mirrors(self, run: str, fingerprint: bytes, layout: bytes) -> ClientStore:
        """Return the place for the mirror of the updates to some of its tensors."""


class OutOfReachError(Exception):
    """The model of an order cannot be reached from what is held here.

    Attributes:
        reply: what to answer, so that the whole model is sent.

    """

    def __init__(self, order: Order, why: str) -> None:
        super().__init__(why)
        _logger.warning("version %d: the model is out of reach: %s", order.round, why)
        self.reply = to_bytes(lost_reply(order, Holding(), why))


class Held(NamedTuple):
    """A model as it came.

    Attributes:
        order: what the server said of it.
        schema: its tensors.
        values: what is trained.

    """

    order: Order
    schema: Schema
    values: Values

    @property
    def is_trained(self) -> bool:
        """Whether the server waits for an update."""
        return not self.order.evaluate


def receive(part: bytes, whole: Values | None, memory: Memory, version: str = __version__) -> Held:
    """Return the model that an order is about, and remember it.

    Args:
        part: the order.
        whole: the model, where it came with the order.
        memory: the client's.
        version: of the server's `aqg`, for messages.

    Raises `OutOfReachError` where the whole model is needed, and `ConfigError`, `MessageError` or
    `WireError` where the order cannot be used.

    """
    order = order_from_bytes(part)
    store = memory.copies(order.run)
    if whole is not None:
        schema = Schema.of(whole)
        copy = PublicCopy.of(whole, schema, order.layout[1:], order.round)
        copy = copy._replace(digest=order.public)
        store.save(copy, schema)
        values = whole
    else:
        found = store.load()
        if found is None:
            raise OutOfReachError(order, "no model is held here")
        copy, schema = found
        try:
            copy = follow_log(copy, order.log, schema)
        except AqgError as error:
            raise OutOfReachError(order, str(error)) from None
        if copy.digest != order.public:
            why = f"version {copy.version} has another digest here than at the server"
            raise OutOfReachError(order, why)
        store.save(copy, schema)
        values = copy.values(schema)
    recipe = make_recipe(order.recipe, order.bits, order.max_staleness)
    ours = agreement(recipe, order.num_params, order.dtype, order.seed, schema)
    if ours != order.fingerprint:
        raise ConfigError(
            f"client and server do not agree on recipe {order.recipe!r}: the server has aqg "
            f"{version}, this node {__version__}; both need the same version"
        )
    return Held(order, schema, values)


def reply_to(held: Held, after: Values, memory: Memory) -> bytes:
    """Return what stands for a trained model, of the same tensors as the one that came."""
    order, schema, before = held.order, held.schema, held.values
    kinds = kinds_of(schema)
    changed = {
        name
        for name, tensor in after.items()
        if kinds[name] is not Kind.STILL
        and not is_same(tensor, before[name])
        and is_finite(before[name])
    }
    bad = next((name for name in sorted(changed) if not is_finite(after[name])), None)
    if bad is not None:
        fault = f"tensor {bad[:200]!r} holds NaN or infinity after training"
        _logger.warning("version %d: nothing sent: %s", order.round, fault)
        return to_bytes(replace(stale_reply(order), stale=False, fault=fault))
    chosen = schema.chosen(order.layout[1:])
    if order.layout[:1] == OPEN:
        chosen = [spec for spec in chosen if spec.name in changed]
    layout = schema.bitmap(spec.name for spec in chosen)
    kept = changed - {spec.name for spec in chosen}
    rest = encode_kept(after, kept, schema, kinds) if kept else b""
    reply = _respond(held, chosen, layout, after, memory)
    return to_bytes(replace(reply, statistics=layout + rest, held_round=order.round))


def _respond(
    held: Held, chosen: list[TensorSpec], layout: bytes, after: Values, memory: Memory
) -> Reply:
    """Return the reply for the tensors that are compressed, and remember it."""
    order, schema = held.order, held.schema
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
    store = memory.mirrors(order.run, order.fingerprint, layout)
    if order.serial <= store.answered:
        return stale_reply(order)
    update = flatten(held.values, chosen)
    subtract(update, after, chosen)
    mirror, reply = answer(recipe, intact_base(recipe, store, order), order, update)
    store.save(mirror)  # before the reply leaves: a crash from here on is a lost upload
    log_reply(order, reply)
    return reply


class CopyStore:
    """Keeps a `PublicCopy` in a vault.

    Args:
        vault: where it lies.
        key: names the model; a copy under another key is not found.

    """

    def __init__(self, vault: Vault, key: str) -> None:
        self._vault = vault
        self._key = key
        self._arrays = ArrayStore(vault)

    def load(self) -> tuple[PublicCopy, Schema] | None:
        """Return the copy and its tensors; None where there is none, or none that can be read."""
        try:
            text = self._vault.read_index()
            index: dict[str, Any] = json.loads(text) if text else {}
            if index.get("key") != self._key:
                return None
            self._arrays.reserve(_numbers_in(index))
            copy = PublicCopy(
                int(index["version"]),
                bytes.fromhex(index["layout"]),
                self._arrays.read(index["vector"]),
                {name: self._arrays.read(cell) for name, cell in index["kept"].items()},
                {name: bytes.fromhex(digest) for name, digest in index["digests"].items()},
                bytes.fromhex(index["digest"]),
            )
            return copy, Schema(index["schema"])
        except _UNREADABLE as error:
            _logger.warning("the saved model cannot be used: %r", error)
            return None

    def save(self, copy: PublicCopy, schema: Schema) -> None:
        """Write the copy, whole or not at all."""
        index = {
            "key": self._key,
            "version": copy.version,
            "schema": schema.rows(),
            "layout": copy.layout.hex(),
            "vector": self._arrays.write(copy.vector),
            "kept": {name: self._arrays.write(tensor) for name, tensor in copy.kept.items()},
            "digests": {name: digest.hex() for name, digest in copy.digests.items()},
            "digest": copy.digest.hex(),
        }
        self._arrays.commit(json.dumps(index), _numbers_in(index))


def _numbers_in(index: dict[str, Any]) -> set[int]:
    cells = [index["vector"], *index["kept"].values()]
    return {int(cell["number"]) for cell in cells if "number" in cell}
