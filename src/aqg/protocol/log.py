"""The log of a model: what a client that holds some round must receive to hold this one.

The server keeps an entry per round (`aqg.wire.entry`). A client that holds round ``p`` receives the
entries since, or their sum where the model lies on an exact grid, or a snapshot and either of these
since that, whichever is shorter. A snapshot is made when entries are longer than the last one and
the log has grown by as much since: work and log stay in proportion to what travels.

`ModelLog` has the entries, `ReadLog` also knows how far each client has read them: a simulation
needs no more. On a server, `Publisher`, the round that a client is known to hold changes when the
client says what it holds, never when something is sent; and that counts only with the digest of the
round. Anything else costs the client a snapshot.

On a client's side a `Parcel` leads from what it holds to the model of a round (`follow`). The
client takes the digest of what it arrives at and compares it with the server's. A client that
cannot follow, or arrives elsewhere, changes nothing and says what it holds; the server then sends
what it lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aqg.core.downlink import STATE_DIGEST_BYTES, Entry, Public, start_digest
from aqg.core.recipe import Recipe
from aqg.core.types import FloatArray, IntArray
from aqg.errors import MessageError, RunError, WireError
from aqg.start import MARK, unpack
from aqg.wire.entry import (
    Merger,
    decode_snapshot,
    encode_entry,
    encode_log,
    encode_snapshot,
    follow_log,
    known_velocity,
    log_overhead,
    log_rounds,
    log_since,
)

Start: TypeAlias = "Callable[[], FloatArray | None]"
"""Returns a client's own starting model, where it has one."""
CONTENT_EVERY = 16
"""Rounds from one look at all coordinates of a model on an exact grid to the next."""


class LostError(MessageError):
    """The model of a round cannot be reached from what is held here."""


class Parcel(NamedTuple):
    """What brings a client to the model of a round."""

    round: int  # ``k``
    digest: bytes  # of the public model before round ``k``
    log: bytes  # a frame of entries; those that the client has are left out of account
    # a frame to start from instead of what the client holds, or the message of a first model; empty
    # where it needs none
    snapshot: bytes = b""


class Holding(NamedTuple):
    """What a client says that it holds."""

    round: int = 0  # of its public model; 0 where it has none
    digest: bytes = bytes(STATE_DIGEST_BYTES)  # of that; zeros where it has none
    start: bytes = b""  # digest of the starting model that it has; empty where it has none


class Terms(NamedTuple):
    """What must be known before a log can be followed."""

    recipe: Recipe  # as the server has it
    num_params: int  # length of the model
    dtype: str  # of the model
    is_at_rest: bool = False  # whether the model has no velocity, whatever the recipe

    def first(self, start: FloatArray) -> Public:
        return Public.at_rest(start) if self.is_at_rest else Public.first(self.recipe, start)

    def blank(self) -> Public:
        return self.first(np.zeros(self.num_params, self.dtype))

    def fits(self, public: Public) -> bool:
        return all(
            mine.dtype == theirs.dtype and mine.shape == theirs.shape
            for mine, theirs in zip(public.vectors, self.blank().vectors, strict=True)
        )


def follow(
    terms: Terms, parcel: Parcel, held: Public | None, start: Start, in_place: bool = False
) -> Public:
    """Return the model that a parcel leads to, its digest compared; raise `LostError` if not.

    With ``in_place`` what is held, or the start, is given away, then, too.
    """
    try:
        public = _open(terms, parcel, held, start)
        rounds = log_rounds(parcel.log)
        if public.round < rounds.start:
            raise LostError(
                f"the log begins with round {rounds.start}, and round {public.round} is held here"
            )
        if public.round > rounds.stop:
            raise LostError(
                f"round {public.round} is held here, which is later than round {rounds.stop}"
            )
        log = log_since(parcel.log, public.round)
        public = follow_log(log, public, terms.recipe.movement, in_place=in_place)
    except WireError as error:
        raise LostError(str(error)) from error
    if public.round != parcel.round:
        raise LostError(f"the log leads to round {public.round}; it should to {parcel.round}")
    if public.round % CONTENT_EVERY == 0:
        public = public.marked()
    digest = public.digest()
    if digest != parcel.digest:
        raise LostError(
            f"the model of round {public.round} has digest {digest.hex()} here; "
            f"the server says {parcel.digest.hex()}"
        )
    return public


def _open(terms: Terms, parcel: Parcel, held: Public | None, start: Start) -> Public:
    if parcel.snapshot[:1] == bytes([MARK]):
        return terms.first(unpack(parcel.snapshot, terms.num_params, terms.dtype, start()))
    if parcel.snapshot:
        is_relative = parcel.snapshot[1:2] == b"\1"
        base = start() if is_relative else None
        if base is not None and not _is_start(terms, base):
            raise LostError(f"the starting model here is {base.dtype}{base.shape}, another one")
        return decode_snapshot(parcel.snapshot, terms.blank(), base)
    held = first_held(terms, start) if held is None else held
    if held is None:
        raise LostError("no model is held here, and no snapshot was sent")
    return held


def first_held(terms: Terms, start: Start) -> Public | None:
    own = start()
    return terms.first(own) if own is not None and _is_start(terms, own) else None


def holding_of(terms: Terms, held: Public | None, start: Start) -> Holding:
    first = first_held(terms, start)
    held = first if held is None else held
    if held is None:
        return Holding()
    digest = b"" if first is None else start_digest(first.parameters)
    return Holding(held.round, held.digest(), digest)


def _is_start(terms: Terms, own: FloatArray) -> bool:
    return own.shape == (terms.num_params,) and own.dtype == np.dtype(terms.dtype)


_MERGED = 8
"""Entries that are added up are kept while they are as long as so many snapshots; their sum is
shorter than they are."""


class Delivery(NamedTuple):
    """What brings a client up to date."""

    first: int  # the round of the first entry to send
    num_bytes: int  # in all
    snapshot: bytes = b""  # the frame to send before it; empty where the entries do
    merged: bytes = b""  # one frame in place of the entries; empty where they are sent


class ModelLog:
    """Entries and the last snapshot.

    Args:
        first: the round of the first entry.
        entries: frames of consecutive rounds.
        merges: whether the model lies on an exact grid, and entries can be added up.
    """

    def __init__(self, first: int = 1, entries: Iterable[bytes] = (), merges: bool = False) -> None:
        self.first = first
        self.entries = list(entries)
        self.snapshot = b""  # the last one; empty before the first
        self.snapshot_round = 1  # that it holds
        self.merges_from = 0.0 if merges else math.inf
        """The round of the first entry that can be added up with all later ones."""
        self._merger: Merger | None = None
        self._sums: dict[int, bytes] = {}

    @property
    def round(self) -> int:
        """The round that a reader of the whole log holds."""
        return self.first + len(self.entries)

    def append(self, entry: bytes) -> None:
        self.entries.append(entry)
        self._merger = None
        self._sums = {}

    def deliver(
        self, position: int, make_snapshot: Callable[[], bytes], public: Callable[[], Public]
    ) -> Delivery:
        """Return what a client at round ``position`` needs; 0 for one that holds nothing.

        ``public`` returns the public model as it is now, and ``make_snapshot`` its frame.
        """
        has_entries = self.first <= position <= self.round
        if has_entries and position >= self.round - 1:  # the normal case: one entry, or none
            return Delivery(position, self._log_bytes(position))
        by_entries = self.entries_since(position, public) if has_entries else None
        is_new = self.snapshot_round < self.round or not self.snapshot
        if is_new and (by_entries is None or self._is_due(by_entries.num_bytes)):
            self.snapshot, self.snapshot_round = make_snapshot(), self.round
        if by_entries is not None and self.snapshot_round < self.first:  # entries after it are gone
            return by_entries
        rest = self.entries_since(self.snapshot_round, public)
        by_snapshot = len(self.snapshot) + rest.num_bytes
        if by_entries is not None and by_entries.num_bytes <= by_snapshot:
            return by_entries
        return Delivery(self.snapshot_round, by_snapshot, self.snapshot, rest.merged)

    def entries_since(self, first: int, public: Callable[[], Public]) -> Delivery:
        """Return all entries from a round on, or their sum where that is shorter."""
        num_bytes = self._log_bytes(first)
        merged = b""
        if first >= self.merges_from and self.round - first >= 2:
            merged = self._merged(first, public)
        if merged and len(merged) < num_bytes:
            return Delivery(first, len(merged), merged=merged)
        return Delivery(first, num_bytes)

    def _merged(self, first: int, public: Callable[[], Public]) -> bytes:
        """Return one frame for all entries from a round on; empty where they cannot be merged."""
        if first in self._sums:
            return self._sums[first]
        merger = self._merger
        if merger is None or merger.first < first:
            merger = Merger(public())
        self._merger = merger
        while merger.first > first:
            if not merger.add(self.entries[merger.first - 1 - self.first]):
                return b""
        self._sums[first] = merger.frame()
        return self._sums[first]

    def frame(self, first: int) -> bytes:
        """Return the frame of all entries from a round on."""
        return encode_log(first, self.entries[first - self.first :])

    def cut(self, oldest: int) -> None:
        """Drop entries that no one wants: all hold ``oldest``, or a snapshot would be shorter."""
        drop = max(0, min(oldest, self.round) - self.first)
        budget = len(self.snapshot) * (_MERGED if self.merges_from < math.inf else 1)
        before = self.entries[: max(0, self.snapshot_round - self.first)]
        beyond = self.snapshot_round - _num_within(budget, before) - self.first
        if self.snapshot_round > 1 or self.first > 1:
            drop = max(drop, min(beyond, len(self.entries)))
        self._drop(drop)

    def bound(self, most_bytes: int) -> None:
        """Drop entries that together are longer than this."""
        self._drop(len(self.entries) - _num_within(most_bytes, self.entries))

    def _drop(self, count: int) -> None:
        if count > 0:
            del self.entries[:count]
            self.first += count

    def _is_due(self, by_entries: int) -> bool:
        """Whether a snapshot as of now may be shorter than entries of so many bytes."""
        known = len(self.snapshot)
        return by_entries > known and self.bytes_since(self.snapshot_round) > known

    def _log_bytes(self, first: int) -> int:
        return log_overhead(first, self.round - first) + self.bytes_since(first)

    def bytes_since(self, position: int) -> int:
        return sum(map(len, self.entries[max(0, position - self.first) :]))


def _num_within(most_bytes: int, entries: Sequence[bytes]) -> int:
    """Return how many of the last entries have no more bytes than this together."""
    lengths = np.cumsum([len(entry) for entry in reversed(entries)])
    return int(np.searchsorted(lengths, most_bytes, side="right"))


_NOTHING = 0
_UNKNOWN, _HAS, _LACKS = range(3)
"""Whether a client has the starting model."""


class LogState(NamedTuple):
    """A log and its readers between two rounds; nothing of it is ever changed."""

    positions: IntArray  # the round that each client holds, ``(M,)``; 0 where it needs a snapshot
    first: int = 1  # the round of the first entry
    entries: tuple[bytes, ...] = ()  # frames of consecutive rounds
    snapshot_round: int = 1  # the round that the last snapshot holds
    snapshot: bytes = b""  # relative to the starting model; empty before the first
    # of the public model before each of these rounds, and after the last; empty in a simulation
    digests: tuple[bytes, ...] = ()
    # whether each client has the starting model, ``(M,)``; empty in a simulation
    starts: NDArray[np.int8] = np.zeros(0, np.int8)


class ReadLog(ModelLog):
    """The log of a run, and the round that each client holds.

    Without the starting model ``start`` snapshots stand alone.
    """

    def __init__(self, start: FloatArray | None, state: LogState, merges: bool = False) -> None:
        super().__init__(state.first, state.entries, merges)
        self.snapshot, self.snapshot_round = state.snapshot, state.snapshot_round
        self.start = start
        self.positions = state.positions.copy()

    def state(self) -> LogState:
        at = self.positions.copy()
        return LogState(at, self.first, tuple(self.entries), self.snapshot_round, self.snapshot)

    def deliver_to(
        self, clients: IntArray, public: Callable[[], Public]
    ) -> list[tuple[IntArray, Delivery]]:
        """Return what brings clients up to date, for all that hold the same round at once."""
        held, public = self.positions[clients], cache(public)
        return [  # entries are added up from the last one on
            (
                clients[held == position],
                self.deliver(position, lambda: encode_snapshot(public(), self.start), public),
            )
            for position in np.unique(held)[::-1].tolist()
        ]


def initial_state(public: Public, num_clients: int) -> LogState:
    """Return the state before the first round: all are taken to have the starting model."""
    return LogState(
        positions=np.ones(num_clients, np.int64),
        first=public.round,
        digests=(public.digest(),),
        starts=np.full(num_clients, _UNKNOWN, np.int8),
    )


class Publisher(ReadLog):
    """The log of a server, whose clients may lose what they are sent, or what they hold.

    Attributes:
        first_message: what a client that has nothing can start from (`aqg.start`), as long as all
            entries since are there; empty where it gets a snapshot.
    """

    def __init__(self, start: FloatArray | None, state: LogState, merges: bool = False) -> None:
        super().__init__(start, state, merges)
        self.first_message = b""
        self._start_digest = b"" if start is None else start_digest(start)
        self._digests = list(state.digests)
        if len(self._digests) != len(self.entries) + 1:
            raise RunError(f"{len(self._digests)} digests for {len(self.entries)} entries")
        self._starts = state.starts.copy()
        self._absolute: tuple[int, bytes] = (0, b"")
        self._mark: int | None = None
        self._offered: dict[int, int] = {}  # the round since which a client has not replied

    @property
    def digest(self) -> bytes:
        return self._digests[-1]

    def state(self) -> LogState:
        return super().state()._replace(digests=tuple(self._digests), starts=self._starts.copy())

    def publish(self, entry: Entry, before: Public, public: Public) -> None:
        """Add a round's entry, which leads from the public model before to that after it."""
        self.append(encode_entry(entry, known_velocity(before)))
        is_due = public.round % CONTENT_EVERY == 0
        public = public.marked() if is_due else public.marked_after(self._mark, entry)
        self._mark = public.mark
        self._digests.append(public.digest())
        held = self.positions[self.positions > _NOTHING]
        oldest = int(held.min()) if len(held) else self.round
        if self.first_message and (self._starts == _UNKNOWN).any():
            oldest = self.first  # somebody new may begin with the first entry
        if oldest > self.first:
            self.cut(oldest)
        self.bound(_longest_snapshot(public))
        del self._digests[: len(self._digests) - len(self.entries) - 1]

    def parcel(self, client: int, public: Public) -> Parcel:
        """Return what brings a client to the model of this round."""
        has, lacks = (self._starts == _HAS).any(), (self._starts == _LACKS).any()
        if self._starts[client] == _UNKNOWN and lacks and not has:
            self._starts[client], self.positions[client] = _LACKS, _NOTHING
        position = int(self.positions[client])
        if self.start is None or self._starts[client] == _LACKS:
            is_new = self._starts[client] == _UNKNOWN
            delivery = self._deliver_without_start(position, public, is_new)
        else:
            delivery = self.deliver(
                position, lambda: encode_snapshot(public, self.start), lambda: public
            )
        is_sure = self._offered.setdefault(client, self.round) == self.round
        entries = delivery.merged if is_sure else b""  # whoever is ahead leaves out what it has
        entries = entries or self.frame(delivery.first)
        return Parcel(self.round, self.digest, entries, delivery.snapshot)

    def followed(self, client: int) -> None:
        """Take note that a client holds the model of this round."""
        self._offered.pop(client, None)
        self.positions[client] = self.round
        if self._starts[client] == _UNKNOWN:  # it can have come from there only
            self._starts[client] = _HAS

    def lost(self, client: int, holding: Holding) -> None:
        """Take note of what a client holds that could not follow.

        If it holds just what it was thought to hold, entries were no help to it.
        """
        self._offered.pop(client, None)
        has_start = self.start is not None and holding.start == self._start_digest
        self._starts[client] = _HAS if has_start else _LACKS
        place = holding.round - self.first
        is_known = 0 <= place < len(self._digests) and self._digests[place] == holding.digest
        is_news = holding.round != self.positions[client]
        self.positions[client] = holding.round if is_known and is_news else _NOTHING

    def _deliver_without_start(self, position: int, public: Public, is_new: bool) -> Delivery:
        """Return what a client without the starting model needs."""
        number, snapshot = self._absolute
        if self.first <= position <= self.round:
            by_entries = self.entries_since(position, lambda: public)
            limit = len(snapshot) if snapshot else _longest_snapshot(public)
            if position >= self.round - 1 or by_entries.num_bytes <= limit:
                return by_entries
        if self.first_message and is_new and self.first == 1:
            by_entries = self.entries_since(1, lambda: public)
            size = len(self.first_message) + by_entries.num_bytes
            if size <= (len(snapshot) if number == self.round else _longest_snapshot(public)):
                return by_entries._replace(snapshot=self.first_message, num_bytes=size)
        if number != self.round:
            snapshot = encode_snapshot(public, None)
            self._absolute = self.round, snapshot
        return Delivery(self.round, len(snapshot), snapshot)


def _longest_snapshot(public: Public) -> int:
    """Return more bytes than any snapshot has: twice what the vectors take in memory."""
    return 1024 + 2 * sum(vector.nbytes for vector in public.vectors)
