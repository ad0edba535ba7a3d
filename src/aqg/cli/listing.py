"""``aqg recipes`` and ``aqg datasets``: one line for each, never wrapped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from aqg.core.recipes import RECIPES
from aqg.data import DATASETS

if TYPE_CHECKING:
    from collections.abc import Iterable


def list_recipes() -> None:
    """Print name, summary and options of every recipe."""
    _print_lines(
        (
            entry.name,
            entry.summary
            + "".join(f" [{name}={value:g}]" for name, value in entry.options.items()),
        )
        for entry in RECIPES.values()
    )


def list_datasets() -> None:
    """Print name and summary of every dataset."""
    _print_lines((info.name, info.summary) for info in DATASETS.values())


def _print_lines(rows: Iterable[tuple[str, str]]) -> None:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    console = Console()
    for name, summary in rows:
        console.print(Text.assemble((name.ljust(width), "bold"), "  ", summary), soft_wrap=True)
