"""The server's end for one model: its public copy and log, and a mirror of every node's updates.

What of the difference between the model and its public copy is sent: a change of few coordinates,
as sparse replies make it, is answered in kind, by the largest coordinates of the difference as
sparse ternary, while that leaves the copy within `FARTHEST` steps of the model. Clients whose copy
falls back farther go on correcting what the model has long had, and it swings. Any other change is
quantized with the fewest bits that bring the copy within a tolerance of the model. What is left out
stays in the difference.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakSet

import numpy as np

from aqg.channel.settings import Settings
from aqg.channel.tensors import (
    PIECE,
    First,
    Kind,
    Kinds,
    PublicCopy,
    Schema,
    Tensor,
    Update,
    Values,
    as_received,
    choose_way,
    flatten,
    is_finite,
    is_same,
    pieces,
    shifted,
    squared_norm,
    vector_dtype,
)
from aqg.core.auto import first_budget
from aqg.core.downlink import Condensed, Entry, Public, advance, rounded_up
from aqg.core.grids import value_table
from aqg.core.messages import AnyUpload, Message, Skip, Upload, energy_of, num_nonzero
from aqg.core.quantizers import TERNARY_WIDTH, largest, ternary
from aqg.core.round import describe_fault
from aqg.core.server import Peer, on_grid
from aqg.core.space import NumpySpace
from aqg.core.track import Flow, correct
from aqg.core.types import FloatArray, IntArray
from aqg.errors import ConfigError, MessageError
from aqg.objectives.layout import TensorSpec
from aqg.protocol import messages
from aqg.protocol.log import LostError, ModelLog
from aqg.wire.entry import encode_entry, encode_log, encode_snapshot

OPEN, MOVING, FORGETTING = 1, 2, 4
"""Flags before a layout: whether a client may choose, by what its training changes, which tensors
are compressed; whether the vector has a velocity; and whether the client is to hold nothing."""
_CAUTION = 0.03
"""Factor on the movement that recipes see. After local training, tolerating an error as large as
the step makes training oscillate; with exact gradients it does not."""
_MOST_SUMMED = 1 << 20
"""Coordinates of which replies are summed up; of larger models that many are a sample."""
_STEPS = 10
"""How many past steps the tolerance of an entry looks at."""
_FEWEST = 32
_SPARSE = 8
"""An entry with fewer than one coordinate in so many is sparse."""
_SPACE = NumpySpace(in_place=True)
FARTHEST = 1.0
"""How far a sparse entry may leave the copy from the model, squared, in squared steps of it."""
_ROUNDING = 64.0
"""Averages of equal numbers are off by less than this many units in the last place."""
_GRID_SHARE = 0.25
"""Part of the tolerance that is left to a choice of levels whose step is then rounded up to a power
of two, at most to twice itself: the error, squared, to four times itself."""

_FINEST = 2.0**-8
"""In the step of an entry, the longest quantum of a grid that is begun. Where one coordinate is
much larger than all others, its grid is too coarse for them, and the copy stays on none."""


@dataclass(frozen=True, eq=False)
class Phase:
    """What was sent of a model at one time, and what replies to it are relative to.

    While it is held anywhere its copy stays as it is: the channel then moves another one.
    """

    channel: Channel  # of the model
    is_open: bool  # whether clients may choose fewer tensors to compress
    values: dict[str, Tensor]  # the strategy's own model; of tensors that are kept, clients' copy
    copy: PublicCopy  # the public copy

    @property
    def version(self) -> int:
        return self.copy.version


class Taken(NamedTuple):
    """A reply that was read, and has changed nothing yet."""

    channel: Channel
    node: int
    phase: Phase  # what it answers
    layout: bytes  # which tensors were compressed
    kept: dict[str, Tensor]  # tensors that came as they are
    # what the server holds of the node after it; None where nothing was compressed.
    peer: Peer | None
    message: Message  # what was sent
    update: Update  # what it stands for; of no values where nothing was compressed
    reply: messages.Reply  # as it came

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the model that the reply stands for, in order.

        The update is shown against the strategy's own model, so that what the public copy lacks of
        it is not lost. Raises `MessageError` where one is beyond its type's numbers.
        """
        schema, values = self.channel.schema, self.phase.values
        factor, inside = self.channel.cut(self), schema.names(self.layout)
        moving = shifted(values, self.update, schema.chosen(self.layout), factor)
        for spec in schema.specs:
            if spec.name not in inside:
                tensor = self.kept.get(spec.name, values[spec.name])
                if factor < 1.0 and tensor.dtype.kind == "f":
                    change = tensor - values[spec.name]
                    tensor = (values[spec.name] + factor * change).astype(spec.dtype)
                yield spec.name, tensor
                continue
            name, tensor = next(moving)
            if not is_finite(tensor):
                raise MessageError(f"its update makes {name!r} hold NaN or infinity")
            yield name, tensor

    def commit(self) -> None:
        self.channel.commit(self)


class Channel:
    """One model of a run.

    Args:
        run: names run and model.
        values: the model to start from.
        settings: of the user.
        kinds: how tensors travel, where that is not to be found out from types and names.

    Attributes:
        schema: the model's tensors.
        odd: tensors that never change, because they hold NaN or infinity at the start, as masks do.
        fault: why the strategy's model could not be sent last time; empty where it was.

    Raises `ConfigError` where no tensor can be compressed.
    """

    makes_model = False
    """Whether the model is made here, from the updates, and not by a strategy."""
    incarnation = 1
    """Grows when a server goes on with a run."""

    def __init__(
        self, run: str, values: Values, settings: Settings, kinds: Kinds | None = None
    ) -> None:
        self.schema = Schema.of(values)
        self.run = run
        self.fault = ""
        self._settings = settings
        self._recipe = settings.make_recipe()
        self._kinds = kinds or self.schema.kinds(settings.include, settings.exclude)
        self._values = self.schema.cast(values)
        self.odd = tuple(name for name, t in self._values.items() if not is_finite(t))
        self._kinds |= dict.fromkeys(self.odd, Kind.STILL)
        candidates = [n for n, k in self._kinds.items() if k is Kind.VECTOR]
        if not candidates:
            raise ConfigError("no tensor holds finite numbers that can be compressed")
        layout = self.schema.bitmap(candidates)
        way = choose_way(settings.start, self._values, self.schema, layout)
        self._first = First.of(way, self._values, self.schema, layout, settings.seed)
        if self._first is not None:
            self._values = dict(self._first.values(self._values))
        self._copy = PublicCopy.of(self._values, self.schema, layout).digested()
        self._is_open = True
        self._wanted: set[str] = set()
        self._trained = 0
        self._log = ModelLog(merges=True)
        self._changed: dict[str, int] = {}  # since which version kept tensors are as they are
        self._snapshot: tuple[tuple[int, bool], bytes] = (0, False), b""
        self._positions: dict[int, int] = {}
        self._offered: dict[int, int] = {}  # the version since which a node has not replied
        self._tried: set[int] = set()  # nodes that were sent the first model
        self._strangers: set[int] = set()  # those who could do nothing with it
        self._informed: dict[int, bytes] = {}  # layouts of orders whose terms nodes have
        self._numbers: dict[int, int] = {}
        self._peers: dict[int, tuple[bytes, Peer]] = {}
        self._squares: deque[float] = deque(maxlen=_STEPS)  # of the strategy's last steps
        self._sums: dict[bytes, tuple[FloatArray, int]] = {}
        self._senders = 1
        self._num_sent = 0
        self._budget = first_budget(self._recipe.noise)
        self._energy = 0.0
        self._zero: dict[tuple[int, str], Peer] = {}
        self._phases: WeakSet[Phase] = WeakSet()

    @property
    def version(self) -> int:
        return self._copy.version

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._values.values())

    @property
    def whole_bytes(self) -> int:
        """The length of what a node is sent that holds nothing."""
        return self.num_bytes

    def publish(self, given: Values, is_train: bool, as_it_is: bool = False) -> Phase:
        """Bring the public copy nearer to the model, and return what is sent now.

        A model with NaN or infinity is not sent: clients go on from the one before, and replies
        are relative to that. With ``as_it_is`` the copy becomes the model, as a whole.
        """
        values = self.schema.cast(given)
        is_news = not all(is_same(t, self._values[name]) for name, t in values.items())
        changing = (n for n, k in self._kinds.items() if is_news and k is not Kind.STILL)
        bad = (name for name in changing if not is_finite(values[name]))
        self.fault = next((f"tensor {name!r} holds NaN or infinity" for name in bad), "")
        if self.fault:
            values, is_news = self._values, False
        layout = self._next_layout()
        is_repeated = is_train and self._trained == self._copy.version
        if as_it_is and is_news:
            version = self._copy.version + 1
            self._copy = PublicCopy.of(values, self.schema, self._copy.layout, version).digested()
            self._values = values
            self._log = ModelLog(version, merges=True)
        elif is_news or layout is not None or is_repeated:
            self._advance(values, layout, is_news)
        if is_train:
            self._trained = self._copy.version
        held = {n: t for n, t in self._copy.kept.items() if self._kinds[n] is not Kind.STILL}
        phase = Phase(self, self._is_open, {**self._values, **held}, self._copy)
        self._phases.add(phase)
        return phase

    def order(self, node: int, evaluate: bool) -> tuple[bytes, bool]:
        """Return a node's order, and whether the node needs the whole public copy as well."""
        copy, settings, place = self._copy, self._settings, self._place(node)
        position = self._positions.get(place, 0)
        is_behind = position < self._log.first
        first = self._from_first(place) if is_behind else b""
        is_full = is_behind and not first
        size, dtype = self.schema.vector_of(copy.layout)
        stamp = self._peer(place, copy.layout).held.stamp
        names = ("recipe", "bits", "max_staleness", "seed", "updates")
        terms = size, dtype, settings.seed, self.schema.fingerprint
        order = messages.Order(
            **{name: getattr(settings, name) for name in names},
            run=self.run,
            fingerprint=messages.fingerprint(self._recipe, *terms),
            num_params=size,
            dtype=dtype,
            incarnation=self.incarnation,
            round=copy.version,
            client=self._number(place),
            **stamp._asdict(),
            evaluate=evaluate,
            layout=self._flagged(self._is_open, copy),
            constants=self._beside(),
            public=copy.digest,
            log=b"" if position == copy.version else self._entries(place, position, is_behind),
            snapshot=self._snapshot_since(first) if is_behind else b"",
            statistics=b"" if is_behind else self._kept_since(position),
            first=first,
            noise=self._noise,
        )
        is_informed = not is_behind and self._informed.get(place) == order.layout
        return order.to_bytes(order if is_informed else None), is_full

    def _place(self, node: int) -> int:
        """Return under which number a node is remembered."""
        return node

    def _number(self, place: int) -> int:
        """Return the number of a client in the keys of its random draws."""
        return self._numbers.setdefault(place, len(self._numbers))

    def _entries(self, place: int, position: int, is_behind: bool) -> bytes:
        """Return what leads from a version to this one."""
        copy, log = self._copy, self._log
        if is_behind:
            return encode_log(copy.version, [])
        delivery = log.entries_since(position, lambda: copy.public)
        is_sure = self._offered.setdefault(place, copy.version) == copy.version
        merged = delivery.merged if is_sure else b""  # whoever is ahead leaves out what it has
        return merged or log.frame(position)

    def _kept_since(self, position: int) -> bytes:
        names = [name for name, version in self._changed.items() if version > position]
        return self.schema.encode(self._copy.kept, names, self._kinds) if names else b""

    @property
    def _noise(self) -> float:
        return self._budget.noise

    def _beside(self) -> bytes:
        """Return which tensors beside the vector our own server takes; empty where all."""
        return b""

    def _snapshot_since(self, first: bytes) -> bytes:
        """Return what leads from the first model, or from the whole one, to the copy's vector."""
        copy, key = self._copy, (self._copy.version, bool(first))
        if copy.version == 1:
            return b""
        if self._snapshot[0] != key:
            sent = self.copied() if self._first is None or not first else self._first.values({})
            specs = self.schema.chosen(copy.layout)
            self._snapshot = key, encode_snapshot(copy.public, flatten(sent, specs))
        return self._snapshot[1]

    def _from_first(self, place: int) -> bytes:
        """Return what a node starts from that holds nothing; empty: it gets the whole model."""
        if self._first is None or place in self._strangers:
            return b""
        copy = self._copy
        first = self._first.encode(copy.kept, self._changed)
        is_shorter = len(first) + len(self._snapshot_since(first)) < self.whole_bytes
        if is_shorter:
            self._tried.add(place)
        return first if is_shorter else b""

    def is_new(self, node: int) -> bool:
        """Tell whether a node has never answered, or has lost what it had."""
        return self._place(node) not in self._positions

    def is_compact(self, node: int) -> bool:
        """Tell whether a node that has never answered was sent the first model in few bytes."""
        place = self._place(node)
        return place in self._tried - self._strangers and place not in self._positions

    def copied(self) -> Values:
        """Return the tensors of the public copy; the next `publish` may write to them."""
        return self._copy.values(self.schema)

    def note(self, node: int, phase: Phase) -> None:
        """Take note that a node holds the copy of a phase."""
        place = self._place(node)
        version = 0 if self._settings.forgets else phase.version
        self._positions[place] = max(version, self._positions.get(place, 0))
        self._informed[place] = self._flagged(phase.is_open, phase.copy)
        self._offered.pop(place, None)

    def forget(self, node: int) -> None:
        """Take note that a node holds nothing."""
        place = self._place(node)
        if place in self._tried and place not in self._positions:
            self._strangers.add(place)
        for noted in (self._positions, self._informed, self._offered):
            noted.pop(place, None)

    def take(self, node: int, phase: Phase, part: bytes) -> Taken:
        """Read a node's reply; raise where it is refused. Nothing changes until it is committed."""
        place = self._place(node)
        reply = messages.Reply.from_bytes(part, self._peer(place, phase.copy.layout).held.stamp)
        if reply.lost:
            raise LostError(reply.lost)
        if reply.stale:
            raise MessageError("it has answered a later order already")
        if (reply.incarnation, reply.round) != (self.incarnation, phase.version):
            raise MessageError(
                f"its reply is to version {reply.round} of the model, not to {phase.version}"
            )
        if reply.fault:
            self.note(node, phase)
            raise MessageError(f"its training made nothing that can be sent: {reply.fault}")
        length = self.schema.bitmap_bytes
        beside = reply.statistics or phase.copy.layout
        layout, rest = beside[:length], beside[length:]
        inside = self.schema.names(layout)
        told = self.schema.names(phase.copy.layout)
        if inside != told and not (phase.is_open and inside < told):
            raise MessageError("it compressed other tensors than it was told to")
        kept = self.schema.decode(rest) if rest else {}
        for name, tensor in kept.items():
            if name in inside:
                raise MessageError(f"tensor {name!r} comes compressed and as it is")
            if self._kinds[name] is Kind.STILL:
                raise MessageError(f"tensor {name!r} cannot be changed")
            if not is_finite(tensor):
                raise MessageError(f"tensor {name!r} holds NaN or infinity")
        size, dtype = self.schema.vector_of(layout)
        if not inside:
            if reply.frame:
                raise MessageError("it sent a frame for no tensors")
            nothing = Update(np.zeros(0, np.float32), dtype)
            return Taken(self, node, phase, layout, kept, None, Skip(), nothing, reply)
        peer, message = messages.take_reply(
            self._recipe, self._peer(place, layout), reply, size, dtype
        )
        update = Update(messages.update_of(self._recipe, peer, message, size), dtype)
        return Taken(self, node, phase, layout, kept, peer, message, update, reply)

    def commit(self, taken: Taken) -> None:
        """Take note of a reply that was read, and of what the node then holds."""
        if taken.peer is not None:
            if not self._settings.forgets:
                self._peers[self._place(taken.node)] = taken.layout, taken.peer
            if not isinstance(taken.message, Skip):
                self._num_sent += num_nonzero(taken.message)
                self._energy += energy_of(taken.message) if self._recipe.noise else 0.0
            total, count = self._sums.get(taken.layout, (None, 0))
            sample = taken.update.sample(_MOST_SUMMED)
            self._sums[taken.layout] = sample if total is None else total + sample, count + 1
        self.note(taken.node, taken.phase)
        if taken.phase.is_open:
            self._wanted |= self.schema.names(taken.layout)
        self._wanted |= {name for name in taken.kept if self._kinds[name] is Kind.VECTOR}

    def cut(self, taken: Taken) -> float:
        """Return how much of an update is shown, so that it is no longer than clients clip to."""
        limit = self._settings.clip()
        if limit is None:
            return 1.0
        square = squared_norm(taken.update)
        for name, tensor in taken.kept.items():
            if tensor.dtype.kind == "f":
                change = tensor.astype(np.float64) - taken.phase.values[name]
                square += float(np.vdot(change, change))
        return min(1.0, limit / math.sqrt(square)) if square else 1.0

    def take_whole(self, phase: Phase, values: Values) -> Iterator[tuple[str, Tensor]]:
        """Yield what a whole model from a node stands for, which trained the public copy.

        As of an update, what the public copy lacks of the strategy's model is added.
        """
        specs = self.schema.chosen(phase.copy.layout)
        lacks = flatten(phase.values, specs)
        np.subtract(phase.copy.vector, lacks, out=lacks)
        update = Update(lacks, str(lacks.dtype))
        moving = dict(shifted(self.schema.cast(values), update, specs)) if lacks.any() else {}
        for name, tensor in values.items():
            yield name, moving.get(name, tensor)

    def _peer(self, place: int, layout: bytes) -> Peer:
        known = self._peers.get(place)
        if known is not None and known[0] == layout:
            return known[1]
        vector = self.schema.vector_of(layout)
        if vector not in self._zero:  # all that have no mirror yet share one of zeros
            self._zero = {vector: messages.first_peer(self._recipe, *vector)}
        return self._zero[vector]

    def _next_layout(self) -> bytes | None:
        """Return which tensors are compressed from now on; None if it is as before."""
        if not self._wanted:
            return None
        inside = set() if self._is_open else self.schema.names(self._copy.layout)
        wanted = inside | self._wanted
        self._wanted, self._is_open = set(), False
        layout = self.schema.bitmap(wanted)
        return None if layout == self._copy.layout else layout

    def _advance(self, values: dict[str, Tensor], layout: bytes | None, is_news: bool) -> None:
        """Add an entry, and go to the next version of the public copy."""
        copy = self._copy
        if layout is not None:
            copy = copy.with_layout(self.schema, layout)
            self._log = ModelLog(copy.version, merges=True)  # whoever is behind cannot follow
        specs = self.schema.chosen(copy.layout)
        mean = self._mean_square(copy.layout, len(copy.vector))
        entry = Entry(copy.version, is_step=False)
        if is_news:
            square, num_changed = measure_change(values, self._values, specs, vector_dtype(specs))
            self._values = values
            self._squares.appendleft(square)
            movement = sum(self._squares) / len(self._squares)
            count = self._num_published(num_changed, len(copy.vector))
            gap = flatten(values, specs)  # what the public copy lacks
            gap -= copy.vector
            upload, self.fault = condense(
                gap, count, movement, copy.version, self._settings.downlink
            )
            entry = entry_of(copy.public, upload, gap)
            del gap, upload
            entry = entry._replace(movement=self._movement(square, mean))
            copy = self._with_kept(copy)
        self._publish(copy, entry)

    def _publish(self, copy: PublicCopy, entry: Entry) -> None:
        """Move the public copy by an entry, and put that into the log."""
        self._log.append(encode_entry(entry, None))
        is_own = not any(np.may_share_memory(p.copy.vector, copy.vector) for p in self._phases)
        public = advance(copy.public, entry, self._recipe.movement, in_place=is_own)
        if entry.position is not None and not public.quantum:  # it adds up with no later one
            self._log.merges_from = public.round
        self._copy = copy._replace(public=public).digested()
        self._cut()

    def _with_kept(self, copy: PublicCopy) -> PublicCopy:
        """Return the copy with the kept tensors that have changed, as clients will read them."""
        changed = [n for n in copy.kept if self._differs(n, self._values[n], copy.kept[n])]
        tensors: Values = self._values
        for _ in range(2 if changed else 0):  # what was read once is read the same ever after
            kept = self.schema.encode(tensors, changed, self._kinds)
            tensors = self.schema.decode(kept)
        self._changed |= dict.fromkeys(changed, copy.version + 1)
        return copy.with_kept(tensors if changed else {})

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

    def _differs(self, name: str, tensor: Tensor, held: Tensor) -> bool:
        """Tell whether clients must be told of a kept tensor."""
        kind = self._kinds[name]
        if kind is Kind.STILL or is_same(tensor, held):
            return False
        if kind is Kind.HALF:
            return not is_same(as_received(tensor), held)
        if tensor.dtype.kind != "f":
            return True
        spec = self.schema.specs[self.schema.places[name]]
        _, num_changed = measure_change({name: tensor}, {name: held}, [spec], spec.dtype)
        return num_changed > 0

    def _mean_square(self, layout: bytes, size: int) -> float | None:
        """Return ``‖u‖²`` of the mean ``u`` of the replies since the last entry."""
        total, count = self._sums.pop(layout, (None, 0))
        self._senders = max(1, count)
        self._sums = {}
        energy, self._energy = self._energy, 0.0
        if total is None:
            return None
        square = squared_norm(total) * max(1.0, size / len(total))
        if energy:
            self._budget = self._budget.after(self._recipe.noise, square, energy, count)
        return square / count**2

    def _movement(self, step: float, mean: float | None) -> float | None:
        """Return the scale of the last step that recipes look at; None: as before.

        That is the model's step, or the mean update where the strategy made a larger step of it:
        an error in one update must be small against both.
        """
        square = _CAUTION * min(step, math.inf if mean is None else mean)
        if mean is None or not math.isfinite(square):
            return None
        movement = rounded_up(square)
        history = self._copy.public.history
        return None if history and history[0] == movement else movement

    def _cut(self) -> None:
        """Drop entries that no node wants, or that together are longer than the model."""
        held = [] if self._settings.forgets else self._positions.values()
        self._log.cut(min(held, default=self._copy.version))
        self._log.bound(self.whole_bytes)

    def _flagged(self, is_open: bool, copy: PublicCopy) -> bytes:
        """Return which tensors are compressed, as orders say it."""
        flags = OPEN * is_open + MOVING * bool(len(copy.public.velocity))
        return bytes([flags + FORGETTING * self._settings.forgets]) + copy.layout


def entry_of(public: Public, upload: AnyUpload | None, gap: FloatArray) -> Entry:
    """Return the entry that adds an upload of a gap to the public model, on its grid if it can."""
    entry = Entry(public.round, position=upload, is_rounded=True)
    if not isinstance(upload, Upload):
        return entry
    moved = on_grid(_SPACE, public.parameters, public.quantum, upload, gap)
    if moved is None:
        return entry._replace(position=None)
    snapped, quantum = moved
    if not public.quantum and quantum > _FINEST * upload.step:
        return entry
    return entry._replace(position=snapped, quantum=None if quantum == public.quantum else quantum)


def measure_change(
    values: Values, before: Values, specs: Sequence[TensorSpec], dtype: str
) -> tuple[float, int]:
    """Return ``‖θ - θ'‖²``, and how many values changed by more than rounding in ``dtype`` does."""
    square, count, bound = 0.0, 0, _ROUNDING * float(np.finfo(dtype).eps)
    with np.errstate(over="ignore", invalid="ignore"):
        for spec in specs:
            new, old = values[spec.name].reshape(-1), before[spec.name].reshape(-1)
            for piece in pieces(len(new)):
                was = old[piece].astype(np.float64)
                change = new[piece] - was
                square += float(np.vdot(change, change))
                np.abs(was, out=was)
                was *= bound
                count += int(np.count_nonzero(np.abs(change) > was))
    return square, count


def condense(
    gap: FloatArray, count: int | None, movement: float, version: int, downlink: Condensed
) -> tuple[AnyUpload | None, str]:
    """Return what is to be added to the public copy, None for nothing; and what is wrong, if any.

    The ``gap``, the strategy's model less the public copy, is left as it was; ``count`` is that of
    a sparse entry's coordinates, None for one that is not, and ``movement`` the mean
    ``‖θ^{k+1} - θ^k‖²`` of the last steps.
    """
    if count is not None:
        kept = largest_of(gap, min(count, len(gap)))
        if not len(kept):
            return None, ""
        sparse = ternary(gap, kept, TERNARY_WIDTH)
        whole = gap[kept]
        value = value_table(sparse.grid, sparse.width, sparse.step, gap.dtype.type)
        gap[kept] -= value[sparse.levels[kept]]
        is_near = squared_norm(gap) <= FARTHEST * movement
        gap[kept] = whole
        if is_near:
            return sparse, ""
        del sparse
    tolerance = _GRID_SHARE * downlink.tolerance * movement
    found = correct(downlink.of_velocity, Flow(gap[None], tolerance, _SPACE, version))
    fault = describe_fault(gap) if len(found.faulty) else ""
    return (found.uploads[0] if found.uploads else None), fault


def largest_of(vector: FloatArray, count: int) -> IntArray:
    """Return what `aqg.core.quantizers.largest` does, in little memory: piece by piece.

    >>> largest_of(np.array([0.5, -2.0, 0.5, 1.0, 0.0], np.float32), 3)
    array([0, 1, 3])
    """
    found = np.arange(0)
    for piece in pieces(len(vector), max(PIECE, 3 * count)):
        found = np.concatenate([found, piece.start + largest(vector[piece], count)])
        found = found[largest(vector[found], count)]
    return found
