"""The files that a comparison leaves in its directory, besides the trials themselves.

================== ==========================================================================
``compare.json``   what is compared
``trials.jsonl``   every finished trial, a line each
``results.json``   a cell for each recipe and task
``tables.md``      the tables, and the settings
``comparison.png`` the picture
``tuned.json``     after a search: the best setting of every recipe and task
``TASK/RECIPE/``   of a task of the user's own: a run directory for each trial
================== ==========================================================================

Tables in a document, between ``<!-- table: NAME -->`` and ``<!-- end -->``, are written anew with

    python -m aqg.studies.compare.results DOCUMENT.md DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from aqg.runs.files import write_atomically
from aqg.studies.compare.comparison import open_comparison
from aqg.studies.compare.picture import draw
from aqg.studies.compare.plan import comparable, read_outcomes
from aqg.studies.compare.search import TUNED, collect_tuned, write_tuned
from aqg.studies.compare.table import Cell, as_tables, make_cells, settings_table
from aqg.studies.document import refresh

if TYPE_CHECKING:
    from aqg.runs.table import Table
    from aqg.studies.compare.comparison import Comparison

RESULTS = "results.json"
TABLES = "tables.md"
PICTURE = "comparison.png"


def write_results(comparison: Comparison, directory: Path) -> list[Cell]:
    """Write every view of what is finished, and return the cells."""
    outcomes = comparable(read_outcomes(directory))
    cells = make_cells(comparison, outcomes)
    text = json.dumps({"cells": [cell.to_json() for cell in cells]}, indent=1, allow_nan=False)
    write_atomically(directory / RESULTS, (text + "\n").encode())
    tables = "\n".join(_with_line(*pair) for pair in _all_tables(comparison, cells))
    write_atomically(directory / TABLES, tables.encode())
    write_atomically(directory / PICTURE, draw(comparison, cells))
    if comparison.search:
        tuned = write_tuned(collect_tuned(outcomes.values()))
        write_atomically(directory / TUNED, tuned.encode())
    return cells


def _all_tables(comparison: Comparison, cells: list[Cell]) -> list[tuple[Table, str]]:
    return [*as_tables(comparison, cells), (settings_table(cells), "")]


def _with_line(table: Table, line: str) -> str:
    """Write a table, and the line that belongs below it."""
    return table.to_markdown() + (f"\n{line}\n" if line else "")


def main(arguments: list[str]) -> None:
    """Refresh the document named first from the comparison named second."""
    document, directory = map(Path, arguments)
    comparison = open_comparison(directory)
    tables = _all_tables(comparison, make_cells(comparison, comparable(read_outcomes(directory))))
    below = {table.name: line for table, line in tables}
    text = document.read_text(encoding="utf-8")
    text = refresh(text, [table for table, _ in tables], below=below)
    document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
