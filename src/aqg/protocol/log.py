"""The log of a model: what a client that holds some round must receive to hold this one.

The server keeps an entry per round (`aqg.wire.entry`). A client that holds round ``p`` receives the
entries since, or a snapshot and the entries since that, whichever is shorter.

A snapshot is made when it is wanted and can pay: when a client's entries are longer than the last
snapshot, and the log has grown by as much since that was made. So the work for snapshots, and the
length of the log, stay in proportion to what travels. The same rules serve a server, which has the
bytes, and a simulator, which has their number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from aqg.wire.entry import encode_log, log_overhead

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Content = bytes | int
"""A frame, or its length."""


class Delivery(NamedTuple):
    """What brings a client up to date.

    Attributes:
        first: the round of the first entry to send.
        snapshot: the frame to send before it, or its length; None where the entries do.
        num_bytes: in all.

    """

    first: int
    snapshot: Content | None
    num_bytes: int


class ModelLog:
    """Entries and the last snapshot.

    Args:
        first: the round of the first entry.
        entries: of consecutive rounds.
        snapshot_round: the round that the last snapshot holds.
        snapshot: the snapshot.

    """

    def __init__(
        self,
        first: int = 1,
        entries: Sequence[Content] = (),
        snapshot_round: int = 1,
        snapshot: Content = 0,
    ) -> None:
        self.first = first
        self.entries = list(entries)
        self.snapshot_round = snapshot_round
        self.snapshot = snapshot

    @property
    def round(self) -> int:
        """The round that a reader of the whole log holds."""
        return self.first + len(self.entries)

    def append(self, entry: Content) -> None:
        """Add the entry of the round."""
        self.entries.append(entry)

    def bytes_since(self, position: int) -> int:
        """Return the length of all entries from a round on."""
        return sum(map(length, self.entries[max(0, position - self.first) :]))

    def deliver(self, position: int, make_snapshot: Callable[[], Content]) -> Delivery:
        """Return what a client at round ``position`` needs; 0 for one that holds nothing.

        ``make_snapshot`` returns the public model as it is now, or the length of its frame.
        """
        has_entries = self.first <= position <= self.round
        by_entries = self._log_bytes(position) if has_entries else 0
        if has_entries and position >= self.round - 1:  # the normal case: one entry, or none
            return Delivery(position, None, by_entries)
        if not has_entries or self._is_due(by_entries):
            self.snapshot, self.snapshot_round = make_snapshot(), self.round
        if self.snapshot_round < self.first:  # entries after it are gone
            return Delivery(position, None, by_entries)
        by_snapshot = length(self.snapshot) + self._log_bytes(self.snapshot_round)
        if has_entries and by_entries <= by_snapshot:
            return Delivery(position, None, by_entries)
        return Delivery(self.snapshot_round, self.snapshot, by_snapshot)

    def frame(self, first: int) -> bytes:
        """Return the frame of all entries from a round on."""
        entries = self.entries[first - self.first :]
        assert all(isinstance(entry, bytes) for entry in entries)
        return encode_log(first, entries)  # type: ignore[arg-type]

    def cut(self, oldest: int) -> None:
        """Drop entries that no one wants: all hold ``oldest``, or a snapshot would be shorter."""
        drop = max(0, min(oldest, self.round) - self.first)
        kept, budget = 0, length(self.snapshot)
        for entry in reversed(self.entries[: max(0, self.snapshot_round - self.first)]):
            budget -= length(entry)
            if budget < 0:
                break
            kept += 1
        beyond = self.snapshot_round - kept - self.first
        if self.snapshot_round > 1 or self.first > 1:
            drop = max(drop, min(beyond, len(self.entries)))
        if drop > 0:
            del self.entries[:drop]
            self.first += drop

    def _is_due(self, by_entries: int) -> bool:
        """Whether a snapshot as of now may be shorter than entries of so many bytes."""
        known = length(self.snapshot)
        return by_entries > known and self.bytes_since(self.snapshot_round) > known

    def _log_bytes(self, first: int) -> int:
        return log_overhead(first, self.round - first) + self.bytes_since(first)


def length(content: Content) -> int:
    """Return the number of bytes."""
    return content if isinstance(content, int) else len(content)
