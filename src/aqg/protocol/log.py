"""The log of a model: what a client that holds some round must receive to hold this one.

The server keeps an entry per round (`aqg.wire.entry`). A client that holds round ``p`` receives the
entries since, or their sum where the model lies on an exact grid, or a snapshot and either of these
since that, whichever is shorter.

A snapshot is made when it is wanted and can pay: when a client's entries are longer than the last
snapshot, and the log has grown by as much since that was made. So the work for snapshots, and the
length of the log, stay in proportion to what travels. The same rules serve a server, which has the
bytes, and a simulator, which has their number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from aqg.wire.entry import Merger, encode_log, log_overhead

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aqg.core.public import Public

Content = bytes | int
"""A frame, or its length."""


_MERGED = 8
"""Entries that are added up are kept while they are as long as so many snapshots; their sum is
shorter than they are."""


class Delivery(NamedTuple):
    """What brings a client up to date.

    Attributes:
        first: the round of the first entry to send.
        snapshot: the frame to send before it, or its length; None where the entries do.
        num_bytes: in all.
        merged: one frame in place of the entries; empty where they are sent.

    """

    first: int
    snapshot: Content | None
    num_bytes: int
    merged: bytes = b""


class ModelLog:
    """Entries and the last snapshot.

    Args:
        first: the round of the first entry.
        entries: of consecutive rounds.
        snapshot_round: the round that the last snapshot holds.
        snapshot: the snapshot.
        merges: whether the model lies on an exact grid, and entries can be added up.

    """

    def __init__(
        self,
        first: int = 1,
        entries: Sequence[Content] = (),
        snapshot_round: int = 1,
        snapshot: Content = 0,
        merges: bool = False,
    ) -> None:
        self.first = first
        self.entries = list(entries)
        self.snapshot_round = snapshot_round
        self.snapshot = snapshot
        self.merges = merges
        self._merger: Merger | None = None
        self._merged_round = 0

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

    def deliver(
        self,
        position: int,
        make_snapshot: Callable[[], Content],
        public: Callable[[], Public],
    ) -> Delivery:
        """Return what a client at round ``position`` needs; 0 for one that holds nothing.

        ``make_snapshot`` returns the public model as it is now, or the length of its frame;
        ``public`` that model.
        """
        has_entries = self.first <= position <= self.round
        if has_entries and position >= self.round - 1:  # the normal case: one entry, or none
            return Delivery(position, None, self._log_bytes(position))
        by_entries = self.entries_since(position, public) if has_entries else None
        if by_entries is None or self._is_due(by_entries.num_bytes):
            self.snapshot, self.snapshot_round = make_snapshot(), self.round
        if by_entries is not None and self.snapshot_round < self.first:  # entries after it are gone
            return by_entries
        rest = self.entries_since(self.snapshot_round, public)
        by_snapshot = length(self.snapshot) + rest.num_bytes
        if by_entries is not None and by_entries.num_bytes <= by_snapshot:
            return by_entries
        return Delivery(self.snapshot_round, self.snapshot, by_snapshot, rest.merged)

    def entries_since(self, first: int, public: Callable[[], Public]) -> Delivery:
        """Return all entries from a round on, or their sum where that is shorter."""
        num_bytes = self._log_bytes(first)
        merged = b""
        if self.merges and self.round - first >= 2:
            merged = self._merged(first, public)
        if merged and len(merged) < num_bytes:
            return Delivery(first, None, len(merged), merged)
        return Delivery(first, None, num_bytes)

    def _merged(self, first: int, public: Callable[[], Public]) -> bytes:
        """Return one frame for all entries from a round on; empty where they cannot be merged.

        It is quickest to ask for later rounds first.
        """
        merger = self._merger
        if merger is None or self._merged_round != self.round or merger.first < first:
            merger, self._merged_round = Merger(public()), self.round
        self._merger = merger
        while merger.first > first:
            entry = self.entries[merger.first - 1 - self.first]
            if not isinstance(entry, bytes) or not merger.add(entry):
                return b""
        return merger.frame()

    def frame(self, first: int) -> bytes:
        """Return the frame of all entries from a round on."""
        entries = self.entries[first - self.first :]
        assert all(isinstance(entry, bytes) for entry in entries)
        return encode_log(first, entries)  # type: ignore[arg-type]

    def cut(self, oldest: int) -> None:
        """Drop entries that no one wants: all hold ``oldest``, or a snapshot would be shorter."""
        drop = max(0, min(oldest, self.round) - self.first)
        kept, budget = 0, length(self.snapshot) * (_MERGED if self.merges else 1)
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
