"""The paper's story of dropouts, over several seeds."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from aqg.runs.table import Table, format_bytes
from aqg.studies.paper.cells import SPLITS, costs_to, out_of, paired_ratios, span
from aqg.studies.paper.plan import DROPOUT_RECIPES
from aqg.studies.paper.settings import seeds_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aqg.studies.paper.outcomes import Outcome, Results

STRICT = 1e-6
"""The paper's residual for runs without dropouts."""


def with_dropouts(results: Results, partition: str, rate: float, recipe: str) -> list[Outcome]:
    """Return the runs of a recipe, one per seed."""
    return results.select(section="dropouts", partition=partition, dropout=rate, recipe=recipe)


def cells_of(results: Results) -> Iterator[tuple[str, float]]:
    """Return every split and rate that was run."""
    outcomes = results.select(section="dropouts")
    for partition in ("iid", "label"):
        for rate in sorted({o.dropout for o in outcomes if o.partition == partition}):
            yield partition, rate


def dropout_table(results: Results) -> Table:
    """Return what it takes to reach the residual, and how many seeds do."""
    residual = results.about["dropout_residual"]
    rows = [
        (
            SPLITS[partition],
            f"{rate:g}",
            *(
                _dropout_cell(with_dropouts(results, partition, rate, recipe), residual)
                for recipe in DROPOUT_RECIPES
            ),
        )
        for partition, rate in cells_of(results)
    ]
    return Table(
        "dropouts",
        f"Dropouts: rounds / bits per parameter / bytes uploaded to stay within {residual:g} of f*",
        f"784→10, {results.about['dropout_rounds']:,} rounds, {results.about['dtype']}; medians, "
        f"and for the bits the range, over the seeds that reach it; {_runs(results)}. k of n: so "
        "many reach it, and the median residual at the end of all; ×: ended above its first loss.",
        ("split", "p", *(f"`{recipe}`" for recipe in DROPOUT_RECIPES)),
        tuple(rows),
    )


def _runs(results: Results) -> str:
    return seeds_text(results, "dropouts").replace("median and range over ", "")


def _dropout_cell(outcomes: Sequence[Outcome], residual: float) -> str:
    if not outcomes:
        return "-"
    num_lost = sum(outcome.ran_away for outcome in outcomes)
    if num_lost == len(outcomes):
        return f"× ({out_of(num_lost, num_lost)})"
    costs = costs_to(outcomes, residual)
    text = "-"
    if costs:
        rounds = f"{median(cost.rounds for cost in costs):,.0f}"
        bits = span([cost.bits_per_param for cost in costs])
        text = f"{rounds} / {bits} / {format_bytes(median(cost.upload_bytes for cost in costs))}"
    if len(costs) == len(outcomes):
        return text
    at = median(outcome.residual for outcome in outcomes)
    missing = f"{out_of(len(costs), len(outcomes))}, ends at {at:.0e}"
    if num_lost:
        missing += f", {num_lost} ×"
    return f"{text} ({missing})"


def dropout_arrivals_table(results: Results) -> Table:
    """Return how many seeds arrive at two residuals, and bits compared seed by seed."""
    residual = results.about["dropout_residual"]
    rows = []
    for partition, rate in cells_of(results):
        runs = {
            recipe: with_dropouts(results, partition, rate, recipe) for recipe in DROPOUT_RECIPES
        }
        rows.append(
            (
                SPLITS[partition],
                f"{rate:g}",
                versus(runs["aqg-2"], runs["laq"], residual),
                versus(runs["aqg-augmented"], runs["aqg-2"], residual),
                *(_arrivals(runs[recipe], residual) for recipe in DROPOUT_RECIPES),
            )
        )
    return Table(
        "dropout-arrivals",
        "Dropouts, seed by seed",
        f"Ratios of bits to stay within {residual:g}, over the seeds where both reach it. Then the "
        f"seeds that stay within {residual:g}, at {STRICT:g}, and × those that ended above "
        f"their first loss; of {_runs(results)}.",
        (
            "split",
            "p",
            "two-level / LAQ",
            "augmented / two-level",
            *(f"`{recipe}`" for recipe in DROPOUT_RECIPES),
        ),
        tuple(rows),
    )


def versus(ours: Sequence[Outcome], other: Sequence[Outcome], residual: float) -> str:
    """Compare bits seed by seed, where both arrive."""
    ratios = paired_ratios(ours, other, lambda o: o.reached.get(residual))
    text = span(ratios, lambda ratio: f"{ratio:.2f}")
    seeds = "seed" if len(ratios) == 1 else "seeds"
    return f"{text} ({len(ratios)} {seeds})" if 0 < len(ratios) < len(ours) else text


def _arrivals(outcomes: Sequence[Outcome], residual: float) -> str:
    coarse, fine = (sum(r in o.reached for o in outcomes) for r in (residual, STRICT))
    num_lost = sum(outcome.ran_away for outcome in outcomes)
    text = f"{coarse}, {fine}"
    return f"{text}, {num_lost} ×" if num_lost else text
