"""The commands with many runs: ``aqg sweep``, ``aqg compare`` and ``aqg reproduce``.

Each prepares, runs what is left across cores or a cluster, shows how far it is, and at last what
came of it.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from aqg.cli.display import DIRECTIONS_NOTE, Overview, say, sweep_table, widen
from aqg.cli.options import CompareOptions, ReproduceOptions, StudyOptions, SweepOptions
from aqg.core.downlink import AUTO
from aqg.errors import ConfigError
from aqg.runs.config import located, named_settings, refuse_changes, refuse_unnamed_code
from aqg.runs.directory import output_directory, read_toml
from aqg.runs.executor import Interrupted, Place, Processes, carry_out, default_jobs, visible_gpus
from aqg.runs.files import locked
from aqg.runs.plan import Batch, StudyPlan, prepare, train
from aqg.runs.stopping import Target
from aqg.sim.engine import check_device
from aqg.spec import Code
from aqg.studies import sweep as sweeps
from aqg.studies.contest import plan as contest
from aqg.studies.contest import table as contest_table
from aqg.studies.contest import tasks as contest_tasks
from aqg.studies.contest.search import parse_recipes, read_tuned
from aqg.studies.paper import outcomes
from aqg.studies.paper.plan import FULL, QUICK, PlannedRun, make_plan, parse_sections
from aqg.studies.paper.tables import all_tables, keep_results

_SEEDS = 5


def _describe(options: StudyOptions, num_left: int) -> str:
    if options.cluster is not None:
        return f"on the Ray cluster at {options.cluster}"
    return f"{min(options.jobs or default_jobs(), num_left)} at a time"


def _lock(directory: Path) -> AbstractContextManager[None]:
    return locked(directory) if directory.is_dir() else nullcontext()


def _run_study(
    console: Console,
    options: StudyOptions,
    plan: StudyPlan[Any],
    name: str,
    directory: Path,
    create: Callable[[], object],
    again: str,
    keeps_models: bool = True,
) -> None:
    """Run what a plan wants, below ``directory``, which ``create`` makes when all is prepared.

    ``again`` is the command that goes on after Ctrl-C.
    """
    problems = list(plan.problems())
    uses_gpus = any(config.device.startswith("cuda") for config in problems)
    text = "Preparing data and the minimum of each loss (cached for next time) ..."
    is_new = not directory.is_dir()
    is_begun = not is_new and any(directory.iterdir())
    with ExitStack() as stack:
        try:
            jobs = (options.jobs if options.cluster is None else None) or default_jobs()
            gpus = visible_gpus() if uses_gpus else ()
            place: Place = stack.enter_context(Processes(jobs, gpus))
            with console.status(text) as status:

                def tell(done: int, total: int) -> None:
                    status.update(f"{text} {done} of {total}")

                minima = prepare(place, problems, options.data_dir, tell)
            create()
            is_begun = True
            if is_new:
                stack.enter_context(_lock(directory))
            if options.cluster is not None:
                from aqg.contrib.ray_cluster import RayCluster

                cluster = RayCluster(options.cluster, options.jobs, uses_gpus)
                place = stack.enter_context(cluster)
            shown = stack.enter_context(Overview(console, plan, name))
            given = minima, directory, options.data_dir, keeps_models
            carry_out(plan.next, lambda job: train(job, *given), place, plan.take, shown.show)
        except Interrupted:
            if not is_begun:
                raise Interrupted("stopped before the first run; nothing was written") from None
            raise Interrupted(
                f"stopped with {plan.num_finished} runs finished; everything is saved. "
                f"Go on with: {again}"
            ) from None


def _report_failures(plan: StudyPlan[Any], total: int, again: str) -> int:
    """Name what failed on standard error; return the exit code."""
    if not plan.failures:
        return 0
    names = ", ".join(plan.failures)
    text = f"{len(plan.failures)} of {total} runs failed: {names}; try them again with: {again}"
    print(f"aqg: error: {text}", file=sys.stderr)
    return 1


def print_json(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def sweep(options: SweepOptions) -> int:
    """Run every combination of the settings in a grid file, or a study of your own, across cores.

    Settings that are given as options hold for all runs. Ctrl-C saves everything; --resume goes on
    and repeats nothing that is finished.
    """
    console = Console(stderr=options.as_json)
    with _planned_sweep(options) as (directory, found, grid_file), _lock(directory):
        batch = Batch(found.runs, directory)
        total, num_left = len(found.runs), len(batch.left)
        parts = [f"{total} {'run' if total == 1 else 'runs'} ({' × '.join(found.varying)})"]
        parts += [f"{total - num_left} finished before"] if num_left < total else []
        parts += [_describe(options, num_left)] if num_left else []
        say(console, f"{', '.join(parts)}, in {directory}")
        again = f"aqg sweep --resume {directory}"

        def create() -> None:
            if grid_file is not None:
                sweeps.create_sweep(directory, grid_file)

        if batch.left:
            _run_study(console, options, batch, "sweep", directory, create, again)
        rows = sweeps.collect(found, directory, batch.failures)
        sweeps.write_results(directory, rows)
        if options.as_json:
            print_json({"runs": rows})
        else:
            widen(console, 160)
            console.print(sweep_table(found.varying, rows).to_terminal())
            seeds = " Means over seeds, and smallest..largest." if "seed" in found.varying else ""
            console.print(f"{DIRECTIONS_NOTE}{seeds}\n", style="dim")
            say(console, f"Table: {directory / sweeps.TABLE}")
            say(console, f"Results: {directory}")
            say(console, f"Look at: aqg report {directory}")
        return _report_failures(batch, total, again)


@contextmanager
def _planned_sweep(options: SweepOptions) -> Iterator[tuple[Path, sweeps.Sweep, bytes | None]]:
    """Check all settings; give the directory, the sweep and, where it is new, its grid file."""
    flags = {name: located(name, value) for name, value in options.flags.items()}
    document, grid_file, stem = None, b"", ""
    if options.grid is not None:
        code = Code.parse(str(options.grid))
        stem = (options.grid if code is None else code.path).stem
        if code is not None:  # named on the command line, and so is what it yields
            runs = sweeps.call_study(code, options.data_dir)
            document, text = {sweeps.RUNS: runs}, sweeps.runs_to_toml(runs)
        else:
            document = read_toml(options.grid)
            _guard(options.grid, document, options)
            text = options.grid.read_text(encoding="utf-8")
        named = {key for part in _parts(document) for key in part}
        flags = flags if "downlink" in named else {"downlink": AUTO, **flags}
        for key in sorted(flags.keys() & named):
            raise ConfigError(f"{key} is both in {str(options.grid)!r} and an option; keep one")
        # Top-level keys come before tables in TOML.
        lines = (f"{key} = {json.dumps(value)}\n" for key, value in flags.items())
        grid_file = ("".join(lines) + text).encode()
        document = {**flags, **document}
    if options.resume is not None:
        if options.out is not None:
            raise ConfigError("--resume and --out exclude each other: a sweep stays where it is")
        stored = options.resume / sweeps.GRID
        if stored.is_file():
            settings = read_toml(stored)
            before = {key: located(key, settings[key]) for key in flags if key in settings}
            advice = "drop the option, or start a new sweep"
            refuse_changes(options.resume, before, flags, "sweep", advice)
            _guard(stored, settings, options)
        found = sweeps.open_sweep(options.resume, document, options.data_dir)
        yield options.resume, found, None
        return
    if document is None:
        raise ConfigError("name a grid file, or a sweep's directory with --resume")
    found = sweeps.expand(document, options.data_dir)
    with output_directory(options.out, stem) as directory:
        yield directory, found, grid_file


def _guard(file: Path, document: Mapping[str, Any], options: SweepOptions) -> None:
    """Refuse a grid that would run code which the command line does not name."""
    grid = document.get("grid")
    parts = [part for part in _parts(document) if part is not grid]
    if isinstance(grid, dict):
        parts += [{k: v} for k, values in grid.items() if isinstance(values, list) for v in values]
    for part in parts:
        refuse_unnamed_code(part, options.flags, allowed=options.allow_code, where=repr(str(file)))


def _parts(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the tables of a grid file: its top level, the grid, and each run."""
    runs = document.get(sweeps.RUNS)
    tables = [document, document.get("grid"), *(runs if isinstance(runs, list) else ())]
    return [table for table in tables if isinstance(table, dict)]


def compare(options: CompareOptions) -> int:
    """Compare recipes by bytes and rounds until a task's goal is reached.

    Bytes are all that clients send and receive. The goal is a target, or to be as good as federated
    averaging in full precision. Without --search every recipe is run as it is, or with settings
    that a search found before. Ctrl-C keeps what is finished; --resume goes on.
    """
    console = Console(stderr=options.as_json)
    if options.saved is not None:
        reason = "--from runs nothing and shows all that is finished: it excludes"
        options.refuse(reason, "recipes", "task", "seeds", "resume", "out", "again")
        comparison = contest.Comparison.open(options.saved)
        _show_comparison(console, comparison, options.saved, options.as_json)
        return 0
    target = contest_tasks.parse_target(options.target, options.target_accuracy)
    check_device(options.device)
    if options.resume is not None:
        reason = "--resume goes on with what was begun; it excludes"
        options.refuse(reason, "out", "search", "quick", "downlink")
        return _go_on(console, options, options.resume, target)
    if options.again is not None:
        raise ConfigError(f"--again {options.again} needs --resume: nothing was run before")
    own = _own_tasks(options, target)
    named = contest_tasks.parse_tasks(options.task) if options.task or not own else ()
    tasks, lines = contest_tasks.available(contest_tasks.in_order((*named, *own)), options.data_dir)
    seeds = options.seeds if options.seeds is not None else 1 if options.quick else _SEEDS
    how = seeds, options.search, options.quick, options.downlink or AUTO
    comparison = contest.Comparison(tasks, parse_recipes(options.recipes), *how)
    with output_directory(options.out, "compare") as directory:
        return _compare(console, options, comparison, comparison, directory, lines)


def _own_tasks(
    options: CompareOptions, target: Target | None, before: tuple[contest_tasks.Task, ...] = ()
) -> tuple[contest_tasks.Task, ...]:
    """Return the user's own task, if there is one; ``before`` may hold it."""
    if named := named_settings(options.assignments, options.flags):
        return (contest_tasks.make_own_task(named, target, options.data_dir, before),)
    if target is not None:
        raise ConfigError(
            f"a target ({target}) is for a task of your own; name it with --problem, "
            "--dataset or --model"
        )
    return ()


def _go_on(
    console: Console, options: CompareOptions, directory: Path, target: Target | None
) -> int:
    """Go on with all of a comparison, or with what is named, which is added to it."""
    before = contest.Comparison.open(directory)
    own = _own_tasks(options, target, before.tasks)
    mine = [task for task in before.tasks if task.is_own]
    named = contest_tasks.parse_tasks(options.task, mine) if options.task else ()
    chosen, again = (
        tuple(name.strip() for name in (text or "").split(",") if name.strip())
        for text in (options.recipes, options.again)
    )
    for names in (chosen, again):
        parse_recipes(",".join(names) or None)
    recipes = tuple(dict.fromkeys((*chosen, *again)))
    comparison = before.extended((*named, *own), recipes, options.seeds)
    part = comparison.narrowed((*named, *own), recipes)
    settings = named_settings(options.assignments, options.flags)
    how: Any = {"allowed": options.allow_code, "where": repr(str(directory / contest.PLAN))}
    contest_tasks.check_code_and_files(part.tasks, settings, **how)
    kept, lines = contest_tasks.available(part.tasks, options.data_dir)
    part = part.narrowed(kept, ())
    return _compare(console, options, comparison, part, directory, lines, again)


def _compare(
    console: Console,
    options: CompareOptions,
    comparison: contest.Comparison,
    part: contest.Comparison,
    directory: Path,
    lines: Sequence[str],
    forgotten: Sequence[str] = (),
) -> int:
    """Run a part of a comparison, without what some recipes did on its tasks before."""
    for line in lines:
        say(console, line)
    tuned = read_tuned(options.tuned)
    create = partial(comparison.write, directory, is_new=options.resume is None)
    with _lock(directory):
        if forgotten:
            count = contest.forget(directory, forgotten, part.tasks)
            console.print(f"Forgotten: {count} runs of {', '.join(forgotten)}", highlight=False)
        plan = contest.ContestPlan(part, directory, tuned, options.device)
        num_before, most = plan.num_finished, plan.most_left()
        counts = f"Recipes: {len(part.recipes)}, tasks: {len(part.tasks)}, up to {most} runs"
        before, place = f"{num_before} finished before", _describe(options, most)
        say(console, f"{counts}, {before}, {place}, in {directory}")
        again = f"aqg compare --resume {directory}"
        if most:
            _run_study(console, options, plan, "compare", directory, create, again, False)
        else:
            create()
        total = plan.num_finished - num_before + len(plan.failures)
        code = _report_failures(plan, total, again)
        _show_comparison(console, comparison, directory, options.as_json)
        return code


def _show_comparison(
    console: Console, comparison: contest.Comparison, directory: Path, as_json: bool
) -> None:
    cells = contest_table.write_results(comparison, directory)
    if as_json:
        print_json({"cells": [cell.to_json() for cell in cells]})
        return
    widen(console, 200)
    tables = contest_table.as_tables(comparison, cells)
    for table in tables:
        console.print(table.title, style="bold")
        console.print(table.to_terminal(keeps_stars=not console.is_terminal))
    if tables:
        console.print(tables[0].note + "\n", style="dim")
    shown = {cell.task for cell in cells}
    for task in comparison.tasks:
        if task.name not in shown and task.goal.target is None:
            reason = "as federated averaging's search is not over or fails"
            again = f"aqg compare --resume {directory} goes on with it"
            say(console, f"{task.name} has no target yet, {reason}; {again}")
    say(console, f"Picture: {directory / contest_table.PICTURE}")
    say(console, f"Results: {directory}")
    if any((directory / contest.safe(task.name)).is_dir() for task in comparison.tasks):
        say(console, f"Look at: aqg report {directory}")


def reproduce(options: ReproduceOptions) -> int:
    """Run the paper's experiments again and print its figures beside ours.

    Its Table 2 and Figures 5 to 10 over several seeds, logistic runs with data that differ in the
    last bit, and the 784-200-10 network. Ctrl-C saves everything; the same command goes on and
    repeats nothing that is finished.
    """
    console = Console()
    if options.saved is not None:
        options.refuse("--from runs nothing: it excludes", "quick", "out", "only", "missing")
        show_results(console, outcomes.read_results(options.saved))
        return 0
    scale, name = (QUICK, "reproduce-quick") if options.quick else (FULL, "reproduce")
    directory = options.out or Path("runs") / name
    device = options.device or ("cuda" if visible_gpus() else "cpu")
    plan = make_plan(scale, device, parse_sections(options.only))
    if options.missing is not None:
        plan = outcomes.missing_from(options.missing, plan)
    code = run_plan(console, options, plan, directory)
    show_results(console, keep_results(plan, scale, directory))
    say(console, f"Tables, pictures and data: {directory}")
    return code


def run_plan(
    console: Console, options: StudyOptions, plan: tuple[PlannedRun, ...], directory: Path
) -> int:
    runs = directory / outcomes.RUN_DIRECTORY
    with _lock(runs):
        batch = Batch(outcomes.adopt_devices(plan, directory), runs)
        before, place = f"{batch.num_before} finished before", _describe(options, len(batch.left))
        say(console, f"{len(plan)} runs, {before}, {place}, in {directory}")
        if not batch.left:
            return 0
        again = f"the same command (its results are in {directory})"
        create = partial(runs.mkdir, parents=True, exist_ok=True)
        _run_study(console, options, batch, "reproduce", runs, create, again)
        return _report_failures(batch, len(plan), again)


def show_results(console: Console, results: outcomes.Results) -> None:
    widen(console, 200)
    for note in results.about["notes"]:
        say(console, f"Shortened: {note}", style="yellow")
    for section, (done, planned) in results.about.get("finished", {}).items():
        if done < planned:
            say(console, f"Not finished: {section}, {done} of {planned} runs", style="yellow")
    for table in all_tables(results):
        console.print(f"\n[bold]{table.title.replace('`', '')}[/bold]")
        console.print(table.note.replace("`", ""), style="dim", highlight=False)
        console.print(table.to_terminal())
