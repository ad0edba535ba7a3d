"""The result of a run, in the numbers people compare."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

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
    cost = functools.reduce(Cost.plus, records, Cost())
    first_loss = records[0].loss if records else None
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
    names = ("statistics_upload_bytes", "statistics_download_bytes")
    statistics = {name: sum(getattr(record, name) for record in records) for name in names}
    if any(statistics.values()):
        row |= statistics
    if target is not None:
        reached = Trace.of(lines, final_loss, metrics).cost_to(target, minimum)
        spent = (reached or cost).to_json()
        if reached is None:
            spent = dict.fromkeys(spent)
        spent["reached_round"] = spent.pop("rounds")
        row["target"] = {target.kind: target.value, **spent}
    return row
