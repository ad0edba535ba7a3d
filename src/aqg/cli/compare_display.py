"""A comparison as people see it: how far it is, and its table."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from aqg.compare.table import cell_text
from aqg.errors import AqgError
from aqg.reproduce.cells import size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from rich.console import Console

    from aqg.compare.schedule import Comparison
    from aqg.compare.table import Cell
    from aqg.compare.trial import Outcome, Trial

_FIRST_COLUMN = 16
_COLUMN = 24
"""A task's column in a table, at its widest."""


class Overview:
    """Shows how many of ``total`` trials have ended, and the time left.

    On a terminal: a bar. Elsewhere: a line per trial.
    """

    def __init__(self, console: Console, total: int, num_before: int) -> None:
        self._console = console
        self._total = total
        self._num_before = num_before
        self._num_ended = num_before
        self._started = time.monotonic()
        self._bar = Progress(
            TextColumn("compare", style="bold"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("runs"),
            TextColumn("{task.description}", style="cyan"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("", total=total, completed=num_before)

    def __enter__(self) -> Overview:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, result: Outcome | AqgError, trial: Trial) -> None:
        """Count one more trial."""
        self._num_ended += 1
        what = f"{trial.task}: {trial.setting}, seed {trial.seed}"
        self._bar.update(self._task, completed=self._num_ended, description=what)
        if isinstance(result, AqgError):
            self._say(f"{what}: failed: {result}")
        elif not self._console.is_terminal:
            self._say(f"{what}: {_in_one_line(result)}")

    def _say(self, text: str) -> None:
        elapsed = time.monotonic() - self._started
        done = self._num_ended - self._num_before
        left = elapsed / done * max(0, self._total - self._num_ended)
        self._console.print(
            f"[{self._num_ended}/{self._total}, {_clock(elapsed)}, {_clock(left)} left] {text}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _clock(seconds: float) -> str:
    """Write a time.

    >>> _clock(75), _clock(3723)
    ('1:15', '1:02:03')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _in_one_line(outcome: Outcome) -> str:
    value = "" if outcome.value is None else f" at {outcome.value:.4g}"
    return (
        f"{outcome.ending}{value}, {outcome.rounds} rounds, {size(outcome.upload_bytes)}, "
        f"{outcome.seconds:.1f} s"
    )


def comparison_tables(comparison: Comparison, cells: Sequence[Cell], width: int) -> Iterator[Table]:
    """Yield the comparison, a column per task; as many tables as the width makes necessary."""
    by_place = {(cell.recipe, cell.task): cell for cell in cells}
    per_table = max(1, (width - _FIRST_COLUMN) // _COLUMN)
    tasks = comparison.tasks
    for start in range(0, len(tasks), per_table):
        shown = tasks[start : start + per_table]
        table = Table(
            box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False
        )
        table.add_column("recipe", style="bold", no_wrap=True)
        for task in shown:
            table.add_column(f"{task.name}\n{task.target}", justify="right", no_wrap=True)
        for recipe in comparison.recipes:
            row = [by_place.get((recipe, task.name)) for task in shown]
            if not any(row):
                continue
            texts = [cell_text(cell, task) for cell, task in zip(row, shown, strict=True)]
            table.add_row(
                recipe, *(f"{text}\n{spread}" if spread else text for text, spread in texts)
            )
        yield table
