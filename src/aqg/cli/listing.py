"""``aqg recipes`` and ``aqg datasets``."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from aqg.core.recipes import RECIPES
from aqg.data import DATASETS


def list_recipes() -> None:
    """Print name, summary and options of every recipe."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for entry in RECIPES.values():
        options = " ".join(f"[{name}={value:g}]" for name, value in entry.options.items())
        suffix = f"  {options}" if options else ""
        table.add_row(entry.name, entry.summary + suffix.replace("[", r"\["))
    Console().print(table)


def list_datasets() -> None:
    """Print name and summary of every dataset."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for info in DATASETS.values():
        table.add_row(info.name, info.summary)
    Console().print(table)
