"""The same logistic runs on two kinds of processor: how far their counts agree, and the verdicts.

Two machines differ in more than the processor: libraries, their versions and how they sum. The
versions are named wherever the machines are compared.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from aqg.runs.table import Table
from aqg.studies.paper.cells import SPLITS, out_of, paired_ratios, percent, span
from aqg.studies.paper.claims import find
from aqg.studies.paper.outcomes import CONVERGED, main_reading
from aqg.studies.paper.plan import ALWAYS_SEND, BY_SOURCE, TABLE_RECIPES
from aqg.studies.paper.settings import reading_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aqg.studies.paper.outcomes import Outcome, Results

Pairs = list[tuple["Outcome", "Outcome"]]

_LAZY = tuple(recipe for recipe in TABLE_RECIPES if recipe not in ALWAYS_SEND)
_SHOWN = ("laq", "aqg-2")
_NAMED_LIBRARIES = ("numpy", "numba")


def pair_up(results: Results, elsewhere: Iterable[Outcome]) -> Pairs:
    """Return the lazy recipes' logistic runs here, each with the same run elsewhere."""
    there = {o.name: o for o in elsewhere}
    return [
        (o, there[o.name])
        for o in results.select(section="logistic")
        if o.name in there and o.recipe in _LAZY
    ]


def machine_table(results: Results) -> Table:
    """Return uploads on two machines at every step size, for LAQ and two-level AQG."""
    rows = []
    for machine, elsewhere in results.elsewhere.items():
        pairs = [(a, b) for a, b in pair_up(results, elsewhere) if a.scaling == "sum"]
        for partition in ("iid", BY_SOURCE):
            for alpha in sorted({a.alpha for a, _ in pairs}):
                for recipe in _SHOWN:
                    settings = (partition, alpha, recipe)
                    chosen = [
                        (a, b) for a, b in pairs if (a.partition, a.alpha, a.recipe) == settings
                    ]
                    if chosen:
                        rows.append(_row(machine, chosen))
    return Table(
        "machines",
        "The same logistic runs on two machines",
        f"Summed losses, 500 rounds; {_machines_text(results)}. `same` counts the seeds with the "
        f"same number of uploads on both: in all rounds, and until the loss stays within "
        f"{CONVERGED:g} of its minimum, of the seeds where it does on both. Differences are of all "
        "uploads, over the latter.",
        (
            "split",
            "α",
            "recipe",
            "machines",
            "uploads",
            "there",
            "same",
            f"same to {CONVERGED:g}",
            "largest difference",
            "converge",
            "there",
        ),
        tuple(rows),
    )


def _row(machine: str, pairs: Pairs) -> tuple[str, ...]:
    first = pairs[0][0]
    both = _converge_on_both(pairs)
    return (
        SPLITS[first.partition],
        f"{first.alpha:g}",
        f"`{first.recipe}`",
        f"{first.machine}, {machine}",
        span([a.total.uploads for a, _ in pairs]),
        span([b.total.uploads for _, b in pairs]),
        out_of(_num_same(pairs), len(pairs)),
        out_of(_num_same_until_converged(both), len(both)) if both else "-",
        f"{100 * _largest_difference(both):.1f} %" if both else "-",
        out_of(sum(a.converged for a, _ in pairs), len(pairs)),
        out_of(sum(b.converged for _, b in pairs), len(pairs)),
    )


def _converge_on_both(pairs: Pairs) -> Pairs:
    return [(a, b) for a, b in pairs if all(o.converged and CONVERGED in o.reached for o in (a, b))]


def _num_same(pairs: Pairs) -> int:
    return sum(a.total.uploads == b.total.uploads for a, b in pairs)


def _num_same_until_converged(pairs: Pairs) -> int:
    return sum(a.reached[CONVERGED].uploads == b.reached[CONVERGED].uploads for a, b in pairs)


def _largest_difference(pairs: Pairs) -> float:
    return max((abs(b.total.uploads / a.total.uploads - 1) for a, b in pairs), default=0.0)


def machine_sentences(results: Results) -> list[str]:
    """Say what is the same on the other machines and what is not."""
    reading = main_reading(results.outcomes)
    lines: list[str] = []
    for machine, elsewhere in results.elsewhere.items():
        pairs = pair_up(results, elsewhere)
        at_reading = [(a, b) for a, b in pairs if (a.scaling, a.alpha) == reading]
        if not at_reading:
            continue
        here = pairs[0][0].machine
        lines.append(
            f"The same {len(pairs)} logistic runs of {len({a.recipe for a, _ in pairs})} lazy "
            f"recipes on {_with_versions(results, here)} and on "
            f"{_with_versions(results, machine)}, every α and both splits: {_agreement(pairs)} "
            f"{_flips_text(pairs)}"
        )
        lines.append(
            f"The {len(at_reading)} of them at Table 2's {reading_text(results)}: "
            f"{_agreement(at_reading)} {_by_recipe(at_reading)}"
        )
        lines += [
            _savings_sentence(results, elsewhere, partition, (here, machine))
            for partition in ("iid", BY_SOURCE)
        ]
        lines.append(_verdicts_sentence(results, machine, elsewhere))
    return lines


def _agreement(pairs: Pairs) -> str:
    both = _converge_on_both(pairs)
    return (
        f"{_num_same(pairs)} have the same number of uploads in 500 rounds; of the {len(both)} "
        f"that converge on both, {_num_same_until_converged(both)} have the same number until the "
        f"loss stays within {CONVERGED:g} of its minimum."
    )


def _flips_text(pairs: Pairs) -> str:
    flips = [(a, b) for a, b in pairs if a.converged != b.converged]
    if not flips:
        return "None converges on one machine only."
    named = "; ".join(
        f"`{a.recipe}`, {SPLITS[a.partition]}, {a.scaling} loss, α = {a.alpha:g}, seed {a.seed}, "
        f"on {(a if a.converged else b).machine}"
        for a, b in flips[:3]
    )
    rest = f", and {len(flips) - 3} more" if len(flips) > 3 else ""
    verb = "converges" if len(flips) == 1 else "converge"
    return f"{len(flips)} {verb} on one machine only ({named}{rest})."


def _by_recipe(pairs: Pairs) -> str:
    """Say by how much uploads differ, recipe by recipe, where both converge."""
    parts = []
    for recipe in _LAZY:
        both = _converge_on_both([(a, b) for a, b in pairs if a.recipe == recipe])
        if both:
            parts.append(f"`{recipe}` {100 * _largest_difference(both):.1f} %")
    return f"In all 500 rounds these differ by up to: {', '.join(parts)}." if parts else ""


def _savings_sentence(
    results: Results, elsewhere: Sequence[Outcome], partition: str, machines: tuple[str, str]
) -> str:
    reading = main_reading(results.outcomes)
    saved = []
    for runs in (results.select(section="logistic"), elsewhere):
        ours, laq = (
            [
                o
                for o in runs
                if (o.scaling, o.alpha) == reading and (o.partition, o.recipe) == (partition, name)
            ]
            for name in ("aqg-2", "laq")
        )
        ratios = paired_ratios(ours, laq, lambda o: o.total if o.converged else None)
        count = f"{out_of(len(ratios), len(ours))} seeds"
        saved.append(f"{span([1 - r for r in ratios], percent)} ({count})")
    split = SPLITS[partition]
    return (
        f"{split[0].upper()}{split[1:]}, two-level saves {saved[0]} of LAQ's bits on {machines[0]} "
        f"and {saved[1]} on {machines[1]}."
    )


def _verdicts_sentence(results: Results, machine: str, elsewhere: Sequence[Outcome]) -> str:
    """Say whether the other machine's runs alone would give the same α and the same verdicts."""
    others = (o for o in results.outcomes if o.section != "logistic")
    swapped = replace(results, outcomes=(*others, *elsewhere))
    here, there = (_logistic_verdicts(one) for one in (results, swapped))
    chosen = [reading_text(one) for one in (results, swapped)]
    rule = f"the rule for α chooses {chosen[1]}"
    rule += " as well" if chosen[0] == chosen[1] else f", not {chosen[0]}"
    text = (
        f"From {machine}'s logistic runs alone {rule}, and "
        f"{out_of((here & there).total(), here.total())} logistic verdicts above are the same"
    )
    changed = [f"*{claim}*, {setting}: {verdict}" for claim, setting, verdict in there - here]
    return f"{text}; there it is {'; '.join(changed)}." if changed else f"{text}."


def _logistic_verdicts(results: Results) -> Counter[tuple[str, str, str]]:
    return Counter(
        (f.claim, f.setting, f.verdict) for f in find(results) if f.setting.startswith("logistic")
    )


def _machines_text(results: Results) -> str:
    machines = {o.machine for o in results.select(section="logistic")} | set(results.elsewhere)
    return "; ".join(_with_versions(results, machine) for machine in sorted(machines))


def _with_versions(results: Results, machine: str) -> str:
    """Write a machine and the libraries that did its arithmetic, as far as they are known."""
    versions = results.about.get("versions", {}).get(f"logistic: {machine}", {})
    known = [f"{name} {versions[name]}" for name in _NAMED_LIBRARIES if name in versions]
    return f"{machine} ({', '.join(known)})" if known else machine
