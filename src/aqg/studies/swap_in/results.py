"""The files that such a comparison leaves in its directory, besides the runs themselves.

================ ============================================================================
``compare.json``  what is compared
``trials.jsonl``  every finished run with its curve, a line each
``targets.json``  federated averaging's plateaus, the goals, and when it reaches them
``results.json``  a cell for each recipe, task and goal
``tables.md``     the tables
``frontier.png``  the picture
================ ============================================================================

Tables in a document, between ``<!-- table: NAME -->`` and ``<!-- end -->``, are written anew with

    python -m aqg.studies.swap_in.results docs/explanation/measure.md DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from aqg.runs.files import write_atomically
from aqg.studies.document import refresh
from aqg.studies.swap_in.comparison import open_swap_in
from aqg.studies.swap_in.picture import draw
from aqg.studies.swap_in.plan import Findings, read_outcomes, write_targets
from aqg.studies.swap_in.table import Cell, as_tables, make_cells

if TYPE_CHECKING:
    from aqg.studies.swap_in.comparison import SwapIn

RESULTS = "results.json"
TABLES = "tables.md"
PICTURE = "frontier.png"


def write_results(comparison: SwapIn, directory: Path) -> list[Cell]:
    """Write every view of what is finished, and return the cells."""
    outcomes = read_outcomes(directory)
    cells = make_cells(comparison, outcomes)
    text = json.dumps({"cells": [cell.to_json() for cell in cells]}, indent=1, allow_nan=False)
    write_atomically(directory / RESULTS, (text + "\n").encode())
    tables = "\n".join(table.to_markdown() for table in as_tables(comparison, cells))
    write_atomically(directory / TABLES, tables.encode())
    write_atomically(directory / PICTURE, draw(comparison, cells))
    write_targets(directory, Findings(comparison, outcomes))
    return cells


def main(arguments: list[str]) -> None:
    """Refresh the document named first from the comparison named second."""
    document, directory = map(Path, arguments)
    comparison = open_swap_in(directory)
    tables = as_tables(comparison, make_cells(comparison, read_outcomes(directory)))
    text = refresh(document.read_text(encoding="utf-8"), tables)
    write_atomically(document, text.encode())


if __name__ == "__main__":
    main(sys.argv[1:])
