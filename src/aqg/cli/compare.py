"""``aqg compare``: recipes on tasks, by every byte and by rounds until a goal is reached."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from aqg.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from aqg.cli.study import Where
    from aqg.runs.stopping import Target
    from aqg.studies.contest.plan import Comparison
    from aqg.studies.contest.tasks import Task

_SEEDS = 5


def _option(*names: str, own: bool = False, **details: Any) -> Any:
    """Return an option; its flag follows from the field's name, unless it is given."""
    panel = "A task of your own" if own else None
    return typer.Option(*names, rich_help_panel=panel, **details)


@dataclass(frozen=True)
class Options:
    """What the command line says; a field is an option, and None where nothing was said."""

    recipes: Annotated[
        str | None,
        typer.Argument(
            help="Names separated by commas, or all; by default the best-known ones. With options, "
            "as in stc:keep=0.001, a recipe is run as told. Federated averaging is run in any case."
        ),
    ] = None
    task: Annotated[
        str | None,
        _option(
            metavar="NAME[,NAME]|all|averaging",
            help="On what; two quick tasks on digits by default. A task says what its goal is: a "
            "target, or to be as good as federated averaging in full precision (averaging: all of "
            "those).",
        ),
    ] = None
    problem: Annotated[
        str | None,
        _option(
            own=True,
            metavar="FILE.py:FUNCTION",
            help="A task of your own, as in `aqg run`; in place of --task, or beside it.",
        ),
    ] = None
    dataset: Annotated[
        str | None, _option(own=True, metavar="NAME|FILE.npz", help="The same: as in `aqg run`.")
    ] = None
    model: Annotated[
        str | None,
        _option(own=True, metavar="NAME|FILE.py:FUNCTION", help="The same: as in `aqg run`."),
    ] = None
    assignments: Annotated[
        list[str] | None,
        _option(
            "--set",
            own=True,
            metavar="KEY=VALUE",
            help="Any other setting of its runs, as in `aqg run`; repeatable.",
        ),
    ] = None
    target: Annotated[
        float | None, _option(own=True, help="It is learned when its loss is at most this.")
    ] = None
    target_accuracy: Annotated[
        float | None,
        _option(
            own=True,
            help="It is learned when its test accuracy is at least this share, such as 0.9; with "
            "--set validation=0.1 its accuracy on such a share of the samples.",
        ),
    ] = None
    seeds: Annotated[
        int | None, _option(help="Runs per recipe and task; 5, and 3 of who is far behind.")
    ] = None
    out: Annotated[Path | None, _option(help="Directory for the results (new or empty).")] = None
    resume: Annotated[
        Path | None,
        _option(
            help="Go on with the comparison in this directory: with everything unfinished, or with "
            "the recipes and tasks named, which are added to it."
        ),
    ] = None
    again: Annotated[
        str | None,
        _option(
            metavar="NAME[,NAME]",
            help="With --resume: forget what these recipes did on the tasks named, or on all, and "
            "run them anew.",
        ),
    ] = None
    jobs: Annotated[int | None, _option(help="Runs at a time; one per core by default.")] = None
    device: Annotated[
        str, _option(metavar="cpu|cuda", help="Where to compute the larger tasks.")
    ] = "cpu"
    downlink: Annotated[
        str | None,
        _option(
            metavar="auto|full|exact|condensed",
            help="How clients receive the model; what suits each recipe by default.",
        ),
    ] = None
    search: Annotated[
        bool,
        _option("--search", help="Find every recipe's best step and parameters first, on seed 0."),
    ] = False
    quick: Annotated[bool, _option("--quick", help="One seed, and a small part of the search.")] = (
        False
    )
    saved: Annotated[
        Path | None, _option("--from", help="Run nothing: show what is finished in this directory.")
    ] = None
    tuned: Annotated[
        Path | None, _option(help="Settings that a search found; by default those of the package.")
    ] = None
    data_dir: Annotated[
        Path | None, _option(envvar="AQG_DATA_DIR", help="Where datasets are kept.")
    ] = None
    as_json: Annotated[bool, _option("--json", help="Print one JSON object.")] = False
    allow_code: Annotated[
        bool, _option("--allow-code", own=True, help="Run Python files that only --resume names.")
    ] = False
    cluster: Annotated[
        str | None, _option(metavar="ADDRESS", help="Run on the Ray cluster there.")
    ] = None

    def refuse(self, reason: str, *names: str) -> None:
        """Refuse options that were given and have no place beside another."""
        for name in names:
            if getattr(self, name) not in (None, False):
                flag = name if name == "recipes" else f"--{name}"
                raise ConfigError(f"{reason} {flag}")


def _command(run: Callable[[Options], int]) -> Callable[..., int]:
    """Return a function whose parameters are the fields of `Options`, as the command line reads."""
    hints = get_type_hints(Options, include_extras=True)

    def call(**values: Any) -> int:
        return run(Options(**values))

    parameters = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=hints[each.name],
        )
        for each in fields(Options)
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    call.__doc__ = run.__doc__
    call.__name__ = "compare"
    return call


@dataclass(frozen=True)
class _Work:
    """What to do, and where.

    Attributes:
        comparison: all that is compared.
        part: of it, what to run now.
        directory: for the results; that of a new comparison is empty, or does not exist yet.
        is_new: whether the comparison is.
        again: recipes whose finished runs on the part's tasks are dropped first.
        lines: to show first, about tasks that are left out.

    """

    comparison: Comparison
    part: Comparison
    directory: Path
    is_new: bool = True
    again: tuple[str, ...] = ()
    lines: list[str] = field(default_factory=list)


def _compare(options: Options) -> int:
    """Compare recipes by bytes and rounds until a task's goal is reached.

    Bytes are all that clients send and receive. The goal is a target, or to be as good as federated
    averaging in full precision. Without --search every recipe is run as it is, or with settings
    that a search found before. Ctrl-C keeps what is finished; --resume goes on.
    """
    from rich.console import Console

    from aqg.cli.study import Where
    from aqg.runs.directory import output_directory
    from aqg.sim.backends import check_device
    from aqg.studies.contest.plan import Comparison
    from aqg.studies.contest.tasks import parse_target

    console = Console(stderr=options.as_json)
    if options.saved is not None:
        reason = "--from runs nothing and shows all that is finished: it excludes"
        options.refuse(reason, "recipes", "task", "seeds", "resume", "out", "again")
        _show(console, Comparison.open(options.saved), options.saved, options.as_json)
        return 0
    target = parse_target(options.target, options.target_accuracy)
    check_device(options.device)
    where = Where(options.jobs, options.cluster, options.data_dir)
    where.check()
    if options.resume is not None:
        reason = "--resume goes on with what was begun; it excludes"
        options.refuse(reason, "out", "search", "quick", "downlink")
        return _carry_out(console, _go_on(options, options.resume, target), where, options)
    if options.again is not None:
        raise ConfigError(f"--again {options.again} needs --resume: nothing was run before")
    comparison, lines = _begin(options, target)
    with output_directory(options.out, "compare") as directory:
        work = _Work(comparison, comparison, directory, lines=lines)
        return _carry_out(console, work, where, options)


compare = _command(_compare)


def _own_tasks(
    options: Options, target: Target | None, before: tuple[Task, ...] = ()
) -> tuple[dict[str, Any], tuple[Task, ...]]:
    """Return the settings of the user's own task, and the task; ``before`` may hold it."""
    from aqg.runs.config import parse_assignment
    from aqg.studies.contest.tasks import make_own_task

    named: dict[str, Any] = dict(parse_assignment(text) for text in options.assignments or ())
    flags = {name: getattr(options, name) for name in ("problem", "dataset", "model")}
    named |= {name: value for name, value in flags.items() if value is not None}
    if named:
        return named, (make_own_task(named, target, options.data_dir, before),)
    if target is not None:
        raise ConfigError(
            f"a target ({target}) is for a task of your own; name it with --problem, "
            "--dataset or --model"
        )
    return named, ()


def _begin(options: Options, target: Target | None) -> tuple[Comparison, list[str]]:
    """Return a new comparison, and lines about tasks that are left out."""
    from aqg.core.downlink import AUTO
    from aqg.studies.contest.plan import Comparison
    from aqg.studies.contest.search import parse_recipes
    from aqg.studies.contest.tasks import available, in_order, parse_tasks

    _, own = _own_tasks(options, target)
    named = parse_tasks(options.task) if options.task or not own else ()
    tasks, lines = available(in_order((*named, *own)), options.data_dir)
    seeds = options.seeds if options.seeds is not None else 1 if options.quick else _SEEDS
    recipes, downlink = parse_recipes(options.recipes), options.downlink or AUTO
    return Comparison(tasks, recipes, seeds, options.search, options.quick, downlink), lines


def _go_on(options: Options, directory: Path, target: Target | None) -> _Work:
    """Return what to do in a directory that exists: all of its comparison, or what is named."""
    from aqg.studies.contest.plan import PLAN, Comparison
    from aqg.studies.contest.search import parse_recipes
    from aqg.studies.contest.tasks import available, check_code_and_files

    before = Comparison.open(directory)
    settings, own = _own_tasks(options, target, before.tasks)
    tasks = (*(before.parse_tasks(options.task) if options.task else ()), *own)
    listed = [text for text in (options.recipes, options.again) if text]
    for text in listed:
        parse_recipes(text)
    named = [name.strip() for text in listed for name in text.split(",")]
    again = tuple(name.strip() for name in options.again.split(",")) if options.again else ()
    recipes = tuple(dict.fromkeys(named))
    comparison = before.extended(tasks, recipes, options.seeds)
    part = comparison.narrowed(tasks, recipes)
    where = repr(str(directory / PLAN))
    check_code_and_files(part.tasks, settings, allowed=options.allow_code, where=where)
    kept, lines = available(part.tasks, options.data_dir)
    return _Work(comparison, part.narrowed(kept, ()), directory, False, again, lines)


def _carry_out(console: Console, work: _Work, where: Where, options: Options) -> int:
    """Run what is left and show what came of it; return the exit code."""
    from aqg.cli.study import lock, run_comparison
    from aqg.studies.contest.plan import ContestPlan, forget
    from aqg.studies.contest.search import read_tuned

    part, directory = work.part, work.directory
    for line in work.lines:
        console.print(line, highlight=False, soft_wrap=True)
    tuned = read_tuned(options.tuned)
    with lock(directory):
        if work.again:
            count = forget(directory, work.again, part.tasks)
            console.print(f"Forgotten: {count} runs of {', '.join(work.again)}", highlight=False)
        plan = ContestPlan(part, directory, tuned, options.device)
        size = f"Recipes: {len(part.recipes)}, tasks: {len(part.tasks)}"

        def create() -> None:
            work.comparison.write(directory, is_new=work.is_new)

        code = run_comparison(console, plan, directory, where, size, create)
        _show(console, work.comparison, directory, options.as_json)
        return code


def _show(console: Console, comparison: Comparison, directory: Path, as_json: bool) -> None:
    """Write results, tables, picture and the settings found; print the tables."""
    from aqg.studies.contest.plan import safe
    from aqg.studies.contest.table import PICTURE, as_tables, write_results

    cells = write_results(comparison, directory)
    if as_json:
        rows = [cell.to_json() for cell in cells]
        sys.stdout.write(json.dumps({"cells": rows}, indent=2, allow_nan=False) + "\n")
        return

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

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
        if task.name not in shown and task.goal.target is None:
            say(
                f"{task.name} has no target yet, as federated averaging's search is not over or "
                f"fails; aqg compare --resume {directory} goes on with it"
            )
    say(f"Picture: {directory / PICTURE}")
    say(f"Results: {directory}")
    if any((directory / safe(task.name)).is_dir() for task in comparison.tasks):
        say(f"Look at: aqg report {directory}")
