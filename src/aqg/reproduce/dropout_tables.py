"""The paper's story of dropouts, over several seeds."""

from __future__ import annotations

from statistics import fmean, median
from typing import TYPE_CHECKING

from aqg.reproduce.cells import SPLITS, Table, size
from aqg.reproduce.plan import DROPOUT_RECIPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.reproduce.outcomes import Outcome, Results


def dropout_table(results: Results) -> Table:
    """Return what it takes to reach the residual, and how many seeds do."""
    residual = results.about["dropout_residual"]
    outcomes = results.select(section="dropouts")
    rows = []
    for partition in ("iid", "label"):
        for rate in sorted({o.dropout for o in outcomes if o.partition == partition}):
            cells = []
            for recipe in DROPOUT_RECIPES:
                ours = results.select(
                    section="dropouts", partition=partition, dropout=rate, recipe=recipe
                )
                cells.append(_dropout_cell(ours, residual))
            rows.append((SPLITS[partition], f"{rate:g}", *cells))
    rounds = results.about["dropout_rounds"]
    return Table(
        "dropouts",
        f"Dropouts: rounds / bits per parameter / bytes to stay within {residual:g} of f*",
        f"784→10, {rounds} rounds, means over seeds and in brackets the range of bits. k/n: only k "
        "of n seeds arrived, and the median residual at the end; ×: ended above its first loss.",
        ("split", "p", *(f"`{recipe}`" for recipe in DROPOUT_RECIPES)),
        tuple(rows),
    )


def dropout_claims_table(results: Results) -> Table:
    """Return the paper's statements on dropouts, seed by seed."""
    residual = results.about["dropout_residual"]
    outcomes = results.select(section="dropouts")
    rows = []
    for partition in ("iid", "label"):
        for rate in sorted({o.dropout for o in outcomes if o.partition == partition}):
            by_recipe = {
                recipe: {
                    o.seed: o
                    for o in results.select(
                        section="dropouts", partition=partition, dropout=rate, recipe=recipe
                    )
                }
                for recipe in DROPOUT_RECIPES
            }
            rows.append(
                (
                    SPLITS[partition],
                    f"{rate:g}",
                    _versus(by_recipe["aqg-2"], by_recipe["laq"], residual),
                    _versus(by_recipe["aqg-augmented"], by_recipe["aqg-2"], residual),
                    _arrivals(by_recipe["aqg-2"], residual),
                    _arrivals(by_recipe["aqg-augmented"], residual),
                    _arrivals(by_recipe["lean"], residual),
                )
            )
    return Table(
        "dropout-claims",
        f"The paper's claims on dropouts, seed by seed (residual {residual:g})",
        "Ratios of bits, seed by seed: mean and range over the seeds where both arrive.",
        (
            "split",
            "p",
            "two-level / LAQ",
            "augmented / two-level",
            "two-level arrives",
            "augmented arrives",
            "`lean` arrives",
        ),
        tuple(rows),
    )


def _dropout_cell(outcomes: Sequence[Outcome], residual: float) -> str:
    if not outcomes:
        return "-"
    num_lost = sum(outcome.ran_away for outcome in outcomes)
    if num_lost == len(outcomes):
        return f"× ({num_lost}/{num_lost})"
    costs = [cost for o in outcomes if (cost := o.reached.get(residual)) is not None]
    text = ""
    if costs:
        bits = [cost.bits_per_param for cost in costs]
        spent = size(fmean(cost.upload_bytes for cost in costs))
        text = f"{fmean(cost.rounds for cost in costs):.0f} / {fmean(bits):.0f} / {spent}"
        if min(bits) < max(bits):
            text += f" [{min(bits)}..{max(bits)}]"
    if len(costs) == len(outcomes):
        return text
    at = median(outcome.residual for outcome in outcomes)
    missing = f"{len(costs)}/{len(outcomes)}, ends at {at:.0e}"
    if num_lost:
        missing += f", {num_lost} ×"
    return f"{text} ({missing})" if text else f"- ({missing})"


def _versus(ours: dict[int, Outcome], other: dict[int, Outcome], residual: float) -> str:
    """Compare bits seed by seed, where both arrive."""
    ratios = []
    for seed, outcome in ours.items():
        left = outcome.reached.get(residual)
        right = other[seed].reached.get(residual) if seed in other else None
        if left is not None and right is not None:
            ratios.append(left.bits_per_param / right.bits_per_param)
    if not ratios:
        return "-"
    spread = f" [{min(ratios):.2f}..{max(ratios):.2f}]" if len(ratios) > 1 else ""
    return f"{fmean(ratios):.2f}{spread}"


def _arrivals(outcomes: dict[int, Outcome], residual: float) -> str:
    arrived = sum(residual in outcome.reached for outcome in outcomes.values())
    num_lost = sum(outcome.ran_away for outcome in outcomes.values())
    text = f"{arrived} of {len(outcomes)}"
    return f"{text}, {num_lost} ×" if num_lost else text
