"""Tables as Markdown, and documents whose tables and numbers are written by code.

In a document a table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``, and a passage
between ``<!-- text: NAME -->`` and ``<!-- end -->``; `refresh` replaces what is between. From the
command line:

    python -m aqg.studies.paper.markdown docs/results.md results
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from aqg.errors import RunError
from aqg.studies.paper.outcomes import read_results
from aqg.studies.paper.passages import all_passages
from aqg.studies.paper.tables import all_tables

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aqg.studies.paper.cells import Table
    from aqg.studies.paper.passages import Passage

_PLACE = re.compile(
    r"(<!-- (?P<kind>table|text): (?P<name>[a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL
)


def to_markdown(table: Table) -> str:
    """Write a table with its title and note.

    >>> from aqg.studies.paper.cells import Table
    >>> print(to_markdown(Table("t", "Costs", "In bits.", ("recipe", "bits"), (("lean", "3"),))))
    **Costs.** In bits.
    <BLANKLINE>
    | recipe | bits |
    |---|---|
    | lean | 3 |
    <BLANKLINE>
    """
    lines = [f"**{table.title}.** {table.note}", "", _line(table.header)]
    lines.append("|" + "---|" * len(table.header))
    lines.extend(_line(row) for row in table.rows)
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def refresh(document: str, tables: Iterable[Table], passages: Iterable[Passage] = ()) -> str:
    r"""Return the document with every marked table and passage written anew.

    >>> from aqg.studies.paper.cells import Table
    >>> table = Table("t", "T", "N.", ("a",), (("1",),))
    >>> "| 1 |" in refresh("Text.\n<!-- table: t -->\n<!-- end -->\n", [table])
    True
    """
    written = {
        "table": {table.name: to_markdown(table) for table in tables},
        "text": {passage.name: passage.text + "\n" for passage in passages},
    }

    def write(match: re.Match[str]) -> str:
        kind, name = match["kind"], match["name"]
        if name not in written[kind]:
            known = ", ".join(written[kind])
            raise RunError(f"the document asks for {kind} {name!r}; the results have: {known}")
        return f"{match[1]}\n{written[kind][name]}\n{match[4]}"

    return _PLACE.sub(write, document)


def main(arguments: list[str]) -> None:
    """Refresh the document named first from the results named second."""
    document, directory = map(Path, arguments)
    results = read_results(directory)
    before = document.read_text(encoding="utf-8")
    text = refresh(before, all_tables(results), all_passages(results))
    document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
