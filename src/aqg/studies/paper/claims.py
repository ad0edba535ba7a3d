"""What the paper says, setting by setting, and what our runs say to that.

Every verdict is computed from the runs by the rule that stands beside it; nothing here knows how
it comes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from aqg.runs.table import Table
from aqg.studies.paper.cells import SPLITS, out_of, paired_ratios, percent, span
from aqg.studies.paper.dropout_tables import STRICT, with_dropouts
from aqg.studies.paper.paper import PAPER_RESIDUAL, SETTINGS, performance
from aqg.studies.paper.settings import LABELS, cost_of, cost_to_the_end, of_setting, savings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aqg.studies.paper.outcomes import Outcome, Results

REPRODUCES = "reproduces"
IN_PART = "in part"
DOES_NOT = "does not"
UNDECIDED = "undecided"
VERDICTS = (REPRODUCES, IN_PART, DOES_NOT, UNDECIDED)
MODERATE, HIGH = (0.2, 0.5, 0.7), (0.8, 0.9)
"""The dropout rates of the paper's Figures 9 and 10."""
_SAME_SAVING = 0.1


@dataclass(frozen=True)
class Finding:
    """A claim of the paper in one setting.

    Attributes:
        claim: what the paper says, in short.
        setting: where.
        verdict: one of `VERDICTS`.
        evidence: the numbers behind it, with the number of seeds.

    """

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
    return [setting for setting in SETTINGS if full or setting.startswith("logistic")]


def _saves(recipe: str, name: str, results: Results) -> Iterator[Finding]:
    """Compare savings: on every seed something, and in the median the paper's to 10 points.

    In part: in the median something, but not on every seed, or another amount.
    """
    told = {row.setting: row.saving for row in performance() if row.recipe == recipe}
    for setting in _comparable(results):
        ours = of_setting(results, setting, recipe)
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
    """Compare savings of two-level AQG: all larger non-IID than IID; in part: in the median."""
    for kind in ("logistic", "network"):
        if f"{kind}-iid" not in _comparable(results):
            continue
        iid, _ = savings(results, f"{kind}-iid", "aqg-2")
        other, at = savings(results, f"{kind}-noniid", "aqg-2")
        if not iid or not other:
            continue
        verdict = DOES_NOT
        if median(other) > median(iid):
            verdict = REPRODUCES if min(other) > max(iid) else IN_PART
        evidence = f"two-level saves {span(other, percent)}{at} against {span(iid, percent)} IID"
        claim = "AQG saves more where clients differ"
        yield Finding(claim, kind, verdict, evidence)


def _far_fewer_than_qgd(results: Results) -> Iterator[Finding]:
    """Compare LAQ with QGD, seed by seed; the paper has a QGD row in three settings."""
    told = {(row.setting, row.recipe): row.bits for row in performance()}
    for setting in _comparable(results):
        laq, qgd = (of_setting(results, setting, recipe) for recipe in ("laq", "qgd"))
        if not laq or not qgd:
            continue
        ratios = paired_ratios(laq, qgd, lambda o: cost_to_the_end(results, o))
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
        for recipe, name in (("aqg-2", "two-level"), ("aqg", "multilevel")):
            ours, laq = (of_setting(results, setting, r) for r in (recipe, "laq"))
            if not ours:
                continue
            good, base = _num_good(results, ours), _num_good(results, laq)
            evidence = f"{name} on {out_of(good, len(ours))} seeds, LAQ on {out_of(base, len(laq))}"
            claim = "AQG converges as LAQ does"
            yield Finding(claim, LABELS[setting], share_verdict(good, len(ours)), evidence)


def _num_good(results: Results, outcomes: Sequence[Outcome]) -> int:
    if outcomes and outcomes[0].section == "logistic":
        return sum(o.converged for o in outcomes)
    return sum(cost_of(results, o) is not None for o in outcomes)


def _fewer_with_dropouts(ours: str, other: str, claim: str, results: Results) -> Iterator[Finding]:
    """Compare bits where both arrive: fewer on each of these seeds, at least half of all.

    Where the other arrives on some seeds and ours on none, the claim does not hold.
    """
    residual = results.about["dropout_residual"]
    for partition in ("iid", "label"):
        for rate in MODERATE:
            first, second = (with_dropouts(results, partition, rate, r) for r in (ours, other))
            if not first or not second:
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
            yield Finding(claim, _rate(partition, rate), verdict, evidence)


def _stable_at_high_rates(results: Results) -> Iterator[Finding]:
    """Count the seeds on which two-level AQG arrives at the coarse residual and stays."""
    residual = results.about["dropout_residual"]
    for partition in ("iid", "label"):
        for rate in HIGH:
            ours = with_dropouts(results, partition, rate, "aqg-2")
            if not ours:
                continue
            coarse, fine = (sum(r in o.reached for o in ours) for r in (residual, STRICT))
            away = sum(o.ran_away for o in ours)
            evidence = (
                f"{out_of(coarse, len(ours))} seeds stay within {residual:g}, {fine} within "
                f"{STRICT:g}; {away} end above their first loss"
            )
            claim = "AQG converges stably at p = 0.8 and 0.9"
            verdict = share_verdict(coarse, len(ours))
            yield Finding(claim, _rate(partition, rate), verdict, evidence)


def _augmented_fails(results: Results) -> Iterator[Finding]:
    """Count the seeds on which Augmented AQG ends above its first loss."""
    for partition in ("iid", "label"):
        for rate in HIGH:
            ours = with_dropouts(results, partition, rate, "aqg-augmented")
            if not ours:
                continue
            away = sum(o.ran_away for o in ours)
            evidence = f"{out_of(away, len(ours))} seeds end above their first loss"
            claim = "Augmented AQG fails above 0.8"
            yield Finding(claim, _rate(partition, rate), share_verdict(away, len(ours)), evidence)


def _rate(partition: str, rate: float) -> str:
    return f"{SPLITS[partition]}, p = {rate:g}"


def claims_table(results: Results) -> Table:
    """Return the verdicts, claim by claim."""
    rows = tuple((f.claim, f.setting, f.verdict, f.evidence) for f in find(results))
    return Table(
        "claims",
        "The paper's claims, setting by setting",
        "*Reproduces*: on every seed; *in part*: on some seeds, in the median, or by another "
        "amount; *does not*: neither; *undecided*: no two runs to compare. The rules are in "
        "`aqg.studies.paper.claims`.",
        ("the paper says", "setting", "verdict", "here"),
        rows,
    )
