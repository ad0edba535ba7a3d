"""The picture of a comparison: the same curves against rounds, bytes up and bytes down."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from aqg.core.types import Float64Array
    from aqg.runs.loop import Result

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555", "#8C510A")
_STYLES = ("-", "--", "-.", ":")


def draw_comparison(results: Sequence[Result], minimum: float | None) -> bytes:
    """Draw loss and metrics against rounds, bytes uploaded and bytes downloaded; return a PNG.

    Where the downloads of some run are not on record: against rounds, uploads and bytes uploaded.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = list(dict.fromkeys(name for r in results for name in r.summary.metrics))
    num_rows = 1 + len(metrics)
    figure = Figure(figsize=(12, 4.2 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(num_rows, 3, sharey="row", squeeze=False)
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
    costs = ("round", *(sizes if has_downloads else ("uploads", sizes[0]))) * num_rows
    for axis, label in zip(rows.flat, costs, strict=True):
        axis.set_xlabel(label)
        axis.set_xscale("linear" if label == "round" else "log")
        axis.grid(True, which="major", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
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
    """Draw one run against all three costs, without the rounds that have no value."""
    trace = result.trace
    color = _COLORS[index % len(_COLORS)]
    known = np.isfinite(heights)
    rounds = np.array([cost.rounds for cost in trace.costs], np.float64)
    uploads = [cost.uploads for cost in trace.costs]
    sent = [cost.upload_bytes for cost in trace.costs]
    received = [cost.download_bytes for cost in trace.costs]
    pair = np.array((sent, received) if has_downloads else (uploads, sent), np.float64)
    pair[pair == 0] = np.nan  # a logarithmic axis has no zero
    for axis, x in zip(axes, (rounds, *pair), strict=True):
        axis.plot(
            x[known],
            heights[known],
            color=color,
            linestyle=_STYLES[index // len(_COLORS) % len(_STYLES)],
            label=result.config.recipe,
            linewidth=1.6,
        )
        axis.plot(x[known][-1:], heights[known][-1:], "o", color=color, markersize=4)
