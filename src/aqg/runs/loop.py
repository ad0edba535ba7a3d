"""Run a config in its directory: from the start, or on from where it stopped."""

from __future__ import annotations

import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from aqg.errors import ConfigError, RunError
from aqg.runs.client_bytes import ClientBytes
from aqg.runs.config import RunConfig, read_settings, resolve, to_toml
from aqg.runs.cost import add_bytes
from aqg.runs.directory import CONFIG, Line, RunFiles, create_directory
from aqg.runs.executor import Contact, Interrupted
from aqg.runs.files import locked, write_atomically
from aqg.runs.models import ModelFiles, name_tensors, shared_buffers
from aqg.runs.setup import make_simulation
from aqg.runs.stopping import has_diverged
from aqg.runs.summary import Summary, Trace, summarize
from aqg.runs.versions import installed_versions
from aqg.sim.state import SimulationState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from aqg.sim.engine import FastSimulation
    from aqg.sim.problem import Problem
    from aqg.sim.reference import ReferenceSimulation

_SECONDS_FOR_ORPHANS = 60.0
"""How long to wait for a process in the same directory, such as one left by a killed parent."""
_SECONDS_BETWEEN_CHECKPOINTS = 5.0
_METRIC_POINTS = 50


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
    settings = read_settings(directory / CONFIG)
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


def identity(config: RunConfig) -> str:
    """Return what tells a run from others: a digest of its settings that are not the defaults.

    >>> from aqg.runs.config import resolve
    >>> first, second = (identity(resolve({"recipe": name})[0]) for name in ("lean", "gd"))
    >>> first == second
    False
    """
    defaults = {field.name: field.default for field in fields(RunConfig)}
    settings = {k: v for k, v in asdict(config).items() if v != defaults[k]}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def run(
    config: RunConfig,
    problem: Problem,
    minimum: float | None,
    directory: Path,
    contact: Contact | None = None,
) -> Result:
    """Run to the last round, from the directory's checkpoint if it has one.

    Args:
        config: of the run.
        problem: that the config describes.
        minimum: ``f*`` where it is known.
        directory: of the run; it exists and holds the config.
        contact: is told `Progress` after every round, and when to stop.

    Raises:
        Interrupted: when asked to stop, after the round in progress was finished and saved.

    """
    with locked(directory, _SECONDS_FOR_ORPHANS):
        files = RunFiles(directory, identity(config))
        try:
            return _run(config, problem, minimum, files, contact or Contact())
        finally:
            files.close()


def _run(
    config: RunConfig,
    problem: Problem,
    minimum: float | None,
    files: RunFiles,
    contact: Contact,
) -> Result:
    simulation = make_simulation(config, problem)
    arrays, lines = files.restore()
    client_bytes = ClientBytes.first(problem.num_clients)
    if arrays is not None:
        simulation.restore(SimulationState.from_arrays(arrays))
        client_bytes = ClientBytes.from_arrays(arrays)
    directions = {metric.name: metric.higher_is_better for metric in problem.chosen_metrics}
    models = ModelFiles(files.path, directions, simulation.next_round)
    progress = Progress()
    for line in lines:
        progress.add(line)

    last_saved = time.monotonic()
    measured_every = max(1, config.rounds // _METRIC_POINTS)
    diverged = _ended_beyond_numbers(lines, config.eval_every)

    def save() -> None:
        models.save()
        arrays = simulation.state().to_arrays() | client_bytes.to_arrays()
        files.checkpoint(arrays, len(lines))
        contact.saved()

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
        files.add(line)
        diverged = record.loss is not None and has_diverged(record.loss)
        contact.tell(progress)
        is_stop_asked = contact.is_stop_asked()
        if is_stop_asked or time.monotonic() - last_saved > _SECONDS_BETWEEN_CHECKPOINTS:
            save()
            last_saved = time.monotonic()
        if is_stop_asked:
            raise Interrupted
    save()

    final_loss = simulation.loss()
    metrics = simulation.problem.measure(simulation.parameters)
    model = _snapshot(simulation)
    models.consider(len(lines), metrics, final_loss, model)
    models.finish(len(lines), model)
    summary = summarize(config.recipe, lines, final_loss, metrics, minimum, config.target)
    described = {metric.name: metric.describe() for metric in problem.chosen_metrics}
    files.finish(
        summary.to_json()
        | {
            "metrics": described,
            "versions": installed_versions(),
            "run": identity(config),
        }
        | client_bytes.to_json()
    )
    contact.saved()
    return Result(config, summary, Trace.of(lines, final_loss, metrics))


def _ended_beyond_numbers(lines: Sequence[Line], eval_every: int) -> bool:
    """Tell whether the last loss on record has diverged; one beyond all numbers reads as None."""
    measured = [line.record for line in lines if (line.record.round - 1) % eval_every == 0]
    if not measured:
        return False
    loss = measured[-1].loss
    return loss is None or has_diverged(loss)


def _snapshot(simulation: FastSimulation | ReferenceSimulation) -> Callable[[], Mapping[str, Any]]:
    """Return what makes the tensors of the model as it is now, by name."""
    params, buffers = simulation.parameters, shared_buffers(simulation)
    return lambda: name_tensors(simulation.problem.objective, params, buffers)


def batch_summary(summaries: Sequence[Summary]) -> str:
    """Return all runs' results as one JSON object."""
    runs = [summary.to_json() for summary in summaries]
    return json.dumps({"runs": runs}, indent=2, allow_nan=False) + "\n"
