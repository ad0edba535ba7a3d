"""The paper's Table 2 beside ours, and a table for each part that was run.

Tables for the pages about the paper are made in ``papers/``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from aqg.runs.table import Table, format_bytes
from aqg.studies.paper.outcomes import (
    CONVERGED,
    ROUNDING,
    Outcome,
    Results,
    cost_of,
    cost_to_the_end,
    of_setting,
    paired_ratios,
)
from aqg.studies.paper.plan import (
    ALWAYS_SEND,
    BLOCKS,
    BY_SOURCE,
    PAPER_RESIDUAL,
    TABLE_2,
    TABLE_RECIPES,
)

LABELS = {
    "logistic-iid": "logistic, IID",
    "logistic-noniid": "logistic, non-IID",
    "network-iid": "network, IID",
    "network-noniid": "network, non-IID",
}
SPLITS = {"iid": "IID", "label": "one digit per client", BY_SOURCE: "by source"}


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
    return bool(results.about["softmax_residual"] == PAPER_RESIDUAL)


def all_tables(results: Results) -> list[Table]:
    sections = dict.fromkeys(o.section for o in results.outcomes)
    tables = [table_2(results), *(section_table(results, name) for name in sections)]
    return [table for table in (*tables, rounding_table(results)) if table.rows]


def table_2(results: Results) -> Table:
    paper = {(row.setting, row.recipe): row for row in TABLE_2}
    rows = []
    for setting in BLOCKS:
        for recipe in TABLE_RECIPES:
            if not (ours := of_setting(results, setting, recipe)):
                continue
            has_paper = is_comparable(results) or setting.startswith("logistic")
            row = paper.get((setting, recipe)) if has_paper else None
            costs = [cost for o in ours if (cost := cost_of(results, o)) is not None]
            ratios = paired_ratios(
                ours, of_setting(results, setting, "laq"), lambda o: cost_to_the_end(results, o)
            )
            told = f"{percent(row.saving)} / " if row and row.saving else ""
            shares = [] if recipe in ("laq", *ALWAYS_SEND) else [1 - ratio for ratio in ratios]
            uploaded = span([cost.upload_bytes for cost in costs], format_bytes)
            rows.append(
                (
                    *(LABELS[setting], f"`{recipe}`"),
                    beside(row and row.rounds, [cost.rounds for cost in costs]),
                    beside(row and row.uploads, [cost.uploads for cost in costs]),
                    beside(row and row.bits, [cost.bits_per_param for cost in costs]),
                    *(told + span(shares, percent), uploaded),
                    out_of(sum(cost_to_the_end(results, o) is not None for o in ours), len(ours)),
                )
            )
    note = (
        "Logistic: 500 rounds. Network: 784→10, until the loss stays within "
        f"{results.about['softmax_residual']:g} of its minimum. Median and range over the seeds "
        "that get there (logistic: of all), and how many do; `saves` is of LAQ's bits, seed by "
        "seed. Where one figure stands alone, the paper has none."
    )
    header = ("setting", "recipe", "rounds", "uploads", "bits/param", "saves", "uploaded", "seeds")
    return Table("table2", "The paper's Table 2: the paper / ours", note, header, tuple(rows))


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
    costs = [cost for o in runs if (cost := cost_to_the_end(results, o)) is not None]
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
