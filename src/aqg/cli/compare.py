"""``aqg compare``: recipes on tasks, bytes until the target is reached."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from aqg.compare.schedule import Comparison
    from aqg.compare.search import Tuned
    from aqg.compare.trial import Trial
    from aqg.errors import AqgError
    from aqg.experiments.workers import Workers


@dataclass(frozen=True)
class _Plan:
    """What to compare, and where; the directory of a new one does not exist yet."""

    comparison: Comparison
    directory: Path
    is_new: bool


def compare(
    recipes: Annotated[
        str | None,
        typer.Argument(
            help="Names separated by commas, or all; by default the best-known ones. With options, "
            "as in stc:keep=0.001, a recipe is run as told."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]|all", help="On what; two quick tasks on digits by default."
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs per recipe and task; 5.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for the results (new or empty).")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Go on with the comparison in this directory; recipes and tasks named are added."
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time; one per core by default.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="Where to compute the larger tasks.")
    ] = "cpu",
    search: Annotated[
        bool,
        typer.Option(
            "--search", help="Find every recipe's best step size and knob first, on seed 0."
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed, and a small part of the search.")
    ] = False,
    saved: Annotated[
        Path | None,
        typer.Option("--from", help="Run nothing: show what is finished in this directory."),
    ] = None,
    tuned: Annotated[
        Path | None,
        typer.Option(help="Settings that a search found; by default those of the package."),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(envvar="AQG_DATA_DIR", help="Where datasets are kept.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Compare recipes by the bytes they upload until a target is reached.

    A run ends when its model has the loss or test accuracy that the task asks for. Every recipe is
    run with the best step size and knob that the same search found for each. Ctrl-C keeps what is
    finished; --resume goes on.
    """
    from rich.console import Console

    from aqg.compare.schedule import Comparison, open_comparison
    from aqg.compare.search import parse_recipes, read_tuned
    from aqg.compare.tasks import parse_tasks
    from aqg.errors import ConfigError
    from aqg.experiments.rundir import create_directory
    from aqg.experiments.workers import Workers, default_jobs
    from aqg.sim.backends import check_device

    console = Console(stderr=as_json)
    if saved is not None:
        if resume is not None or out is not None:
            raise ConfigError("--from runs nothing: it goes with neither --resume nor --out")
        _show(console, open_comparison(saved), saved, as_json)
        return 0
    check_device(device)
    settings = read_tuned(tuned)
    workers = Workers(default_jobs() if jobs is None else jobs)
    if resume is not None:
        for name, is_given in (("--out", out), ("--search", search), ("--quick", quick)):
            if is_given:
                raise ConfigError(f"--resume goes on with what was begun; it excludes {name}")
        directory = resume
        comparison = open_comparison(directory).extended(
            parse_tasks(task) if task else (), parse_recipes(recipes) if recipes else (), seeds
        )
    else:
        comparison = Comparison(
            tasks=parse_tasks(task),
            recipes=parse_recipes(recipes),
            seeds=(1 if quick else 5) if seeds is None else seeds,
            search=search,
            quick=quick,
        )
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        directory = out or Path("runs") / f"compare-{stamp}"
        if directory.exists():
            create_directory(directory)  # refuses an occupied one now, not after the preparations
    plan = _Plan(comparison, directory, is_new=resume is None)
    failures = _run(console, plan, workers, settings, device, data_dir)
    _show(console, comparison, directory, as_json)
    if failures:
        trial, error = next(iter(failures.items()))
        print(
            f"aqg: error: {len(failures)} runs failed, the first {trial.recipe} on {trial.task}: "
            f"{error}; try them again with: aqg compare --resume {directory}",
            file=sys.stderr,
        )
        return 1
    return 0


def _run(
    console: Console,
    plan: _Plan,
    workers: Workers,
    tuned: Tuned,
    device: str,
    data_dir: Path | None,
) -> dict[Trial, AqgError]:
    """Run what is left, with a bar and the time left, or a line for each where no one looks."""
    from aqg.cli.compare_display import Overview
    from aqg.compare.ledger import Ledger
    from aqg.compare.schedule import (
        create_comparison,
        prepare,
        run_comparison,
        write_comparison,
    )
    from aqg.experiments.runner import Interrupted

    comparison, directory = plan.comparison, plan.directory
    ledger = Ledger(directory)
    ledger.repair()
    num_before = len(ledger.outcomes())
    total = comparison.num_trials
    console.print(
        f"Recipes: {len(comparison.recipes)}, tasks: {len(comparison.tasks)}, up to {total} runs, "
        f"{num_before} finished before, {workers.jobs} at a time, in {directory}",
        highlight=False,
        soft_wrap=True,
    )
    try:
        with workers:
            with console.status("Preparing kernels, data and minima (cached for next time) ..."):
                prepare(workers, comparison, data_dir)
            if plan.is_new:
                create_comparison(directory, comparison)
            else:
                write_comparison(directory, comparison)
            with Overview(console, total, num_before) as overview:
                return run_comparison(
                    workers, comparison, directory, tuned, device, data_dir, overview.show
                )
    except Interrupted:
        raise Interrupted(_how_to_go_on(directory)) from None


def _how_to_go_on(directory: Path) -> str:
    from aqg.compare.ledger import Ledger
    from aqg.compare.schedule import PLAN

    if not (directory / PLAN).exists():
        return "stopped before the first run; nothing was written"
    num_done = len(Ledger(directory).outcomes())
    return f"stopped with {num_done} runs finished; go on with: aqg compare --resume {directory}"


def _show(console: Console, comparison: Comparison, directory: Path, as_json: bool) -> None:
    """Write results, tables, picture and the settings found; print the table."""
    from aqg.cli.compare_display import comparison_tables
    from aqg.compare.results import PICTURE, write_results

    cells = write_results(comparison, directory)
    if as_json:
        rows = [cell.to_json() for cell in cells]
        sys.stdout.write(json.dumps({"cells": rows}, indent=2, allow_nan=False) + "\n")
        return
    if not console.is_terminal:
        console.width = max(console.width, 200)  # a file has no edge to wrap at
    for table in comparison_tables(comparison, cells, console.width):
        console.print(table)
    console.print(
        "Bytes until the target is reached: median, its ratio to the best, smallest–largest. "
        "†: the search was cut short.\n",
        style="dim",
    )
    console.print(f"Picture: {directory / PICTURE}", highlight=False, soft_wrap=True)
    console.print(f"Results: {directory}", highlight=False, soft_wrap=True)
