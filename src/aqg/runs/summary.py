"""The result of a run, in the numbers people compare."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from aqg.runs.config import RunConfig
from aqg.runs.cost import Cost
from aqg.runs.directory import Line, finite_or_none, metric_fields
from aqg.runs.stopping import Target, has_diverged


def student_quantile(degrees: int, level: float = 0.95) -> float:
    """Return how many standard errors a two-sided interval of Student's has to each side.

    >>> [round(student_quantile(degrees), 3) for degrees in (1, 9, 40)]
    [12.706, 2.262, 2.021]
    """
    from scipy import stats  # takes a second to import

    return float(stats.t.ppf((1 + level) / 2, degrees))


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
        if target.kind == "accuracy":
            values = [metrics.get("accuracy") for metrics in self.metrics]
        elif target.kind == "residual" and minimum is None:
            return None
        else:
            start = minimum if target.kind == "residual" and minimum is not None else 0.0
            values = [loss - start for loss in self.losses]
        known = [(v, cost) for v, cost in zip(values, self.costs, strict=True) if v is not None]
        first = target.first_reached([value for value, _ in known])
        return None if first is None else known[first][1]


@dataclass(frozen=True)
class Summary:
    """One run's results."""

    recipe: str
    cost: Cost
    final_loss: float
    residual: float | None
    metrics: Mapping[str, float]
    faults: int
    target: Target | None
    target_cost: Cost | None
    statistics: tuple[int, int] = (0, 0)
    first_loss: float | None = None

    @property
    def diverged(self) -> bool:
        return has_diverged(self.final_loss)

    @property
    def is_worse(self) -> bool:
        """Whether the model is worse than the one that training began with."""
        return self.first_loss is not None and not self.final_loss <= self.first_loss

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints for this run."""
        row: dict[str, Any] = {
            "recipe": self.recipe,
            **self.cost.to_json(),
            "final_loss": finite_or_none(self.final_loss),
            "residual": finite_or_none(self.residual),
            "test_accuracy": None,
            **metric_fields(self.metrics),
            "diverged": self.diverged,
            "worse_than_start": self.is_worse,
            "faults": self.faults,
        }
        if any(self.statistics):
            names = ("statistics_upload_bytes", "statistics_download_bytes")
            row |= zip(names, self.statistics, strict=True)
        if self.target is not None:
            cost = (self.target_cost or self.cost).to_json()
            if self.target_cost is None:
                cost = dict.fromkeys(cost)
            cost["reached_round"] = cost.pop("rounds")
            row["target"] = {self.target.kind: self.target.value, **cost}
        return row


@dataclass(frozen=True)
class Result:
    config: RunConfig
    summary: Summary
    trace: Trace


def summarize(
    recipe: str,
    lines: Sequence[Line],
    final_loss: float,
    metrics: Mapping[str, float],
    minimum: float | None,
    target: Target | None,
) -> Summary:
    records = [line.record for line in lines]
    reached = None
    if target is not None:
        reached = Trace.of(lines, final_loss, metrics).cost_to(target, minimum)
    return Summary(
        recipe,
        functools.reduce(Cost.plus, records, Cost()),
        final_loss,
        None if minimum is None else final_loss - minimum,
        dict(metrics),
        sum(len(record.faults) for record in records),
        target,
        reached,
        (
            sum(record.statistics_upload_bytes for record in records),
            sum(record.statistics_download_bytes for record in records),
        ),
        records[0].loss if records else None,
    )
