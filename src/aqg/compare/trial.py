"""One run of one recipe on one task, stopped as soon as its outcome is known."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from aqg.core.dropouts import BernoulliDropout
from aqg.core.recipes import make_recipe
from aqg.experiments.summary import Cost, add_bytes
from aqg.sim.engine import FastSimulation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from aqg.compare.tasks import Target, Task
    from aqg.sim.problem import Problem
    from aqg.sim.record import RoundRecord

Ending: TypeAlias = Literal["reached", "rounds", "diverged", "too slow", "costlier", "beyond"]

CEILING = 10
"""Costs of so many times those of the best recipe of a task are of no interest."""

_HOPELESS = 100.0
"""A loss so many times that of the first round has left all use."""
_MILESTONES = (0.5, 0.75)
"""At such a share of its rounds, a run must have come such a share of its way."""


@dataclass(frozen=True)
class Setting:
    """A recipe with its knob and step size fixed.

    Attributes:
        spec: the recipe with its options, such as ``"stc:keep=0.001"``.
        bits: ``b_max``.
        multiplier: of the task's step size.

    """

    spec: str
    bits: int = 4
    multiplier: float = 1.0

    def __str__(self) -> str:
        text = self.spec if self.bits == 4 else f"{self.spec}, {self.bits} bits"
        return text if self.multiplier == 1 else f"{text}, step ×{self.multiplier:g}"


@dataclass(frozen=True)
class Limits:
    """Numbers of bytes beyond which a run's cost is of no interest.

    Attributes:
        own: what another setting of the same recipe needed.
        ceiling: a multiple of what the best recipe needed.
        uploads_only: whether these are uploads alone, as in comparisons from before downloads were
            counted; else both directions.

    """

    own: float = math.inf
    ceiling: float = math.inf
    uploads_only: bool = False


@dataclass(frozen=True)
class Trial:
    """What is run: a task by name, a recipe by name, its setting and the seed."""

    task: str
    recipe: str
    setting: Setting
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes:
        trial: what was run.
        ending: ``"reached"``; ``"rounds"``, the task's rounds were over; ``"diverged"``; ``"too
            slow"``, not even half of the way after half of the rounds; ``"costlier"`` than another
            setting of the same recipe that reached the target; or ``"beyond"`` the `CEILING`.
        rounds: until the target was reached; else until the end.
        uploads: in these rounds.
        upload_bytes: in these rounds, what all clients sent.
        value: the loss, residual or accuracy at the end; None where it is no number.
        seconds: the whole run took.
        download_bytes: in these rounds, what all clients received; None where it is not on record.

    """

    trial: Trial
    ending: Ending
    rounds: int
    uploads: int
    upload_bytes: int
    value: float | None
    seconds: float
    download_bytes: int | None = None

    @property
    def is_reached(self) -> bool:
        """Whether the target was reached."""
        return self.ending == "reached"

    @property
    def total_bytes(self) -> int | None:
        """What the clients sent and received; None where the latter is not on record."""
        return add_bytes(self.upload_bytes, self.download_bytes)

    @property
    def cost(self) -> int:
        """The bytes that count: those of both directions or, without downloads, the uploads."""
        return self.upload_bytes if self.total_bytes is None else self.total_bytes

    def to_json(self) -> dict[str, Any]:
        """Return one flat object."""
        row = asdict(self)
        trial = row.pop("trial")
        setting = trial.pop("setting")
        return {**trial, **setting, **row}

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Outcome:
        """Read what `to_json` wrote."""
        setting = Setting(row["spec"], row["bits"], row["multiplier"])
        trial = Trial(row["task"], row["recipe"], setting, row["seed"])
        names = ("ending", "rounds", "uploads", "upload_bytes", "value", "seconds")
        found = {name: row[name] for name in names}
        return Outcome(trial, download_bytes=row.get("download_bytes"), **found)


_NO_LIMITS = Limits()


class Meter:
    """Follows a run's costs and its loss or accuracy, and says when its outcome is known."""

    def __init__(self, target: Target, num_rounds: int) -> None:
        self._target = target
        self._milestones = {round(share * num_rounds): share for share in _MILESTONES}
        self._costs = Cost(0, 0, 0, 0, 0)
        self._streak = 0
        self._first_value = math.nan
        self._candidate = self._costs
        self.value = math.nan

    def pay(self, record: RoundRecord) -> None:
        """Count what a round cost."""
        spent = self._costs
        self._costs = Cost(
            spent.rounds + 1,
            spent.uploads + record.num_uploads,
            spent.bits_per_param + record.bits_per_param,
            spent.upload_bytes + record.upload_bytes,
            add_bytes(spent.download_bytes, record.download_bytes),
        )

    def look(self, value: float, limits: Limits = _NO_LIMITS) -> Ending | None:
        """Take the value that the rounds paid for so far have led to."""
        self.value = value
        if math.isnan(self._first_value):
            self._first_value = value
        self._streak = self._streak + 1 if self._target.is_met(value) else 0
        if self._streak == 1:
            self._candidate = self._costs
        if self._streak >= self._target.hold:
            return "reached"
        is_loss = self._target.kind != "accuracy"
        if not math.isfinite(value) or (is_loss and value > _HOPELESS * self._first_value):
            return "diverged"
        share = self._milestones.get(self._costs.rounds, 0.0)
        if share and self._target.progress(self._first_value, value) < share:
            return "too slow"
        costs = self._candidate if self._streak else self._costs
        total = costs.total_bytes
        spent = costs.upload_bytes if limits.uploads_only or total is None else total
        if spent > limits.own:
            return "costlier"
        return "beyond" if spent > limits.ceiling else None

    def costs(self, ending: Ending) -> Cost:
        """Return what the rounds cost until the target was reached, or else all of them."""
        return self._candidate if ending == "reached" else self._costs


def run_trial(
    trial: Trial,
    task: Task,
    problem: Problem,
    minimum: float | None,
    device: str = "cpu",
    limits: Callable[[], Limits] = Limits,
    watch: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Run until the target is reached, or until it is clear that it is not.

    Args:
        trial: what to run.
        task: the task that it names.
        problem: of the task and the trial's seed.
        minimum: ``f*`` where the target is a residual.
        device: where to compute.
        limits: returns the bytes beyond which the outcome is of no interest; asked every round.
        watch: is told of every round.

    """
    started = time.perf_counter()
    simulation = FastSimulation(
        problem,
        make_recipe(trial.setting.spec, trial.setting.bits),
        task.step_size * trial.setting.multiplier,
        BernoulliDropout(task.dropout, trial.seed),
        trial.seed,
        device=device,
        training=task.training,
    )
    meter = Meter(task.target, task.rounds)
    if task.target.kind == "accuracy":
        values = _accuracies(simulation, meter, task.rounds)
    else:
        values = _losses(simulation, minimum or 0.0, meter, task.rounds)
    return follow(trial, meter, values, started, limits, watch)


def follow(
    trial: Trial,
    meter: Meter,
    values: Iterator[float],
    started: float,
    limits: Callable[[], Limits] = Limits,
    watch: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Take values, which pay the meter on their way, until the outcome is known."""
    ending: Ending = "rounds"
    for number, value in enumerate(values):
        found = meter.look(value, limits())
        if found is not None:
            ending = found
            break
        watch(number)
    costs = meter.costs(ending)
    last = meter.value if math.isfinite(meter.value) else None
    seconds = time.perf_counter() - started
    return Outcome(
        trial,
        ending,
        costs.rounds,
        costs.uploads,
        costs.upload_bytes,
        last,
        seconds,
        costs.download_bytes,
    )


def _losses(
    simulation: FastSimulation, minimum: float, meter: Meter, num_rounds: int
) -> Iterator[float]:
    """Yield the loss above ``minimum`` before every round: what the rounds before it led to."""
    for record in simulation.run_rounds(num_rounds):
        assert record.loss is not None
        yield record.loss - minimum
        meter.pay(record)


def _accuracies(simulation: FastSimulation, meter: Meter, num_rounds: int) -> Iterator[float]:
    """Yield the test accuracy after every round."""
    problem = simulation.problem  # whose objective has the run's statistics
    assert problem.test is not None
    backend, labels = simulation.backend, problem.test.labels
    features = backend.put(problem.test.features)
    for _ in range(num_rounds):
        meter.pay(simulation.run_round(evaluate=False))
        params = simulation.parameters
        if not np.isfinite(params).all():
            yield math.nan
            continue
        predicted = problem.objective.predict(backend.put(params), features)
        yield float(np.mean(backend.get(predicted) == labels))
