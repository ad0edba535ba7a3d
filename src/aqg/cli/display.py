"""Progress bars and tables."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from aqg.objectives.metrics import named_metric
from aqg.runs.table import Table, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from aqg.objectives.metrics import Metric
    from aqg.runs import loop
    from aqg.runs.cost import Cost
    from aqg.runs.summary import Summary


def both_directions(progress: loop.Progress) -> str:
    """Write what was sent and received so far, in a few letters.

    >>> from aqg.runs.loop import Progress
    >>> both_directions(Progress(upload_bytes=812, download_bytes=48_200))
    '812 B up, 48.2 kB down'
    """
    return f"{format_bytes(progress.upload_bytes)} up, {format_bytes(progress.download_bytes)} down"


@contextmanager
def progress_bars(
    console: Console, names: Sequence[str], num_rounds: int
) -> Iterator[Callable[[str], Callable[[loop.Progress], None]]]:
    """Show one bar per run; yields a function that gives the watcher of a run by name."""
    with Progress(
        TextColumn("{task.description}", style="bold"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[uploads]} uploads"),
        TextColumn("{task.fields[size]}", style="cyan"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
    ) as bars:
        width = max(len(name) for name in names)
        tasks = {
            name: bars.add_task(
                name.ljust(width), total=num_rounds, loss="-", uploads=0, size="", start=False
            )
            for name in names
        }

        def watcher(name: str) -> Callable[[loop.Progress], None]:
            task = tasks[name]
            bars.start_task(task)

            def watch(progress: loop.Progress) -> None:
                bars.update(
                    task,
                    completed=progress.round,
                    loss="-" if math.isnan(progress.loss) else f"{progress.loss:.4f}",
                    uploads=progress.uploads,
                    size=both_directions(progress),
                )

            return watch

        yield watcher


def result_table(summaries: Sequence[Summary], width: int | None = None) -> Table:
    """Return the comparison: one row per run, savings against `BASELINES` where present.

    Savings are of the bytes that `counted_bytes` returns. Where all columns do not fit into
    ``width`` characters, bits per parameter are left out.
    """
    table = _result_table(summaries)
    is_too_wide = (
        width is not None and Console(width=1000).measure(table.to_terminal()).maximum > width
    )
    return _result_table(summaries, with_bits=False) if is_too_wide else table


def _result_table(summaries: Sequence[Summary], with_bits: bool = True) -> Table:
    counted = counted_bytes(summaries)
    baselines = [s for s in summaries if s.recipe in BASELINES]
    metrics = measured(summary.metrics for summary in summaries)
    names = [metric_title(metric) for metric in metrics]
    bits = ["bits/param"] if with_bits else []
    savings = [f"vs {baseline.recipe}" for baseline in baselines]
    header = ("recipe", "final loss", *names, "uploads", *bits, *_DIRECTIONS, *savings)
    rows = tuple(
        (
            summary.recipe,
            "diverged" if summary.diverged else f"{summary.final_loss:.6f}",
            *(metric.format(summary.metrics.get(metric.name)) for metric in metrics),
            f"{summary.uploads:,}",
            *([f"{summary.bits_per_param:,}"] if with_bits else []),
            *_sizes(summary),
            *(_saving(counted[summary.recipe], counted[b.recipe]) for b in baselines),
        )
        for summary in summaries
    )
    return Table("runs", "Runs", DIRECTIONS_NOTE, header, rows, num_labels=1)


def headline(summaries: Sequence[Summary]) -> str | None:
    """Say in a sentence what the first recipe saves in each direction, and at which accuracy.

    None where there is nothing to compare: no uncompressed run, or downloads not on record.
    """
    plain = next((s for s in summaries if s.recipe in UNCOMPRESSED), None)
    ours = summaries[0]
    if plain is None or plain is ours or ours.diverged or plain.diverged:
        return None
    if not (ours.upload_bytes and ours.download_bytes and plain.download_bytes):
        return None
    up = plain.upload_bytes / ours.upload_bytes
    down = plain.download_bytes / ours.download_bytes
    quality = [
        f"{metric_title(metric)} {metric.format(ours.metrics[metric.name])} "
        f"({plain.recipe}: {metric.format(plain.metrics[metric.name])})"
        for metric in measured([ours.metrics])
        if metric.name in plain.metrics
    ]
    loss = f"loss {ours.final_loss:.4f} ({plain.recipe}: {plain.final_loss:.4f})"
    rounds = f"{ours.rounds:,} rounds"
    if ours.rounds != plain.rounds:
        rounds += f" ({plain.recipe}: {plain.rounds:,})"
    return (
        f"{ours.recipe} after {rounds}: {', '.join(quality) or loss}; "
        f"{up:,.3g} times fewer bytes up, {down:,.3g} times fewer down."
    )


def warnings_of(summaries: Sequence[Summary]) -> list[str]:
    """Return a line for every run that ended with a worse model than it began with."""
    return [
        f"{summary.recipe} got worse: its loss began at {summary.first_loss:.4g} and ended at "
        f"{summary.final_loss:.4g}; try a smaller local rate or step"
        for summary in summaries
        if summary.is_worse
    ]


def counted_bytes(summaries: Sequence[Summary]) -> dict[str, int]:
    """Return by recipe what runs are compared by: the bytes of both directions.

    Where the downloads of some run are not on record, the uploads alone, of all.
    """
    totals = {summary.recipe: summary.total_bytes for summary in summaries}
    known = {recipe: total for recipe, total in totals.items() if total is not None}
    uploads = {summary.recipe: summary.upload_bytes for summary in summaries}
    return known if len(known) == len(totals) else uploads


def measured(found: Iterable[Mapping[str, float]]) -> list[Metric]:
    """Return the metrics that runs have, in order; none is shown that no run has."""
    names = dict.fromkeys(name for metrics in found for name in metrics)
    return [named_metric(name) for name in names]


def metric_title(metric: Metric) -> str:
    """Return the heading of a metric's column.

    >>> metric_title(named_metric("accuracy")), metric_title(named_metric("largest_error"))
    ('test acc', 'test largest error')
    """
    return "test acc" if metric.name == "accuracy" else f"test {metric.name.replace('_', ' ')}"


def target_table(summaries: Sequence[Summary]) -> Table:
    """Return what it cost to come within the target of the minimum, and stay there."""
    header = ("recipe", "rounds", "uploads", "bits/param", *_DIRECTIONS, "final residual")
    rows = []
    for summary in summaries:
        cost = summary.target_cost
        spent: tuple[str, ...] = ("not reached", *[""] * 5)
        if cost is not None:
            spent = (
                f"{cost.rounds:,}",
                f"{cost.uploads:,}",
                f"{cost.bits_per_param:,}",
                *_sizes(cost),
            )
        residual = summary.residual
        known = residual is not None and not summary.diverged
        rows.append((summary.recipe, *spent, f"{residual:.1e}" if known else "-"))
    return Table("target", "Cost to the target", DIRECTIONS_NOTE, header, tuple(rows), num_labels=1)


UNCOMPRESSED = ("fedavg", "gd")
BASELINES = (*UNCOMPRESSED, "laq")
"""Recipes that savings are measured against where a comparison has them."""
_DIRECTIONS = ("up", "down", "total")
DIRECTIONS_NOTE = "up, down: bytes that all clients sent and received; total: both."


def _sizes(spent: Summary | Cost) -> tuple[str, str, str]:
    sizes = (spent.upload_bytes, spent.download_bytes, spent.total_bytes)
    return format_bytes(sizes[0]), format_bytes(sizes[1]), format_bytes(sizes[2])


def _saving(size: int, baseline: int) -> str:
    if size == baseline or size == 0:
        return "-"
    ratio = baseline / size
    return f"{ratio:.3g}×" if ratio >= 1 else f"{ratio:.1g}×"
