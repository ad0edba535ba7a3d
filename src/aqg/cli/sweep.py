"""``aqg sweep``: expand, run across cores, show."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from aqg.cli.display import DIRECTIONS_NOTE
from aqg.cli.sweep_display import Overview, sweep_table
from aqg.core.downlink import AUTO
from aqg.errors import ConfigError
from aqg.experiments import runner
from aqg.experiments.config import located, read_settings, refuse_unnamed_code
from aqg.experiments.rundir import output_directory
from aqg.experiments.summary import add_bytes
from aqg.experiments.sweep import (
    GRID,
    TABLE,
    Sweep,
    SweepRun,
    collect,
    create_sweep,
    expand,
    open_sweep,
    read_summary,
    unfinished,
    write_results,
)
from aqg.experiments.sweep_tasks import by_problem, prepare, run_all
from aqg.experiments.workers import Done, Event, Workers, default_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from aqg.errors import AqgError


@dataclass(frozen=True)
class SweepOptions:
    """The command line of ``aqg sweep``."""

    grid: Path | None = None
    out: Path | None = None
    resume: Path | None = None
    jobs: int | None = None
    data_dir: Path | None = None
    as_json: bool = False
    flags: Mapping[str, Any] = field(default_factory=dict)
    allow_code: bool = False


@dataclass(frozen=True)
class _Plan:
    """What to run, and where; ``grid_file`` is the content to store in a new directory."""

    directory: Path
    sweep: Sweep
    grid_file: bytes | None


def sweep_command(options: SweepOptions) -> int:
    """Run what is not finished yet, show and save the results; return the exit code."""
    with _planned(options) as plan:
        return _carry_out(plan, options)


def _carry_out(plan: _Plan, options: SweepOptions) -> int:
    console = Console(stderr=options.as_json)
    workers = Workers(default_jobs() if options.jobs is None else options.jobs)
    runs = by_problem(unfinished(plan.sweep, plan.directory))
    console.print(_announce(plan, len(runs), workers.jobs), highlight=False, soft_wrap=True)
    failures = _run(console, plan, runs, workers, options.data_dir) if runs else {}

    rows = collect(plan.sweep, plan.directory, failures)
    write_results(plan.directory, rows)
    if options.as_json:
        sys.stdout.write(json.dumps({"runs": rows}, indent=2, allow_nan=False) + "\n")
    else:
        if not console.is_terminal:
            console.width = max(console.width, 160)  # a file has no edge to wrap at
        console.print(sweep_table(plan.sweep.varying, rows))
        seeds = " Means over seeds, and smallest..largest." if "seed" in plan.sweep.varying else ""
        console.print(f"{DIRECTIONS_NOTE}{seeds}\n", style="dim")
        console.print(f"Table: {plan.directory / TABLE}", highlight=False, soft_wrap=True)
        console.print(f"Results: {plan.directory}", highlight=False, soft_wrap=True)
        console.print(f"Look at: aqg report {plan.directory}", highlight=False, soft_wrap=True)
    if failures:
        print(
            f"aqg: error: {len(failures)} of {len(rows)} runs failed: {', '.join(failures)}; "
            f"try them again with: aqg sweep --resume {plan.directory}",
            file=sys.stderr,
        )
        return 1
    return 0


@contextmanager
def _planned(options: SweepOptions) -> Iterator[_Plan]:
    """Check every setting before anything is touched."""
    flags = {name: located(name, value) for name, value in options.flags.items()}
    document, grid_file = None, b""
    if options.grid is not None:
        document = read_settings(options.grid)
        _guard(options.grid, document, options)
        # Top-level keys come before tables in TOML.
        if "downlink" not in document and "downlink" not in document.get("grid", {}):
            flags = {"downlink": AUTO, **flags}
        lines = (f"{key} = {json.dumps(value)}\n" for key, value in flags.items())
        grid_file = "".join(lines).encode() + options.grid.read_bytes()
        for key in flags:
            if key in document or key in document.get("grid", {}):
                raise ConfigError(f"{key} is both in {str(options.grid)!r} and an option; keep one")
        document = {**flags, **document}
    if options.resume is not None:
        if options.out is not None:
            raise ConfigError("--resume and --out exclude each other: a sweep stays where it is")
        stored = options.resume / GRID
        if stored.is_file():
            _check_flags(read_settings(stored), flags, options.resume)
            _guard(stored, read_settings(stored), options)
        sweep = open_sweep(options.resume, document, options.data_dir)
        yield _Plan(options.resume, sweep, None)
        return
    if options.grid is None or document is None:
        raise ConfigError("name a grid file, or a sweep's directory with --resume")
    sweep = expand(document, options.data_dir)
    with output_directory(options.out, options.grid.stem) as directory:
        yield _Plan(directory, sweep, grid_file)


def _check_flags(stored: Mapping[str, Any], flags: Mapping[str, Any], directory: Path) -> None:
    for key, value in flags.items():
        if located(key, stored.get(key)) != value:
            raise ConfigError(
                f"cannot resume {str(directory)!r} with {key} {value}: the sweep has {key} "
                f"{stored.get(key, 'missing')}; drop the option, or start a new sweep"
            )


def _guard(file: Path, document: Mapping[str, Any], options: SweepOptions) -> None:
    """Refuse a grid that would run code which the command line does not name."""
    allowed, where = options.allow_code, repr(str(file))
    refuse_unnamed_code(document, options.flags, allowed=allowed, where=where)
    grid = document.get("grid")
    for key, values in grid.items() if isinstance(grid, dict) else ():
        for value in values if isinstance(values, list) else ():
            refuse_unnamed_code({key: value}, options.flags, allowed=allowed, where=where)


def _announce(plan: _Plan, num_left: int, jobs: int) -> str:
    total = len(plan.sweep.runs)
    text = f"{total} {'run' if total == 1 else 'runs'} ({' × '.join(plan.sweep.varying)})"
    if num_left < total:
        text += f", {total - num_left} finished before"
    if num_left:
        text += f", {min(jobs, num_left)} at a time"
    return f"{text}, in {plan.directory}"


def _run(
    console: Console,
    plan: _Plan,
    runs: list[SweepRun],
    workers: Workers,
    data_dir: Path | None,
) -> dict[str, AqgError]:
    directory = plan.directory
    try:
        with workers:
            with _preparation(console) as show:
                minima = prepare(workers, runs, data_dir, show)
            if plan.grid_file is not None:
                create_sweep(directory, plan.grid_file)
            left = {run.name for run in runs}
            done = [run for run in plan.sweep.runs if run.name not in left]
            spent = (read_summary(directory / run.name).get("total_bytes") for run in done)
            bytes_before = add_bytes(*spent)
            with Overview(console, runs, len(plan.sweep.runs), bytes_before) as overview:
                return run_all(workers, runs, minima, directory, data_dir, overview.show)
    except runner.Interrupted:
        raise runner.Interrupted(_how_to_go_on(plan)) from None


@contextmanager
def _preparation(console: Console) -> Iterator[Callable[[Event, int], None]]:
    """Show how far the preparations are."""
    text = "Preparing kernels, data and the minimum of each loss (cached for next time) ..."
    num_done = 0
    with console.status(text) as status:

        def show(event: Event, num_tasks: int) -> None:
            nonlocal num_done
            if isinstance(event, Done):
                num_done += 1
                status.update(f"{text} {num_done} of {num_tasks}")

        yield show


def _how_to_go_on(plan: _Plan) -> str:
    if not (plan.directory / GRID).exists():
        return "stopped before the first run; nothing was written"
    num_left = len(unfinished(plan.sweep, plan.directory))
    total = len(plan.sweep.runs)
    return (
        f"stopped with {total - num_left} of {total} runs finished; everything is saved. "
        f"Go on with: aqg sweep --resume {plan.directory}"
    )
