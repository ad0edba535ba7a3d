"""What the clients of a simulation receive: who holds which round, and what that costs.

Every client takes up the log where it left off: one entry in a round that follows another, more
after a pause, or a snapshot when that is shorter. One that is new begins with the starting model,
whose message a `aqg.runs.cost.Meter` counts, and gets the rest from the log like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqg.core.downlink import Downlink, Full
from aqg.core.public import Public, lies_on_grid
from aqg.core.recipe import Recipe
from aqg.core.types import FloatArray, IntArray
from aqg.protocol.log import Content, Delivery, ModelLog, length
from aqg.sim.problem import Problem
from aqg.wire.entry import decode_snapshot, encode_snapshot, follow_log, log_overhead

_MOST_KEPT = 64
"""So many entries that all clients have are kept, before they are dropped together."""
_FIELDS = ("positions", "log_first", "log_lengths", "snapshot", "log_entries")


class LogState(NamedTuple):
    """A log and its readers between two rounds."""

    positions: IntArray  # the round that each client holds, ``(M,)``
    first: int  # the round of the first entry that is kept
    lengths: IntArray  # of the entries
    snapshot: IntArray  # round and length of the last snapshot, ``(2,)``
    # all of them, one after the other, where they can be added up; else nothing
    entries: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        values = (self.positions, np.array(self.first), *self[2:])
        return dict(zip(_FIELDS, values, strict=True))

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> LogState:
        positions, first, lengths, snapshot, entries = (np.array(arrays[n]) for n in _FIELDS)
        return LogState(positions, int(first), lengths, snapshot, entries)


def initial_log(num_clients: int) -> LogState:
    ones = np.ones(num_clients, np.int64)
    return LogState(ones, 1, np.zeros(0, np.int64), np.array([1, 0], np.int64))


class Downloads:
    """The log of a simulation, and how far each client has read it."""

    def __init__(
        self, start: FloatArray, state: LogState, merges: bool, forgets: bool = False
    ) -> None:
        self.start = start
        self.merges = merges
        self.forgets = forgets  # whether clients hold nothing but the first model, each time anew
        self.load(state)

    def load(self, state: LogState) -> None:
        """Go on from a state; of entries that are not added up, lengths are known."""
        self._positions = np.array(state.positions)
        self._shared: int | None = None
        snapshot_round, snapshot_bytes = state.snapshot.tolist()
        entries: list[Content] = state.lengths.tolist()
        if self.merges:
            ends, data = np.cumsum(state.lengths).tolist(), state.entries.tobytes()
            entries = [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        self.log = ModelLog(state.first, entries, snapshot_round, snapshot_bytes, self.merges)

    @property
    def positions(self) -> IntArray:
        if self._shared is not None:  # all the same, until someone drops out
            self._positions[:] = self._shared
            self._shared = None
        return self._positions

    def state(self) -> LogState:
        log = self.log
        log.cut(int(self.positions.min()))
        lengths = np.array([length(entry) for entry in log.entries], np.int64)
        snapshot = np.array([log.snapshot_round, length(log.snapshot)], np.int64)
        joined = b"".join(e for e in log.entries if self.merges and isinstance(e, bytes))
        entries = np.frombuffer(joined, np.uint8)
        return LogState(self.positions.copy(), log.first, lengths, snapshot, entries)

    def deliver(
        self, present: IntArray, public: Callable[[], Public]
    ) -> list[tuple[IntArray, Content]]:
        """Bring clients up to date; return which of them receive frames of which length.

        ``public`` returns the public model as it is, for a snapshot.
        """
        log = self.log
        now, is_everyone = log.round, len(present) == len(self._positions) and not self.forgets
        if is_everyone and self._shared == now - 1 >= log.first:
            self._shared = now
            return [(present, log_overhead(now - 1, 1)), (present, log.entries[-1])]
        frames: list[tuple[IntArray, Content]] = []
        held, public = self.positions[present], cache(public)
        for position in np.unique(held)[::-1].tolist():  # entries are added up from the last one on
            clients = present[held == position]
            if position == now - 1 >= log.first:  # its length may still be on its way
                frames += [(clients, log_overhead(position, 1)), (clients, log.entries[-1])]
                continue
            delivery = log.deliver(position, lambda: self._snapshot_size(public), public)
            frames.append((clients, delivery.num_bytes))
        self._note(present)
        self._shared = now if is_everyone else None
        return frames

    def _snapshot_size(self, public: Callable[[], Public]) -> int:
        return len(encode_snapshot(public(), self.start))

    def plan(self, present: IntArray, public: Public) -> dict[int, Delivery]:
        found = {}
        for held in sorted({*self.positions[present].tolist()}, reverse=True):
            found[held] = self.log.deliver(
                held, lambda: encode_snapshot(public, self.start), lambda: public
            )
        plan = {client: found[int(self.positions[client])] for client in present.tolist()}
        self._note(present)
        return plan

    def _note(self, present: IntArray) -> None:
        if not self.forgets:
            self.positions[present] = self.log.round

    def follow(self, held: Public, delivery: Delivery, recipe: Recipe) -> Public:
        """Return what a client holds after a delivery; a restored one holds the model already."""
        if isinstance(delivery.snapshot, bytes):
            held = decode_snapshot(delivery.snapshot, held, self.start)
        is_behind = held.round == delivery.first
        frame = (is_behind and delivery.merged) or self.log.frame(held.round)
        return follow_log(frame, held, recipe.movement)

    def append(self, entry: Content) -> None:
        self.log.append(entry)
        if self._shared is None:
            self.log.cut(int(self._positions.min()))
        elif len(self.log.entries) > _MOST_KEPT:
            self.log.cut(self._shared)


def make_downloads(
    problem: Problem, recipe: Recipe, downlink: Downlink, forgets: bool
) -> Downloads | None:
    if isinstance(downlink, Full):
        return None
    log = initial_log(problem.num_clients)
    return Downloads(problem.initial_params, log, lies_on_grid(recipe, downlink), forgets)
