"""``aqg compare``: recipes on tasks, bytes until the target is reached."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from aqg.cli.study import Where
    from aqg.runs.stopping import Target
    from aqg.studies.compare.comparison import Comparison
    from aqg.studies.compare.search import Tuned
    from aqg.studies.compare.tasks import Task


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
        from aqg.errors import ConfigError
        from aqg.studies.compare.tasks import make_own_task

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
    downlink: Annotated[
        str | None,
        typer.Option(
            metavar="auto|full|exact|condensed",
            help="How clients receive the model; what suits each recipe by default.",
        ),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Find every recipe's best step size and parameters first, on seed 0; those close "
            "to the best have a final, with two seeds more.",
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed, and a small part of the search.")
    ] = False,
    swap_in: Annotated[
        bool,
        typer.Option(
            "--swap-in",
            help="Compare by another measure: the bytes in both directions until a recipe is as "
            "good as federated averaging in full precision, and by how many rounds it is later. "
            "Other tasks; all of them, and all recipes, by default.",
        ),
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
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on the Ray cluster there.")
    ] = None,
) -> int:
    """Compare recipes by the bytes that clients send and receive until a target is reached.

    A run ends when its model has the loss or test accuracy that the task asks for. Every recipe is
    run with the best step size and parameters that the same search found for each. Ctrl-C keeps
    what is finished; --resume goes on.
    """
    from rich.console import Console

    from aqg.cli.study import Where, lock
    from aqg.core.downlink import AUTO
    from aqg.errors import ConfigError
    from aqg.runs.config import parse_assignment
    from aqg.runs.directory import output_directory
    from aqg.sim.backends import check_device
    from aqg.studies.compare.comparison import Comparison, open_comparison
    from aqg.studies.compare.search import parse_recipes, read_tuned
    from aqg.studies.compare.tasks import in_order, parse_target, parse_tasks
    from aqg.studies.swap_in.comparison import is_swap_in

    console = Console(stderr=as_json)
    if saved is not None:
        others = {
            "recipes": recipes,
            "--task": task,
            "--seeds": seeds,
            "--resume": resume,
            "--out": out,
            "--again": again,
        }
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise ConfigError(
                f"--from runs nothing and shows all that is finished: it excludes {given[0]}"
            )
        if is_swap_in(saved):
            from aqg.cli import swap_in as swap_in_command
            from aqg.studies.swap_in.comparison import open_swap_in

            swap_in_command.show(console, open_swap_in(saved), saved, as_json)
            return 0
        _show(console, open_comparison(saved), saved, as_json)
        return 0
    named: dict[str, Any] = dict(parse_assignment(text) for text in assignments or ())
    flags = {"problem": problem, "dataset": dataset, "model": model}
    named |= {name: value for name, value in flags.items() if value is not None}
    goal = parse_target(target, target_accuracy)
    own = _Own(named, goal, data_dir, allow_code)
    check_device(device)
    settings = read_tuned(tuned)
    where = Where(jobs, cluster, data_dir)
    where.check()
    if resume is not None:
        begun = (
            ("--out", out),
            ("--search", search),
            ("--quick", quick),
            ("--downlink", downlink),
            ("--swap-in", swap_in),
        )
        for name, is_given in begun:
            if is_given:
                raise ConfigError(f"--resume goes on with what was begun; it excludes {name}")
    elif again is not None:
        raise ConfigError(f"--again {again} needs --resume: nothing was run before")
    if swap_in or (resume is not None and is_swap_in(resume)):
        from aqg.cli import swap_in as swap_in_command

        if named or goal is not None or tuned is not None:
            raise ConfigError(
                "--swap-in has tasks and targets of its own: it excludes --problem, --dataset, "
                "--model, --set, --target, --target-accuracy and --tuned"
            )
        asked = swap_in_command.Asked(
            recipes, task, seeds, search, quick, downlink or AUTO, device, as_json
        )
        if resume is not None:
            return swap_in_command.go_on(console, asked, resume, again, where)
        return swap_in_command.start(console, asked, out, where)

    def carry_out(work: _Work) -> int:
        with lock(work.directory):
            code = _run(console, work, where, settings, device)
            _show(console, work.comparison, work.directory, as_json)
            return code

    if resume is not None:
        return carry_out(_go_on(resume, recipes, task, seeds, again, own))
    own_tasks = own.tasks()
    comparison = Comparison(
        tasks=in_order((*(parse_tasks(task) if task or not own_tasks else ()), *own_tasks)),
        recipes=parse_recipes(recipes),
        seeds=(1 if quick else 5) if seeds is None else seeds,
        search=search,
        quick=quick,
        downlink=downlink or AUTO,
        extends=True,
    )
    with output_directory(out, "compare") as directory:
        return carry_out(_Work(comparison, comparison, directory))


def _go_on(
    directory: Path,
    recipes: str | None,
    task: str | None,
    seeds: int | None,
    again: str | None,
    own: _Own,
) -> _Work:
    """Return what to do in a directory that exists: all of its comparison, or what is named."""
    from aqg.studies.compare.comparison import PLAN, open_comparison
    from aqg.studies.compare.search import parse_recipes
    from aqg.studies.compare.tasks import check_code_and_files

    before = open_comparison(directory)
    tasks = (*(before.parse_tasks(task) if task else ()), *own.tasks(before.tasks))
    repeated = parse_recipes(again) if again else ()
    named = (*(parse_recipes(recipes) if recipes else ()), *repeated)
    comparison = before.extended(tasks, named, seeds)
    part = comparison.narrowed(tasks, named)
    where = repr(str(directory / PLAN))
    check_code_and_files(part.tasks, own.settings, allowed=own.allow_code, where=where)
    return _Work(comparison, part, directory, is_new=False, again=repeated)


def _run(console: Console, work: _Work, where: Where, tuned: Tuned, device: str) -> int:
    """Run what is left; return the exit code."""
    from aqg.cli.study import run_comparison
    from aqg.studies.compare.comparison import create_comparison, write_comparison
    from aqg.studies.compare.plan import ComparePlan, forget

    part, directory = work.part, work.directory
    if work.again:
        num_dropped = forget(directory, work.again, [task.name for task in part.tasks])
        console.print(f"Forgotten: {num_dropped} runs of {', '.join(work.again)}", highlight=False)
    plan = ComparePlan(part, directory, tuned, device)
    write = create_comparison if work.is_new else write_comparison
    size = f"Recipes: {len(part.recipes)}, tasks: {len(part.tasks)}"
    return run_comparison(
        console, plan, directory, where, size, lambda: write(directory, work.comparison)
    )


def _show(console: Console, comparison: Comparison, directory: Path, as_json: bool) -> None:
    """Write results, tables, picture and the settings found; print the table."""
    from aqg.cli.compare_display import comparison_tables
    from aqg.studies.compare.results import PICTURE, write_results
    from aqg.studies.compare.table import counts_uploads_only, summary
    from aqg.studies.compare.trial import CEILING, safe

    cells = write_results(comparison, directory)
    if as_json:
        rows = [cell.to_json() for cell in cells]
        sys.stdout.write(json.dumps({"cells": rows}, indent=2, allow_nan=False) + "\n")
        return
    if not console.is_terminal:
        console.width = max(console.width, 200)  # a file has no edge to wrap at
    for table in comparison_tables(comparison, cells, console.width):
        console.print(table.to_terminal())
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
    if any((directory / safe(task.name)).is_dir() for task in comparison.tasks):
        console.print(f"Look at: aqg report {directory}", highlight=False, soft_wrap=True)
