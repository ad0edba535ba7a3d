"""A comparison on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqg.runs.table import Table
from aqg.studies.compare.table import counts_uploads_only, table_row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
        header = ["recipe"]
        for task in shown:
            header += [f"{task.name}<br>{task.target}", "of it<br>uploaded"][: 1 + with_uploads]
        rows = []
        for recipe in comparison.recipes:
            own = [by_place.get((recipe, task.name)) for task in shown]
            if any(own):
                rows.append((recipe, *table_row(own, shown, with_uploads)))
        yield Table("comparison", "Comparison", "", tuple(header), tuple(rows), num_labels=1)
