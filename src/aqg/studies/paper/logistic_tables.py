"""Logistic regression near the edge of stability: step sizes, and the last bit."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from aqg.runs.table import Table
from aqg.studies.paper.cells import SPLITS, out_of, paired_ratios, percent, span
from aqg.studies.paper.outcomes import CONVERGED, main_reading
from aqg.studies.paper.plan import BY_SOURCE, PERTURBED_RECIPES
from aqg.studies.paper.rounding import ROUNDING
from aqg.studies.paper.settings import seeds_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.studies.paper.outcomes import Outcome, Results

_LAZY = ("laq", "aqg-2", "aqg", "lean", "auto")


def step_size_table(results: Results) -> Table:
    """Return logistic regression at every reading of the loss, and what is saved of LAQ's bits."""
    runs = results.select(section="logistic")
    readings = sorted({(o.scaling, o.alpha) for o in runs})
    shown = main_reading(runs)
    rows = []
    for partition in ("iid", BY_SOURCE):
        for reading in readings:
            here = {
                recipe: [
                    o
                    for o in runs
                    if (o.scaling, o.alpha) == reading
                    and (o.partition, o.recipe) == (partition, recipe)
                ]
                for recipe in ("gd", "qgd", *_LAZY)
            }
            mark = " ←" if reading == shown else ""
            rows.append(
                (
                    SPLITS[partition],
                    f"{reading[0]}, {reading[1]:g}{mark}",
                    *(_converged(here[recipe]) for recipe in ("gd", "qgd")),
                    *(_lazy_cell(here[recipe], here["laq"]) for recipe in _LAZY),
                )
            )
    return Table(
        "step-sizes",
        "Logistic regression by loss and α: uploads in 500 rounds",
        f"{seeds_text(results, 'logistic').capitalize()}. In parentheses the seeds that end within "
        f"{CONVERGED:g} of the minimum, if not all, with the median residual there; and the bits "
        "saved of LAQ's on the seeds where both do. `gd` and `qgd` always upload, and their "
        "columns say which seeds converge. ←: what Table 2 is compared with.",
        ("split", "loss, α", "`gd`", "`qgd`", *(f"`{recipe}`" for recipe in _LAZY)),
        tuple(rows) if runs else (),
    )


def _converged(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "-"
    return _ends(outcomes) or "all"


def _ends(outcomes: Sequence[Outcome]) -> str:
    """Say how many runs converged and where they ended, unless all did."""
    good = sum(o.converged for o in outcomes)
    if good == len(outcomes):
        return ""
    return f"{out_of(good, len(outcomes))}, ends at {median(o.residual for o in outcomes):.0e}"


def _lazy_cell(ours: Sequence[Outcome], laq: Sequence[Outcome]) -> str:
    if not ours:
        return "-"
    parts = [text] if (text := _ends(ours)) else []
    if ours[0].recipe != "laq":
        saved = [
            1 - r for r in paired_ratios(ours, laq, lambda o: o.total if o.converged else None)
        ]
        if saved:
            parts.append(f"saves {span(saved, percent)}")
    text = span([o.total.uploads for o in ours])
    return f"{text} ({', '.join(parts)})" if parts else text


def rounding_table(results: Results) -> Table:
    """Return what a change of the data in the last bit does to one seed's counts."""
    rows = []
    alphas = sorted({one.alpha for one in results.perturbed})
    for partition in ("iid", BY_SOURCE):
        for alpha in alphas:
            for recipe in PERTURBED_RECIPES:
                ours = [
                    one
                    for one in results.perturbed
                    if (one.partition, one.alpha, one.recipe) == (partition, alpha, recipe)
                ]
                if not ours:
                    continue
                plain = [one for one in ours if one.draw == 0]
                drawn = [one for one in ours if one.draw > 0]
                rows.append(
                    (
                        SPLITS[partition],
                        f"{alpha:g}",
                        f"`{recipe}`",
                        span([one.uploads for one in plain]),
                        span([one.uploads for one in drawn]),
                        span([one.uploads_before for one in ours]),
                        str(len({one.uploads for one in ours})),
                        str(len({one.uploads_before for one in ours})),
                        out_of(sum(one.residual < CONVERGED for one in ours), len(ours)),
                    )
                )
    return Table(
        "rounding",
        "Logistic regression with the data changed in the last bit",
        "Seed 0, summed losses, 500 rounds; every nonzero feature is left alone or moved by one "
        f"unit in the last place, at random. `before {ROUNDING:g}` are the uploads until the loss "
        "first comes so close to its minimum.",
        (
            "split",
            "α",
            "recipe",
            "uploads, data as they are",
            "uploads, last bit changed",
            f"uploads before {ROUNDING:g}",
            "different counts",
            f"before {ROUNDING:g}",
            "converge",
        ),
        tuple(rows),
    )
