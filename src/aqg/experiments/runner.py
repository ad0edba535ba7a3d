"""Run a config in its directory: from the start, or on from where it stopped."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from aqg.errors import ConfigError, RunError
from aqg.experiments.client_bytes import ClientBytes
from aqg.experiments.config import BEFORE_DOWNLINKS, RunConfig, read_settings, resolve, to_toml
from aqg.experiments.models import ModelFiles, name_tensors, shared_buffers
from aqg.experiments.rundir import (
    CONFIG,
    ROUNDS,
    SUMMARY,
    Line,
    create_directory,
    read_checkpoint,
    read_lines,
    rewrite_lines,
    write_atomically,
    write_checkpoint,
)
from aqg.experiments.setup import make_simulation
from aqg.experiments.summary import Summary, Trace, add_bytes, has_diverged, summarize
from aqg.experiments.versions import installed_versions
from aqg.sim.state import SimulationState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from aqg.sim.engine import FastSimulation
    from aqg.sim.problem import Problem
    from aqg.sim.reference import ReferenceSimulation

_SECONDS_BETWEEN_CHECKPOINTS = 5.0
_METRIC_POINTS = 50


class Interrupted(Exception):  # noqa: N818  (not an error: the user asked for it)
    """The run was stopped at a round's end, with everything saved."""


@dataclass
class Progress:
    """Running totals of a run, for a progress bar."""

    round: int = 0
    loss: float = math.nan
    uploads: int = 0
    upload_bytes: int = 0
    download_bytes: int | None = 0

    @property
    def total_bytes(self) -> int | None:
        """What the clients sent and received; None where the latter is not on record."""
        return add_bytes(self.upload_bytes, self.download_bytes)

    def add(self, line: Line) -> None:
        """Count one more round."""
        self.round = line.record.round
        if line.record.loss is not None:
            self.loss = line.record.loss
        self.uploads += line.record.num_uploads
        self.upload_bytes += line.record.upload_bytes
        self.download_bytes = add_bytes(self.download_bytes, line.record.download_bytes)


class Watcher(Protocol):
    """Is told after every round."""

    def __call__(self, progress: Progress) -> None:
        """Show it."""


@dataclass(frozen=True)
class Result:
    """A finished run: its results and its curves."""

    config: RunConfig
    summary: Summary
    trace: Trace


def slug(recipe: str) -> str:
    """Return a directory name for a recipe spec."""
    return recipe.replace(":", "_").replace("=", "-")


def create_run(directory: Path, config: RunConfig) -> None:
    """Make a run's directory with its config, and nothing else yet."""
    create_directory(directory)
    write_atomically(directory / CONFIG, to_toml((config,)).encode())


def read_configs(
    directory: Path, overrides: Mapping[str, Any], data_dir: Path | None = None
) -> tuple[RunConfig, ...]:
    """Read a run directory's configs; overrides that differ from them are refused."""
    if not (directory / CONFIG).is_file():
        raise RunError(f"{str(directory)!r} is not a run directory: it has no {CONFIG}")
    settings = {**BEFORE_DOWNLINKS, **read_settings(directory / CONFIG)}
    configs = resolve(settings, data_dir)
    asked = resolve({**settings, **overrides}, data_dir)
    if asked != configs:
        before, after = asdict(configs[0]), asdict(asked[0])
        before["recipe"] = ",".join(config.recipe for config in configs)
        after["recipe"] = ",".join(config.recipe for config in asked)
        name = next(name for name in before if before[name] != after[name])
        raise ConfigError(
            f"cannot resume {str(directory)!r} with {name} {after[name]}: "
            f"the run has {name} {before[name]}; drop the option, or start a new run"
        )
    return configs


def run(
    config: RunConfig,
    problem: Problem,
    minimum: float | None,
    directory: Path,
    watch: Watcher | None = None,
) -> Result:
    """Run to the last round, from the directory's checkpoint if it has one.

    Raises:
        Interrupted: on Ctrl-C, after the round in progress was finished and saved.

    """
    simulation = make_simulation(config, problem)
    arrays = read_checkpoint(directory)
    client_bytes = ClientBytes.first(problem.num_clients)
    if arrays is not None:
        simulation.restore(SimulationState.from_arrays(arrays))
        client_bytes = ClientBytes.from_arrays(arrays)
    lines = read_lines(directory, before_round=simulation.next_round)
    rewrite_lines(directory, lines)
    directions = {metric.name: metric.higher_is_better for metric in problem.chosen_metrics}
    models = ModelFiles(directory, directions, simulation.next_round)
    progress = Progress()
    for line in lines:
        progress.add(line)

    def save() -> None:
        write_checkpoint(directory, simulation.state().to_arrays() | client_bytes.to_arrays())

    last_saved = time.monotonic()
    measured_every = max(1, config.rounds // _METRIC_POINTS)
    diverged = bool(lines) and has_diverged(progress.loss)
    with _stop_requests() as stop, (directory / ROUNDS).open("a", encoding="utf-8") as file:
        while simulation.next_round <= config.rounds and not diverged:
            number = simulation.next_round
            metrics: dict[str, float] = {}
            is_measured = (number - 1) % measured_every == 0
            if is_measured:
                model = _snapshot(simulation)
                metrics = simulation.problem.measure(simulation.parameters)
            record = simulation.run_round(evaluate=(number - 1) % config.eval_every == 0)
            if is_measured:
                models.consider(number - 1, metrics, record.loss, model)
            client_bytes.add(record)
            line = Line(record.without_clients(), metrics)
            lines.append(line)
            progress.add(line)
            file.write(line.to_json() + "\n")
            diverged = record.loss is not None and has_diverged(record.loss)
            if watch is not None:
                watch(progress)
            if stop.is_set() or time.monotonic() - last_saved > _SECONDS_BETWEEN_CHECKPOINTS:
                file.flush()
                models.save()
                save()
                last_saved = time.monotonic()
            if stop.is_set():
                raise Interrupted
    save()

    final_loss = simulation.loss()
    metrics = simulation.problem.measure(simulation.parameters)
    model = _snapshot(simulation)
    models.consider(len(lines), metrics, final_loss, model)
    models.finish(len(lines), model)
    summary = summarize(config.recipe, lines, final_loss, metrics, minimum, config.target)
    described = {metric.name: metric.describe() for metric in problem.chosen_metrics}
    row = summary.to_json() | {"metrics": described, "versions": installed_versions()}
    row |= client_bytes.to_json()
    text = json.dumps(row, indent=2, allow_nan=False) + "\n"
    write_atomically(directory / SUMMARY, text.encode())
    return Result(config, summary, Trace.of(lines, final_loss, metrics))


def _snapshot(simulation: FastSimulation | ReferenceSimulation) -> Callable[[], Mapping[str, Any]]:
    """Return what makes the tensors of the model as it is now, by name."""
    params, buffers = simulation.parameters, shared_buffers(simulation)
    return lambda: name_tensors(simulation.problem.objective, params, buffers)


def batch_summary(summaries: Sequence[Summary]) -> str:
    """Return all runs' results as one JSON object."""
    runs = [summary.to_json() for summary in summaries]
    return json.dumps({"runs": runs}, indent=2, allow_nan=False) + "\n"


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into a request to stop after the round; the second stops at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = signal.getsignal(signal.SIGINT)

    def ask(signum: int, frame: object) -> None:  # noqa: ARG001
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)
