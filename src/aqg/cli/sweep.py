"""``aqg sweep``: expand, run across cores, show."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from aqg.cli.display import DIRECTIONS_NOTE, Overview, measured, metric_title
from aqg.cli.study import Where, lock, report_failures, run_study
from aqg.core.downlink import AUTO
from aqg.errors import ConfigError
from aqg.objectives.metrics import Metric
from aqg.runs.config import located, read_settings, refuse_unnamed_code
from aqg.runs.cost import add_bytes
from aqg.runs.directory import output_directory, read_metrics, read_summary
from aqg.runs.plan import Batch, unfinished
from aqg.runs.table import Table, format_bytes
from aqg.spec import Code
from aqg.studies.own import RUNS, call_study
from aqg.studies.sweep import (
    GRID,
    TABLE,
    Sweep,
    collect,
    create_sweep,
    expand,
    open_sweep,
    runs_to_toml,
    write_results,
)


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
    cluster: str | None = None


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
    where = Where(options.jobs, options.cluster, options.data_dir)
    where.check()
    directory, runs = plan.directory, plan.sweep.runs
    with lock(directory):
        batch = Batch(runs, directory)
        console.print(_announce(plan, len(batch.left), where), highlight=False, soft_wrap=True)
        if batch.left:

            def create() -> None:
                if plan.grid_file is not None:
                    create_sweep(directory, plan.grid_file)

            left = {job.name for job in batch.left}
            done = [
                read_summary(directory / run.name) or {} for run in runs if run.name not in left
            ]
            spent = add_bytes(*(summary.get("total_bytes") for summary in done))
            run_study(
                console,
                batch,
                directory,
                where,
                lambda: Overview(console, batch, "sweep", len(runs) - len(left), spent),
                create,
                lambda: _how_to_go_on(plan),
            )
        return _show(console, plan, batch, options)


def _show(console: Console, plan: _Plan, batch: Batch, options: SweepOptions) -> int:
    rows = collect(plan.sweep, plan.directory, batch.failures)
    write_results(plan.directory, rows)
    if options.as_json:
        sys.stdout.write(json.dumps({"runs": rows}, indent=2, allow_nan=False) + "\n")
    else:
        if not console.is_terminal:
            console.width = max(console.width, 160)  # a file has no edge to wrap at
        console.print(sweep_table(plan.sweep.varying, rows).to_terminal())
        seeds = " Means over seeds, and smallest..largest." if "seed" in plan.sweep.varying else ""
        console.print(f"{DIRECTIONS_NOTE}{seeds}\n", style="dim")
        console.print(f"Table: {plan.directory / TABLE}", highlight=False, soft_wrap=True)
        console.print(f"Results: {plan.directory}", highlight=False, soft_wrap=True)
        console.print(f"Look at: aqg report {plan.directory}", highlight=False, soft_wrap=True)
    return report_failures(
        batch, len(rows), f"try them again with: aqg sweep --resume {plan.directory}"
    )


@contextmanager
def _planned(options: SweepOptions) -> Iterator[_Plan]:
    """Check every setting before anything is touched."""
    flags = {name: located(name, value) for name, value in options.flags.items()}
    document, grid_file = None, b""
    code = None if options.grid is None else Code.parse(str(options.grid))
    if options.grid is not None:
        if code is not None:  # named on the command line, and so is what it yields
            runs = call_study(code, options.data_dir)
            document, text = {RUNS: runs}, runs_to_toml({}, runs)
        else:
            document = read_settings(options.grid)
            _guard(options.grid, document, options)
            text = options.grid.read_text(encoding="utf-8")
        # Top-level keys come before tables in TOML.
        if not any("downlink" in part for part in _parts(document)):
            flags = {"downlink": AUTO, **flags}
        lines = (f"{key} = {json.dumps(value)}\n" for key, value in flags.items())
        grid_file = ("".join(lines) + text).encode()
        for key in flags:
            if any(key in part for part in _parts(document)):
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
    stem = options.grid.stem if code is None else code.path.stem
    with output_directory(options.out, stem) as directory:
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
    for part in _parts(document)[1:]:
        if part is not document.get("grid"):
            refuse_unnamed_code(part, options.flags, allowed=allowed, where=where)
    grid = document.get("grid")
    for key, values in grid.items() if isinstance(grid, dict) else ():
        for value in values if isinstance(values, list) else ():
            refuse_unnamed_code({key: value}, options.flags, allowed=allowed, where=where)


def _parts(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the tables of a grid file: its top level, the grid, and each run."""
    runs = document.get(RUNS)
    tables = [document, document.get("grid"), *(runs if isinstance(runs, list) else ())]
    return [table for table in tables if isinstance(table, dict)]


def _announce(plan: _Plan, num_left: int, where: Where) -> str:
    total = len(plan.sweep.runs)
    text = f"{total} {'run' if total == 1 else 'runs'} ({' × '.join(plan.sweep.varying)})"
    if num_left < total:
        text += f", {total - num_left} finished before"
    if num_left:
        text += f", {where.describe(num_left)}"
    return f"{text}, in {plan.directory}"


def _how_to_go_on(plan: _Plan) -> str:
    if not (plan.directory / GRID).exists():
        return "stopped before the first run; nothing was written"
    num_left = len(unfinished(plan.sweep.runs, plan.directory))
    total = len(plan.sweep.runs)
    return (
        f"stopped with {total - num_left} of {total} runs finished; everything is saved. "
        f"Go on with: aqg sweep --resume {plan.directory}"
    )


Row = Mapping[str, Any]

_BYTES = ("upload_bytes", "download_bytes", "total_bytes")


def sweep_table(varying: Sequence[str], rows: Sequence[Row]) -> Table:
    """Return one row per combination of the settings that vary, except for the seed.

    A cell holds the mean over the seeds and, below, the smallest and the largest value.
    """
    names = [name for name in varying if name != "seed"]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(repr([row["settings"][name] for name in names]), []).append(row)
    with_target = any("target" in row for row in rows)

    metrics = measured(read_metrics(row) for row in rows)
    titles = [metric_title(metric) for metric in metrics]
    header = (*names, "runs", "final loss", *titles, "uploads", "up", "down", "total")
    if with_target:
        header = (*header, "total to target")
    found = tuple(
        (
            *(str(group[0]["settings"][name]) for name in names),
            *_results(group, metrics),
            *([_target_cost(group)] if with_target else []),
        )
        for group in groups.values()
    )
    note = "Means over seeds, and smallest..largest."
    return Table("sweep", "Sweep", note, header, found, num_labels=len(names))


def _results(group: Sequence[Row], metrics: Sequence[Metric]) -> list[str]:
    done = [row for row in group if "error" not in row]
    if not done:
        return [f"0 of {len(group)}", "failed", *("-" for _ in metrics), *("-" for _ in range(4))]
    num_diverged = sum(row["diverged"] for row in done)
    loss = _spread([row["final_loss"] for row in done if not row["diverged"]], "{:.6f}".format)
    if num_diverged:
        loss = f"diverged<br>({num_diverged} of {len(done)})"
    return [
        str(len(group)) if len(done) == len(group) else f"{len(done)} of {len(group)}",
        loss,
        *(
            _spread([read_metrics(row).get(metric.name) for row in done], metric.format)
            for metric in metrics
        ),
        _spread([row["uploads"] for row in done], "{:,.0f}".format),
        *(_spread([row.get(name) for row in done], _size, "unknown") for name in _BYTES),
    ]


def _target_cost(group: Sequence[Row]) -> str:
    targets = [row["target"] for row in group if "target" in row]
    reached = [t.get("total_bytes") for t in targets if t["upload_bytes"] is not None]
    if not reached:
        return "not reached" if targets else "-"
    text = _spread(reached, _size, "unknown")
    return (
        text
        if len(reached) == len(targets)
        else f"{text}<br>{len(reached)} of {len(targets)} reached"
    )


def _size(mean: float) -> str:
    return format_bytes(round(mean))


def _spread(
    values: Sequence[float | None], write: Callable[[float], str], otherwise: str = "-"
) -> str:
    """Write the mean and, where values differ, the smallest and the largest.

    >>> _spread([1.0, 2.0, 6.0], "{:.1f}".format)
    '3.0<br>1.0..6.0'
    >>> _spread([2.0], "{:.1f}".format), _spread([None], "{:.1f}".format)
    ('2.0', '-')
    """
    known = [value for value in values if value is not None]
    if not known:
        return otherwise
    mean = write(sum(known) / len(known))
    low, high = write(min(known)), write(max(known))
    return mean if low == high else f"{mean}<br>{low}..{high}"
