"""The four blocks of the paper's table, and which of our runs stand for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqg.studies.paper.cells import out_of, paired_ratios
from aqg.studies.paper.outcomes import RESIDUALS, main_reading
from aqg.studies.paper.plan import ALWAYS_SEND, BY_SOURCE

if TYPE_CHECKING:
    from aqg.runs.cost import Cost
    from aqg.studies.paper.outcomes import Outcome, Results

PARTITIONS = {
    "logistic-iid": ("logistic", "iid"),
    "logistic-noniid": ("logistic", BY_SOURCE),
    "network-iid": ("softmax", "iid"),
    "network-noniid": ("softmax", "label"),
}
LABELS = {
    "logistic-iid": "logistic, IID",
    "logistic-noniid": "logistic, non-IID",
    "network-iid": "network, IID",
    "network-noniid": "network, non-IID",
}


def of_setting(results: Results, setting: str, recipe: str) -> list[Outcome]:
    """Return our runs, one per seed, of a block of the paper's table."""
    section, partition = PARTITIONS[setting]
    found = results.select(section=section, partition=partition, recipe=recipe)
    if section == "logistic":
        shown = main_reading(results.outcomes)
        found = [o for o in found if (o.scaling, o.alpha) == shown]
    return found


def cost_of(results: Results, outcome: Outcome) -> Cost | None:
    """Return what the paper counts: all 500 rounds, or those until the residual is reached."""
    if outcome.section == "logistic":
        return outcome.total
    return outcome.reached.get(results.about["softmax_residual"])


def cost_to_the_end(results: Results, outcome: Outcome) -> Cost | None:
    """Return what the paper counts, of runs that get where they should: what ratios are made of.

    A logistic run has 500 rounds whether it converges or not.
    """
    if outcome.section == "logistic" and not outcome.converged:
        return None
    return cost_of(results, outcome)


def savings(results: Results, setting: str, recipe: str) -> tuple[list[float], str]:
    """Return what part of LAQ's bits is saved, seed by seed, and what to say about where.

    Logistic: over 500 rounds, on the seeds where both converge. Network: at the smallest residual
    where the most seeds have both arrive.
    """
    ours, laq = of_setting(results, setting, recipe), of_setting(results, setting, "laq")
    if recipe in ("laq", *ALWAYS_SEND) or not ours or not laq:
        return [], ""
    if setting.startswith("logistic"):
        ratios = paired_ratios(ours, laq, lambda o: cost_to_the_end(results, o))
        at = f" ({out_of(len(ratios), len(ours))} seeds)" if len(ratios) < len(ours) else ""
        return [1 - ratio for ratio in ratios], at if ratios else ""
    goal = results.about["softmax_residual"]
    best: list[float] = []
    where = goal
    for residual in sorted(r for r in RESIDUALS if r >= goal):
        ratios = paired_ratios(ours, laq, lambda o, r=residual: o.reached.get(r))  # type: ignore[misc]
        if len(ratios) > len(best):
            best, where = ratios, residual
    parts = [f"at {where:g}"] if where != goal else []
    if len(best) < len(ours):
        parts.append(f"{out_of(len(best), len(ours))} seeds")
    return [1 - ratio for ratio in best], f" ({', '.join(parts)})" if parts and best else ""


def reading_text(results: Results) -> str:
    """Write the loss and step size of the logistic runs that are compared with the paper's."""
    reading = main_reading(results.outcomes)
    return "not run" if reading is None else f"{reading[0]} loss, α = {reading[1]:g}"


def seeds_text(results: Results, section: str) -> str:
    """Write over how many seeds a section's medians and ranges are."""
    count = len({o.seed for o in results.select(section=section)})
    if count == 0:
        return "not run"
    return "one seed" if count == 1 else f"median and range over {count} seeds"
