"""The results as tables of text, the paper's figures beside ours."""

from __future__ import annotations

from statistics import fmean, median
from typing import TYPE_CHECKING

from aqg.reproduce.cells import SPLITS, Table, beside, mean_cost_to, size, spread_cell
from aqg.reproduce.differences import explain
from aqg.reproduce.dropout_tables import dropout_claims_table, dropout_table
from aqg.reproduce.outcomes import RESIDUALS
from aqg.reproduce.paper import SETTINGS, table_one
from aqg.reproduce.plan import MAIN_READING, NETWORK_RECIPES, TABLE_RECIPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.experiments.summary import Cost
    from aqg.reproduce.outcomes import Outcome, Results

_PARTITIONS = {
    "logistic-iid": ("logistic", "iid"),
    "logistic-noniid": ("logistic", "source"),
    "network-iid": ("softmax", "iid"),
    "network-noniid": ("softmax", "label"),
}
_LABELS = {
    "logistic-iid": "logistic, IID",
    "logistic-noniid": "logistic, non-IID",
    "network-iid": "network, IID",
    "network-noniid": "network, non-IID",
}


def all_tables(results: Results) -> list[Table]:
    """Return every table that the results have rows for."""
    makers = (
        summary_table,
        table_one_table,
        differences_table,
        step_size_table,
        residual_table,
        dropout_table,
        dropout_claims_table,
        network_table,
    )
    return [table for table in (make(results) for make in makers) if table.rows]


def of_setting(results: Results, setting: str, recipe: str) -> list[Outcome]:
    """Return our runs, one per seed, of a block of Table 1."""
    section, partition = _PARTITIONS[setting]
    found = results.select(section=section, partition=partition, recipe=recipe)
    if section == "logistic":
        found = [o for o in found if (o.scaling, o.alpha) == MAIN_READING]
    return found


def cost_of(results: Results, outcome: Outcome) -> Cost | None:
    """Return what Table 1 counts: all 500 rounds, or those until the residual is reached."""
    if outcome.section == "logistic":
        return outcome.total
    return outcome.reached.get(results.about["softmax_residual"])


def summary_table(results: Results) -> Table:
    """Return bytes on the wire for the network of Table 1, and how many times fewer than GD."""
    residual = results.about["softmax_residual"]
    rows = []
    for recipe in ("gd", "qgd", "laq", "aqg-2", "aqg", "lean"):
        cells = [f"`{recipe}`"]
        for partition in ("iid", "label"):
            ours = results.select(section="softmax", partition=partition, recipe=recipe)
            base = results.select(section="softmax", partition=partition, recipe="gd")
            spent = mean_cost_to(ours, residual, "upload_bytes")
            unit = mean_cost_to(base, residual, "upload_bytes")
            if spent is None:
                cells += ["not reached" if ours else "-", "-"]
            else:
                cells += [size(spent), f"{unit / spent:,.0f}×" if unit else "-"]
        if any(cell != "-" for cell in cells[1:]):
            rows.append(tuple(cells))
    return Table(
        "summary",
        f"Bytes uploaded until the loss stays within {residual:g} of its minimum",
        "MNIST, 784→10 softmax, ten clients together, full-batch gradients; real frames"
        f"{_seeds(results)}.",
        ("recipe", "IID", "fewer than `gd`", "one digit per client", "fewer than `gd`"),
        tuple(rows),
    )


def table_one_table(results: Results) -> Table:
    """Return Table 1: the paper's figure / ours (ratio), with `lean` beside."""
    paper = {(row.setting, row.recipe): row for row in table_one()}
    rows = []
    for setting in SETTINGS:
        for recipe in TABLE_RECIPES:
            ours = of_setting(results, setting, recipe)
            if not ours:
                continue
            row = paper.get((setting, recipe))
            bits = _mean_cost(results, ours, "bits_per_param")
            told = "" if row is None or not row.saving else f"{row.saving:.0%} / "
            spent = _mean_cost(results, ours, "upload_bytes")
            rows.append(
                (
                    _LABELS[setting],
                    f"`{recipe}`",
                    beside(row.rounds if row else None, _mean_cost(results, ours, "rounds")),
                    beside(row.uploads if row else None, _mean_cost(results, ours, "uploads")),
                    beside(row.bits if row else None, bits),
                    told + _saving(results, setting, recipe),
                    "-" if spent is None else size(spent),
                    _ending(results, ours),
                )
            )
    residual = results.about["softmax_residual"]
    return Table(
        "table1",
        "Table 1: the paper / ours (ratio)",
        f"Logistic: 500 rounds, {MAIN_READING[0]} loss, α = {MAIN_READING[1]:g}. Network: 784→10, "
        f"until the loss stays within {residual:g} of f*{_seeds(results)}. `saves` is of LAQ's "
        "bits; bytes are real frames. Where one figure stands alone, the paper has none.",
        ("setting", "recipe", "rounds", "uploads", "bits/param", "saves", "bytes", "ends"),
        tuple(rows),
    )


def differences_table(results: Results) -> Table:
    """Return one line per row of Table 1: how far ours is from the paper, and why."""
    rows = []
    for row in table_one():
        ours = of_setting(results, row.setting, row.recipe)
        if ours:
            costs = [cost_of(results, outcome) for outcome in ours]
            standing = median(results.residual_after(o, row.rounds) for o in ours)
            line = explain(row, ours, costs, results.about["softmax_residual"], standing)
            rows.append((_LABELS[row.setting], f"`{row.recipe}`", line))
    return Table(
        "differences",
        "Every difference, in one line",
        "Ratios are ours over the paper's.",
        ("setting", "recipe", "difference"),
        tuple(rows),
    )


def step_size_table(results: Results) -> Table:
    """Return logistic regression at every reading of the loss, and what is saved of LAQ's bits."""
    readings = dict.fromkeys((o.scaling, o.alpha) for o in results.select(section="logistic"))
    rows = []
    for partition in ("iid", "source"):
        for scaling, alpha in readings:
            runs = {
                o.recipe: o
                for o in results.select(
                    section="logistic", partition=partition, scaling=scaling, alpha=alpha
                )
            }
            rows.append(
                (
                    SPLITS[partition],
                    f"{scaling}, {alpha:g}",
                    *(_logistic_cell(runs, recipe) for recipe in ("gd", "qgd")),
                    *(
                        _logistic_cell(runs, recipe, against="laq")
                        for recipe in ("laq", "aqg-2", "aqg", "lean")
                    ),
                )
            )
    return Table(
        "step-sizes",
        "Logistic regression: uploads / bits per parameter, by loss and α",
        "In brackets: bits saved of LAQ's. A residual is given where 500 rounds end more than 1e-6 "
        "above the minimum.",
        ("split", "loss, α", "`gd`", "`qgd`", "`laq`", "`aqg-2`", "`aqg`", "`lean`"),
        tuple(rows),
    )


def residual_table(results: Results) -> Table:
    """Return Table 1's network at several residuals, for the rows that miss the last one."""
    residuals = tuple(r for r in (0.1, 1e-2, 1e-3, 1e-4, 1e-6))
    rows = []
    for partition in ("iid", "label"):
        for recipe in TABLE_RECIPES:
            ours = results.select(section="softmax", partition=partition, recipe=recipe)
            if ours:
                cells = (spread_cell(ours, residual) for residual in residuals)
                rows.append((SPLITS[partition], f"`{recipe}`", *cells))
    return Table(
        "residuals",
        "Table 1's network: bits per parameter / bytes to stay within a residual of f*",
        f"A dash: never{_seeds(results)}.",
        ("split", "recipe", *(f"{residual:g}" for residual in residuals)),
        tuple(rows),
    )


def network_table(results: Results) -> Table:
    """Return the 784-200-10 network's table, where the published rules fail."""
    rows = []
    for partition in ("iid", "label"):
        base = results.select(section="network", partition=partition, recipe="gd")
        for recipe in NETWORK_RECIPES:
            for ours in results.select(section="network", partition=partition, recipe=recipe):
                accuracy = ours.test_accuracy
                fewer = base[0].total.upload_bytes / ours.total.upload_bytes if base else 0.0
                rows.append(
                    (
                        SPLITS[partition],
                        f"`{recipe}`",
                        _final(ours, results),
                        "-" if accuracy is None or ours.diverged else f"{accuracy:.1%}",
                        f"{ours.total.rounds:,}",
                        f"{ours.total.uploads:,}",
                        f"{ours.total.bits_per_param:,}",
                        size(ours.total.upload_bytes),
                        f"{fewer:,.0f}×" if recipe != "gd" and not ours.diverged else "-",
                    )
                )
    return Table(
        "network",
        "MNIST, 784-200-10 network",
        f"{results.about['network_rounds']} rounds, or until the loss passes 1e20.",
        (
            "split",
            "recipe",
            "final loss",
            "accuracy",
            "rounds",
            "uploads",
            "bits/param",
            "bytes",
            "fewer than `gd`",
        ),
        tuple(rows),
    )


def _seeds(results: Results) -> str:
    return "; means over seeds" if results.about["softmax_seeds"] > 1 else ""


def _mean_cost(results: Results, outcomes: Sequence[Outcome], name: str) -> float | None:
    costs = [cost_of(results, outcome) for outcome in outcomes]
    known = [float(getattr(cost, name)) for cost in costs if cost is not None]
    return fmean(known) if known and len(known) == len(costs) else None


def _saving(results: Results, setting: str, recipe: str) -> str:
    """Say what part of LAQ's bits is saved, at the smallest residual that all runs arrive at."""
    ours, laq = of_setting(results, setting, recipe), of_setting(results, setting, "laq")
    if recipe == "laq" or not laq:
        return ""
    bits = _mean_cost(results, ours, "bits_per_param")
    base = _mean_cost(results, laq, "bits_per_param")
    at = ""
    for residual in sorted(RESIDUALS):
        if bits is not None and base is not None:
            break
        bits = mean_cost_to(ours, residual, "bits_per_param")
        base = mean_cost_to(laq, residual, "bits_per_param")
        at = f" (at {residual:g})"
    if bits is None or base is None:
        return ""
    return f"{1 - bits / base:.0%}{at}" if bits < base else "none"


def _ending(results: Results, outcomes: Sequence[Outcome]) -> str:
    """Say how the runs of a row of Table 1 ended."""
    if outcomes[0].section == "logistic":
        residual = outcomes[0].residual
        return "converges" if residual < 1e-6 else f"at {residual:.0e}"
    arrived = sum(cost_of(results, outcome) is not None for outcome in outcomes)
    if arrived == len(outcomes):
        return "arrives" if arrived == 1 else f"{arrived}/{arrived} seeds arrive"
    at = median(outcome.residual for outcome in outcomes)
    if len(outcomes) == 1:
        return f"at {at:.0e}"
    return f"{arrived}/{len(outcomes)} arrive, median {at:.0e}"


def _logistic_cell(runs: dict[str, Outcome], recipe: str, against: str | None = None) -> str:
    ours = runs.get(recipe)
    if ours is None:
        return "-"
    text = f"{ours.total.uploads} / {ours.total.bits_per_param}"
    base = runs.get(against or "")
    if base is not None and base is not ours:
        saved = 1 - ours.total.bits_per_param / base.total.bits_per_param
        text += f" ({saved:.0%})" if saved > 0 else " (none)"
    return text if ours.residual < 1e-6 else f"{text}, at {ours.residual:.0e}"


def _final(outcome: Outcome, results: Results) -> str:
    if outcome.diverged:
        return "diverged"
    losses = results.curves[outcome.name].losses
    if losses[0] == losses[-1]:
        return f"{outcome.final_loss:.4f} (never moved)"
    return f"{outcome.final_loss:.4f}"
