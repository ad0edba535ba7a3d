"""A sweep as people see it: the live overview, and the table at the end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from aqg.cli.display import both_directions, format_bytes, measured, metric_title
from aqg.cli.live import LiveDisplay, plain_table
from aqg.experiments.rundir import read_metrics
from aqg.experiments.summary import add_bytes
from aqg.experiments.workers import Done, Event, Failed, Reported, Started, Stopping

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table

    from aqg.experiments.sweep import SweepRun
    from aqg.objectives.metrics import Metric

    Row = Mapping[str, Any]


_BYTES = ("upload_bytes", "download_bytes", "total_bytes")


class Overview(LiveDisplay):
    """Shows what happens to ``runs``, the part of a sweep of ``total`` that was left to do.

    On a terminal: one bar for the sweep, and a line per run under way. Elsewhere: a line per run
    that has ended.
    """

    def __init__(
        self, console: Console, runs: Sequence[SweepRun], total: int, bytes_before: int | None
    ) -> None:
        self._runs = runs
        self._total = total
        self._num_ended = total - len(runs)
        self._bytes_before = bytes_before
        self._bytes: dict[int, int | None] = {}
        self._lines: dict[int, TaskID] = {}
        self._sweep_bar = Progress(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("runs"),
            TextColumn("{task.fields[size]}", style="cyan"),
            TimeElapsedColumn(),
            console=console,
        )
        self._sweep = self._sweep_bar.add_task(
            "sweep", total=total, completed=self._num_ended, size=_total_size(bytes_before)
        )
        self._run_lines = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=60)),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[size]}", style="cyan"),
            console=console,
        )
        super().__init__(console, Live(Group(self._sweep_bar, self._run_lines), console=console))

    def show(self, event: Event) -> None:
        """Bring the picture up to date."""
        match event:
            case Started(index):
                config = self._runs[index].config
                self._lines[index] = self._run_lines.add_task(
                    self._runs[index].name, total=config.rounds, loss="-", size="-"
                )
            case Reported(index, progress):
                loss = "-" if math.isnan(progress.loss) else f"{progress.loss:.4f}"
                size = both_directions(progress)
                self._run_lines.update(
                    self._lines[index], completed=progress.round, loss=loss, size=size
                )
                self._count_bytes(index, progress.total_bytes)
            case Done(index, summary):
                self._count_bytes(index, summary.get("total_bytes"))
                self._end(index, _in_one_line(summary))
            case Failed(index, error):
                self._end(index, f"failed: {error}", failed=True)
            case Stopping():
                self._say("Stopping after the current rounds; Ctrl-C once more stops at once.")

    def _count_bytes(self, index: int, total_bytes: int | None) -> None:
        self._bytes[index] = total_bytes
        size = _total_size(add_bytes(self._bytes_before, *self._bytes.values()))
        self._sweep_bar.update(self._sweep, size=size)

    def _end(self, index: int, result: str, failed: bool = False) -> None:
        self._num_ended += 1
        self._sweep_bar.update(self._sweep, completed=self._num_ended)
        self._run_lines.remove_task(self._lines.pop(index))
        if failed or not self._console.is_terminal:
            self._say(f"[{self._num_ended}/{self._total}] {self._runs[index].name}: {result}")


def _in_one_line(summary: Row) -> str:
    loss = "diverged" if summary["diverged"] else f"loss {summary['final_loss']:.6f}"
    up, down = (format_bytes(summary.get(name)) for name in _BYTES[:2])
    return f"{loss}, {summary['uploads']:,} uploads, {up} up, {down} down"


def _total_size(total_bytes: int | None) -> str:
    return f"{format_bytes(total_bytes)} up and down"


def sweep_table(varying: Sequence[str], rows: Sequence[Row]) -> Table:
    """Return one row per combination of the settings that vary, except for the seed.

    A cell holds the mean over the seeds and, below, the smallest and the largest value.
    """
    names = [name for name in varying if name != "seed"]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(repr([row["settings"][name] for name in names]), []).append(row)
    with_target = any("target" in row for row in rows)

    table = plain_table()
    for name in names:
        table.add_column(name, style="bold")
    metrics = measured(read_metrics(row) for row in rows)
    titles = [metric_title(metric) for metric in metrics]
    for column in ("runs", "final loss", *titles, "uploads", "up", "down", "total"):
        table.add_column(column, justify="right")
    if with_target:
        table.add_column("total to target", justify="right")
    for group in groups.values():
        table.add_row(
            *(str(group[0]["settings"][name]) for name in names),
            *_results(group, metrics),
            *([_target_cost(group)] if with_target else []),
        )
    return table


def _results(group: Sequence[Row], metrics: Sequence[Metric]) -> list[str]:
    done = [row for row in group if "error" not in row]
    if not done:
        return [f"0 of {len(group)}", "failed", *("-" for _ in metrics), *("-" for _ in range(4))]
    num_diverged = sum(row["diverged"] for row in done)
    loss = _spread([row["final_loss"] for row in done if not row["diverged"]], "{:.6f}".format)
    if num_diverged:
        loss = f"diverged\n({num_diverged} of {len(done)})"
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
        else f"{text}\n{len(reached)} of {len(targets)} reached"
    )


def _size(mean: float) -> str:
    return format_bytes(round(mean))


def _spread(
    values: Sequence[float | None], write: Callable[[float], str], otherwise: str = "-"
) -> str:
    r"""Write the mean and, where values differ, the smallest and the largest.

    >>> _spread([1.0, 2.0, 6.0], "{:.1f}".format)
    '3.0\n1.0..6.0'
    >>> _spread([2.0], "{:.1f}".format), _spread([None], "{:.1f}".format)
    ('2.0', '-')
    """
    known = [value for value in values if value is not None]
    if not known:
        return otherwise
    mean = write(sum(known) / len(known))
    low, high = write(min(known)), write(max(known))
    return mean if low == high else f"{mean}\n{low}..{high}"
