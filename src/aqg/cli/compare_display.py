"""A comparison as people see it: how far it is, and its table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqg.cli.live import plain_table
from aqg.studies.compare.table import cell_text, counts_uploads_only, upload_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from aqg.studies.compare.comparison import Comparison
    from aqg.studies.compare.table import Cell

_FIRST_COLUMN = 16
_COLUMN = 24
"""A task's column in a table, at its widest."""
_UPLOADS_COLUMN = 12


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
