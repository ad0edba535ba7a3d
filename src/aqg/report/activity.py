"""Who sent what and when: counts per width and per client, binned over the rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aqg.sim.record import DROPPED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]


@dataclass(frozen=True)
class WidthHistogram:
    """Uploads by width over time.

    Attributes:
        edges: bin ``i`` covers the rounds from index ``edges[i]`` up to, not including,
            ``edges[i + 1]``.
        widths: the widths that occur, ascending.
        counts: uploads, widths × bins.

    """

    edges: Counts
    widths: tuple[int, ...]
    counts: Counts


@dataclass(frozen=True)
class Activity:
    """What every client did over time; arrays are rows of clients × bins of rounds.

    Attributes:
        edges: bins of rounds, as in `WidthHistogram`.
        client_edges: row ``i`` holds the clients from ``client_edges[i]`` up to, not including,
            ``client_edges[i + 1]``; one client per row unless there are very many.
        uploads: how many times they uploaded.
        bits: the sum of the widths they sent.
        away: how many times they had dropped out.

    """

    edges: Counts
    client_edges: Counts
    uploads: Counts
    bits: Counts
    away: Counts


def bin_edges(length: int, max_bins: int) -> Counts:
    """Cut ``length`` things into at most ``max_bins`` bins of nearly equal, whole size.

    >>> bin_edges(3, 10), bin_edges(10, 4)
    (array([0, 1, 2, 3]), array([ 0,  2,  5,  7, 10]))
    """
    num_bins = min(length, max_bins)
    if num_bins == 0:
        return np.zeros(1, np.int64)
    return np.arange(num_bins + 1, dtype=np.int64) * length // num_bins


def count_widths(widths: NDArray[np.int16], max_bins: int) -> WidthHistogram:
    """Count uploads by width; ``widths`` is rounds × clients, as in a run.

    >>> widths = np.array([[4, 4], [0, 2], [-1, 0], [2, 0]], np.int16)
    >>> count_widths(widths, 2).counts
    array([[1, 1],
           [2, 0]])
    """
    edges = bin_edges(len(widths), max_bins)
    present = tuple(int(width) for width in np.unique(widths[widths > 0]))
    counts = np.zeros((len(present), len(edges) - 1), np.int64)
    for row, width in zip(counts, present, strict=True):
        row[:] = np.add.reduceat((widths == width).sum(axis=1), edges[:-1])
    return WidthHistogram(edges, present, counts)


def watch_clients(widths: NDArray[np.int16], max_bins: int, max_rows: int) -> Activity:
    """Count what every client did; ``widths`` is rounds × clients, as in a run.

    >>> activity = watch_clients(np.array([[4, -1], [2, 0]], np.int16), max_bins=1, max_rows=9)
    >>> activity.bits.tolist(), activity.away.tolist()
    ([[6], [0]], [[0], [1]])
    """
    num_rounds, num_clients = widths.shape
    edges = bin_edges(num_rounds, max_bins)
    client_edges = bin_edges(num_clients, max_rows)

    def total(values: NDArray[np.int64]) -> Counts:
        if values.size == 0:
            return np.zeros((len(client_edges) - 1, len(edges) - 1), np.int64)
        per_bin = np.add.reduceat(values, edges[:-1], axis=0)
        return np.add.reduceat(per_bin, client_edges[:-1], axis=1).T

    spoke = widths > 0
    return Activity(
        edges,
        client_edges,
        uploads=total(spoke.astype(np.int64)),
        bits=total(np.where(spoke, widths, 0).astype(np.int64)),
        away=total((widths == DROPPED).astype(np.int64)),
    )
