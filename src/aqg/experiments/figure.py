"""The picture of a comparison: the same curves against rounds, uploads and bytes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from aqg.experiments.runner import Result

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555", "#8C510A")
_STYLES = ("-", "--", "-.", ":")


def draw_comparison(results: Sequence[Result], minimum: float | None) -> bytes:
    """Draw loss against rounds, uploads and uploaded bytes; return a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3, sharey=True)
    for index, result in enumerate(results):
        _draw_curves(axes, index, result, minimum)
    config = results[0].config
    axes[0].set_ylabel("loss" if minimum is None else "loss − minimum")
    for axis, label in zip(axes, ("round", "uploads", "bytes uploaded"), strict=True):
        axis.set_xlabel(label)
        axis.grid(True, which="major", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xscale("log")
    axes[2].set_xscale("log")
    axes[0].set_yscale("log")
    axes[0].legend(frameon=False)
    dropout = f", dropout {config.dropout:g}" if config.dropout else ""
    figure.suptitle(f"{config.title}{dropout}", fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _draw_curves(axes: Sequence[Axes], index: int, result: Result, minimum: float | None) -> None:
    trace = result.trace
    losses = np.array(trace.losses)
    heights = losses if minimum is None else losses - minimum
    heights = np.where(np.isfinite(heights) & (heights > 0), heights, np.nan)
    color = _COLORS[index % len(_COLORS)]
    rounds = np.array([cost.rounds for cost in trace.costs], np.float64)
    uploads = np.array([cost.uploads for cost in trace.costs], np.float64)
    num_bytes = np.array([cost.upload_bytes for cost in trace.costs], np.float64)
    uploads[uploads == 0] = np.nan  # a logarithmic axis has no zero
    num_bytes[num_bytes == 0] = np.nan
    for axis, x in zip(axes, (rounds, uploads, num_bytes), strict=True):
        axis.plot(
            x,
            heights,
            color=color,
            linestyle=_STYLES[index // len(_COLORS) % len(_STYLES)],
            label=result.config.recipe,
            linewidth=1.6,
        )
        axis.plot(x[-1], heights[-1], "o", color=color, markersize=4)
