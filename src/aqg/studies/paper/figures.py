"""The paper's figures, drawn from our curves: loss against iterations, uploads and bits.

A line is the median over seeds, and the band around it their range. The paper prints no data for
its curves, so its Table 2 stands in for them: a diamond marks what the paper says it took to come
within 1e-6 of the minimum. Figures have the paper's numbers.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.report.curves import Band, Points, combine
from aqg.report.pictures import new_figure, tidy
from aqg.runs.files import write_atomically
from aqg.studies.paper.outcomes import (
    RUN_DIRECTORY,
    Outcome,
    Results,
    adopt_devices,
    collect,
    count_runs,
    describe,
    main_reading,
    write_results,
)
from aqg.studies.paper.plan import (
    BY_SOURCE,
    DROPOUT_RECIPES,
    NETWORK_RECIPES,
    PAPER_RESIDUAL,
    TABLE_2,
    TABLE_RECIPES,
    PaperRow,
    PlannedRun,
    Scale,
)
from aqg.studies.paper.tables import SPLITS, all_tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "lean": "#0072B2",
    "auto": "#8C510A",
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
_CEILING = 1e4
_DPI = 100
FIGURE_DIRECTORY = "figures"
TABLES = "tables.md"


def all_figures(results: Results) -> dict[str, bytes]:
    figures: dict[str, bytes | None] = {
        "figure-5-logistic-iid": _comparison(results, "logistic", "iid", "logistic-iid"),
        "figure-6-network-iid": _comparison(results, "softmax", "iid", "network-iid"),
        "figure-7-logistic-noniid": _comparison(results, "logistic", BY_SOURCE, "logistic-noniid"),
        "figure-8-network-noniid": _comparison(results, "softmax", "label", "network-noniid"),
    }
    for partition, suffix in (("iid", "iid"), ("label", "noniid")):
        for number, rates in ((9, (0.2, 0.5, 0.7)), (10, (0.8, 0.9))):
            name = f"figure-{number}-dropouts-{suffix}"
            figures[name] = _dropouts(results, partition, rates)
    figures["network-784-200-10"] = _network(results)
    return {name: picture for name, picture in figures.items() if picture is not None}


def _comparison(results: Results, section: str, partition: str, setting: str) -> bytes | None:
    outcomes = results.select(section=section, partition=partition)
    model = "MNIST, 784→10 softmax"
    reading = main_reading(results.outcomes)
    if section == "logistic" and reading is not None:
        outcomes = [o for o in outcomes if (o.scaling, o.alpha) == reading]
        model = f"logistic regression, {reading[0]} loss, α = {reading[1]:g}"
    rows = []
    if section == "softmax" and results.about["softmax_residual"] == PAPER_RESIDUAL:
        rows = [row for row in TABLE_2 if row.setting == setting]
    title = f"{model}, {SPLITS[partition]}"
    panels = {"loss − minimum": outcomes} if outcomes else {}
    return _figure(results, panels, TABLE_RECIPES, title, paper=rows)


def _dropouts(results: Results, partition: str, rates: Sequence[float]) -> bytes | None:
    outcomes = results.select(section="dropouts", partition=partition)
    by_rate = {rate: [o for o in outcomes if o.dropout == rate] for rate in rates}
    panels = {f"loss − minimum, p = {rate:g}": own for rate, own in by_rate.items() if own}
    title = f"MNIST, 784→10 softmax with dropouts, {SPLITS[partition]}"
    return _figure(results, panels, DROPOUT_RECIPES, title, limits=(_FLOOR, 1e2))


def _network(results: Results) -> bytes | None:
    by_split = {p: results.select(section="network", partition=p) for p in ("iid", "label")}
    panels = {f"loss, {SPLITS[p]}": own for p, own in by_split.items() if own}
    title = "MNIST, 784-200-10 network"
    return _figure(results, panels, NETWORK_RECIPES, title, limits=(0.4, 1e3))


def _figure(
    results: Results,
    panels: Mapping[str, Sequence[Outcome]],
    recipes: Sequence[str],
    title: str,
    limits: tuple[float, float] | None = None,
    paper: Sequence[PaperRow] = (),
) -> bytes | None:
    """Draw a row of panels for each label; None without any. ``paper`` has counts to mark."""
    if not panels:
        return None
    figure = new_figure(11, 0.7 + 3.1 * len(panels))
    rows = figure.subplots(len(panels), len(_PANELS), sharey="row", squeeze=False)
    for axes, (label, outcomes) in zip(rows, panels.items(), strict=True):
        for recipe in recipes:
            _draw(axes, results, [o for o in outcomes if o.recipe == recipe], recipe)
        for row in paper:
            counts = (row.rounds, row.uploads, row.bits)
            for axis, count in zip(axes, counts, strict=True):
                axis.plot(count, 1e-6, "D", mfc="none", mec=COLORS[row.recipe], ms=7, mew=1.6)
        if paper:
            axes[0].plot([], [], "D", mfc="none", mec="#333333", ms=7, label="paper, Table 2")
        if limits is not None:
            axes[0].set_ylim(*limits)
        _finish(axes, label)
    count = len({o.seed for outcomes in panels.values() for o in outcomes})
    seeds = f"median and range of {count} seeds" if count > 1 else "one seed"
    figure.suptitle(f"{title}; {seeds}")
    return _png(figure)


def _draw(axes: Sequence[Axes], results: Results, outcomes: Sequence[Outcome], recipe: str) -> None:
    shown = [o for o in outcomes if o.name in results.curves]
    if not shown:
        return
    look: dict[str, Any] = {"color": COLORS[recipe], "linewidth": 1.7, "label": recipe}
    look["linestyle"] = "--" if recipe in ("gd", "auto") else "-"  # they hide others otherwise
    for axis, (name, _) in zip(axes, _PANELS, strict=True):
        band = band_of(results, shown, name)
        seen = band.x >= (0 if name == "rounds" else 1)  # a logarithmic axis has no zero
        axis.plot(band.x[seen], band.median[seen], zorder=3 if recipe == "lean" else 2, **look)
        if len(shown) > 1:
            ends = band.low[seen], band.high[seen]
            axis.fill_between(band.x[seen], *ends, color=COLORS[recipe], alpha=0.18, linewidth=0)


def band_of(results: Results, outcomes: Sequence[Outcome], name: str) -> Band:
    """Return the height of some runs above the minimum, against the cost of that name.

    Between two points of a curve the logarithm of the height is taken to be a straight line. A run
    that has diverged stays at the ceiling.
    """
    curves = []
    for outcome in outcomes:
        curve = results.curves[outcome.name]
        losses = np.nan_to_num(np.array(curve.losses), nan=np.inf, posinf=np.inf)
        heights = np.clip(losses - (outcome.minimum or 0.0), _FLOOR / 10, _CEILING)
        costs = np.array([getattr(cost, name) for cost in curve.costs], np.float64)
        curves.append(Points(costs, np.log(heights)))
    band = combine(curves)
    assert band is not None, "a curve has its first point"
    return Band(band.x, np.exp(band.median), np.exp(band.low), np.exp(band.high))


def _finish(axes: Sequence[Axes], ylabel: str) -> None:
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
        tidy(axis)
    axes[0].legend(frameon=False, fontsize=8, loc="best")


def _png(figure: Any) -> bytes:
    """Write with a palette: a few dozen colors are all there is, in half of the bytes."""
    from PIL import Image

    drawn, packed = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI)
    with Image.open(drawn) as image:
        colors = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        colors.save(packed, format="png", optimize=True)
    return packed.getvalue()


def keep_results(plan: Sequence[PlannedRun], scale: Scale, directory: Path) -> Results:
    plan = adopt_devices(plan, directory)
    results = collect(plan, directory / RUN_DIRECTORY, describe(plan, scale))
    results = replace(results, about={**results.about, **count_runs(plan, results.outcomes)})
    write_results(directory, results)
    write_views(directory, results)
    return results


def write_views(directory: Path, results: Results) -> None:
    """Write the tables as Markdown and, where matplotlib is installed, the figures as PNG."""
    text = "\n".join(table.to_markdown() for table in all_tables(results))
    write_atomically(directory / TABLES, text.encode())
    if find_spec("matplotlib") is None:
        return
    figures = directory / FIGURE_DIRECTORY
    figures.mkdir(exist_ok=True)
    for name, picture in all_figures(results).items():
        write_atomically(figures / f"{name}.png", picture)
