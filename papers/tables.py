"""Tables for the pages about the paper, its figures beside ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from statistics import median

from aqg.runs.cost import Cost
from aqg.runs.table import Table, format_bytes
from aqg.studies.paper.outcomes import (
    CONVERGED,
    RESIDUALS,
    ROUNDING,
    Outcome,
    Results,
    main_reading,
    paired_ratios,
)
from aqg.studies.paper.plan import (
    ALWAYS_SEND,
    BY_SOURCE,
    DROPOUT_RECIPES,
    NETWORK_RECIPES,
    PERTURBED_RECIPES,
    TABLE_RECIPES,
)
from aqg.studies.paper.tables import (
    HEADER_2,
    SPLITS,
    is_comparable,
    out_of,
    percent,
    rows_of_table_2,
    span,
)

STRICT = 1e-6
"""The paper's residual for runs without dropouts."""
_AS_GOOD = 1.01
"""Bytes are compared where a network's loss is within this factor of gradient descent's."""
_LAZY = ("laq", "aqg-2", "aqg", "lean", "auto")


def arrival_cell(outcomes: Sequence[Outcome], residual: float) -> str:
    """Write bits and bytes until the residual, and how many seeds arrived if not all."""
    costs = costs_to(outcomes, residual)
    if not costs:
        return "-"
    bits = span([cost.bits_per_param for cost in costs])
    text = f"{bits} / {format_bytes(median(cost.upload_bytes for cost in costs))}"
    if len(costs) < len(outcomes):
        text = f"{out_of(len(costs), len(outcomes))}: {text}"
    return text


def all_tables(results: Results) -> list[Table]:
    """Return every table that the results have rows for."""
    makers = (
        summary_table,
        performance_table,
        step_size_table,
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
    rows = []
    for setting, ours, told, counts, uploaded in rows_of_table_2(results):
        saved, at = savings(results, setting, ours[0].recipe)
        saves = told + (span(saved, percent) + at if saved else "-" * bool(told))
        rows.append((*counts, saves, uploaded, _ending(results, ours)))
    residual = results.about["softmax_residual"]
    note = (
        f"Logistic: 500 rounds, {reading_text(results)}. Network: 784→10, until the loss stays "
        f"within {residual:g} of f*; costs are of the seeds that reach it. `saves` is of LAQ's "
        f"bits, seed by seed. Logistic: {seeds_text(results, 'logistic')}; network: "
        f"{seeds_text(results, 'softmax')}. Where one figure stands alone, the paper has none."
    )
    if not is_comparable(results):
        note += " The paper's network rows are at 1e-06 and not shown."
    title = "The paper's Table 2: the paper / ours"
    return Table("table2", title, note, HEADER_2, tuple(rows))


def _ending(results: Results, outcomes: Sequence[Outcome]) -> str:
    """Say how many runs of a row converge, or arrive and stay."""
    if outcomes[0].section == "logistic":
        good, verb = sum(o.converged for o in outcomes), "converge"
    else:
        good, verb = sum(results.cost_of(o) is not None for o in outcomes), "reach it"
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
            *("split", "recipe", "final loss", "accuracy", "diverged", "rounds", "uploads"),
            *("bits/param", "uploaded", "fewer than `gd`"),
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


def step_size_table(results: Results) -> Table:
    """Return logistic regression at every reading of the loss, and what is saved of LAQ's bits."""
    runs = results.select(section="logistic")
    readings = sorted({(o.scaling, o.alpha) for o in runs})
    shown = main_reading(runs)
    rows = []
    for partition, reading in product(("iid", BY_SOURCE), readings):
        own = [o for o in runs if (o.partition, (o.scaling, o.alpha)) == (partition, reading)]
        here = {r: [o for o in own if o.recipe == r] for r in ("gd", "qgd", *_LAZY)}
        rows.append(
            (
                SPLITS[partition],
                f"{reading[0]}, {reading[1]:g}{' ←' if reading == shown else ''}",
                *((_ends(here[r]) or "all") if here[r] else "-" for r in ("gd", "qgd")),
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
    for partition, alpha, recipe in product(("iid", BY_SOURCE), alphas, PERTURBED_RECIPES):
        place = partition, alpha, recipe
        ours = [o for o in results.perturbed if (o.partition, o.alpha, o.recipe) == place]
        if ours:
            rows.append(
                (
                    SPLITS[partition],
                    f"{alpha:g}",
                    f"`{recipe}`",
                    span([one.uploads for one in ours if one.draw == 0]),
                    span([one.uploads for one in ours if one.draw > 0]),
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
            *("split", "α", "recipe", "uploads, data as they are", "uploads, last bit changed"),
            *(f"uploads before {ROUNDING:g}", "different counts"),
            *(f"before {ROUNDING:g}", "converge"),
        ),
        tuple(rows),
    )


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
    runs = seeds_text(results, "dropouts").replace("median and range over ", "")
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
        f"and for the bits the range, over the seeds that reach it; {runs}. k of n: so "
        "many reach it, and the median residual at the end of all; ×: ended above its first loss.",
        ("split", "p", *(f"`{recipe}`" for recipe in DROPOUT_RECIPES)),
        tuple(rows),
    )


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
    runs = seeds_text(results, "dropouts").replace("median and range over ", "")
    rows = []
    for partition, rate in cells_of(results):
        here = {r: with_dropouts(results, partition, rate, r) for r in DROPOUT_RECIPES}
        rows.append(
            (
                SPLITS[partition],
                f"{rate:g}",
                versus(here["aqg-2"], here["laq"], residual),
                versus(here["aqg-augmented"], here["aqg-2"], residual),
                *(_arrivals(here[recipe], residual) for recipe in DROPOUT_RECIPES),
            )
        )
    return Table(
        "dropout-arrivals",
        "Dropouts, seed by seed",
        f"Ratios of bits to stay within {residual:g}, over the seeds where both reach it. Then the "
        f"seeds that stay within {residual:g}, at {STRICT:g}, and × those that ended above "
        f"their first loss; of {runs}.",
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


def reading_text(results: Results) -> str:
    """Write the loss and step size of the logistic runs that are compared with the paper's."""
    reading = results.reading
    return "not run" if reading is None else f"{reading[0]} loss, α = {reading[1]:g}"


def seeds_text(results: Results, section: str) -> str:
    """Write over how many seeds a section's medians and ranges are."""
    count = len({o.seed for o in results.select(section=section)})
    if count == 0:
        return "not run"
    return "one seed" if count == 1 else f"median and range over {count} seeds"


def savings(
    results: Results, setting: str, recipe: str, residual: float | None = None
) -> tuple[list[float], str]:
    """Return what part of LAQ's bits is saved, seed by seed, and what to say about where.

    Logistic: over 500 rounds, on the seeds where both converge. Network: until ``residual``, by
    default the smallest one where the most seeds have both arrive.
    """
    ours, laq = results.of_setting(setting, recipe), results.of_setting(setting, "laq")
    if recipe in ("laq", *ALWAYS_SEND) or not ours or not laq:
        return [], ""
    where = []
    if setting.startswith("logistic"):
        ratios = paired_ratios(ours, laq, results.cost_to_the_end)
    else:
        goal = results.about["softmax_residual"]
        at = arrival_of_both(results, setting, recipe) if residual is None else residual
        ratios = paired_ratios(ours, laq, lambda o: o.reached.get(at))
        where = [f"at {at:g}"] if at != goal else []
    if len(ratios) < len(ours):
        where.append(f"{len(ratios)} of {len(ours)} seeds")
    return [1 - ratio for ratio in ratios], f" ({', '.join(where)})" if where and ratios else ""


def arrival_of_both(results: Results, setting: str, recipe: str) -> float:
    """Return the smallest residual where the most seeds have both a rule and LAQ arrive."""
    runs = [results.of_setting(setting, name) for name in (recipe, "laq")]
    allowed = [r for r in RESIDUALS if r >= results.about["softmax_residual"]]

    def num_both(residual: float) -> int:
        first, second = ({o.seed for o in some if residual in o.reached} for some in runs)
        return len(first & second)

    return max(allowed, key=lambda residual: (num_both(residual), -residual))


def costs_to(outcomes: Sequence[Outcome], residual: float) -> list[Cost]:
    """Return what each run that arrives at the residual, and stays, cost until then."""
    return [cost for o in outcomes if (cost := o.reached.get(residual)) is not None]
