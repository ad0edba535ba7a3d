"""Documents whose tables and passages are written by code.

In a document a table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``, and a passage
between ``<!-- text: NAME -->`` and ``<!-- end -->``; `refresh` replaces what is between.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from aqg.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aqg.runs.table import Table


class Passage(NamedTuple):
    """Markdown with a name that marks its place in a document."""

    name: str
    text: str


_PLACE = re.compile(
    r"(<!-- (?P<kind>table|text): (?P<name>[a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL
)


def refresh(document: str, tables: Iterable[Table], passages: Iterable[Passage] = ()) -> str:
    r"""Return the document with every marked table and passage written anew.

    >>> from aqg.runs.table import Table
    >>> table = Table("t", "T", "N.", ("a",), (("1",),))
    >>> "| 1 |" in refresh("Text.\n<!-- table: t -->\n<!-- end -->\n", [table])
    True
    """
    written = {
        "table": {table.name: table.to_markdown() for table in tables},
        "text": {passage.name: passage.text + "\n" for passage in passages},
    }

    def write(match: re.Match[str]) -> str:
        kind, name = match["kind"], match["name"]
        if name not in written[kind]:
            known = ", ".join(written[kind])
            raise RunError(f"the document asks for {kind} {name!r}; the results have: {known}")
        return f"{match[1]}\n{written[kind][name]}\n{match[4]}"

    return _PLACE.sub(write, document)
