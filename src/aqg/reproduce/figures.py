"""The paper's figures, drawn from our curves: loss against iterations, uploads and bits.

The paper prints no data for its curves, so its Table 1 stands in for them: a diamond marks what the
paper says it took to come within 1e-6 of the minimum.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.reproduce.cells import SPLITS
from aqg.reproduce.paper import table_one
from aqg.reproduce.plan import DROPOUT_RECIPES, MAIN_READING, NETWORK_RECIPES, TABLE_RECIPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from aqg.reproduce.outcomes import Outcome, Results

COLORS = {
    "lean": "#0072B2",
    "aqg-2": "#D55E00",
    "aqg": "#E69F00",
    "aqg-augmented": "#CC79A7",
    "laq": "#009E73",
    "qgd": "#56B4E9",
    "gd": "#555555",
}
_PANELS = (
    ("rounds", "iteration"),
    ("uploads", "uploads"),
    ("bits_per_param", "bits per parameter"),
)
_FLOOR = 1e-7
_DPI = 100


def all_figures(results: Results) -> dict[str, bytes]:
    """Return PNG pictures by name, those that the results have runs for."""
    figures: dict[str, bytes | None] = {
        "figure-1-logistic-iid": _comparison(results, "logistic", "iid", "logistic-iid"),
        "figure-2-network-iid": _comparison(results, "softmax", "iid", "network-iid"),
        "figure-3-logistic-noniid": _comparison(results, "logistic", "source", "logistic-noniid"),
        "figure-4-network-noniid": _comparison(results, "softmax", "label", "network-noniid"),
    }
    for partition, suffix in (("iid", "iid"), ("label", "noniid")):
        for number, rates in ((5, (0.2, 0.5, 0.7)), (6, (0.8, 0.9))):
            name = f"figure-{number}-dropouts-{suffix}"
            figures[name] = _dropouts(results, partition, rates)
    figures["network-784-200-10"] = _network(results)
    return {name: picture for name, picture in figures.items() if picture is not None}


def _comparison(results: Results, section: str, partition: str, setting: str) -> bytes | None:
    outcomes = results.select(section=section, partition=partition)
    model = "MNIST, 784→10 softmax"
    if section == "logistic":
        outcomes = [o for o in outcomes if (o.scaling, o.alpha) == MAIN_READING]
        model = f"logistic regression, {MAIN_READING[0]} loss, α = {MAIN_READING[1]:g}"
    if not outcomes:
        return None
    figure, (axes,) = _panels(1)
    for recipe in TABLE_RECIPES:
        _draw(axes, results, [o for o in outcomes if o.recipe == recipe], recipe)
    if section == "softmax" and results.about["softmax_residual"] == 1e-6:
        for row in (row for row in table_one() if row.setting == setting):
            counts = (row.rounds, row.uploads, row.bits)
            for axis, count in zip(axes, counts, strict=True):
                axis.plot(count, 1e-6, "D", mfc="none", mec=COLORS[row.recipe], ms=7, mew=1.6)
        axes[0].plot([], [], "D", mfc="none", mec="#333333", ms=7, label="paper, Table 1")
    _finish(figure, axes, f"{model}, {SPLITS[partition]}", "loss − minimum")
    return _png(figure)


def _dropouts(results: Results, partition: str, rates: Sequence[float]) -> bytes | None:
    outcomes = results.select(section="dropouts", partition=partition)
    present = [rate for rate in rates if any(o.dropout == rate for o in outcomes)]
    if not present:
        return None
    figure, rows = _panels(len(present))
    for axes, rate in zip(rows, present, strict=True):
        for recipe in DROPOUT_RECIPES:
            ours = [o for o in outcomes if o.recipe == recipe and o.dropout == rate]
            _draw(axes, results, ours, recipe)
        axes[0].set_ylim(_FLOOR, 1e2)
        _finish(figure, axes, "", f"loss − minimum, p = {rate:g}")
    figure.suptitle(f"MNIST, 784→10 softmax with dropouts, {SPLITS[partition]}; a line per seed")
    return _png(figure)


def _network(results: Results) -> bytes | None:
    outcomes = results.select(section="network")
    partitions = [p for p in ("iid", "label") if any(o.partition == p for o in outcomes)]
    if not partitions:
        return None
    figure, rows = _panels(len(partitions))
    for axes, partition in zip(rows, partitions, strict=True):
        for recipe in NETWORK_RECIPES:
            ours = [o for o in outcomes if o.recipe == recipe and o.partition == partition]
            _draw(axes, results, ours, recipe)
        axes[0].set_ylim(0.4, 1e3)
        _finish(figure, axes, "", f"loss, {SPLITS[partition]}")
    figure.suptitle("MNIST, 784-200-10 network: the published rules fail")
    return _png(figure)


def _panels(num_rows: int) -> tuple[Any, list[Sequence[Axes]]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 0.7 + 3.1 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(num_rows, 3, sharey="row", squeeze=False)
    return figure, list(axes)


def _draw(axes: Sequence[Axes], results: Results, outcomes: Sequence[Outcome], recipe: str) -> None:
    """Draw a line per seed in every panel."""
    for number, outcome in enumerate(outcomes):
        curve = results.curves[outcome.name]
        heights = np.array(curve.losses) - (outcome.minimum or 0.0)
        heights = np.where(np.isfinite(heights), heights, np.nan)
        heights = np.where(heights < _FLOOR, _FLOOR / 10, heights)
        for axis, (name, _) in zip(axes, _PANELS, strict=True):
            costs = np.array([getattr(cost, name) for cost in curve.costs], np.float64)
            costs[costs == 0] = np.nan  # a logarithmic axis has no zero
            axis.plot(
                costs,
                heights,
                color=COLORS[recipe],
                linestyle="--" if recipe == "gd" else "-",  # it hides qgd otherwise
                linewidth=1.7 if len(outcomes) == 1 else 1.0,
                alpha=1.0 if len(outcomes) == 1 else 0.75,
                label=recipe if number == 0 else None,
                zorder=3 if recipe == "lean" else 2,
            )


def _finish(figure: Any, axes: Sequence[Axes], title: str, ylabel: str) -> None:
    from matplotlib.ticker import NullFormatter

    axes[0].set_yscale("log")
    if axes[0].get_ylim()[0] < _FLOOR:
        axes[0].set_ylim(bottom=_FLOOR)
    axes[0].set_ylabel(ylabel)
    for axis, (name, label) in zip(axes, _PANELS, strict=True):
        axis.set_xlabel(label)
        if name != "rounds":
            axis.set_xscale("log")
            axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(True, which="major", color="#e2e2e2", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    legend = axes[0].legend(frameon=False, fontsize=8, loc="best")
    for line in legend.get_lines():
        line.set_alpha(1.0)
    if title:
        figure.suptitle(title)


def _png(figure: Any) -> bytes:
    """Write with a palette: a few dozen colors are all there is, in half of the bytes."""
    from PIL import Image

    drawn, packed = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI)
    with Image.open(drawn) as image:
        colors = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        colors.save(packed, format="png", optimize=True)
    return packed.getvalue()
