"""One kind of table, for the terminal and Markdown; CSV; and how sizes are written."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table as TerminalTable

_STRONG = re.compile(r"\*\*(.+?)\*\*", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """Text in cells, written as in Markdown.

    Names are in backticks, ``<br>`` is between lines, and ``**`` around what stands out.
    """

    name: str  # marks its place in a document
    title: str
    note: str  # what the numbers are
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_labels: int | None = None  # columns that are no numbers; None: all are text

    def to_markdown(self) -> str:
        lines = [f"**{self.title}.** {self.note}", "", _line(self.header)]
        lines.append("|" + "---|" * len(self.header))
        lines.extend(_line(row) for row in self.rows)
        return "\n".join(lines) + "\n"

    def to_terminal(self, keeps_stars: bool = False) -> TerminalTable:
        r"""Return header and rows for a console of rich's, with no lines but one below the header.

        What stands out is bold; ``keeps_stars`` is for files, which have no bold.

        >>> table = Table("t", "", "", ("a", "b"), (("x", "**1**<br>2"),), num_labels=1)
        >>> [list(column.cells) for column in table.to_terminal().columns]
        [['x'], ['[bold]1[/bold]\n2']]
        """
        from rich import box
        from rich.markup import escape
        from rich.table import Table as TerminalTable

        def shown_cell(cell: str) -> str:
            text = escape(_lines(cell))
            return text if keeps_stars else _STRONG.sub(r"[bold]\1[/bold]", text)

        shown = TerminalTable(
            box=box.SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False
        )
        for position, name in enumerate(self.header):
            style: dict[str, Any] = {}
            if self.num_labels is not None:
                is_label = position < self.num_labels
                style = {"style": "bold"} if is_label else {"justify": "right"}
            shown.add_column(_lines(name), no_wrap=self.num_labels == 1, **style)
        for row in self.rows:
            shown.add_row(*map(shown_cell, row))
        return shown


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _lines(cell: str) -> str:
    return cell.replace("`", "").replace("<br>", "\n")


def write_csv(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return buffer.getvalue()


def records_to_csv(records: Sequence[Mapping[str, Any]]) -> str:
    """Write objects, a row each, with a column for every field that some of them have."""
    columns = list(dict.fromkeys(column for row in records for column in row))
    return write_csv(columns, ([row.get(column) for column in columns] for row in records))


def format_bytes(count: float) -> str:
    """Write a size for humans.

    >>> format_bytes(812), format_bytes(48_200), format_bytes(3_140_000)
    ('812 B', '48.2 kB', '3.14 MB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"
