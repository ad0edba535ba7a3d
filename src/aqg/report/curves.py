"""Runs in numbers: curves of groups, who sent what and when, and results; and all of them as CSV.

A point of a run's curve is the state after some rounds: what they cost and what they achieved.
Curves of a group are the median and the extremes over seeds, thinned to what a screen can show.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqg.core.types import Float64Array, IntArray
from aqg.objectives.metrics import Metric, named_metric
from aqg.report.runs import Run
from aqg.runs.cost import BYTES
from aqg.runs.directory import finite_or_none
from aqg.runs.table import records_to_csv, write_csv
from aqg.sim.record import DROPPED

AXES = ("rounds", "uploads", "total_bytes", "upload_bytes")
SECONDS = "simulated_seconds"
"""One more axis, for runs that have a clock."""
LOSSES = ("residual", "loss")


@dataclass(frozen=True)
class Points:
    """One run's curve: ``y`` after a cost of ``x``, which never falls.

    ``ended`` says that the run is complete: whatever more is spent, ``y`` stays where it is.
    """

    x: Float64Array
    y: Float64Array
    ended: bool = True


@dataclass(frozen=True)
class Band:
    """A group's curve."""

    x: Float64Array
    median: Float64Array
    low: Float64Array
    high: Float64Array


def run_points(run: Run, axis: str, metric: str) -> Points:
    """Return a run's curve; rounds without a value, or with one beyond numbers, are left out.

    A round reports the model that it starts from, so its value belongs to the cost of the rounds
    before it; the summary holds the value after the last.
    """
    values = _metric(run, metric)
    if axis == "rounds":
        last = run.rounds[-1] if len(run.rounds) else 0
        costs = np.append(run.rounds - 1, last).astype(np.float64)
    elif axis == SECONDS:
        costs = np.concatenate(([0.0], run.extras[SECONDS]))
    else:
        costs = np.concatenate(([0.0], np.cumsum(getattr(run, axis), dtype=np.float64)))
    known = np.isfinite(values)
    return Points(costs[known], values[known], ended=run.summary is not None)


def _metric(run: Run, metric: str) -> Float64Array:
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
    values = run.extras.get(name, np.full(len(run.rounds), np.nan))
    known = np.isfinite(values)
    return Points(run.rounds[known].astype(np.float64), values[known], ended=False)


def combine(curves: Sequence[Points]) -> Band | None:
    """Take the runs of a group together, at every cost that one of them has.

    Between its points a run's curve is straight. A run that has ended keeps its last value; one
    that has not counts only as far as it came. Where all have ended, the group's curve ends at the
    median of what they cost. None where there is no point at all.
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
    return Band(grid, *(over(table, axis=0) for over in (np.nanmedian, np.nanmin, np.nanmax)))


def _without_repeats(curve: Points) -> Points:
    """Keep the last of several values at the same cost: rounds in which nothing was spent."""
    kept = np.append(np.diff(curve.x) > 0, True)
    return Points(curve.x[kept], curve.y[kept], curve.ended)


def thin(band: Band, limit: int) -> Band:
    """Keep at most about ``limit`` points; ``low`` and ``high`` become those of all they stand for.

    Half of the bins are even on a linear axis and half on a logarithmic one, so that the curve
    looks the same on either. Each keeps its smallest and its largest median; ends always stay.
    """
    kept = thin_indices(band.x, band.median, limit)
    if len(kept) == len(band.x):
        return band
    low, high = np.minimum.reduceat(band.low, kept), np.maximum.reduceat(band.high, kept)
    return Band(band.x[kept], band.median[kept], low, high)


def thin_indices(x: Float64Array, y: Float64Array, limit: int) -> NDArray[np.intp]:
    """Return which points of a curve to keep; see `thin`."""
    if len(x) <= limit:
        return np.arange(len(x))
    num_bins = max(1, limit // 4)
    edges = np.linspace(x[0], x[-1], num_bins + 1)
    positive = x[x > 0]
    if len(positive) > 1:
        edges = np.union1d(edges, np.geomspace(positive[0], positive[-1], num_bins + 1))
    starts = np.union1d(np.searchsorted(x, edges[:-1]), [0])
    starts = starts[starts < len(x)]
    kept = {0, len(x) - 1}
    for start, end in zip(starts, [*starts[1:], len(x)], strict=True):
        piece = y[start:end]
        kept |= {int(start + piece.argmin()), int(start + piece.argmax())}
    return np.array(sorted(kept), np.intp)


class WidthHistogram(NamedTuple):
    """Uploads by width over time: counts are widths × bins.

    Bin ``i`` has the rounds from index ``edges[i]`` up to, not including, ``edges[i + 1]``.
    """

    edges: IntArray
    widths: tuple[int, ...]
    counts: IntArray


class Activity(NamedTuple):
    """What every client did over time; arrays are rows of clients × bins of rounds.

    Row ``i`` has the clients from ``clients[i]`` up to ``clients[i + 1]``.
    """

    edges: IntArray
    clients: IntArray
    uploads: IntArray
    bits: IntArray  # the sum of the widths
    away: IntArray  # how many times they had dropped out


def bin_edges(length: int, max_bins: int) -> IntArray:
    """Cut ``length`` things into at most ``max_bins`` bins of nearly equal, whole size."""
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
    counts = [np.add.reduceat((widths == w).sum(axis=1), edges[:-1]) for w in present]
    shape = len(present), len(edges) - 1
    return WidthHistogram(edges, present, np.array(counts, np.int64).reshape(shape))


def watch_clients(widths: NDArray[np.int16], max_bins: int, max_rows: int) -> Activity:
    """Count what every client did; ``widths`` is rounds × clients, as in a run.

    >>> widths = np.array([[4, -1], [2, 0], [0, 1]], np.int16)
    >>> activity = watch_clients(widths, max_bins=2, max_rows=9)
    >>> activity.bits.tolist(), activity.away.tolist()
    ([[4, 2], [0, 1]], [[0, 0], [1, 0]])
    """
    num_rounds, num_clients = widths.shape
    edges = bin_edges(num_rounds, max_bins)
    client_edges = bin_edges(num_clients, max_rows)

    def total(values: IntArray) -> IntArray:
        if values.size == 0:
            return np.zeros((len(client_edges) - 1, len(edges) - 1), np.int64)
        per_bin = np.add.reduceat(values, edges[:-1], axis=0)
        return np.add.reduceat(per_bin, client_edges[:-1], axis=1).T

    counted = widths > 0, np.maximum(widths, 0), widths == DROPPED
    return Activity(edges, client_edges, *(total(part.astype(np.int64)) for part in counted))


def result_of(run: Run) -> dict[str, Any]:
    """Return what a run has spent and reached so far; None where a number is unknown."""
    target = (run.summary or {}).get("target")
    target = target if isinstance(target, dict) else {}
    kind = run.config.get("target_kind", "residual")
    reached = {f"target_{name}": finite_or_none(target.get(name)) for name in BYTES}
    return {
        "finished": run.summary is not None,
        "diverged": run.diverged,
        "rounds": len(run.rounds),
        "uploads": int(run.uploads.sum()),
        "bits_per_param": int(run.bits.sum()),
        **{name: int(getattr(run, name).sum()) for name in BYTES},
        "final_loss": _last(run, "loss"),
        "residual": _last(run, "residual"),
        "metrics": {name: _last(run, name) for name in run.metrics},
        "target": finite_or_none(run.config.get("target")) if kind == "residual" else None,
        "target_rounds": finite_or_none(target.get("reached_round")),
        **reached,
        "faults": len(run.faults),
    }


def _last(run: Run, metric: str) -> float | None:
    if run.diverged and metric in LOSSES:
        return None
    values = run_points(run, "rounds", metric).y
    return float(values[-1]) if len(values) else None


def spread(values: Sequence[float]) -> list[float]:
    return [float(np.median(values)), float(min(values)), float(max(values))]


def spread_of_known(values: Iterable[float | None]) -> list[float] | None:
    """Return median, smallest and largest; None unless all are known."""
    known = list(values)
    return None if None in known else spread(known)  # type: ignore[arg-type]


def summary_csv(runs: Sequence[Run]) -> str:
    settings = list(dict.fromkeys(name for run in runs for name in run.config))
    metrics = metric_names(runs)
    rows = []
    for run in runs:
        row: dict[str, Any] = {"run": run.name}
        for name in settings:
            value = run.config.get(name)
            row[name] = json.dumps(value) if isinstance(value, list | dict) else value
        results = result_of(run)
        found = results.pop("metrics")
        results |= {_column(name, results): found.get(name) for name in metrics}
        row.update((f"result_{k}" if k in settings else k, v) for k, v in results.items())
        rows.append(row)
    return records_to_csv(rows)


def curves_csv(runs: Sequence[Run]) -> str:
    metrics = metric_names(runs)
    columns = ["run", "recipe", "seed", "round", "uploads", *BYTES, "loss", "residual"]
    columns += [_column(name, columns) for name in metrics]
    rows: list[Iterable[Any]] = []
    for run in runs:
        counts = (run.uploads, *(getattr(run, name) for name in BYTES))
        spent = (np.concatenate(([0], np.cumsum(count))).tolist() for count in counts)
        rounds = [*(run.rounds - 1).tolist(), *run.rounds[-1:].tolist()]
        reached = [_metric(run, name).tolist() for name in ("loss", "residual", *metrics)]
        known = ([None if value != value else value for value in values] for values in reached)
        about = run.name, run.recipe, run.seed
        rows += [(*about, *row) for row in zip(rounds, *spent, *known, strict=False)]
    return write_csv(columns, rows)


def metric_names(runs: Iterable[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.metrics))


def described(name: str, runs: Iterable[Run]) -> Metric:
    """Return a metric as the first run that describes it does; else, as we know it."""
    rows = ((run.summary or {}).get("metrics", {}).get(name) for run in runs)
    metric, own = named_metric(name), next((row for row in rows if isinstance(row, dict)), None)
    if own is None:
        return metric
    is_higher = own.get("higher_is_better")
    is_higher = None if is_higher is None else bool(is_higher)
    return replace(metric, higher_is_better=is_higher, is_percent=bool(own.get("percent")))


def test_title(name: str) -> str:
    return f"test {name.replace('_', ' ')}"


def _column(name: str, taken: Iterable[str]) -> str:
    return f"test_{name}" if name in taken else name


def clients_csv(runs: Sequence[Run]) -> str:
    rows: list[Iterable[Any]] = []
    for run in runs:
        unknown = [None] * run.widths.shape[1]
        totals = (run.client_upload_bytes, run.client_download_bytes)
        known = (unknown if found is None else found.tolist() for found in totals)
        for client, (up, down) in enumerate(zip(*known, strict=True)):
            total = None if up is None or down is None else up + down
            rows.append((run.name, run.recipe, run.seed, client, up, down, total))
    return write_csv(["run", "recipe", "seed", "client", *BYTES], rows)


TABLES = {"summary.csv": summary_csv, "curves.csv": curves_csv, "clients.csv": clients_csv}
