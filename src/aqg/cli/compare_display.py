"""A comparison as people see it: how far it is, and its table."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from aqg.cli.live import LiveDisplay, plain_table
from aqg.compare.table import cell_text, counts_uploads_only, upload_text
from aqg.errors import AqgError
from aqg.reproduce.cells import size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console
    from rich.table import Table

    from aqg.compare.plan import Comparison
    from aqg.compare.table import Cell
    from aqg.compare.trial import Outcome, Trial

_FIRST_COLUMN = 16
_COLUMN = 24
"""A task's column in a table, at its widest."""
_UPLOADS_COLUMN = 12


class Overview(LiveDisplay):
    """Shows how many trials have ended, of how many there are at most, and the time left.

    On a terminal: a bar. Elsewhere: a line per trial.
    """

    def __init__(self, console: Console, most: int) -> None:
        self._num_ended = 0
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
        self._task = self._bar.add_task("", total=most)
        super().__init__(console, self._bar)

    def show(self, result: Outcome | AqgError, trial: Trial, most_left: int) -> None:
        """Count one more trial; the total falls when trials prove needless."""
        self._num_ended += 1
        total = self._num_ended + most_left
        what = f"{trial.task}: {trial.setting}, seed {trial.seed}"
        self._bar.update(self._task, completed=self._num_ended, total=total, description=what)
        elapsed = time.monotonic() - self._started
        left = elapsed / self._num_ended * most_left
        head = f"[{self._num_ended}/{total}, {_clock(elapsed)}, {_clock(left)} left] {what}"
        if isinstance(result, AqgError):
            self._say(f"{head}: failed: {result}")
        elif not self._console.is_terminal:
            self._say(f"{head}: {_in_one_line(result)}")


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
        f"{outcome.ending}{value}, {outcome.rounds} rounds, {_costs(outcome)}, "
        f"{outcome.seconds:.1f} s"
    )


def _costs(outcome: Outcome) -> str:
    if outcome.download_bytes is None:
        return f"{size(outcome.upload_bytes)} up"
    return f"{size(outcome.upload_bytes)} up, {size(outcome.download_bytes)} down"


def comparison_tables(comparison: Comparison, cells: Sequence[Cell], width: int) -> Iterator[Table]:
    """Yield the comparison, a column per task; as many tables as the width makes necessary."""
    by_place = {(cell.recipe, cell.task): cell for cell in cells}
    with_uploads = not counts_uploads_only(cells)
    column = _COLUMN + (_UPLOADS_COLUMN if with_uploads else 0)
    per_table = max(1, (width - _FIRST_COLUMN) // column)
    tasks = comparison.tasks
    for start in range(0, len(tasks), per_table):
        shown = tasks[start : start + per_table]
        table = plain_table()
        table.add_column("recipe", style="bold", no_wrap=True)
        for task in shown:
            table.add_column(f"{task.name}\n{task.target}", justify="right", no_wrap=True)
            if with_uploads:
                table.add_column("of it\nuploaded", justify="right", no_wrap=True)
        for recipe in comparison.recipes:
            row = [by_place.get((recipe, task.name)) for task in shown]
            if not any(row):
                continue
            texts = [cell_text(cell, task) for cell, task in zip(row, shown, strict=True)]
            shown_row = [f"{text}\n{spread}" if spread else text for text, spread in texts]
            if with_uploads:
                pairs = zip(shown_row, map(upload_text, row), strict=True)
                shown_row = [text for pair in pairs for text in pair]
            table.add_row(recipe, *shown_row)
        yield table
