"""Documents whose tables and passages are written by code.

In a document a table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``, and a passage
between ``<!-- text: NAME -->`` and ``<!-- end -->``; `refresh` replaces what is between.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from aqg.errors import RunError
from aqg.runs.table import Table


class Passage(NamedTuple):
    """Markdown with a name that marks its place in a document."""

    name: str
    text: str


_WIDTH = 118
"""Of prose, in characters."""
_PLACE = re.compile(
    r"(<!-- (?P<kind>table|text): (?P<name>[a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL
)


def refresh(
    document: str,
    tables: Iterable[Table],
    passages: Iterable[Passage] = (),
    below: Mapping[str, str] | None = None,
) -> str:
    r"""Return the document with every marked table and passage written anew.

    ``below`` has lines that belong below tables, by their names.

    >>> from aqg.runs.table import Table
    >>> table = Table("t", "T", "N.", ("a",), (("1",),))
    >>> print(refresh("<!-- table: t -->\n<!-- end -->", [table], below={"t": "word word"}))
    <!-- table: t -->
    <BLANKLINE>
    **T.** N.
    <BLANKLINE>
    | a |
    |---|
    | 1 |
    <BLANKLINE>
    word word
    <BLANKLINE>
    <!-- end -->
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
        line = (below or {}).get(name) if kind == "table" else None
        whole = written[kind][name] + (f"\n{line}\n" if line else "")
        lines = map(_wrap, whole.split("\n"))
        text = "\n".join(lines)
        return f"{match[1]}\n{text}\n{match[4]}"

    return _PLACE.sub(write, document)


def _wrap(line: str) -> str:
    """Break a line of prose; a row of a table must stay in one."""
    if line.startswith("|"):
        return line
    indent = "  " if line.startswith("- ") else ""
    wrapper = textwrap.TextWrapper(
        _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.fill(line)
