"""The server's end for one model: its public copy and log, and a mirror of every node's updates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqg.core.budget import first_budget
from aqg.core.downlink import Condensed
from aqg.core.messages import Skip, energy_of, num_nonzero
from aqg.core.recipes import make_recipe
from aqg.errors import MessageError
from aqg.flower.dropin.copies import PublicCopy, encode_entry, encode_log, moved, tensor_digest
from aqg.flower.dropin.publishing import Steps, condense, measure_change, squared_norm
from aqg.flower.dropin.tensors import (
    Kind,
    Schema,
    as_received,
    decode_kept,
    encode_kept,
    flatten,
    is_same,
    kinds_of,
    record_of,
    shifted,
    values_like,
    vector_dtype,
)
from aqg.protocol.coding import reply_from_bytes, to_bytes
from aqg.protocol.messages import Order
from aqg.protocol.mirrors import fingerprint
from aqg.protocol.peers import Peer, first_peer, take_reply, update_of
from aqg.wire import encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from flwr.app import ArrayRecord

    from aqg.core.messages import Message
    from aqg.core.recipe import Recipe
    from aqg.core.types import FloatArray
    from aqg.flower.dropin.tensors import Spec, Tensor

INCARNATION = 1
"""A run of Flower has one server; a new run begins anew."""
OPEN, CLOSED = b"\1", b"\0"
"""Whether a client may choose, by what its training changes, which tensors are compressed."""


_CAUTION = 0.03
"""Recipes are told this part of the movement. A round of local training goes far: an update that is
out of date by as much as the model moves, which a gradient may be, makes the model swing."""


_TRY_EVERY = 8
"""Versions from one trial of the context coder to the next, while it does not pay: it takes most of
the wrapper's time on large models, and saved 20 % of an entry in the examples, but nothing of
noise."""
_FEWEST = 32
_SPARSE = 8
"""An entry with fewer than one coordinate in so many is sparse."""
_LEAST_SAVED = 1 / 32
"""The part of an entry that the context coder must save to be worth its time."""


@dataclass(frozen=True)
class Settings:
    """What a user can choose.

    Attributes:
        recipe: name and options of the compressor.
        bits: its ``b_max``.
        max_staleness: after how many silent rounds a client sends all the same.
        seed: of recipes that draw.
        include: patterns for names of tensors to compress; all where there are none.
        exclude: patterns for names of tensors that travel as they are.
        downlink: how the public copy follows the model.
        clip: returns the largest norm of an update, where the strategy relies on one.

    """

    recipe: str = "lean"
    bits: int = 4
    max_staleness: int = 100
    seed: int = 0
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    downlink: Condensed = field(default_factory=Condensed)
    clip: Callable[[], float | None] = lambda: None


class LostError(MessageError):
    """A node does not hold the copy that it was thought to hold."""


class Phase(NamedTuple):
    """What was sent of a model at one time, and what replies to it are relative to.

    Attributes:
        version: of the public copy.
        layout: which tensors are compressed.
        is_open: whether clients may choose fewer.
        values: the strategy's own model; of tensors that are kept, clients' copy.

    """

    version: int
    layout: bytes
    is_open: bool
    values: dict[str, Tensor]


class Channel:
    """One model of a run.

    Args:
        run: names run and model.
        record: the model to start from.
        schema: of that.
        settings: of the user.

    """

    def __init__(self, run: str, record: ArrayRecord, schema: Schema, settings: Settings) -> None:
        self.schema = schema
        self._run = run
        self._settings = settings
        self._recipe = make_recipe(settings.recipe, settings.bits, settings.max_staleness)
        self._kinds = kinds_of(schema, settings.include, settings.exclude)
        self._candidates = schema.bitmap(n for n, k in self._kinds.items() if k is Kind.VECTOR)
        self._values = values_like(record, schema)
        self._copy = PublicCopy.of(self._values, schema, self._candidates)
        self._arrays = dict(record)
        self._full: ArrayRecord | None = record
        self._is_open = True
        self._wanted: set[str] = set()
        self._trained = 0
        self._first = 1
        self._entries: list[bytes] = []
        self._digest = self._copy.digest()
        self._positions: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._peers: dict[int, tuple[bytes, Peer]] = {}
        self._steps = Steps()
        self._history: tuple[float, ...] = ()
        self._sums: dict[bytes, tuple[FloatArray, int]] = {}
        self._senders = 1
        self._num_sent = 0
        self._budget = first_budget(self._recipe.noise)
        self._energy = 0.0
        self._zero: dict[tuple[int, str], Peer] = {}
        self._context_pays = True

    @property
    def version(self) -> int:
        """Of the public copy."""
        return self._copy.version

    def publish(self, record: ArrayRecord, is_train: bool) -> Phase:
        """Bring the public copy nearer to the model, and return what is sent now.

        Raises `MessageError` where the model has other tensors than before.
        """
        is_news = any(record.get(name) is not array for name, array in self._arrays.items())
        values = values_like(record, self.schema) if is_news else self._values
        if is_news and all(is_same(t, self._values[name]) for name, t in values.items()):
            is_news = False
        layout = self._next_layout()
        is_repeated = is_train and self._trained == self._copy.version
        if is_news or layout is not None or is_repeated:
            self._advance(values, layout, is_news)
        self._arrays = dict(record)
        if is_train:
            self._trained = self._copy.version
        held = {n: t for n, t in self._copy.kept.items() if self._kinds[n] is not Kind.STILL}
        values = {**self._values, **held}
        return Phase(self._copy.version, self._copy.layout, self._is_open, values)

    def order(self, node: int, evaluate: bool) -> tuple[bytes, ArrayRecord | None]:
        """Return a node's order, and the whole model where the node needs it."""
        copy, settings = self._copy, self._settings
        position = self._positions.get(node, 0)
        is_full = position < self._first
        first = copy.version if is_full else position
        number = self._numbers.setdefault(node, len(self._numbers))
        specs = self.schema.chosen(copy.layout)
        size, dtype = sum(spec.size for spec in specs), vector_dtype(specs)
        stamp = self._peer(node, copy.layout, size, dtype).entry.stamp
        order = Order(
            run=self._run,
            fingerprint=agreement(self._recipe, size, dtype, settings.seed, self.schema),
            recipe=settings.recipe,
            bits=settings.bits,
            max_staleness=settings.max_staleness,
            seed=settings.seed,
            num_params=size,
            dtype=dtype,
            incarnation=INCARNATION,
            round=copy.version,
            client=number,
            movement=_CAUTION * self._recipe.movement.of(self._history),
            epoch=stamp.epoch,
            uploads=stamp.uploads,
            digest=stamp.digest,
            evaluate=evaluate,
            layout=(OPEN if self._is_open else CLOSED) + copy.layout,
            public=self._digest,
            log=encode_log(first, self._entries[first - self._first :]),
            noise=self._budget.noise,
        )
        return to_bytes(order), self._whole() if is_full else None

    def note(self, node: int, phase: Phase) -> None:
        """Take note that a node holds the copy of a phase."""
        self._positions[node] = max(phase.version, self._positions.get(node, 0))

    def forget(self, node: int) -> None:
        """Take note that a node holds nothing."""
        self._positions.pop(node, None)

    def take(self, node: int, phase: Phase, part: bytes) -> ArrayRecord:
        """Return the model that a node's reply stands for; raise where it is refused.

        The update is shown against the strategy's own model, so that what the public copy lacks of
        it is not lost.
        """
        reply = reply_from_bytes(part)
        if reply.lost:
            raise LostError(reply.lost)
        if reply.stale:
            raise MessageError("it has answered a later order already")
        if (reply.incarnation, reply.round) != (INCARNATION, phase.version):
            raise MessageError(
                f"its reply is to version {reply.round} of the model, not to {phase.version}"
            )
        length = self.schema.bitmap_bytes
        layout, rest = reply.statistics[:length], reply.statistics[length:]
        specs = self.schema.chosen(layout)
        self._check_layout(layout, phase)
        kept = decode_kept(rest, self.schema) if rest else {}
        if inside := sorted(set(kept) & {spec.name for spec in specs}):
            raise MessageError(f"tensor {inside[0]!r} comes compressed and as it is")
        shown = {**phase.values, **kept}
        if specs:
            shown |= self._hear(node, phase, layout, specs, part)
        elif reply.frame:
            raise MessageError("it sent a frame for no tensors")
        self.note(node, phase)
        self._wanted |= {spec.name for spec in specs} if phase.is_open else set()
        self._wanted |= {name for name in kept if self._kinds[name] is Kind.VECTOR}
        return record_of(self._clipped(shown, phase), self.schema)

    def _hear(
        self, node: int, phase: Phase, layout: bytes, specs: list[Spec], part: bytes
    ) -> dict[str, Tensor]:
        """Return the compressed tensors of a reply, after moving the node's mirror."""
        reply = reply_from_bytes(part)
        size, dtype = sum(spec.size for spec in specs), vector_dtype(specs)
        peer = self._peer(node, layout, size, dtype)
        peer, message = take_reply(self._recipe, peer, reply, size, dtype)
        if isinstance(message, Skip) and reply.fault:
            self.note(node, phase)
            raise MessageError(f"its training made nothing that can be sent: {reply.fault}")
        self._peers[node] = layout, peer
        if not isinstance(message, Skip):
            self._num_sent += num_nonzero(message)
            self._energy += energy_of(message) if self._recipe.noise else 0.0
        update = update_of(self._recipe, peer, message, size)
        total, count = self._sums.get(layout, (None, 0))
        self._sums[layout] = update if total is None else total + update, count + 1
        return shifted(phase.values, update, specs)

    def _check_layout(self, layout: bytes, phase: Phase) -> None:
        if layout == phase.layout:
            return
        extra = int.from_bytes(layout, "little") & ~int.from_bytes(phase.layout, "little")
        if not phase.is_open or extra:
            raise MessageError("it compressed other tensors than it was told to")

    def _peer(self, node: int, layout: bytes, size: int, dtype: str) -> Peer:
        known = self._peers.get(node)
        if known is not None and known[0] == layout:
            return known[1]
        if (size, dtype) not in self._zero:  # all that have no mirror yet share one of zeros
            self._zero = {(size, dtype): first_peer(self._recipe, size, dtype)}
        return self._zero[size, dtype]

    def _clipped(self, shown: dict[str, Tensor], phase: Phase) -> dict[str, Tensor]:
        """Shorten an update that compression has made longer than the strategy relies on."""
        limit = self._settings.clip()
        if limit is None:
            return shown
        floats = [n for n, t in shown.items() if t.dtype.kind == "f"]
        changes = {n: shown[n].astype(np.float64) - phase.values[n] for n in floats}
        norm = math.sqrt(sum(float(np.vdot(c, c)) for c in changes.values()))
        if norm <= limit:
            return shown
        short = limit / norm
        return shown | {
            n: (phase.values[n] + short * c).astype(shown[n].dtype) for n, c in changes.items()
        }

    def _next_layout(self) -> bytes | None:
        """Return which tensors are compressed from now on; None if it is as before."""
        if not self._wanted:
            return None
        inside = {spec.name for spec in self.schema.chosen(self._copy.layout)}
        wanted = self._wanted if self._is_open else inside | self._wanted
        self._wanted, self._is_open = set(), False
        layout = self.schema.bitmap(wanted)
        return None if layout == self._copy.layout else layout

    def _advance(self, values: dict[str, Tensor], layout: bytes | None, is_news: bool) -> None:
        """Add an entry, and go to the next version of the public copy."""
        copy = self._copy if layout is None else self._copy.with_layout(self.schema, layout)
        specs = self.schema.chosen(copy.layout)
        mean = self._mean_square(copy.layout)
        frame, kept, vector = b"", b"", copy.vector
        tensors, digests = dict(copy.kept), dict(copy.digests)
        if is_news:
            square, num_changed = measure_change(values, self._values, specs, vector_dtype(specs))
            self._steps = self._steps.after(square)
            if mean is not None:
                self._note_movement(square, mean)
            message = condense(
                flatten(values, specs),
                vector,
                self._num_published(num_changed, len(vector)),
                self._steps,
                copy.version,
                self._settings.downlink,
            )
            if message is not None:
                frame, vector = self._encode(message), moved(vector, message, specs)
            changed = [n for n in tensors if self._differs(n, values[n], tensors[n])]
            if changed:
                kept = encode_kept(values, changed, self.schema, self._kinds)
                tensors |= decode_kept(kept, self.schema)
                digests |= {name: tensor_digest(tensors[name]) for name in changed}
            self._values = values
        self._entries.append(encode_entry(layout, frame, kept))
        self._full = None
        self._copy = PublicCopy(copy.version + 1, copy.layout, vector, tensors, digests)
        self._digest = self._copy.digest()
        self._cut()

    def _num_published(self, num_changed: int, size: int) -> int | None:
        """Return how many coordinates the next entry has; None: as many as the tolerance asks for.

        Entries are as long as replies: half as long as a mean one, or whatever the ratio is. Where
        nodes keep mirrors, replies say nothing of how much the model changed, and the change is
        counted itself.
        """
        num_sent, self._num_sent = self._num_sent, 0
        if self._recipe.memory.keeps_mirror:
            num_sent = num_changed if num_changed * _SPARSE <= size else size
        count = max(_FEWEST, round(self._settings.downlink.ratio * num_sent / self._senders))
        return count if count * _SPARSE <= size else None

    def _encode(self, message: Message) -> bytes:
        """Write the frame of an entry; with the context coder, as long as that pays."""
        short = encode(message, tries_context=False)
        if not self._context_pays and self._copy.version % _TRY_EVERY:
            return short
        shorter = encode(message)
        self._context_pays = len(shorter) < (1.0 - _LEAST_SAVED) * len(short)
        return shorter

    def _differs(self, name: str, tensor: Tensor, held: Tensor) -> bool:
        """Tell whether clients must be told of a kept tensor."""
        kind = self._kinds[name]
        if kind is Kind.STILL or is_same(tensor, held):
            return False
        if kind is Kind.HALF:
            return not is_same(as_received(tensor, kind), held)
        if tensor.dtype.kind != "f":
            return True
        spec = self.schema.specs[self.schema.places[name]]
        _, num_changed = measure_change({name: tensor}, {name: held}, [spec], spec.dtype)
        return num_changed > 0 or not np.isfinite(tensor).all()

    def _mean_square(self, layout: bytes) -> float | None:
        """Return ``‖u‖²`` of the mean ``u`` of the replies since the last entry."""
        total, count = self._sums.pop(layout, (None, 0))
        self._senders = max(1, count)
        self._sums = {}
        energy, self._energy = self._energy, 0.0
        if total is None:
            return None
        square = squared_norm(total)
        if energy:
            self._budget = self._budget.after(self._recipe.noise, square, energy, count)
        return square / count**2

    def _note_movement(self, step: float, mean: float) -> None:
        """Put the scale of the last step into the history that recipes look at.

        That is the model's step, or the mean update where the strategy made a larger step of it:
        an error in one update must be small against both.
        """
        square = min(step, mean)
        if math.isfinite(square):
            self._history = self._recipe.movement.extend(self._history, square)

    def _whole(self) -> ArrayRecord:
        """Return the public copy as a record."""
        if self._full is None:
            self._full = record_of(self._copy.values(self.schema), self.schema)
        return self._full

    def _cut(self) -> None:
        """Drop entries that no node wants, or that together are longer than the model."""
        oldest = min(self._positions.values(), default=self._copy.version)
        budget = sum(array.nbytes for array in self._values.values())
        kept = 0
        for entry in reversed(self._entries):
            budget -= len(entry)
            if budget < 0:
                break
            kept += 1
        drop = max(oldest - self._first, len(self._entries) - kept, 0)
        del self._entries[:drop]
        self._first += drop


def agreement(recipe: Recipe, size: int, dtype: str, seed: int, schema: Schema) -> bytes:
    """Return a digest of everything both sides must have alike."""
    ours = fingerprint(recipe, size, dtype, seed)
    return bytes(a ^ b for a, b in zip(ours, schema.fingerprint, strict=True))
