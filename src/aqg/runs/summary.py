"""The result of a run, in the numbers people compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from aqg.runs.config import RunConfig
from aqg.runs.cost import Cost, add_bytes
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
        uploads = [0, *accumulate(record.num_uploads for record in records)]
        bits = [0, *accumulate(record.bits_per_param for record in records)]
        sizes = [0, *accumulate(record.upload_bytes for record in records)]
        downloads: list[int | None] = [0]
        for record in records:
            downloads.append(add_bytes(downloads[-1], record.download_bytes))
        measured = [*(line.metrics for line in lines), final_metrics or {}]
        costs, losses, kept = [], [], []
        for k in range(len(records) + 1):
            loss = records[k].loss if k < len(records) else final_loss
            if loss is None:
                continue
            seconds = records[k - 1].simulated_seconds if k else None
            costs.append(Cost(k, uploads[k], bits[k], sizes[k], downloads[k], seconds))
            losses.append(loss)
            kept.append(measured[k])
        return Trace(tuple(costs), tuple(losses), tuple(kept))

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
    """One run's results; ``download_bytes`` is None where it is not on record."""

    recipe: str
    rounds: int
    uploads: int
    bits_per_param: int
    upload_bytes: int
    download_bytes: int | None
    final_loss: float
    residual: float | None
    metrics: Mapping[str, float]
    faults: int
    target: Target | None
    target_cost: Cost | None
    statistics_upload_bytes: int = 0
    statistics_download_bytes: int = 0
    first_loss: float | None = None
    simulated_seconds: float | None = None

    @property
    def total_bytes(self) -> int | None:
        return add_bytes(self.upload_bytes, self.download_bytes)

    @property
    def test_accuracy(self) -> float | None:
        return self.metrics.get("accuracy")

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
            "rounds": self.rounds,
            "uploads": self.uploads,
            "bits_per_param": self.bits_per_param,
            "upload_bytes": self.upload_bytes,
            "download_bytes": self.download_bytes,
            "total_bytes": self.total_bytes,
            "final_loss": finite_or_none(self.final_loss),
            "residual": finite_or_none(self.residual),
            "test_accuracy": None,
            **metric_fields(self.metrics),
            "diverged": self.diverged,
            "worse_than_start": self.is_worse,
            "faults": self.faults,
        }
        if self.statistics_upload_bytes or self.statistics_download_bytes:
            row["statistics_upload_bytes"] = self.statistics_upload_bytes
            row["statistics_download_bytes"] = self.statistics_download_bytes
        if self.simulated_seconds is not None:
            row["simulated_seconds"] = self.simulated_seconds
        if self.target is not None:
            cost = self.target_cost
            row["target"] = {
                self.target.kind: self.target.value,
                "reached_round": cost.rounds if cost else None,
                "uploads": cost.uploads if cost else None,
                "bits_per_param": cost.bits_per_param if cost else None,
                "upload_bytes": cost.upload_bytes if cost else None,
                "download_bytes": cost.download_bytes if cost else None,
                "total_bytes": cost.total_bytes if cost else None,
            }
            if self.simulated_seconds is not None:
                row["target"]["simulated_seconds"] = cost.simulated_seconds if cost else None
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
    cost = None
    if target is not None:
        cost = Trace.of(lines, final_loss, metrics).cost_to(target, minimum)
    return Summary(
        recipe=recipe,
        rounds=len(records),
        uploads=sum(record.num_uploads for record in records),
        bits_per_param=sum(record.bits_per_param for record in records),
        upload_bytes=sum(record.upload_bytes for record in records),
        download_bytes=add_bytes(*(record.download_bytes for record in records)),
        final_loss=final_loss,
        residual=None if minimum is None else final_loss - minimum,
        metrics=dict(metrics),
        faults=sum(len(record.faults) for record in records),
        target=target,
        target_cost=cost,
        statistics_upload_bytes=sum(record.statistics_upload_bytes for record in records),
        statistics_download_bytes=sum(record.statistics_download_bytes for record in records),
        first_loss=records[0].loss if records else None,
        simulated_seconds=records[-1].simulated_seconds if records else None,
    )
