"""``aqg compare``: recipes on tasks, bytes until the target is reached."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003  (typer reads the annotations at run time)
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from aqg.compare.plan import Comparison
    from aqg.compare.search import Tuned
    from aqg.compare.tasks import Target, Task
    from aqg.compare.trial import Trial
    from aqg.errors import AqgError
    from aqg.experiments.workers import Workers


_OWN = "A task of your own"


@dataclass(frozen=True)
class _Own:
    """What the command line says about a task of the user's own."""

    settings: Mapping[str, Any]
    target: Target | None
    data_dir: Path | None
    allow_code: bool

    def tasks(self, before: tuple[Task, ...] = ()) -> tuple[Task, ...]:
        """Return the task, if there is one; a comparison's tasks ``before`` may hold it."""
        from aqg.compare.own import make_own_task
        from aqg.errors import ConfigError

        if self.settings:
            return (make_own_task(self.settings, self.target, self.data_dir, before),)
        if self.target is not None:
            raise ConfigError(
                f"a target ({self.target}) is for a task of your own; name it with --problem, "
                "--dataset or --model"
            )
        return ()


@dataclass(frozen=True)
class _Work:
    """What to do, and where.

    Attributes:
        comparison: all that is compared.
        part: of it, what to run now.
        directory: for the results; that of a new comparison is empty, or does not exist yet.
        is_new: whether the comparison is.
        again: recipes whose finished trials on the part's tasks are dropped first.

    """

    comparison: Comparison
    part: Comparison
    directory: Path
    is_new: bool = True
    again: tuple[str, ...] = ()


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
    problem: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="A task of your own, as in `aqg run`; in place of --task, or beside it.",
            rich_help_panel=_OWN,
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.npz", help="The same: as in `aqg run`.", rich_help_panel=_OWN
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.py:FUNCTION",
            help="The same: as in `aqg run`.",
            rich_help_panel=_OWN,
        ),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any other setting of its runs, as in `aqg run`; repeatable.",
            rich_help_panel=_OWN,
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="It is learned when its loss is at most this.", rich_help_panel=_OWN),
    ] = None,
    target_accuracy: Annotated[
        float | None,
        typer.Option(
            help="It is learned when its test accuracy is at least this share, such as 0.9.",
            rich_help_panel=_OWN,
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs per recipe and task; 5.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for the results (new or empty).")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Go on with the comparison in this directory: with everything unfinished, or with "
            "the recipes and tasks named, which are added to it."
        ),
    ] = None,
    again: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help="With --resume: forget what these recipes did on the tasks named, or on all, and "
            "run them anew.",
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
            "--search",
            help="Find every recipe's best step size and knob first, on seed 0; those close to the "
            "best have a final, with two seeds more.",
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
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            help="Run Python files that only --resume names.",
            rich_help_panel=_OWN,
        ),
    ] = False,
) -> int:
    """Compare recipes by the bytes that clients send and receive until a target is reached.

    A run ends when its model has the loss or test accuracy that the task asks for. Every recipe is
    run with the best step size and knob that the same search found for each. Ctrl-C keeps what is
    finished; --resume goes on.
    """
    from rich.console import Console

    from aqg.compare.own import parse_target
    from aqg.compare.plan import Comparison, open_comparison
    from aqg.compare.search import parse_recipes, read_tuned
    from aqg.compare.tasks import in_order, parse_tasks
    from aqg.errors import ConfigError
    from aqg.experiments.config import parse_assignment
    from aqg.experiments.rundir import output_directory
    from aqg.experiments.workers import Workers, default_jobs
    from aqg.sim.backends import check_device

    console = Console(stderr=as_json)
    if saved is not None:
        if resume is not None or out is not None or again is not None:
            raise ConfigError("--from runs nothing: it excludes --resume, --out and --again")
        _show(console, open_comparison(saved), saved, as_json)
        return 0
    named: dict[str, Any] = dict(parse_assignment(text) for text in assignments or ())
    flags = {"problem": problem, "dataset": dataset, "model": model}
    named |= {name: value for name, value in flags.items() if value is not None}
    goal = parse_target(target, target_accuracy)
    own = _Own(named, goal, data_dir, allow_code)
    check_device(device)
    settings = read_tuned(tuned)
    workers = Workers(default_jobs() if jobs is None else jobs)

    def carry_out(work: _Work) -> int:
        failures = _run(console, work, workers, settings, device, data_dir)
        _show(console, work.comparison, work.directory, as_json)
        return _exit_code(failures, work.directory)

    if resume is not None:
        for name, is_given in (("--out", out), ("--search", search), ("--quick", quick)):
            if is_given:
                raise ConfigError(f"--resume goes on with what was begun; it excludes {name}")
        return carry_out(_go_on(resume, recipes, task, seeds, again, own))
    if again is not None:
        raise ConfigError(f"--again {again} needs --resume: nothing was run before")
    own_tasks = own.tasks()
    comparison = Comparison(
        tasks=in_order((*(parse_tasks(task) if task or not own_tasks else ()), *own_tasks)),
        recipes=parse_recipes(recipes),
        seeds=(1 if quick else 5) if seeds is None else seeds,
        search=search,
        quick=quick,
    )
    with output_directory(out, "compare") as directory:
        return carry_out(_Work(comparison, comparison, directory))


def _exit_code(failures: dict[Trial, AqgError], directory: Path) -> int:
    """Say what failed, and how to try it again."""
    if failures:
        trial, error = next(iter(failures.items()))
        print(
            f"aqg: error: {len(failures)} runs failed, the first {trial.recipe} on {trial.task}: "
            f"{error}; try them again with: aqg compare --resume {directory}",
            file=sys.stderr,
        )
        return 1
    return 0


def _go_on(
    directory: Path,
    recipes: str | None,
    task: str | None,
    seeds: int | None,
    again: str | None,
    own: _Own,
) -> _Work:
    """Return what to do in a directory that exists: all of its comparison, or what is named."""
    from aqg.compare.own import check_code_and_files
    from aqg.compare.plan import PLAN, open_comparison
    from aqg.compare.search import parse_recipes

    before = open_comparison(directory)
    tasks = (*(before.parse_tasks(task) if task else ()), *own.tasks(before.tasks))
    repeated = parse_recipes(again) if again else ()
    named = (*(parse_recipes(recipes) if recipes else ()), *repeated)
    comparison = before.extended(tasks, named, seeds)
    part = comparison.narrowed(tasks, named)
    where = repr(str(directory / PLAN))
    check_code_and_files(part.tasks, own.settings, allowed=own.allow_code, where=where)
    return _Work(comparison, part, directory, is_new=False, again=repeated)


def _run(
    console: Console,
    work: _Work,
    workers: Workers,
    tuned: Tuned,
    device: str,
    data_dir: Path | None,
) -> dict[Trial, AqgError]:
    """Run what is left, with a bar and the time left, or a line for each where no one looks."""
    from aqg.cli.compare_display import Overview
    from aqg.compare.ledger import Ledger
    from aqg.compare.own_trial import forget_runs
    from aqg.compare.plan import create_comparison, write_comparison
    from aqg.compare.schedule import Schedule, prepare, run_comparison
    from aqg.compare.work import RunTrial
    from aqg.experiments.runner import Interrupted

    part, directory = work.part, work.directory
    ledger = Ledger(directory)
    ledger.repair()
    if work.again:
        names = [task.name for task in part.tasks]
        num_dropped = ledger.forget(work.again, names)
        forget_runs(directory, work.again, names)
        console.print(f"Forgotten: {num_dropped} runs of {', '.join(work.again)}", highlight=False)
    schedule = Schedule(part, ledger, tuned)
    most = schedule.most_left()
    console.print(
        f"Recipes: {len(part.recipes)}, tasks: {len(part.tasks)}, up to {most} runs, "
        f"{len(ledger.outcomes())} finished before, {workers.jobs} at a time, in {directory}",
        highlight=False,
        soft_wrap=True,
    )
    tasks = {task.name: task for task in part.tasks}

    def run(trial: Trial) -> RunTrial:
        return RunTrial(trial, tasks[trial.task], directory, device, data_dir, part.search)

    try:
        with workers:
            if most:
                with console.status("Preparing kernels, data and minima (cached for next time) …"):
                    prepare(workers, part, data_dir)
            if work.is_new:
                create_comparison(directory, work.comparison)
            else:
                write_comparison(directory, work.comparison)
            with Overview(console, most) as overview:
                return run_comparison(workers, schedule, run, overview.show)
    except Interrupted:
        raise Interrupted(_how_to_go_on(directory)) from None


def _how_to_go_on(directory: Path) -> str:
    from aqg.compare.ledger import Ledger
    from aqg.compare.plan import PLAN

    if not (directory / PLAN).exists():
        return "stopped before the first run; nothing was written"
    num_done = len(Ledger(directory).outcomes())
    return f"stopped with {num_done} runs finished; go on with: aqg compare --resume {directory}"


def _show(console: Console, comparison: Comparison, directory: Path, as_json: bool) -> None:
    """Write results, tables, picture and the settings found; print the table."""
    from aqg.cli.compare_display import comparison_tables
    from aqg.compare.results import PICTURE, write_results
    from aqg.compare.table import counts_uploads_only, summary
    from aqg.compare.trial import CEILING

    cells = write_results(comparison, directory)
    if as_json:
        rows = [cell.to_json() for cell in cells]
        sys.stdout.write(json.dumps({"cells": rows}, indent=2, allow_nan=False) + "\n")
        return
    if not console.is_terminal:
        console.width = max(console.width, 200)  # a file has no edge to wrap at
    for table in comparison_tables(comparison, cells, console.width):
        console.print(table)
    uploads_only = counts_uploads_only(cells)
    if uploads_only:
        counted = "Bytes uploaded (uploads only: some runs have no downloads on record)"
    else:
        counted = "Bytes uploaded and downloaded"
    console.print(
        f"{counted} until the target is reached: median, its ratio to the best, smallest–largest; "
        f"2/3: only so many seeds reached it. > ×{CEILING}: stopped there. –: not reached. †: the "
        "search or final is not finished.\n",
        style="dim",
    )
    if line := summary(cells):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"Picture: {directory / PICTURE}", highlight=False, soft_wrap=True)
    console.print(f"Results: {directory}", highlight=False, soft_wrap=True)
    if any(task.config is not None for task in comparison.tasks):
        console.print(f"Look at: aqg report {directory}", highlight=False, soft_wrap=True)
