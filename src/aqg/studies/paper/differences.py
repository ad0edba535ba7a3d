"""Why a row of ours is not the paper's: one line each, computed where it can be."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from aqg.runs.table import Table
from aqg.studies.paper.cells import out_of, span
from aqg.studies.paper.paper import PAPER_RESIDUAL, performance
from aqg.studies.paper.settings import LABELS, cost_of, cost_to_the_end, of_setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.studies.paper.outcomes import Outcome, Results
    from aqg.studies.paper.paper import PaperRow

_CLOSE = 0.1


def differences_table(results: Results) -> Table:
    """Return one line per row of the paper's table: how far ours is from it, and why."""
    rows = []
    for row in performance():
        ours = of_setting(results, row.setting, row.recipe)
        on_network = row.setting.startswith("network")
        if not ours or (on_network and results.about["softmax_residual"] != PAPER_RESIDUAL):
            continue
        label = LABELS[row.setting]
        rows.append((label, f"`{row.recipe}`", compare(results, row, ours), row.kind, row.why))
    return Table(
        "differences",
        "Every difference from Table 2",
        "Ratios are ours over the paper's, median and range over the seeds that reach it "
        "(logistic: converge): that much is measured. The last two columns say where a "
        "difference may come from: a *definition*, a *reading* of ours where the paper says "
        "nothing, or a *conjecture* that nothing here decides.",
        ("setting", "recipe", "ours over the paper's", "known by", "why"),
        tuple(rows),
    )


def compare(results: Results, row: PaperRow, ours: Sequence[Outcome]) -> str:
    """Return how our runs of ``row`` compare, one per seed."""
    one, many = (
        ("reaches it", "reach it")
        if row.setting.startswith("network")
        else ("converges", "converge")
    )
    counts = cost_of if row.kind == "definition" else cost_to_the_end
    costs = [cost for o in ours if (cost := counts(results, o)) is not None]
    if not costs:
        at = median(o.residual for o in ours)
        return f"no seed of {len(ours)} {one}; at the end {at:.0e}"
    uploads = [cost.uploads / row.uploads for cost in costs]
    bits = [cost.bits_per_param / row.bits for cost in costs]
    if row.kind == "definition" and all(abs(ratio - 1) <= 0.005 for ratio in (*uploads, *bits)):
        return "the same"
    text = f"uploads {_ratio(uploads)}, bits {_ratio(bits)}"
    if all(min(ratios) <= 1 <= max(ratios) for ratios in (uploads, bits)):
        text += ": the paper's figures are within the range"
    elif all(abs(median(ratios) - 1) <= _CLOSE for ratios in (uploads, bits)):
        text += f": within {_CLOSE:.0%}"
    if len(costs) < len(ours):
        text += f"; {out_of(len(costs), len(ours))} seeds {many}"
    rose = sum(o.peak_loss > o.start_loss for o in ours)
    if rose:
        text += f"; the loss rises above its start on {out_of(rose, len(ours))} seeds"
    if row.setting.startswith("network"):
        rounds = median(cost.rounds for cost in costs) / row.rounds
        if abs(rounds - 1) > 2 * _CLOSE:
            standing = median(results.residual_after(o, row.rounds) for o in ours)
            text += f"; ours is at {standing:.0e} after the paper's {row.rounds:,} rounds"
    return text


def _ratio(ratios: Sequence[float]) -> str:
    return span(ratios, lambda ratio: f"{ratio:.2f}")
