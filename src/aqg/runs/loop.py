"""Run a config in its directory: from the start, or on from where it stopped.

A run leaves two models. The best one has the best value of the first test metric that says which
way is better; or, without one, the lowest training loss. Up to some fifty models of a run are
measured, the last among them. Ties go to the earlier one.
"""

import copy
import hashlib
import json
import math
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from aqg import __version__
from aqg.runs.config import RunConfig, refuse_changes, resolve, to_toml
from aqg.runs.cost import ClientBytes, Cost, Meter
from aqg.runs.directory import CHECKPOINT, CONFIG, Line, RunFiles, create_directory, read_config
from aqg.runs.executor import Contact, Interrupted
from aqg.runs.files import locked, write_atomically
from aqg.runs.setup import curve, follow_target, make_simulation
from aqg.runs.stopping import Judge, summarize
from aqg.sim.engine import FastSimulation
from aqg.sim.problem import Problem
from aqg.sim.record import RoundRecord
from aqg.sim.reference import ReferenceSimulation
from aqg.sim.simulation import SimulationState
from aqg.weights import BEST, FINAL, read_notes, to_bytes

_SECONDS_FOR_ORPHANS = 60.0
"""How long to wait for a process in the same directory, such as one left by a killed parent."""
_SECONDS_BETWEEN_CHECKPOINTS = 5.0
_LARGEST_SHARE_OF_CHECKPOINTS = 0.1
"""Of a run's time: those of thousands of clients with mirrors take longer than a round."""
_METRIC_POINTS = 50
_SECONDS_BETWEEN_REPORTS = 0.2


Minimum: TypeAlias = float | Callable[[], float | None] | None


@dataclass
class Progress:
    cost: Cost = field(default_factory=Cost)
    loss: float = math.nan

    def add(self, record: RoundRecord) -> None:
        self.cost = self.cost.plus(record)
        if record.loss is not None:
            self.loss = record.loss


def slug(recipe: str) -> str:
    return recipe.replace(":", "_").replace("=", "-")


def create_run(directory: Path, config: RunConfig) -> None:
    create_directory(directory)
    write_atomically(directory / CONFIG, to_toml((config,)).encode())


def read_configs(
    directory: Path, overrides: Mapping[str, Any], data_dir: Path | None = None
) -> tuple[RunConfig, ...]:
    """Read a run directory's configs; overrides that differ from them are refused."""
    settings = read_config(directory)
    configs = resolve(settings, data_dir)
    asked = resolve({**settings, **overrides}, data_dir)
    before, after = (
        {**asdict(found[0]), "recipe": ",".join(config.recipe for config in found)}
        for found in (configs, asked)
    )
    refuse_changes(directory, before, after, "run", "drop the option, or start a new run")
    return configs


def identity(config: RunConfig) -> str:
    """Return what tells a run from others: a digest of its settings that are not the defaults."""
    defaults = {field.name: field.default for field in fields(RunConfig)}
    settings = {k: v for k, v in asdict(config).items() if v != defaults[k]}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def run(
    config: RunConfig,
    problem: Problem,
    minimum: Minimum,
    directory: Path,
    contact: Contact | None = None,
    ceiling: float = math.inf,
    keeps_models: bool = True,
) -> dict[str, Any]:
    """Run until the run is over, from the directory's checkpoint if it has one; return its results.

    That is after its last round, or earlier as `aqg.runs.stopping` has it: a run with a target that
    ends it may cost no more than the ceiling, in bytes. The minimum ``f*`` may be what finds it
    once the last round is done and saved. The contact is told `Progress` now and then; where
    it asks to stop, `Interrupted` is raised after the round was saved.
    """
    files = RunFiles(directory, identity(config))
    with locked(directory, _SECONDS_FOR_ORPHANS), closing(files):
        goal = config.goal
        if goal is not None and goal.hold and goal.kind == "residual" and callable(minimum):
            minimum = minimum()
        how: dict[str, Any] = {"eval_every": config.eval_every, "validates": config.validation > 0}
        how |= {"minimum": None if callable(minimum) else minimum, "ceiling": ceiling}
        judge = Judge(goal, config.rounds, **how)
        return _run(config, problem, minimum, files, contact or Contact(), judge, keeps_models)


def _run(
    config: RunConfig,
    problem: Problem,
    minimum: Minimum,
    files: RunFiles,
    contact: Contact,
    judge: Judge,
    keeps_models: bool,
) -> dict[str, Any]:
    simulation = make_simulation(config, problem)
    arrays, lines = files.restore()
    client_bytes = ClientBytes(problem.num_clients, arrays)
    if arrays is not None:
        simulation.restore(SimulationState.from_arrays(arrays))
    directions = {metric.name: metric.higher_is_better for metric in problem.chosen_metrics}
    models = ModelFiles(files.path, directions, simulation.next_round) if keeps_models else None
    progress = Progress()
    meter = Meter(problem.start_bytes, simulation.training)
    for line in lines:
        meter.replay(line.record)
        progress.add(line.record)
        judge.look_before(line.record.round, line.metrics)
        judge.look_after(line.record)
    follow = None if judge.metric is None else follow_target(config, simulation)

    def followed(metrics: dict[str, float]) -> dict[str, float]:
        """Add what the target is about, where that is not among the metrics."""
        if follow is None or judge.metric is None or judge.metric in metrics:
            return metrics
        return metrics | {judge.metric: follow()}

    checkpoints, last_report = Checkpoints(), 0.0
    measured_every = max(1, config.rounds // _METRIC_POINTS)
    measure = simulation.problem.measure

    def save() -> None:
        if models is not None:
            models.save()
        files.checkpoint(simulation.state().to_arrays() | client_bytes.arrays, len(lines))
        contact.saved()

    while simulation.next_round <= config.rounds and not judge.is_over():
        number = simulation.next_round
        is_measured = (number - 1) % measured_every == 0
        if is_measured:
            model = _snapshot(simulation)
        metrics = followed(measure(simulation.averaged) if is_measured else {})
        judge.look_before(number, metrics)
        if judge.is_over():
            break
        is_evaluated = (number - 1) % config.eval_every == 0
        record = meter.charge(simulation.run_round(evaluate=is_evaluated))
        if is_measured and models is not None:
            models.consider(number - 1, metrics, record.loss, model)
        judge.look_after(record)
        client_bytes.add(record)
        line = Line(record.without_clients(), metrics)
        lines.append(line)
        progress.add(record)
        files.add(line)
        if time.monotonic() - last_report >= _SECONDS_BETWEEN_REPORTS:
            last_report = time.monotonic()
            contact.tell(progress)
        is_stop_asked = contact.is_stop_asked()
        if is_stop_asked or checkpoints.is_due():
            checkpoints.time(save)
        if is_stop_asked:
            raise Interrupted
    save()
    contact.tell(progress)

    final_loss = simulation.loss()
    metrics = measure(simulation.averaged)
    measured = followed(metrics)
    judge.look_before(simulation.next_round, measured)
    if models is not None:
        model = _snapshot(simulation)
        models.consider(len(lines), metrics, final_loss, model)
        models.finish(len(lines), model)
    # A target on the validation set is not that of the test set, which a summary looks at.
    goal = None if config.validation else config.goal
    if callable(minimum):
        minimum = minimum()
    summary = summarize(config.recipe, lines, final_loss, metrics, minimum, goal)
    described = {metric.name: metric.describe() for metric in problem.chosen_metrics}
    values = [judge.value_of(line.metrics, line.record.loss) for line in lines]
    values.append(judge.value_of(measured, final_loss))
    files.finish(
        summary
        | judge.to_json()
        | {"metrics": described, "versions": installed_versions(), "run": identity(config)}
        | client_bytes.to_json()
        | ({"curve": curve(values, lines, metrics)} if judge.is_followed else {})
    )
    if not keeps_models:
        (files.path / CHECKPOINT).unlink(missing_ok=True)
    contact.saved()
    return summary


class Checkpoints:
    """Says when to save: every 5 seconds, unless that would take a tenth of the time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._seconds_apart = _SECONDS_BETWEEN_CHECKPOINTS

    def is_due(self) -> bool:
        return self._clock() - self._last > self._seconds_apart

    def time(self, save: Callable[[], None]) -> None:
        begun = self._clock()
        save()
        self._last = self._clock()
        needed = (self._last - begun) / _LARGEST_SHARE_OF_CHECKPOINTS
        self._seconds_apart = max(_SECONDS_BETWEEN_CHECKPOINTS, needed)


def _snapshot(simulation: FastSimulation | ReferenceSimulation) -> Callable[[], Mapping[str, Any]]:
    """Return what makes the tensors of the model as it is now, by name.

    These are a module's own state, or those of a closed form. Where clients keep statistics of
    their own, those that the module came with are among them.
    """
    params, objective = simulation.averaged, cast("Any", simulation.problem.objective)
    layout = getattr(objective, "model_layout", None)
    if layout is None:
        names = [name for name, _ in objective.layout]
        return lambda: dict(zip(names, objective.tensors(params), strict=True))
    buffers = simulation.statistics.averaged() if layout.policy == "average" else None

    def tensors() -> Mapping[str, Any]:
        module = copy.deepcopy(objective.module)
        layout.load(module, params)
        if buffers is not None:
            layout.write_buffers(module, buffers)
        state: Mapping[str, Any] = module.state_dict()
        return state

    return tensors


class Measured(NamedTuple):
    rounds: int  # after how many rounds
    measure: str  # ``test_NAME`` or ``loss``
    value: float


class ModelFiles:
    """Keeps the best model of a run in mind, and writes it and the final one.

    ``directions`` has for each test metric whether more of it is better; None where nobody said.
    """

    def __init__(
        self, directory: Path, directions: Mapping[str, bool | None], next_round: int = 1
    ) -> None:
        self._directory = directory
        self._directions = directions
        self._pending: bytes | None = None
        self.best = self._read(next_round)

    def _read(self, next_round: int) -> Measured | None:
        """Return the best model so far; one of a round that is run again will be found again."""
        path = self._directory / BEST
        notes = read_notes(path) if path.exists() else {}
        with suppress(KeyError, ValueError, TypeError):
            found = Measured(int(notes["rounds"]), notes["measure"], float(notes["value"]))
            return found if found.rounds < next_round else None
        return None

    def consider(
        self,
        rounds: int,
        metrics: Mapping[str, float],
        loss: float | None,
        tensors: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Remember a model if it is the best so far; ``tensors`` makes its tensors, by name."""
        name = next((name for name in metrics if self._directions.get(name) is not None), None)
        measure, value = ("loss", loss) if name is None else (f"test_{name}", metrics[name])
        if value is None or not math.isfinite(value):
            return
        best, sign = self.best, -1.0 if name is not None and self._directions[name] else 1.0
        if best is not None and best.measure == measure:
            if not sign * value < sign * best.value:
                return
        elif best is not None and measure == "loss":
            return  # beyond numbers, or not measured this time
        self.best = Measured(rounds, measure, value)
        self._pending = to_bytes(tensors(), self.best._asdict())

    def save(self) -> None:
        if self._pending is not None:
            write_atomically(self._directory / BEST, self._pending)
            self._pending = None

    def finish(self, rounds: int, tensors: Callable[[], Mapping[str, Any]]) -> None:
        self.save()
        write_atomically(self._directory / FINAL, to_bytes(tensors(), {"rounds": rounds}))


_LIBRARIES = ("numpy", "numba", "scipy", "torch")


def installed_versions() -> dict[str, str]:
    """Return versions of aqg, Python and the libraries that compute, and the kind of processor."""
    python = platform.python_version()
    versions = {"aqg": __version__, "machine": platform.machine(), "python": python}
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):  # an optional one
            versions[name] = metadata.version(name)
    return versions
