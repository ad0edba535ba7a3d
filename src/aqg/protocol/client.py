"""A client's end of the protocol: bytes in, bytes out, and a memory that survives crashes.

What comes in may be lost, doubled, late or damaged, and the memory may be an old copy: the client
finds out from stamps and digests, and does nothing, goes back by one answer, asks for what it
lacks, or starts again from zero.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from aqg.core.downlink import start_digest
from aqg.core.recipe import Recipe
from aqg.core.recipes import make_recipe
from aqg.core.types import FloatArray
from aqg.errors import ConfigError, GradientError, MessageError, WireError
from aqg.protocol import messages
from aqg.protocol.log import LostError, Terms, follow, holding_of
from aqg.protocol.store import ClientStore, DirectoryVault, MemoryVault, Vault, write_atomically

Train = Callable[[FloatArray, int], FloatArray | tuple[FloatArray, float]]

_logger = logging.getLogger("aqg.protocol")
_TERMS = "terms"


class ClientSession:
    """Answers a server's orders.

    Args:
        path: a directory in which the client remembers; None to remember in this process alone.
        start: the model that training starts from, where the client has it: snapshots are then
            relative to it.
        recipe: in place of the one that the server names; the server must have an equal one.
    """

    def __init__(
        self,
        path: Path | str | None = None,
        *,
        start: FloatArray | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        self._path = None if path is None else Path(path)
        self._memory = MemoryVault()
        self._start = None if start is None else start.copy()
        self._recipe = recipe
        self._terms: dict[str, messages.Order] = {}

    def answer(self, order: bytes, train: Train) -> bytes:
        """Return the reply to an order.

        Args:
            order: what the server's `ServerSession.order` returned. Damaged bytes, and an order
                for another recipe, raise `WireError`, `MessageError` or `ConfigError`; nothing
                has changed then.
            train: called with the model, flat, and the round; returns the update, flat: what the
                server is to go against, such as a gradient, or the model less the one that local
                training arrived at. It may return the loss as well. It is not called for an order
                that was answered already, or that this client cannot follow.
        """
        try:
            read = messages.Order.from_bytes(order, self._terms.values() or self._read_terms())
        except messages.UnknownTermsError as unknown:
            digest = b"" if self._start is None else start_digest(self._start)
            return unknown.reply(digest).to_bytes()
        agreed = agree(read, self._recipe)
        self._keep_terms(read)
        store = ClientStore(self._vault(read), key_of(read))
        if read.serial <= store.answered:
            if read.serial == store.answered and store.last_reply():
                return store.last_reply()  # the same once more: the server takes one of them
            return read.stale_reply().to_bytes(read.stamp)
        parcel = read.parcel
        if parcel is None:
            raise MessageError("the order has no model and nothing that leads to one")
        terms = Terms(agreed, read.num_params, read.dtype)
        held = store.load_public()
        held = held if held is not None and terms.fits(held) else None
        try:
            public = follow(terms, parcel, held, lambda: self._start)
        except LostError as lost:
            _logger.warning("round %d: the model is out of reach: %s", read.round, lost)
            holding = holding_of(terms, held, lambda: self._start)
            return read.lost_reply(holding, str(lost)).to_bytes(read.stamp)
        store.put_public(public)  # counts when the mirror is saved as well
        read = replace(read, movement=agreed.movement.of(public.history))
        started = time.perf_counter()
        base = intact_base(agreed, store, read)
        loss, update = _updated(train, public.parameters, read)
        mirror, reply = base.answer(agreed, read, update, loss)
        seconds = time.perf_counter() - started
        with np.errstate(over="ignore"):
            single = float(np.float32(loss))  # it is only reported
        frame = replace(reply, loss=single, work_seconds=short(seconds)).to_bytes(read.stamp)
        store.save(mirror, frame)  # before the reply leaves: a crash from here on is a lost upload
        log_reply(read, reply)
        return frame

    def _keep_terms(self, order: messages.Order) -> None:
        key = key_of(order)
        if key not in self._terms:
            self._terms[key] = order.terms_of_run()
            if self._path is not None:
                self._vault(order)
                write_atomically(self._path / key / _TERMS, self._terms[key].to_bytes())

    def _read_terms(self) -> Iterable[messages.Order]:
        """Return the terms of the runs that are remembered on disk."""
        for file in [] if self._path is None else sorted(self._path.glob(f"*/{_TERMS}")):
            try:
                order = messages.Order.from_bytes(file.read_bytes())
            except (OSError, WireError, MessageError) as error:
                _logger.warning("%s cannot be read, the server will say it again: %s", file, error)
                continue
            self._terms[key_of(order)] = order
            yield order

    def _vault(self, order: messages.Order) -> Vault:
        return self._memory if self._path is None else DirectoryVault(self._path / key_of(order))


def short(number: float) -> float:
    """Cut a number that is only reported to the three digits of a bfloat16 number."""
    bits = np.float32(number).view(np.uint32) & np.uint32(0xFFFF0000)
    return float(bits.view(np.float32))


def _updated(train: Train, params: FloatArray, order: messages.Order) -> tuple[float, FloatArray]:
    result = train(params.copy(), order.round)
    loss = float("nan")
    if isinstance(result, tuple):
        result, loss = result
    update = np.asarray(result)
    if update.shape != params.shape:
        raise GradientError(f"train returned shape {update.shape}; the model has {params.shape}")
    return float(loss), update.astype(order.dtype, copy=False)


def agree(
    order: messages.Order,
    recipe: Recipe | None,
    layout: bytes = messages.NO_LAYOUT,
    versions: str = "",
) -> Recipe:
    """Return the recipe, after checking that both sides mean the same.

    ``layout`` is the digest of a model's tensors, and ``versions`` is added to the error.
    """
    if recipe is None and not order.recipe:
        raise ConfigError("the server has a recipe of its own; give it to the client as well")
    chosen = recipe or make_recipe(order.recipe, order.bits, order.max_staleness)
    chosen = chosen.for_updates(order.updates)
    terms = order.num_params, order.dtype, order.seed
    if messages.fingerprint(chosen, *terms, layout) != order.fingerprint:
        raise ConfigError(
            f"client and server do not agree on recipe {order.recipe!r}: this client has "
            f"{chosen!r}{versions}; both need the same version of aqg and the same recipe"
        )
    return chosen


def key_of(order: messages.Order) -> str:
    return f"{order.run}-{order.fingerprint.hex()}"


def intact_base(recipe: Recipe, store: ClientStore, order: messages.Order) -> messages.Base:
    """Find the state to answer from in what is stored, and make sure that it has its digest."""

    def empty() -> messages.ClientMirror:
        return messages.ClientMirror.first(recipe, order.num_params, order.dtype)

    def find(mirror: messages.ClientMirror) -> messages.Base | None:
        return messages.find_base(
            recipe, mirror, order, draw=secrets.randbelow(messages.EPOCH_DRAWS)
        )

    base = find(store.load() or empty())
    if base is not None and (base.restarted or base.snapshot.is_intact):
        return base
    _logger.warning("the saved mirror does not have its digest any more; starting from zero")
    base = find(empty())
    assert base is not None  # who has answered nothing knows no older order
    return base


def log_reply(order: messages.Order, reply: messages.Reply) -> None:
    if reply.restarted:
        _logger.warning("round %d: mirror unknown to the server; from zero", order.round)
    if reply.rolled_back:
        _logger.warning("round %d: the last upload was lost; rolled back", order.round)
    if reply.fault:
        _logger.warning("round %d: nothing sent: %s", order.round, reply.fault)
