"""One run of one recipe on a user's own task, kept as a run directory that ``aqg report`` reads.

It lies in ``TASK/RECIPE/SETTING-seed-N`` of the comparison's directory.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from aqg.compare.own import trial_config
from aqg.compare.trial import Limits, Meter, follow
from aqg.experiments.client_bytes import ClientBytes
from aqg.experiments.rundir import SUMMARY, Line, rewrite_lines, write_atomically
from aqg.experiments.runner import create_run, slug
from aqg.experiments.setup import make_simulation
from aqg.experiments.summary import summarize
from aqg.experiments.versions import installed_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from aqg.compare.tasks import Task
    from aqg.compare.trial import Outcome, Trial
    from aqg.sim.engine import FastSimulation
    from aqg.sim.problem import Problem
    from aqg.sim.reference import ReferenceSimulation

    Simulation = FastSimulation | ReferenceSimulation

_LOSS_POINTS = 50
"""Where the target is an accuracy, about so many rounds of a run also have their loss computed."""


def run_own_trial(
    trial: Trial,
    task: Task,
    problem: Problem,
    directory: Path,
    device: str = "cpu",
    limits: Callable[[], Limits] = Limits,
) -> Outcome:
    """Run as `run_trial` does, and leave the rounds in the comparison's ``directory``."""
    assert task.config is not None
    started = time.perf_counter()
    config = trial_config(task.config, trial.setting, trial.seed, device)
    simulation = make_simulation(config, problem)
    meter = Meter(task.target, task.rounds)
    lines: list[Line] = []
    values = _accuracies if task.target.kind == "accuracy" else _losses
    client_bytes = ClientBytes.first(problem.num_clients)
    rounds = values(simulation, meter, lines, client_bytes, task.rounds)
    outcome = follow(trial, meter, rounds, started, limits=limits)

    place = run_directory(directory, trial)
    shutil.rmtree(place, ignore_errors=True)  # of a trial that is repeated
    create_run(place, config)
    rewrite_lines(place, lines)
    metrics = simulation.problem.measure(simulation.parameters)
    summary = summarize(config.recipe, lines, simulation.loss(), metrics, None, None)
    described = {metric.name: metric.describe() for metric in problem.chosen_metrics}
    row = summary.to_json() | {"metrics": described, "versions": installed_versions()}
    row |= client_bytes.to_json()
    text = json.dumps(row, indent=2, allow_nan=False) + "\n"
    write_atomically(place / SUMMARY, text.encode())
    return outcome


def _losses(
    simulation: Simulation,
    meter: Meter,
    lines: list[Line],
    client_bytes: ClientBytes,
    num_rounds: int,
) -> Iterator[float]:
    """Yield the loss before every round: what the rounds before it led to."""
    for _ in range(num_rounds):
        record = simulation.run_round()
        client_bytes.add(record)
        lines.append(Line(record.without_clients()))
        assert record.loss is not None
        yield record.loss
        meter.pay(record)


def _accuracies(
    simulation: Simulation,
    meter: Meter,
    lines: list[Line],
    client_bytes: ClientBytes,
    num_rounds: int,
) -> Iterator[float]:
    """Yield the test accuracy after every round."""
    measured = simulation.problem.measure(simulation.parameters)
    every = max(1, num_rounds // _LOSS_POINTS)
    for number in range(num_rounds):
        record = simulation.run_round(evaluate=number % every == 0)
        client_bytes.add(record)
        lines.append(Line(record.without_clients(), measured))
        meter.pay(record)
        measured = simulation.problem.measure(simulation.parameters)
        yield measured.get("accuracy", math.nan)


def run_directory(directory: Path, trial: Trial) -> Path:
    """Return where the rounds of a trial are kept."""
    setting = str(trial.setting).replace("×", "").replace(", ", "-").replace(" ", "-")
    return (
        directory / _safe(trial.task) / _safe(trial.recipe) / _safe(f"{setting}-seed-{trial.seed}")
    )


def forget_runs(directory: Path, recipes: Collection[str], tasks: Collection[str]) -> None:
    """Remove the runs of these recipes on these tasks."""
    for task in tasks:
        for recipe in recipes:
            shutil.rmtree(directory / _safe(task) / _safe(recipe), ignore_errors=True)


def _safe(text: str) -> str:
    """Make a name that can be read and that a file system takes.

    >>> _safe("heart.py:problem:folder=a/b")
    'heart.py_problem_folder-a%2Fb'
    """
    return slug(quote(text, safe=":=+"))
