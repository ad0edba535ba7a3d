"""``aqg compare --swap-in``: recipes in the place of federated averaging."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aqg.cli.study import lock, run_comparison
from aqg.errors import ConfigError
from aqg.runs.directory import output_directory
from aqg.studies.swap_in.comparison import (
    SwapIn,
    create_swap_in,
    open_swap_in,
    write_swap_in,
)
from aqg.studies.swap_in.plan import SwapPlan, forget
from aqg.studies.swap_in.results import PICTURE, write_results
from aqg.studies.swap_in.search import parse_swap_recipes
from aqg.studies.swap_in.table import as_tables
from aqg.studies.swap_in.tasks import available, parse_swap_tasks

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from aqg.cli.study import Where

_SEEDS = 5
_QUICK_TASKS = "digits-local"


@dataclass(frozen=True)
class Asked:
    """What the command line asks for; None where it says nothing."""

    recipes: str | None
    task: str | None
    seeds: int | None
    search: bool
    quick: bool
    downlink: str
    device: str
    as_json: bool


def start(console: Console, asked: Asked, out: Path | None, where: Where) -> int:
    """Begin a new comparison; return the exit code."""
    if asked.quick and asked.search:
        raise ConfigError("--quick leaves the search out with --swap-in; give one of them")
    named = _QUICK_TASKS if asked.quick and asked.task is None else asked.task
    tasks, lines = available(parse_swap_tasks(named), where.data_dir)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    comparison = SwapIn(
        tasks=tasks,
        recipes=parse_swap_recipes(asked.recipes),
        seeds=(1 if asked.quick else _SEEDS) if asked.seeds is None else asked.seeds,
        search=asked.search,
        downlink=asked.downlink,
    )
    with output_directory(out, "compare") as directory, lock(directory):
        code = _run(console, comparison, comparison, directory, where, asked.device, is_new=True)
        show(console, comparison, directory, asked.as_json)
        return code


def go_on(console: Console, asked: Asked, directory: Path, again: str | None, where: Where) -> int:
    """Go on with the comparison in a directory, or with the part that is named."""
    before = open_swap_in(directory)
    tasks = parse_swap_tasks(asked.task) if asked.task else ()
    repeated = tuple(name.strip() for name in again.split(",")) if again else ()
    if repeated:
        parse_swap_recipes(",".join(repeated))
    named = tuple(name.strip() for name in asked.recipes.split(",")) if asked.recipes else ()
    recipes = tuple(dict.fromkeys((*named, *repeated)))
    comparison = before.extended(tasks, recipes, asked.seeds)
    part = comparison.narrowed(tasks, recipes)
    kept, lines = available(part.tasks, where.data_dir)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    part = part.narrowed(kept, ())
    with lock(directory):
        if repeated:
            count = forget(directory, repeated, tuple(task.name for task in part.tasks))
            console.print(f"Forgotten: {count} runs", highlight=False)
        code = _run(console, comparison, part, directory, where, asked.device, is_new=False)
        show(console, comparison, directory, asked.as_json)
        return code


def _run(
    console: Console,
    comparison: SwapIn,
    part: SwapIn,
    directory: Path,
    where: Where,
    device: str,
    *,
    is_new: bool,
) -> int:
    """Run what is left of the part; return the exit code."""
    plan = SwapPlan(part, directory, device)
    write = create_swap_in if is_new else write_swap_in
    size = f"Recipes: {len(part.recipes)}, tasks: {len(part.tasks)}"
    return run_comparison(
        console, plan, directory, where, size, lambda: write(directory, comparison)
    )


def show(console: Console, comparison: SwapIn, directory: Path, as_json: bool) -> None:
    """Write results, tables and picture; print the tables."""
    cells = write_results(comparison, directory)
    if as_json:
        rows = [cell.to_json() for cell in cells]
        sys.stdout.write(json.dumps({"cells": rows}, indent=2, allow_nan=False) + "\n")
        return
    if not console.is_terminal:
        console.width = max(console.width, 200)  # a file has no edge to wrap at
    tables = as_tables(comparison, cells)
    for table in tables:
        console.print(table.title, style="bold")
        console.print(table.to_terminal(keeps_stars=not console.is_terminal))
    if tables:
        console.print(tables[0].note + "\n", style="dim")
    shown = {cell.task for cell in cells}
    for task in comparison.tasks:
        if task.name not in shown:
            line = (
                f"{task.name} has no target yet, as federated averaging's search is not over or "
                f"fails; aqg compare --resume {directory} goes on with it"
            )
            console.print(line, highlight=False, soft_wrap=True)
    console.print(f"Picture: {directory / PICTURE}", highlight=False, soft_wrap=True)
    console.print(f"Results: {directory}", highlight=False, soft_wrap=True)
