"""A study as people see it: what is under way and how far it is."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from aqg.cli.display import both_directions
from aqg.cli.live import LiveDisplay
from aqg.runs.cost import add_bytes
from aqg.runs.executor import Done, Event, Failed, Reported, Started, Stopping
from aqg.runs.table import format_bytes
from aqg.runs.tasks import Compiling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console
    from rich.progress import TaskID

    from aqg.cli.study import StudyPlan
    from aqg.runs.plan import Job

    Row = Mapping[str, Any]


_BYTES = ("upload_bytes", "download_bytes", "total_bytes")


class Overview(LiveDisplay):
    """Shows what happens to the jobs of a plan.

    On a terminal: one bar for all, and a line per run under way. Elsewhere: a line per run that has
    ended.

    Args:
        console: where to draw.
        plan: says how many jobs are left, at most; that may fall as jobs prove needless.
        name: of the study.
        num_before: how many jobs were finished before.
        bytes_before: what these sent and received.

    """

    def __init__(
        self,
        console: Console,
        plan: StudyPlan[Any],
        name: str,
        num_before: int = 0,
        bytes_before: int | None = 0,
    ) -> None:
        self._plan = plan
        self._num_before = num_before
        self._num_ended = 0
        self._bytes_before = bytes_before
        self._started = time.monotonic()
        self._compiles = False
        self._bytes: dict[int, int | None] = {}
        self._names: dict[int, str] = {}
        self._lines: dict[int, TaskID] = {}
        self._bar = Progress(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("runs"),
            TextColumn("{task.fields[size]}", style="cyan"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._study = self._bar.add_task(
            name,
            total=num_before + plan.most_left(),
            completed=num_before,
            size=_total_size(bytes_before),
        )
        self._run_lines = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=60)),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[size]}", style="cyan"),
            console=console,
        )
        super().__init__(console, Live(Group(self._bar, self._run_lines), console=console))

    def show(self, job: Job | None, event: Event) -> None:
        """Bring the picture up to date."""
        match event:
            case Started(index) if job is not None:
                self._names[index] = job.name
                self._lines[index] = self._run_lines.add_task(
                    job.name, total=job.config.rounds, loss="-", size="-"
                )
            case Reported(_, Compiling()):
                if not self._compiles:
                    self._compiles = True
                    self._say(Compiling.text)
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
        self._bar.update(self._study, size=size)

    def _end(self, index: int, result: str, failed: bool = False) -> None:
        self._num_ended += 1
        num_left = self._plan.most_left()
        done = self._num_before + self._num_ended
        self._bar.update(self._study, completed=done, total=done + num_left)
        self._run_lines.remove_task(self._lines.pop(index))
        if failed or not self._console.is_terminal:
            elapsed = time.monotonic() - self._started
            left = clock(elapsed / self._num_ended * num_left)
            head = f"[{done}/{done + num_left}, {clock(elapsed)}, {left} left]"
            self._say(f"{head} {self._names[index]}: {result}")


def clock(seconds: float) -> str:
    """Write a time.

    >>> clock(75), clock(3723)
    ('1:15', '1:02:03')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _in_one_line(summary: Row) -> str:
    if (outcome := summary.get("outcome")) is not None:
        value = "" if outcome["value"] is None else f" at {outcome['value']:.4g}"
        up, down = (format_bytes(outcome[name]) for name in _BYTES[:2])
        return f"{outcome['ending']}{value}, {outcome['rounds']} rounds, {up} up, {down} down"
    loss = "diverged" if summary["diverged"] else f"loss {summary['final_loss']:.6f}"
    up, down = (format_bytes(summary.get(name)) for name in _BYTES[:2])
    return f"{loss}, {summary['uploads']:,} uploads, {up} up, {down} down"


def _total_size(total_bytes: int | None) -> str:
    return f"{format_bytes(total_bytes)} up and down"
