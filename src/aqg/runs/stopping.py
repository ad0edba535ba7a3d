"""When a run is over before its last round, and its results.

``docs/reference/files.md`` says what each ending means. With ``hold = 0`` a run is not ended by its
target, and the target has to be met to the very end. A run is *beyond* its ceiling where others of
the study show that the cost is of no interest, whether or not the target is reached in the end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from aqg.errors import RunError, require
from aqg.runs.cost import Cost
from aqg.runs.directory import VALIDATION, Line, finite_or_none, metric_fields, statistics_bytes
from aqg.settings import POSITIVE, SHARE
from aqg.sim.record import RoundRecord

Kind: TypeAlias = Literal["residual", "loss", "accuracy"]
Ending: TypeAlias = Literal["reached", "rounds", "diverged", "hopeless", "beyond"]

_DIVERGED_LOSS = 1e20
_HOPELESS = 100.0
"""A loss so many times the first one does not come back."""
_MILESTONES = (0.5, 0.75)
"""At such a share of its rounds, a run must have come such a share of its way."""
_SMALLEST_GOAL = 1e-9
"""Floor on targets, so that the logarithm stays finite."""


def has_diverged(loss: float) -> bool:
    """Tell whether a loss is beyond all use, where a run need not go on; NaN is."""
    return not loss < _DIVERGED_LOSS


@dataclass(frozen=True)
class Target:
    """When a model is good enough."""

    kind: Kind  # the loss, the loss above its minimum, or the accuracy on the test set
    value: float  # at most this loss or residual, at least this accuracy
    hold: int = 0  # for so many rounds in a row, after which the run ends; 0: to the last round
    is_mean: bool = False  # it is enough that the first of these rounds meets it, and their mean

    def __post_init__(self) -> None:
        bound = SHARE if self.kind == "accuracy" else POSITIVE
        require(self.value in bound, f"target {self.kind}", self.value, str(bound))
        require(self.hold >= 0, "hold", self.hold, "at least 0")

    def is_met(self, value: float) -> bool:
        """Tell whether a loss, residual or accuracy is good enough; NaN never is."""
        return value >= self.value if self.kind == "accuracy" else value <= self.value

    def first_reached(self, values: Sequence[float]) -> int | None:
        """Return the position from which the target counts as reached; None if it does not."""
        if self.hold:
            starts = range(len(values) + 1 - self.hold)
            return next((k for k in starts if self.is_held(values[k : k + self.hold])), None)
        met = [self.is_met(value) for value in values]
        streak = len(met) if all(met) else met[::-1].index(False)
        return len(values) - streak if streak else None

    def is_held(self, values: Sequence[float]) -> bool:
        if self.is_mean:
            return self.is_met(values[0]) and self.is_met(sum(values) / len(values))
        return all(map(self.is_met, values))

    def progress(self, start: float, value: float) -> float:
        """Return which share of the way from ``start`` to the target lies behind.

        Measured in the logarithm of the loss, the residual or the error rate: training is fast
        first and slow later, so a run that is behind at half time does not arrive.
        """
        goal = self.value
        if self.kind == "accuracy":
            start, value, goal = 1 - start, 1 - value, 1 - goal
        if value <= goal:
            return 1.0
        goal = max(goal, _SMALLEST_GOAL)
        return math.log(start / value) / math.log(start / goal) if start > goal else 0.0

    def __str__(self) -> str:
        if self.kind == "accuracy":
            return f"accuracy {self.value:.1%}"
        return f"{self.kind} {self.value:g}"


class Judge:
    """Says in ``ending`` why a run is over, and in ``cost`` what it cost until then.

    ``metric`` is what has to be measured before every round, None where the training loss is
    enough; ``value`` is the loss, residual or accuracy that was looked at last.
    """

    def __init__(
        self,
        target: Target | None,
        num_rounds: int,
        *,
        eval_every: int = 1,
        validates: bool = False,
        minimum: float | None = None,
        ceiling: float = math.inf,
    ) -> None:
        self._target = target if target is not None and target.hold else None
        kind = None if self._target is None else self._target.kind
        if kind == "residual" and minimum is None:
            raise RunError(f"the target is a {target}, and the minimum of the loss is unknown")
        self._minimum = (minimum or 0.0) if kind == "residual" else 0.0
        self.metric = VALIDATION if validates else "accuracy" if kind == "accuracy" else None
        self.is_followed = self.metric is not None or self._target is not None
        self._eval_every = eval_every
        self._ceiling = ceiling
        self._milestones = {round(share * num_rounds): share for share in _MILESTONES}
        self._spent = Cost()
        hold = 1 if self._target is None else self._target.hold
        self._recent: deque[tuple[float, Cost]] = deque(maxlen=hold)
        self._first_value = math.nan
        self.value = math.nan
        self.ending: Ending | None = None

    def value_of(self, metrics: Mapping[str, float], loss: float | None) -> float:
        """Return what the target is about; NaN where it was not measured."""
        if self.metric is not None:
            return metrics.get(self.metric, math.nan)
        return math.nan if loss is None else loss - self._minimum

    def is_over(self) -> bool:
        return self.ending is not None

    def look_before(self, number: int, metrics: Mapping[str, float]) -> None:
        """Look at the metrics of the model that a round begins with, after the first one."""
        if self.ending is None and self.metric is not None and number > 1:
            self._look(metrics.get(self.metric, math.nan))

    def look_after(self, record: RoundRecord) -> None:
        """Look at the loss that a round began with, and count the round if it goes on."""
        # One beyond all numbers is read back as None.
        loss = math.inf if record.loss is None else record.loss
        is_evaluated = (record.round - 1) % self._eval_every == 0
        if self._target is None:
            self.ending = "diverged" if is_evaluated and has_diverged(loss) else None
        elif self.ending is None and self.metric is None:
            self._look(loss - self._minimum)
        if self.ending is None:
            self._spent = self._spent.plus(record)

    def _look(self, value: float) -> None:
        """Take the value that the rounds counted so far have led to."""
        if self._target is None:
            return
        self.value = value
        if math.isnan(self._first_value):
            self._first_value = value
        self._recent.append((value, self._spent))
        self.ending = self._judged(self._target, value)

    def _judged(self, target: Target, value: float) -> Ending | None:
        values = [other for other, _ in self._recent]
        if len(values) == target.hold and target.is_held(values):
            return "reached"
        if has_diverged(abs(value)):
            return "diverged"
        if target.kind != "accuracy" and value > _HOPELESS * self._first_value:
            return "hopeless"
        share = self._milestones.get(self._spent.rounds, 0.0)
        if share and target.progress(self._first_value, value) < share:
            return "hopeless"
        # What was met within the ceiling may still be confirmed beyond it.
        met = (cost for other, cost in self._recent if target.is_met(other))
        return "beyond" if next(met, self._spent).total_bytes > self._ceiling else None

    @property
    def cost(self) -> Cost:
        return self._recent[0][1] if self.ending == "reached" else self._spent

    def to_json(self) -> dict[str, Any]:
        """Return why the run ended and what it cost until then, where a target could end it."""
        if self._target is None:
            return {}
        outcome = {"ending": self.ending or "rounds", "value": finite_or_none(self.value)}
        return {"outcome": outcome | self.cost.to_json()}


@dataclass(frozen=True)
class Trace:
    """A run as curves: entry ``i`` is the state after ``rounds[i]`` rounds.

    The loss after ``k`` rounds is the one that round ``k+1`` reported at its start, or the final
    one; costs are cumulative.
    """

    costs: tuple[Cost, ...]
    losses: tuple[float, ...]
    metrics: tuple[Mapping[str, float], ...]

    @staticmethod
    def of(
        lines: Sequence[Line], final_loss: float, final_metrics: Mapping[str, float] | None = None
    ) -> Trace:
        records = [line.record for line in lines]
        costs = accumulate(records, Cost.plus, initial=Cost())
        losses = [*(record.loss for record in records), final_loss]
        measured = [*(line.metrics for line in lines), final_metrics or {}]
        kept = [row for row in zip(costs, losses, measured, strict=True) if row[1] is not None]
        return Trace(*zip(*kept, strict=True))

    def cost_to(self, target: Target, minimum: float | None = None) -> Cost | None:
        """Return the cost of the first point from which a target counts as reached."""
        if target.kind == "residual" and minimum is None:
            return None
        start = (minimum or 0.0) if target.kind == "residual" else 0.0
        values: list[float | None] = [loss - start for loss in self.losses]
        if target.kind == "accuracy":
            values = [metrics.get("accuracy") for metrics in self.metrics]
        known = [(v, cost) for v, cost in zip(values, self.costs, strict=True) if v is not None]
        first = target.first_reached([value for value, _ in known])
        return None if first is None else known[first][1]


def summarize(
    recipe: str,
    lines: Sequence[Line],
    final_loss: float,
    metrics: Mapping[str, float],
    minimum: float | None,
    target: Target | None,
) -> dict[str, Any]:
    """Return a run's results as ``--json`` prints them."""
    records = [line.record for line in lines]
    trace = Trace.of(lines, final_loss, metrics)
    cost, first_loss = trace.costs[-1], records[0].loss if records else None
    row: dict[str, Any] = {
        "recipe": recipe,
        **cost.to_json(),
        "final_loss": finite_or_none(final_loss),
        "residual": None if minimum is None else finite_or_none(final_loss - minimum),
        "test_accuracy": None,
        **metric_fields(metrics),
        "diverged": has_diverged(final_loss),
        "worse_than_start": first_loss is not None and not final_loss <= first_loss,
        "faults": sum(len(record.faults) for record in records),
    }
    row |= statistics_bytes(records)
    if target is not None:
        reached = trace.cost_to(target, minimum)
        spent = dict.fromkeys(cost.to_json()) if reached is None else reached.to_json()
        spent["reached_round"] = spent.pop("rounds")
        row["target"] = {target.kind: target.value, **spent}
    return row
