"""What Mao et al. say, setting by setting, and what our runs say to that.

Every verdict is computed from the runs by the rule in its function; nothing here knows how it comes
out. Below are the same verdicts and counts on another kind of processor.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from aqg.runs.table import Table
from aqg.studies.paper.outcomes import CONVERGED, paired_ratios
from aqg.studies.paper.plan import (
    ALWAYS_SEND,
    BLOCKS,
    BY_SOURCE,
    PAPER_RESIDUAL,
    TABLE_2,
    TABLE_RECIPES,
)
from aqg.studies.paper.tables import LABELS, SPLITS, out_of, percent, span

from papers.tables import STRICT, arrival_of_both, reading_text, savings, with_dropouts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from aqg.studies.paper.outcomes import Outcome, Results

REPRODUCES = "reproduces"
IN_PART = "in part"
DOES_NOT = "does not"
UNDECIDED = "undecided"
VERDICTS = (REPRODUCES, IN_PART, DOES_NOT, UNDECIDED)
MODERATE, HIGH = (0.2, 0.5, 0.7), (0.8, 0.9)
"""The dropout rates of the paper's Figures 9 and 10."""
_SAME_SAVING = 0.1
_NAMES = {"aqg-2": "two-level", "aqg": "multilevel"}


class Finding(NamedTuple):
    """A claim in one setting: one of `VERDICTS`, and the numbers behind it with their seeds."""

    claim: str
    setting: str
    verdict: str
    evidence: str


def find(results: Results) -> list[Finding]:
    """Return every claim in every setting that the results have runs for."""
    makers = (
        _saves("aqg-2", "Two-level AQG", results),
        _saves("aqg", "Multilevel AQG", results),
        _saves_more_where_clients_differ(results),
        _far_fewer_than_qgd(results),
        _converges_like_laq(results),
        _fewer_with_dropouts(
            "aqg-2", "laq", "With dropouts, AQG needs fewer bits than LAQ", results
        ),
        _fewer_with_dropouts(
            "aqg-augmented", "aqg-2", "Augmented AQG needs fewer bits still", results
        ),
        _stable_at_high_rates(results),
        _augmented_fails(results),
    )
    return [finding for maker in makers for finding in maker]


def share_verdict(part: int, whole: int) -> str:
    """Return whether something holds on all seeds, on some, or on none.

    >>> share_verdict(10, 10), share_verdict(3, 10), share_verdict(0, 10), share_verdict(0, 0)
    ('reproduces', 'in part', 'does not', 'undecided')
    """
    if whole == 0:
        return UNDECIDED
    return REPRODUCES if part == whole else IN_PART if part else DOES_NOT


def _comparable(results: Results) -> list[str]:
    """Return the settings whose runs are as long as the paper's."""
    full = results.about["softmax_residual"] == PAPER_RESIDUAL
    return [setting for setting in BLOCKS if full or setting.startswith("logistic")]


def _saves(recipe: str, name: str, results: Results) -> Iterator[Finding]:
    """Compare savings: on every seed something, and in the median the paper's to 10 points.

    In part: in the median something, but not on every seed, or another amount.
    """
    told = {row.setting: row.saving for row in TABLE_2 if row.recipe == recipe}
    for setting in _comparable(results):
        ours = results.of_setting(setting, recipe)
        if not ours:
            continue
        saved, at = savings(results, setting, recipe)
        paper = told[setting] or 0.0
        verdict = share_verdict(sum(share > 0 for share in saved), len(ours))
        if not saved:
            verdict = UNDECIDED if setting.startswith("network") else DOES_NOT
        elif median(saved) <= 0:
            verdict = DOES_NOT
        elif verdict == REPRODUCES and abs(median(saved) - paper) > _SAME_SAVING:
            verdict = IN_PART
        evidence = f"{span(saved, percent)} of LAQ's bits{at}; the paper {percent(paper)}"
        if not saved:
            good = sum(o.converged for o in ours)
            evidence = f"no seed with both at the end; {out_of(good, len(ours))} seeds converge"
        yield Finding(f"{name} saves bits against LAQ", LABELS[setting], verdict, evidence)


def _saves_more_where_clients_differ(results: Results) -> Iterator[Finding]:
    """Compare savings at one residual: all larger non-IID than IID; in part: in the median.

    The residual is the smallest where the most seeds of the non-IID split have both arrive.
    """
    for kind in ("logistic", "network"):
        if f"{kind}-iid" not in _comparable(results):
            continue
        for recipe, name in _NAMES.items():
            setting = f"{kind}-noniid"
            residual = None
            if kind == "network":
                residual = arrival_of_both(results, setting, recipe)
            iid, base = savings(results, f"{kind}-iid", recipe, residual)
            other, at = savings(results, setting, recipe, residual)
            if not results.of_setting(setting, recipe):
                continue
            verdict = UNDECIDED
            evidence = (
                f"{name} ends with LAQ on {len(iid)} seeds IID and on {len(other)} of the others"
            )
            if iid and other:
                verdict = DOES_NOT
                if median(other) > median(iid):
                    verdict = REPRODUCES if min(other) > max(iid) else IN_PART
                evidence = (
                    f"{name} saves {span(other, percent)}{at} against {span(iid, percent)}{base} "
                    "IID"
                )
            yield Finding("AQG saves more where clients differ", kind, verdict, evidence)


def _far_fewer_than_qgd(results: Results) -> Iterator[Finding]:
    """Compare LAQ with QGD, seed by seed; the paper has a QGD row in three settings."""
    told = {(row.setting, row.recipe): row.bits for row in TABLE_2}
    for setting in _comparable(results):
        laq, qgd = (results.of_setting(setting, recipe) for recipe in ("laq", "qgd"))
        if not laq or not qgd:
            continue
        ratios = paired_ratios(laq, qgd, results.cost_to_the_end)
        paper = ""
        if (setting, "qgd") in told:
            paper = f"; the paper {percent(told[setting, 'laq'] / told[setting, 'qgd'])}"
        evidence = f"LAQ reaches it on {out_of(_num_good(results, laq), len(laq))} seeds"
        if ratios:
            evidence = f"{span(ratios, percent)} of QGD's bits{paper}"
        if 0 < len(ratios) < len(laq):
            evidence += f" ({out_of(len(ratios), len(laq))} seeds)"
        verdict = share_verdict(sum(ratio < 1 for ratio in ratios), len(laq))
        yield Finding("LAQ needs fewer bits than QGD", LABELS[setting], verdict, evidence)


def _converges_like_laq(results: Results) -> Iterator[Finding]:
    """Count the seeds on which AQG arrives (logistic: ends within 1e-6 of the minimum)."""
    for setting in _comparable(results):
        for recipe, name in _NAMES.items():
            ours, laq = (results.of_setting(setting, r) for r in (recipe, "laq"))
            if not ours:
                continue
            good, base = _num_good(results, ours), _num_good(results, laq)
            evidence = f"{name} on {out_of(good, len(ours))} seeds, LAQ on {out_of(base, len(laq))}"
            claim = "AQG converges as LAQ does"
            yield Finding(claim, LABELS[setting], share_verdict(good, len(ours)), evidence)


def _num_good(results: Results, outcomes: Sequence[Outcome]) -> int:
    if outcomes and outcomes[0].section == "logistic":
        return sum(o.converged for o in outcomes)
    return sum(results.cost_of(o) is not None for o in outcomes)


def _cells(
    results: Results, rates: Sequence[float], recipe: str
) -> Iterator[tuple[str, str, float, list[Outcome]]]:
    """Yield the name, the split, the rate and the runs of every cell that has runs."""
    for partition in ("iid", "label"):
        for rate in rates:
            if ours := with_dropouts(results, partition, rate, recipe):
                yield f"{SPLITS[partition]}, p = {rate:g}", partition, rate, ours


def _fewer_with_dropouts(ours: str, other: str, claim: str, results: Results) -> Iterator[Finding]:
    """Compare bits where both arrive: fewer on each of these seeds, at least half of all.

    Where the other arrives on some seeds and ours on none, the claim does not hold.
    """
    residual = results.about["dropout_residual"]
    for name, partition, rate, first in _cells(results, MODERATE, ours):
        second = with_dropouts(results, partition, rate, other)
        if not second:
            continue
        ratios = paired_ratios(first, second, lambda o: o.reached.get(residual))
        fewer = sum(ratio < 1 for ratio in ratios)
        verdict = share_verdict(fewer, len(ratios))
        if verdict == REPRODUCES and 2 * len(ratios) < len(first):
            verdict = IN_PART
        arrived = [sum(residual in o.reached for o in runs) for runs in (first, second)]
        if arrived[1] and not arrived[0]:
            verdict = DOES_NOT
        evidence = f"`{ours}` reaches it on {out_of(arrived[0], len(first))} seeds, "
        evidence += f"`{other}` on {arrived[1]}"
        if ratios:
            shown = span(ratios, lambda ratio: f"{ratio:.2f}")
            evidence = f"{shown} of the bits, fewer on {out_of(fewer, len(ratios))}; {evidence}"
        yield Finding(claim, name, verdict, evidence)


def _stable_at_high_rates(results: Results) -> Iterator[Finding]:
    """Count the seeds on which two-level AQG arrives at the coarse residual and stays."""
    residual = results.about["dropout_residual"]
    for name, _, _, ours in _cells(results, HIGH, "aqg-2"):
        coarse, fine = (sum(r in o.reached for o in ours) for r in (residual, STRICT))
        away = sum(o.ran_away for o in ours)
        evidence = (
            f"{out_of(coarse, len(ours))} seeds stay within {residual:g}, {fine} within "
            f"{STRICT:g}; {away} end above their first loss"
        )
        claim = "AQG converges stably at p = 0.8 and 0.9"
        yield Finding(claim, name, share_verdict(coarse, len(ours)), evidence)


def _augmented_fails(results: Results) -> Iterator[Finding]:
    """Count the seeds on which Augmented AQG ends above its first loss."""
    for name, _, _, ours in _cells(results, HIGH, "aqg-augmented"):
        away = sum(o.ran_away for o in ours)
        evidence = f"{out_of(away, len(ours))} seeds end above their first loss"
        verdict = share_verdict(away, len(ours))
        yield Finding("Augmented AQG fails above 0.8", name, verdict, evidence)


# The same logistic runs on two kinds of processor. Two machines differ in more than the processor:
# libraries, their versions and how they sum. The versions are named wherever they are compared.

Pairs = list[tuple["Outcome", "Outcome"]]
_LAZY = tuple(recipe for recipe in TABLE_RECIPES if recipe not in ALWAYS_SEND)
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
    rows: list[tuple[str, ...]] = []
    for machine, elsewhere in results.elsewhere.items():
        groups: dict[tuple[str, float, str], Pairs] = {}
        for a, b in pair_up(results, elsewhere):
            if a.scaling == "sum" and a.recipe in ("laq", "aqg-2"):
                groups.setdefault((a.partition, a.alpha, a.recipe), []).append((a, b))
        order = {"iid": 0, BY_SOURCE: 1, "laq": 0, "aqg-2": 1}
        keys = sorted(groups, key=lambda k: (order[k[0]], k[1], order[k[2]]))
        rows += [_row(machine, groups[key]) for key in keys]
    machines = {o.machine for o in results.select(section="logistic")} | set(results.elsewhere)
    named = "; ".join(_with_versions(results, machine) for machine in sorted(machines))
    return Table(
        "machines",
        "The same logistic runs on two machines",
        f"Summed losses, 500 rounds; {named}. `same` counts the seeds with the same number of "
        f"uploads on both: in all rounds, and until the loss stays within {CONVERGED:g} of its "
        "minimum, of the seeds where it does on both. Differences are of all uploads, over the "
        "latter.",
        (
            *("split", "α", "recipe", "machines", "uploads", "there", "same"),
            *(f"same to {CONVERGED:g}", "largest difference", "converge", "there"),
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
    reading = results.reading
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
    setting = "logistic-iid" if partition == "iid" else "logistic-noniid"
    reading = results.reading
    there = [o for o in elsewhere if (o.scaling, o.alpha) == reading]
    saved = []
    for made in (results, replace(results, outcomes=tuple(there))):
        shares, _ = savings(made, setting, "aqg-2")
        count = out_of(len(shares), len(made.of_setting(setting, "aqg-2")))
        saved.append(f"{span(shares, percent)} ({count} seeds)")
    split = SPLITS[partition]
    return (
        f"{split[0].upper()}{split[1:]}, two-level saves {saved[0]} of LAQ's bits on {machines[0]} "
        f"and {saved[1]} on {machines[1]}."
    )


def _verdicts_sentence(results: Results, machine: str, elsewhere: Sequence[Outcome]) -> str:
    """Say whether the other machine's runs alone would give the same α and the same verdicts."""
    others = (o for o in results.outcomes if o.section != "logistic")
    swapped = replace(results, outcomes=(*others, *elsewhere))
    here, there = (
        Counter(f[:3] for f in find(one) if f.setting.startswith("logistic"))
        for one in (results, swapped)
    )
    chosen = [reading_text(one) for one in (results, swapped)]
    rule = f"the rule for α chooses {chosen[1]}"
    rule += " as well" if chosen[0] == chosen[1] else f", not {chosen[0]}"
    text = (
        f"From {machine}'s logistic runs alone {rule}, and "
        f"{out_of((here & there).total(), here.total())} logistic verdicts above are the same"
    )
    changed = [f"*{claim}*, {setting}: {verdict}" for claim, setting, verdict in there - here]
    return f"{text}; there it is {'; '.join(changed)}." if changed else f"{text}."


def _with_versions(results: Results, machine: str) -> str:
    """Write a machine and the libraries that did its arithmetic, as far as they are known."""
    versions = results.about.get("versions", {}).get(f"logistic: {machine}", {})
    known = [f"{name} {versions[name]}" for name in _NAMED_LIBRARIES if name in versions]
    return f"{machine} ({', '.join(known)})" if known else machine
