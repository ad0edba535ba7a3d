"""Keep what came of a plan."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from aqg import __version__
from aqg.runs.directory import CONFIG, read_config
from aqg.runs.files import write_atomically
from aqg.runs.plan import Job
from aqg.studies.paper.figures import all_figures
from aqg.studies.paper.outcomes import (
    ROUNDING_SECTION,
    Outcome,
    Results,
    collect,
    key_of,
    read_results,
    write_results,
)
from aqg.studies.paper.plan import PlannedRun, Scale
from aqg.studies.paper.tables import all_tables

RUN_DIRECTORY = "runs"
FIGURE_DIRECTORY = "figures"
TABLES = "tables.md"


def adopt_devices(plan: Sequence[PlannedRun], directory: Path) -> tuple[PlannedRun, ...]:
    """Let runs that were begun on another device stay on it."""
    return tuple(PlannedRun(planned.section, _adopt(planned.run, directory)) for planned in plan)


def _adopt(run: Job, directory: Path) -> Job:
    place = directory / RUN_DIRECTORY / run.name
    if not (place / CONFIG).exists():
        return run
    return Job(run.name, replace(run.config, device=read_config(place).get("device", "cpu")))


def keep_results(plan: Sequence[PlannedRun], scale: Scale, directory: Path) -> Results:
    """Write results, tables and pictures of what is finished; return the results."""
    plan = adopt_devices(plan, directory)
    results = collect(plan, directory / RUN_DIRECTORY, describe(plan, scale))
    results = replace(results, about={**results.about, **count_runs(plan, results.outcomes)})
    write_results(directory, results)
    write_views(directory, results)
    return results


def count_runs(plan: Sequence[PlannedRun], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return how many runs of each section are finished, of how many, and what made them."""
    planned = Counter(one.section for one in plan if one.section != ROUNDING_SECTION)
    finished = Counter(outcome.section for outcome in outcomes)
    return {
        "finished": {section: [finished[section], planned[section]] for section in planned},
        "made_on": sorted({f"{o.section}: {o.machine}, {o.device}" for o in outcomes}),
    }


def write_views(directory: Path, results: Results) -> None:
    """Write the tables as Markdown and, where matplotlib is installed, the figures as PNG."""
    text = "\n".join(table.to_markdown() for table in all_tables(results))
    write_atomically(directory / TABLES, text.encode())
    if find_spec("matplotlib") is None:
        return
    figures = directory / FIGURE_DIRECTORY
    figures.mkdir(exist_ok=True)
    for name, picture in all_figures(results).items():
        write_atomically(figures / f"{name}.png", picture)


def describe(plan: Sequence[PlannedRun], scale: Scale) -> dict[str, Any]:
    """Return what a reader of the results has to know about how they were made."""
    devices = sorted({planned.run.config.device for planned in plan})
    return {
        "aqg": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "devices": devices,
        **asdict(scale),
    }


def missing_from(directory: Path, plan: Sequence[PlannedRun]) -> tuple[PlannedRun, ...]:
    """Return what of a plan the results in ``directory`` do not have."""
    results = read_results(directory)
    names = {outcome.name for outcome in results.outcomes}
    keys = {one.key for one in results.perturbed}

    def is_here(planned: PlannedRun) -> bool:
        if planned.section == ROUNDING_SECTION:
            return key_of(planned.run.config) in keys
        return planned.run.name in names

    return tuple(planned for planned in plan if not is_here(planned))
