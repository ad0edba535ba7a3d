"""The table of a sweep: a row per combination, the seeds taken together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aqg.cli.display import measured, metric_title
from aqg.runs.directory import read_metrics
from aqg.runs.table import Table, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aqg.objectives.metrics import Metric

    Row = Mapping[str, Any]

_BYTES = ("upload_bytes", "download_bytes", "total_bytes")


def sweep_table(varying: Sequence[str], rows: Sequence[Row]) -> Table:
    """Return one row per combination of the settings that vary, except for the seed.

    A cell holds the mean over the seeds and, below, the smallest and the largest value.
    """
    names = [name for name in varying if name != "seed"]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(repr([row["settings"][name] for name in names]), []).append(row)
    with_target = any("target" in row for row in rows)

    metrics = measured(read_metrics(row) for row in rows)
    titles = [metric_title(metric) for metric in metrics]
    header = (*names, "runs", "final loss", *titles, "uploads", "up", "down", "total")
    if with_target:
        header = (*header, "total to target")
    found = tuple(
        (
            *(str(group[0]["settings"][name]) for name in names),
            *_results(group, metrics),
            *([_target_cost(group)] if with_target else []),
        )
        for group in groups.values()
    )
    note = "Means over seeds, and smallest..largest."
    return Table("sweep", "Sweep", note, header, found, num_labels=len(names))


def _results(group: Sequence[Row], metrics: Sequence[Metric]) -> list[str]:
    done = [row for row in group if "error" not in row]
    if not done:
        return [f"0 of {len(group)}", "failed", *("-" for _ in metrics), *("-" for _ in range(4))]
    num_diverged = sum(row["diverged"] for row in done)
    loss = _spread([row["final_loss"] for row in done if not row["diverged"]], "{:.6f}".format)
    if num_diverged:
        loss = f"diverged<br>({num_diverged} of {len(done)})"
    return [
        str(len(group)) if len(done) == len(group) else f"{len(done)} of {len(group)}",
        loss,
        *(
            _spread([read_metrics(row).get(metric.name) for row in done], metric.format)
            for metric in metrics
        ),
        _spread([row["uploads"] for row in done], "{:,.0f}".format),
        *(_spread([row.get(name) for row in done], _size, "unknown") for name in _BYTES),
    ]


def _target_cost(group: Sequence[Row]) -> str:
    targets = [row["target"] for row in group if "target" in row]
    reached = [t.get("total_bytes") for t in targets if t["upload_bytes"] is not None]
    if not reached:
        return "not reached" if targets else "-"
    text = _spread(reached, _size, "unknown")
    return (
        text
        if len(reached) == len(targets)
        else f"{text}<br>{len(reached)} of {len(targets)} reached"
    )


def _size(mean: float) -> str:
    return format_bytes(round(mean))


def _spread(
    values: Sequence[float | None], write: Callable[[float], str], otherwise: str = "-"
) -> str:
    """Write the mean and, where values differ, the smallest and the largest.

    >>> _spread([1.0, 2.0, 6.0], "{:.1f}".format)
    '3.0<br>1.0..6.0'
    >>> _spread([2.0], "{:.1f}".format), _spread([None], "{:.1f}".format)
    ('2.0', '-')
    """
    known = [value for value in values if value is not None]
    if not known:
        return otherwise
    mean = write(sum(known) / len(known))
    low, high = write(min(known)), write(max(known))
    return mean if low == high else f"{mean}<br>{low}..{high}"
