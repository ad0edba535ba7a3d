"""The result of a run, in the numbers people compare; and the picture of a comparison."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.core.types import Float64Array
from aqg.runs.config import RunConfig
from aqg.runs.cost import Cost, add_bytes
from aqg.runs.directory import Line, finite_or_none, metric_fields
from aqg.runs.stopping import Target, has_diverged

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        """Build the curves from the rounds, and the loss and the metrics after the last."""
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
        """What the clients sent and received."""
        return add_bytes(self.upload_bytes, self.download_bytes)

    @property
    def test_accuracy(self) -> float | None:
        """The accuracy on the test set, where it was measured."""
        return self.metrics.get("accuracy")

    @property
    def diverged(self) -> bool:
        """Whether the loss left all use."""
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
    """A finished run: its results and its curves."""

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
    """Sum up a finished run; ``minimum`` is ``f*`` where it is known."""
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


_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555", "#8C510A")
_STYLES = ("-", "--", "-.", ":")


def draw_comparison(results: Sequence[Result], minimum: float | None) -> bytes:
    """Draw loss and metrics against rounds, bytes uploaded and bytes downloaded; return a PNG.

    Where the downloads of some run are not on record: against rounds, uploads and bytes uploaded.
    Where time is simulated, against that as well.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = list(dict.fromkeys(name for r in results for name in r.summary.metrics))
    num_rows = 1 + len(metrics)
    has_time = all(result.summary.simulated_seconds is not None for result in results)
    num_columns = 3 + has_time
    figure = Figure(figsize=(4 * num_columns, 4.2 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(num_rows, num_columns, sharey="row", squeeze=False)
    has_downloads = all(result.summary.total_bytes is not None for result in results)
    for index, result in enumerate(results):
        _draw_curves(rows[0], index, result, _losses(result, minimum), has_downloads)
        for axes, name in zip(rows[1:], metrics, strict=True):
            heights = [row.get(name, np.nan) for row in result.trace.metrics]
            _draw_curves(axes, index, result, np.array(heights, np.float64), has_downloads)
    config = results[0].config
    titles = (f"test {name.replace('_', ' ')}" for name in metrics)
    names = ("loss" if minimum is None else "loss − minimum", *titles)
    for axes, name in zip(rows, names, strict=True):
        axes[0].set_ylabel(name)
    sizes = ("bytes uploaded", "bytes downloaded")
    labels = ("round", *(sizes if has_downloads else ("uploads", sizes[0])))
    costs = (*labels, "simulated seconds")[:num_columns] * num_rows
    for axis, label in zip(rows.flat, costs, strict=True):
        axis.set_xlabel(label)
        if label in (*sizes, "uploads") and any(
            np.isfinite(line.get_xdata()).any() for line in axis.lines
        ):
            axis.set_xscale("log")  # which needs a point: runs may have diverged at once
        axis.grid(True, which="major", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    if any(np.isfinite(line.get_ydata()).any() for line in rows[0][0].lines):
        rows[0][0].set_yscale("log")
    rows[0][0].legend(frameon=False)
    dropout = f", dropout {config.dropout:g}" if config.dropout else ""
    figure.suptitle(f"{config.title}{dropout}", fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _losses(result: Result, minimum: float | None) -> Float64Array:
    losses = np.array(result.trace.losses)
    heights = losses if minimum is None else losses - minimum
    return np.where(np.isfinite(heights) & (heights > 0), heights, np.nan)


def _draw_curves(
    axes: Sequence[Axes], index: int, result: Result, heights: Float64Array, has_downloads: bool
) -> None:
    """Draw one run against all costs that have a panel, without the rounds that have no value."""
    trace = result.trace
    color = _COLORS[index % len(_COLORS)]
    known = np.isfinite(heights)
    rounds = np.array([cost.rounds for cost in trace.costs], np.float64)
    uploads = [cost.uploads for cost in trace.costs]
    sent = [cost.upload_bytes for cost in trace.costs]
    received = [cost.download_bytes for cost in trace.costs]
    pair = np.array((sent, received) if has_downloads else (uploads, sent), np.float64)
    pair[pair == 0] = np.nan  # a logarithmic axis has no zero
    seconds = np.array([cost.simulated_seconds or 0.0 for cost in trace.costs])
    for axis, x in zip(axes, (rounds, *pair, seconds), strict=False):
        axis.plot(
            x[known],
            heights[known],
            color=color,
            linestyle=_STYLES[index // len(_COLORS) % len(_STYLES)],
            label=result.config.recipe,
            linewidth=1.6,
        )
        axis.plot(x[known][-1:], heights[known][-1:], "o", color=color, markersize=4)
