"""Curves of groups of runs: median and extremes over seeds, thinned to what a screen can show.

A point of a run's curve is the state after some rounds: what they cost and what they achieved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from aqg.report.runs import Run

    Floats = NDArray[np.float64]

AXES = ("rounds", "uploads", "total_bytes", "upload_bytes")
LOSSES = ("residual", "loss")


@dataclass(frozen=True)
class Points:
    """One run's curve: ``y`` after a cost of ``x``, which never falls.

    ``ended`` says that the run is complete: whatever more is spent, ``y`` stays where it is.
    """

    x: Floats
    y: Floats
    ended: bool = True


@dataclass(frozen=True)
class Band:
    """A group's curve: the median over its runs, and their smallest and largest value."""

    x: Floats
    median: Floats
    low: Floats
    high: Floats


def run_points(run: Run, axis: str, metric: str) -> Points:
    """Return a run's curve; rounds without a value are left out, as are values beyond numbers.

    A round reports the model that it starts from, so its value belongs to the cost of the rounds
    before it; the summary holds the value after the last. There are no points against bytes that
    are not on record.
    """
    values = _metric(run, metric)
    if axis == "rounds":
        costs = np.append(run.rounds - 1, run.rounds[-1] if len(run.rounds) else 0).astype(
            np.float64
        )
    else:
        spent = {
            "uploads": run.uploads,
            "total_bytes": run.total_bytes,
            "upload_bytes": run.upload_bytes,
        }[axis]
        costs = np.concatenate(([0.0], np.cumsum(spent, dtype=np.float64)))
        if np.isnan(costs[-1]):  # a start is no curve
            costs[:] = np.nan
    known = np.isfinite(values) & np.isfinite(costs)
    return Points(costs[known], values[known], ended=run.summary is not None)


def _metric(run: Run, metric: str) -> Floats:
    summary = run.summary or {}
    if metric not in LOSSES:
        values = run.metrics.get(metric, np.full(len(run.rounds), np.nan))
        return np.append(values, _number(summary.get(f"test_{metric}")))
    losses = np.append(run.losses, _number(summary.get("final_loss")))
    if metric == "loss":
        return losses
    return losses - (np.nan if run.minimum is None else run.minimum)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


def extra_points(run: Run, name: str) -> Points:
    """Return an extra number of a run's rounds, round by round."""
    values = run.extras.get(name, np.full(len(run.rounds), np.nan))
    known = np.isfinite(values)
    return Points(run.rounds[known].astype(np.float64), values[known], ended=False)


def combine(curves: Sequence[Points]) -> Band | None:
    """Take the runs of a group together, at every cost that one of them has.

    Between its points a run's curve is straight. A run that has ended keeps its last value; one
    that has not counts only as far as it came. Where all have ended, the group's curve ends at the
    median of what they cost. None where there is no point at all.

    >>> band = combine([Points(np.array([0.0, 2]), np.array([4.0, 1])),
    ...                 Points(np.array([0.0, 2]), np.array([6.0, 3]))])
    >>> band.x, band.median, band.low
    (array([0., 2.]), array([5., 2.]), array([4., 1.]))
    """
    curves = [_without_repeats(curve) for curve in curves if len(curve.x)]
    if not curves:
        return None
    grid = np.unique(np.concatenate([curve.x for curve in curves]))
    if all(curve.ended for curve in curves):
        end = np.median([curve.x[-1] for curve in curves])
        grid = np.append(grid[grid < end], end)
    table = np.full((len(curves), len(grid)), np.nan)
    for row, curve in zip(table, curves, strict=True):
        holds = grid >= curve.x[0]
        if not curve.ended:
            holds &= grid <= curve.x[-1]
        row[holds] = np.interp(grid[holds], curve.x, curve.y)
    some = np.isfinite(table).any(axis=0)
    grid, table = grid[some], table[:, some]
    if len(curves) == 1:
        return Band(grid, table[0], table[0], table[0])
    return Band(
        grid, np.nanmedian(table, axis=0), np.nanmin(table, axis=0), np.nanmax(table, axis=0)
    )


def _without_repeats(curve: Points) -> Points:
    """Keep the last of several values at the same cost: rounds in which nothing was spent."""
    kept = np.append(np.diff(curve.x) > 0, True)
    return Points(curve.x[kept], curve.y[kept], curve.ended)


def thin(band: Band, limit: int) -> Band:
    """Keep at most about ``limit`` points, so that the curve looks the same on either scale.

    Half of the bins are even on a linear axis and half on a logarithmic one. Each bin keeps its
    smallest and its largest median; the first and the last point always stay. ``low`` and ``high``
    become the extremes of all that a kept point stands for.
    """
    kept = thin_indices(band.x, band.median, limit)
    if len(kept) == len(band.x):
        return band
    return Band(
        band.x[kept],
        band.median[kept],
        np.minimum.reduceat(band.low, kept),
        np.maximum.reduceat(band.high, kept),
    )


def thin_indices(x: Floats, y: Floats, limit: int) -> NDArray[np.intp]:
    """Return which points of a curve to keep; see `thin`.

    >>> x = np.arange(1000.0)
    >>> y = np.where(x == 321, -5.0, 0.0)
    >>> kept = thin_indices(x, y, 100)
    >>> len(kept) <= 102, 0 in kept, 999 in kept, 321 in kept
    (True, True, True, True)
    """
    if len(x) <= limit:
        return np.arange(len(x))
    num_bins = max(1, limit // 4)
    edges = np.linspace(x[0], x[-1], num_bins + 1)
    positive = x[x > 0]
    if len(positive) > 1:
        edges = np.union1d(edges, np.geomspace(positive[0], positive[-1], num_bins + 1))
    starts = np.unique(np.searchsorted(x, edges[:-1]))
    starts = starts[starts < len(x)]
    starts = np.union1d(starts, [0])
    ends = np.append(starts[1:], len(x))
    kept = {0, len(x) - 1}
    for start, end in zip(starts, ends, strict=True):
        piece = y[start:end]
        kept.add(int(start + piece.argmin()))
        kept.add(int(start + piece.argmax()))
    return np.array(sorted(kept), np.intp)
