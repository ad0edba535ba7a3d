"""The results as tables of text, the paper's figures beside ours."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from aqg.runs.table import Table, format_bytes
from aqg.studies.paper.cells import (
    SPLITS,
    arrival_cell,
    costs_to,
    out_of,
    paired_ratios,
    percent,
    span,
)
from aqg.studies.paper.claims import claims_table
from aqg.studies.paper.differences import differences_table
from aqg.studies.paper.dropout_tables import dropout_arrivals_table, dropout_table
from aqg.studies.paper.logistic_tables import rounding_table, step_size_table
from aqg.studies.paper.machines import machine_table
from aqg.studies.paper.paper import PAPER_RESIDUAL, SETTINGS, performance
from aqg.studies.paper.plan import NETWORK_RECIPES, TABLE_RECIPES
from aqg.studies.paper.settings import (
    LABELS,
    cost_of,
    of_setting,
    reading_text,
    savings,
    seeds_text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.studies.paper.outcomes import Outcome, Results

_AS_GOOD = 1.01
"""Bytes are compared where a network's loss is within this factor of gradient descent's."""


def all_tables(results: Results) -> list[Table]:
    """Return every table that the results have rows for."""
    makers = (
        claims_table,
        summary_table,
        performance_table,
        differences_table,
        step_size_table,
        machine_table,
        rounding_table,
        residual_table,
        dropout_table,
        dropout_arrivals_table,
        network_table,
    )
    return [table for table in (make(results) for make in makers) if table.rows]


def summary_table(results: Results) -> Table:
    """Return bytes on the wire for the network of Table 2, and how many times fewer than GD."""
    residual = results.about["softmax_residual"]
    rows = []
    for recipe in ("gd", "qgd", "laq", "aqg-2", "aqg", "lean", "auto"):
        cells = [f"`{recipe}`"]
        for partition in ("iid", "label"):
            ours = results.select(section="softmax", partition=partition, recipe=recipe)
            base = results.select(section="softmax", partition=partition, recipe="gd")
            cells += _bytes_cells(ours, base, residual)
        if any(cell != "-" for cell in cells[1:]):
            rows.append(tuple(cells))
    return Table(
        "summary",
        f"Bytes uploaded until the loss stays within {residual:g} of its minimum",
        "MNIST, 784→10 softmax with L2 0.01, α = 0.02, ten clients together, full-batch gradients, "
        f"no dropouts; real frames; {seeds_text(results, 'softmax')}.",
        ("recipe", "IID", "fewer than `gd`", "one digit per client", "fewer than `gd`"),
        tuple(rows),
    )


def _bytes_cells(ours: Sequence[Outcome], base: Sequence[Outcome], residual: float) -> list[str]:
    if not ours:
        return ["-", "-"]
    costs = costs_to(ours, residual)
    if not costs:
        return [f"0 of {len(ours)} seeds reach it", "-"]
    text = span([cost.upload_bytes for cost in costs], format_bytes)
    if len(costs) < len(ours):
        return [f"{text}, {out_of(len(costs), len(ours))} seeds reach it", "-"]
    ratios = paired_ratios(base, ours, lambda o: o.reached.get(residual), "upload_bytes")
    return [text, span(ratios, lambda ratio: f"{ratio:,.0f}×") if ratios else "-"]


def performance_table(results: Results) -> Table:
    """Return the paper's Table 2: its figure / ours, with the recipes it does not have beside."""
    paper = {(row.setting, row.recipe): row for row in performance()}
    rows = []
    for setting in SETTINGS:
        comparable = not setting.startswith("network") or is_comparable(results)
        for recipe in TABLE_RECIPES:
            ours = of_setting(results, setting, recipe)
            if not ours:
                continue
            row = paper.get((setting, recipe)) if comparable else None
            costs = [cost for o in ours if (cost := cost_of(results, o)) is not None]
            told = "" if row is None or not row.saving else f"{percent(row.saving)} / "
            saved, at = savings(results, setting, recipe)
            rows.append(
                (
                    LABELS[setting],
                    f"`{recipe}`",
                    _beside(row.rounds if row else None, [cost.rounds for cost in costs]),
                    _beside(row.uploads if row else None, [cost.uploads for cost in costs]),
                    _beside(row.bits if row else None, [cost.bits_per_param for cost in costs]),
                    told + span(saved, percent) + at if saved else told + "-" * bool(told),
                    span([cost.upload_bytes for cost in costs], format_bytes),
                    _ending(results, ours),
                )
            )
    residual = results.about["softmax_residual"]
    note = (
        f"Logistic: 500 rounds, {reading_text(results)}. Network: 784→10, until the loss stays "
        f"within {residual:g} of f*; costs are of the seeds that reach it. `saves` is of LAQ's "
        f"bits, seed by seed. Logistic: {seeds_text(results, 'logistic')}; network: "
        f"{seeds_text(results, 'softmax')}. Where one figure stands alone, the paper has none."
    )
    if not is_comparable(results):
        note += " The paper's network rows are at 1e-06 and not shown."
    return Table(
        "table2",
        "The paper's Table 2: the paper / ours",
        note,
        ("setting", "recipe", "rounds", "uploads", "bits/param", "saves", "uploaded", "seeds"),
        tuple(rows),
    )


def is_comparable(results: Results) -> bool:
    """Tell whether the network runs are measured where the paper's are."""
    return bool(results.about["softmax_residual"] == PAPER_RESIDUAL)


def _beside(paper: int | None, ours: Sequence[float]) -> str:
    """Write the paper's figure beside ours.

    >>> _beside(854, [821.0, 830, 840]), _beside(None, [476.0]), _beside(921, [])
    ('854 / 830 [821..840]', '476', '921 / -')
    """
    return f"{paper:,} / {span(ours)}" if paper else span(ours)


def _ending(results: Results, outcomes: Sequence[Outcome]) -> str:
    """Say how many runs of a row converge, or arrive and stay."""
    if outcomes[0].section == "logistic":
        good, verb = sum(o.converged for o in outcomes), "converge"
    else:
        good, verb = sum(cost_of(results, o) is not None for o in outcomes), "reach it"
    text = f"{out_of(good, len(outcomes))} {verb}"
    if good < len(outcomes):
        text += f"; at the end {median(o.residual for o in outcomes):.0e}"
    return text


def residual_table(results: Results) -> Table:
    """Return Table 2's network at several residuals, for the rows that miss the last one."""
    goal = results.about["softmax_residual"]
    residuals = tuple(r for r in (0.1, 1e-2, 1e-3, 1e-4, 1e-6) if r >= goal)
    rows = []
    for partition in ("iid", "label"):
        for recipe in TABLE_RECIPES:
            ours = results.select(section="softmax", partition=partition, recipe=recipe)
            if ours:
                cells = (arrival_cell(ours, residual) for residual in residuals)
                rows.append((SPLITS[partition], f"`{recipe}`", *cells))
    return Table(
        "residuals",
        "Table 2's network: bits per parameter / bytes uploaded to stay within a residual of f*",
        f"A dash: never; {seeds_text(results, 'softmax')}.",
        ("split", "recipe", *(f"{residual:g}" for residual in residuals)),
        tuple(rows) if len(residuals) > 1 else (),
    )


def network_table(results: Results) -> Table:
    """Return the 784-200-10 network's table, the loss that is not convex."""
    rows = []
    for partition in ("iid", "label"):
        base = results.select(section="network", partition=partition, recipe="gd")
        for recipe in NETWORK_RECIPES:
            ours = results.select(section="network", partition=partition, recipe=recipe)
            if not ours:
                continue
            ended = [o for o in ours if not o.diverged]
            accuracies = [o.test_accuracy for o in ended if o.test_accuracy is not None]
            rows.append(
                (
                    SPLITS[partition],
                    f"`{recipe}`",
                    span([o.final_loss for o in ended], lambda loss: f"{loss:.4g}"),
                    span(accuracies, lambda share: f"{100 * share:.1f} %"),
                    out_of(len(ours) - len(ended), len(ours)),
                    span([o.total.rounds for o in ours]),
                    span([o.total.uploads for o in ours]),
                    span([o.total.bits_per_param for o in ours]),
                    span([o.total.upload_bytes for o in ours], format_bytes),
                    _fewer(ours, base) if recipe != "gd" else "-",
                )
            )
    return Table(
        "network",
        "MNIST, 784-200-10 network, whose loss is not convex",
        f"{results.about['network_rounds']} rounds, or until the loss passes 1e20 (diverged); "
        f"{seeds_text(results, 'network')}, one for `qgd`. Loss and accuracy are of the runs that "
        f"did not diverge. Fewer bytes uploaded than by `gd`: where every seed's loss is within "
        f"{_AS_GOOD - 1:.0%} of `gd`'s.",
        (
            "split",
            "recipe",
            "final loss",
            "accuracy",
            "diverged",
            "rounds",
            "uploads",
            "bits/param",
            "uploaded",
            "fewer than `gd`",
        ),
        tuple(rows),
    )


def _fewer(ours: Sequence[Outcome], base: Sequence[Outcome]) -> str:
    """Compare bytes with gradient descent's where the loss is as good on every seed."""
    by_seed = {o.seed: o for o in base}
    pairs = [(o, by_seed[o.seed]) for o in ours if o.seed in by_seed]
    if not pairs or any(gd.final_loss >= gd.start_loss for _, gd in pairs):
        return "-"
    if not all(o.final_loss <= _AS_GOOD * gd.final_loss for o, gd in pairs):
        return "-"
    ratios = [gd.total.upload_bytes / o.total.upload_bytes for o, gd in pairs]
    return span(ratios, lambda ratio: f"{ratio:,.0f}×")
