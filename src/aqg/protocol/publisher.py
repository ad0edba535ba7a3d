"""The server's side of the model's log: who holds which round, and what each must be sent.

A position changes when a client says what it holds, never when something is sent: an order that
was lost is made up for by the next one. What a client says counts only if the digest is that of the
round; anything else costs it a snapshot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aqg.core.public import mark_after
from aqg.errors import RunError
from aqg.protocol.digests import STATE_DIGEST_BYTES, public_digest, start_digest
from aqg.protocol.follower import Parcel
from aqg.protocol.log import Delivery, ModelLog
from aqg.wire.entry import encode_entry, known_velocity
from aqg.wire.snapshot import encode_snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from aqg.core.public import Entry, Public
    from aqg.core.types import FloatArray, IntArray
    from aqg.protocol.follower import Holding

_NOTHING = 0
_UNKNOWN, _HAS, _LACKS = range(3)
"""Whether a client has the starting model."""


class LogState(NamedTuple):
    """A log and its readers between two rounds; nothing of it is ever changed.

    Attributes:
        first: the round of the first entry.
        entries: frames of consecutive rounds.
        digests: of the public model before each of these rounds, and after the last.
        snapshot_round: the round that the last snapshot holds.
        snapshot: relative to the starting model; empty before the first.
        positions: the round that each client holds, ``(M,)``; 0 where it needs a snapshot.
        starts: whether each client has the starting model, ``(M,)``.

    """

    first: int
    entries: tuple[bytes, ...]
    digests: tuple[bytes, ...]
    snapshot_round: int
    snapshot: bytes
    positions: IntArray
    starts: NDArray[np.int8]

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return named arrays that a file can hold."""
        return {
            "positions": self.positions,
            "starts": self.starts,
            "log_first": np.array(self.first, np.int64),
            "log_lengths": np.array([len(entry) for entry in self.entries], np.int64),
            "log_entries": np.frombuffer(b"".join(self.entries), np.uint8),
            "log_digests": np.frombuffer(b"".join(self.digests), np.uint8),
            "snapshot_round": np.array(self.snapshot_round, np.int64),
            "snapshot": np.frombuffer(self.snapshot, np.uint8),
        }

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> LogState:
        """Return the state that `to_arrays` wrote."""
        ends = np.cumsum(arrays["log_lengths"]).tolist()
        joined, digests = arrays["log_entries"].tobytes(), arrays["log_digests"].tobytes()
        state = LogState(
            first=int(arrays["log_first"]),
            entries=tuple(joined[a:b] for a, b in zip([0, *ends], ends, strict=False)),
            digests=tuple(
                digests[start : start + STATE_DIGEST_BYTES]
                for start in range(0, len(digests), STATE_DIGEST_BYTES)
            ),
            snapshot_round=int(arrays["snapshot_round"]),
            snapshot=arrays["snapshot"].tobytes(),
            positions=np.array(arrays["positions"], np.int64),
            starts=np.array(arrays["starts"], np.int8),
        )
        if len(joined) != sum(map(len, state.entries)):
            raise RunError(f"the log has {len(joined)} bytes; its entries have {ends[-1:] or 0}")
        if len(state.digests) != len(state.entries) + 1:
            raise RunError(f"{len(state.digests)} digests for {len(state.entries)} entries")
        return state


def initial_state(public: Public, num_clients: int) -> LogState:
    """Return the state before the first round: all are taken to have the starting model."""
    return LogState(
        first=public.round,
        entries=(),
        digests=(public_digest(public),),
        snapshot_round=1,
        snapshot=b"",
        positions=np.ones(num_clients, np.int64),
        starts=np.full(num_clients, _UNKNOWN, np.int8),
    )


class Publisher:
    """Keeps the log, and knows how far each client has read it.

    Args:
        start: the starting model; None where it is not known any more, and snapshots stand alone.
        state: to go on from.
        merges: whether entries can be added up (`aqg.core.public.lies_on_grid`).

    """

    def __init__(self, start: FloatArray | None, state: LogState, merges: bool = False) -> None:
        self.start = start
        self._start_digest = b"" if start is None else start_digest(start)
        self._log = ModelLog(
            state.first, state.entries, state.snapshot_round, state.snapshot or _NOTHING, merges
        )
        self._digests = list(state.digests)
        self.positions = state.positions.copy()
        self._starts = state.starts.copy()
        self._absolute: tuple[int, bytes] = (0, b"")
        self._mark: int | None = None

    @property
    def round(self) -> int:
        """``k``, the round in progress."""
        return self._log.round

    @property
    def digest(self) -> bytes:
        """The digest of the public model."""
        return self._digests[-1]

    def state(self) -> LogState:
        """Return all that is needed to go on."""
        log = self._log
        return LogState(
            log.first,
            tuple(_frames(log.entries)),
            tuple(self._digests),
            log.snapshot_round,
            log.snapshot if isinstance(log.snapshot, bytes) else b"",
            self.positions.copy(),
            self._starts.copy(),
        )

    def publish(self, entry: Entry, before: Public, public: Public) -> None:
        """Add a round's entry, which leads from the public model before to that after it."""
        self._log.append(encode_entry(entry, known_velocity(before)))
        public = public.marked(mark_after(self._mark, entry, public))
        self._mark = public.mark
        self._digests.append(public_digest(public))
        held = self.positions[self.positions > _NOTHING]
        oldest = int(held.min()) if len(held) else self.round
        if oldest > self._log.first:
            self._log.cut(oldest)
        self._bound(_longest_snapshot(public))
        del self._digests[: len(self._digests) - len(self._log.entries) - 1]

    def parcel(self, client: int, public: Public) -> Parcel:
        """Return what brings a client to the model of this round."""
        log = self._log
        if self._starts[client] == _UNKNOWN and self._is_start_rare:
            self._starts[client], self.positions[client] = _LACKS, _NOTHING
        position = int(self.positions[client])
        if self.start is None or self._starts[client] == _LACKS:
            delivery = self._deliver_without_start(position, public)
        else:
            delivery = log.deliver(position, lambda: self._snapshot(public), lambda: public)
        snapshot = delivery.snapshot if isinstance(delivery.snapshot, bytes) else b""
        entries = delivery.merged or log.frame(delivery.first)
        return Parcel(self.round, self.digest, entries, snapshot)

    def followed(self, client: int) -> None:
        """Take note that a client holds the model of this round."""
        self.positions[client] = self.round
        if self._starts[client] == _UNKNOWN:  # it can have come from there only
            self._starts[client] = _HAS

    def lost(self, client: int, holding: Holding) -> None:
        """Take note of what a client holds that could not follow.

        If it holds just what it was thought to hold, entries were no help to it.
        """
        has_start = self.start is not None and holding.start == self._start_digest
        self._starts[client] = _HAS if has_start else _LACKS
        place = holding.round - self._log.first
        is_known = 0 <= place < len(self._digests) and self._digests[place] == holding.digest
        is_news = holding.round != self.positions[client]
        self.positions[client] = holding.round if is_known and is_news else _NOTHING

    @property
    def _is_start_rare(self) -> bool:
        """Whether some have said that they lack the starting model, and none has it."""
        return bool((self._starts == _LACKS).any() and not (self._starts == _HAS).any())

    def _snapshot(self, public: Public) -> bytes:
        log = self._log
        if log.snapshot_round == log.round and isinstance(log.snapshot, bytes):
            return log.snapshot  # another client wanted it in this round
        return encode_snapshot(public, self.start)

    def _deliver_without_start(self, position: int, public: Public) -> Delivery:
        """Return what a client without the starting model needs."""
        log = self._log
        number, snapshot = self._absolute
        if log.first <= position <= log.round:
            by_entries = log.entries_since(position, lambda: public)
            limit = len(snapshot) if snapshot else _longest_snapshot(public)
            if position >= log.round - 1 or by_entries.num_bytes <= limit:
                return by_entries
        if number != log.round:
            snapshot = encode_snapshot(public, None)
            self._absolute = log.round, snapshot
        return Delivery(log.round, snapshot, len(snapshot))

    def _bound(self, most_bytes: int) -> None:
        """Drop entries that together are longer than any snapshot."""
        log = self._log
        size, kept = 0, 0
        for entry in reversed(_frames(log.entries)):
            size += len(entry)
            if size > most_bytes:
                break
            kept += 1
        drop = len(log.entries) - kept
        if drop:
            del log.entries[:drop]
            log.first += drop


def _frames(entries: Sequence[Any]) -> list[bytes]:
    assert all(isinstance(entry, bytes) for entry in entries)
    return list(entries)


def _longest_snapshot(public: Public) -> int:
    """Return more bytes than any snapshot has: twice what the vectors take in memory."""
    return 1024 + 2 * sum(vector.nbytes for vector in public.vectors)
