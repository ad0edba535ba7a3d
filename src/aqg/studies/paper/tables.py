"""The paper's Table 2 and its figures beside ours, and a table for each part that was run.

In figures a line is the median over seeds, and the band around it their range. The paper prints no
data for its curves, so its Table 2 stands in for them: a diamond marks what the paper says it took
to come within 1e-6 of the minimum. Figures have the paper's numbers. Tables for the pages about the
paper are made in ``papers/``.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.report.curves import Band, Points, combine
from aqg.report.pictures import new_figure, tidy
from aqg.report.runs import COLORS as PALETTE
from aqg.runs.files import write_atomically
from aqg.runs.table import Table, format_bytes
from aqg.studies.paper import plan
from aqg.studies.paper.outcomes import CONVERGED, ROUNDING, Outcome, Results, keep, paired_ratios

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {
    "logistic-iid": "logistic, IID",
    "logistic-noniid": "logistic, non-IID",
    "network-iid": "network, IID",
    "network-noniid": "network, non-IID",
}
SPLITS = {"iid": "IID", "label": "one digit per client", plan.BY_SOURCE: "by source"}
HEADER_2 = ("setting", "recipe", "rounds", "uploads", "bits/param", "saves", "uploaded", "seeds")


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def whole(count: float) -> str:
    return f"{count:,.0f}"


def out_of(part: int, total: int) -> str:
    return f"{part} of {total}"


def span(values: Sequence[float], form: Callable[[float], str] = whole) -> str:
    """Write the median and, in brackets, the range.

    >>> span([3, 1, 2]), span([4]), span([0.4, 0.42], percent), span([])
    ('2 [1..3]', '4', '41 % [40..42 %]', '-')
    """
    if not values:
        return "-"
    middle, low, high = form(median(values)), form(min(values)), form(max(values))
    if low == high:
        return middle
    unit = " " + high.split(" ")[-1] if " " in high else ""
    return f"{middle} [{low.removesuffix(unit)}..{high}]"


def beside(paper: int | None, ours: Sequence[float]) -> str:
    """Write the paper's figure beside ours.

    >>> beside(854, [821.0, 830, 840]), beside(None, [476.0]), beside(921, [])
    ('854 / 830 [821..840]', '476', '921 / -')
    """
    return f"{paper:,} / {span(ours)}" if paper else span(ours)


def is_comparable(results: Results) -> bool:
    return bool(results.about["softmax_residual"] == plan.PAPER_RESIDUAL)


def all_tables(results: Results) -> list[Table]:
    sections = dict.fromkeys(o.section for o in results.outcomes)
    tables = [table_2(results), *(section_table(results, name) for name in sections)]
    return [table for table in (*tables, rounding_table(results)) if table.rows]


def rows_of_table_2(
    results: Results,
) -> Iterator[tuple[str, list[Outcome], str, tuple[str, ...], str]]:
    """Yield setting, our runs, what the paper saves, its counts beside ours, and our bytes."""
    paper = {(row.setting, row.recipe): row for row in plan.TABLE_2}
    for setting, recipe in product(plan.BLOCKS, plan.TABLE_RECIPES):
        if ours := results.of_setting(setting, recipe):
            has_paper = is_comparable(results) or setting.startswith("logistic")
            row = paper.get((setting, recipe)) if has_paper else None
            costs = [cost for o in ours if (cost := results.cost_of(o)) is not None]
            counts = (
                beside(row and row.rounds, [cost.rounds for cost in costs]),
                beside(row and row.uploads, [cost.uploads for cost in costs]),
                beside(row and row.bits, [cost.bits_per_param for cost in costs]),
            )
            told = f"{percent(row.saving)} / " if row and row.saving else ""
            uploaded = span([cost.upload_bytes for cost in costs], format_bytes)
            yield setting, ours, told, (LABELS[setting], f"`{recipe}`", *counts), uploaded


def table_2(results: Results) -> Table:
    rows = []
    for setting, ours, told, counts, uploaded in rows_of_table_2(results):
        laq, cost_of = results.of_setting(setting, "laq"), results.cost_to_the_end
        saved = [1 - ratio for ratio in paired_ratios(ours, laq, cost_of)]
        saves = told + span([] if ours[0].recipe in ("laq", *plan.ALWAYS_SEND) else saved, percent)
        num_done = sum(cost_of(o) is not None for o in ours)
        rows.append((*counts, saves, uploaded, out_of(num_done, len(ours))))
    note = (
        "Logistic: 500 rounds. Network: 784→10, until the loss stays within "
        f"{results.about['softmax_residual']:g} of its minimum. Median and range over the seeds "
        "that get there (logistic: of all), and how many do; `saves` is of LAQ's bits, seed by "
        "seed. Where one figure stands alone, the paper has none."
    )
    return Table("table2", "The paper's Table 2: the paper / ours", note, HEADER_2, tuple(rows))


def section_table(results: Results, section: str) -> Table:
    """Return what each recipe needs to reach the section's target, for every setting of it."""
    groups: dict[tuple[str, str], dict[str, list[Outcome]]] = {}
    for o in results.select(section=section):
        varied = {"logistic": f"{o.scaling}, α = {o.alpha:g}", "dropouts": f"p = {o.dropout:g}"}
        own = groups.setdefault((SPLITS[o.partition], varied.get(section, "")), {})
        own.setdefault(o.recipe, []).append(o)
    recipes = list(dict.fromkeys(recipe for own in groups.values() for recipe in own))
    rows = tuple(
        (*key, *(_cell(results, own[recipe]) if recipe in own else "-" for recipe in recipes))
        for key, own in groups.items()
    )
    goals = {"softmax": "softmax_residual", "dropouts": "dropout_residual"}
    until = "in all rounds"
    if section in goals:
        until = f"until the loss stays within {results.about[goals[section]]:g} of its minimum"
    note = (
        f"Medians of uploads / bits per parameter / bytes uploaded {until}; k of n: so many seeds "
        "get there or, without a target, converge. Below, the median end."
    )
    header = ("split", "setting", *(f"`{recipe}`" for recipe in recipes))
    return Table(section, section.capitalize(), note, header, rows, 2)


def _cell(results: Results, runs: Sequence[Outcome]) -> str:
    costs = [cost for o in runs if (cost := results.cost_to_the_end(o)) is not None]
    end = median(o.final_loss if o.minimum is None else o.residual for o in runs)
    text = "-"
    if costs:
        sizes = (median(cost.uploads for cost in costs), median(c.bits_per_param for c in costs))
        uploaded = format_bytes(median(cost.upload_bytes for cost in costs))
        text = f"{sizes[0]:,.0f} / {sizes[1]:,.0f} / {uploaded}"
    if len(costs) < len(runs):
        text += f" ({out_of(len(costs), len(runs))})"
    known = [o.test_accuracy for o in runs if o.test_accuracy is not None and not o.diverged]
    accuracy = f", accuracy {median(known):.1%}" if known else ""
    kind = "loss" if runs[0].minimum is None else "residual"
    return f"{text}<br>{kind} {end:.1e}{accuracy}"


def rounding_table(results: Results) -> Table:
    """Return what a change of the data in the last bit does to one seed's counts."""
    groups: dict[tuple[str, str, float], list[tuple[int, int, float]]] = {}
    for one in results.perturbed:
        row = one.uploads, one.uploads_before, one.residual
        groups.setdefault(one.key[:3], []).append(row)
    rows = tuple(
        (
            *(SPLITS[partition], f"`{recipe}`, α = {alpha:g}", span([r[0] for r in own])),
            *(span([r[1] for r in own]), out_of(sum(r[2] < CONVERGED for r in own), len(own))),
        )
        for (partition, recipe, alpha), own in groups.items()
    )
    before = f"before {ROUNDING:g} of the minimum"
    title = "Logistic regression with the data changed in the last bit"
    header = ("split", "recipe", "uploads", before, "converge")
    return Table("rounding", title, "Uploads of seed 0.", header, rows, 2)


_IN_COLOR_ORDER = ("lean", "aqg-2", "laq", "aqg-augmented", "aqg", "qgd", "gd", "auto")
COLORS = dict(zip(_IN_COLOR_ORDER, PALETTE, strict=False))
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
    figures: dict[str, bytes] = {}

    def draw(name: str, panels: Mapping[str, Sequence[Outcome]], *about: Any) -> None:
        if shown := {label: own for label, own in panels.items() if own}:
            figures[name] = _figure(results, shown, *about)

    reading = results.reading
    for number, (setting, (section, partition)) in zip(
        (5, 7, 6, 8), plan.BLOCKS.items(), strict=True
    ):
        runs = results.select(section=section, partition=partition)
        title, paper = f"MNIST, 784→10 softmax, {SPLITS[partition]}", []
        if section == "logistic" and reading is not None:
            runs = [o for o in runs if (o.scaling, o.alpha) == reading]
            model = f"logistic regression, {reading[0]} loss, α = {reading[1]:g}"
            title = f"{model}, {SPLITS[partition]}"
        elif is_comparable(results):
            paper = [row for row in plan.TABLE_2 if row.setting == setting]
        name, panels = f"figure-{number}-{setting}", {"loss − minimum": runs}
        draw(name, panels, plan.TABLE_RECIPES, title, None, paper)
    for partition, suffix in (("iid", "iid"), ("label", "noniid")):
        runs = results.select(section="dropouts", partition=partition)
        title = f"MNIST, 784→10 softmax with dropouts, {SPLITS[partition]}"
        for number, rates in ((9, (0.2, 0.5, 0.7)), (10, (0.8, 0.9))):
            by_rate = {p: [o for o in runs if o.dropout == p] for p in rates}
            panels = {f"loss − minimum, p = {rate:g}": own for rate, own in by_rate.items()}
            name = f"figure-{number}-dropouts-{suffix}"
            draw(name, panels, plan.DROPOUT_RECIPES, title, (_FLOOR, 1e2))
    splits = {p: results.select(section="network", partition=p) for p in ("iid", "label")}
    panels = {f"loss, {SPLITS[p]}": own for p, own in splits.items()}
    title = "MNIST, 784-200-10 network"
    draw("network-784-200-10", panels, plan.NETWORK_RECIPES, title, (0.4, 1e3))
    return figures


def _figure(
    results: Results,
    panels: Mapping[str, Sequence[Outcome]],
    recipes: Sequence[str],
    title: str,
    limits: tuple[float, float] | None = None,
    paper: Sequence[plan.PaperRow] = (),
) -> bytes:
    """Draw a row of panels for each label; ``paper`` has counts to mark."""
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

    Between two points its logarithm is taken to be straight. Diverged runs stay at the ceiling.
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


def keep_results(runs: Sequence[plan.PlannedRun], scale: plan.Scale, directory: Path) -> Results:
    results = keep(runs, scale, directory)
    text = "\n".join(table.to_markdown() for table in all_tables(results))
    write_atomically(directory / TABLES, text.encode())
    if find_spec("matplotlib") is not None:
        figures = directory / FIGURE_DIRECTORY
        figures.mkdir(exist_ok=True)
        for name, picture in all_figures(results).items():
            write_atomically(figures / f"{name}.png", picture)
    return results
