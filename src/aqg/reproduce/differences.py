"""Why a row of ours is not the paper's: one line each."""

from __future__ import annotations

from statistics import fmean, median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.experiments.summary import Cost
    from aqg.reproduce.outcomes import Outcome
    from aqg.reproduce.paper import PaperRow

PAPER_RESIDUAL = 1e-6
"""Where the paper counts the costs of its network rows."""
_CLOSE = 0.1


def explain(
    row: PaperRow,
    outcomes: Sequence[Outcome],
    costs: Sequence[Cost | None],
    residual: float,
    standing: float,
) -> str:
    """Return how our runs of ``row`` compare, one per seed, and where the difference comes from.

    Args:
        row: the paper's figures.
        outcomes: our runs.
        costs: what each is counted at; None where it did not arrive.
        residual: the residual that network rows are counted at.
        standing: our residual after the paper's number of rounds, median over seeds.

    """
    known = [cost for cost in costs if cost is not None]
    on_network = row.setting.startswith("network")
    if len(known) < len(costs):
        at = median(outcome.residual for outcome in outcomes)
        verdict = f"does not come within {residual:g} of f* (at the end {at:.0e})"
        if len(costs) > 1:
            verdict = (
                f"{len(known)} of {len(costs)} seeds come within {residual:g} of f* and stay "
                f"there (median at the end {at:.0e})"
            )
        return f"{verdict}: {row.why}"
    bits = fmean(cost.bits_per_param for cost in known) / row.bits
    uploads = fmean(cost.uploads for cost in known) / row.uploads
    if on_network and residual != PAPER_RESIDUAL:
        return f"not comparable: counted at a residual of {residual:g}, the paper's is 1e-06"
    agrees = abs(bits - 1) <= _CLOSE and abs(uploads - 1) <= _CLOSE
    if row.why.endswith("by definition"):
        return row.why
    if agrees:
        return f"agrees within {max(abs(bits - 1), abs(uploads - 1)):.0%} ({row.why})"
    verdict = f"{uploads:.2f} of the uploads, {bits:.2f} of the bits"
    rounds = fmean(cost.rounds for cost in known) / row.rounds
    if on_network and abs(rounds - 1) > 2 * _CLOSE:
        verdict += f" (ours is at {standing:.0e} after the paper's {row.rounds} rounds)"
    return f"{verdict}: {row.why}"
