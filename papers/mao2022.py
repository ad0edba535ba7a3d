"""Write the pages about the paper anew, tables, sentences and verdicts, from the stored results.

    python -m papers.mao2022

refreshes ``results/paper.md`` and ``docs/explanation/reproduction.md``, in place, from the runs in
``results``; other documents can be named, and with ``--results`` another directory. The verdicts'
rules are in ``claims.py``, and in ``mao2022.toml`` is where differences may come from.
"""

from __future__ import annotations

import argparse
import math
import tomllib
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tools.document import Passage, refresh

from aqg.runs.table import Table
from aqg.studies.paper.outcomes import CONVERGED, ROUNDING, paired_ratios, read_results
from aqg.studies.paper.plan import BY_SOURCE, DROPOUT_RECIPES, PAPER_RESIDUAL, TABLE_2
from aqg.studies.paper.tables import LABELS, SPLITS, out_of, span

from papers.claims import (
    DOES_NOT,
    IN_PART,
    REPRODUCES,
    UNDECIDED,
    find,
    machine_sentences,
    machine_table,
)
from papers.merge import keep_beside
from papers.tables import all_tables as plain_tables
from papers.tables import cells_of, costs_to, with_dropouts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.studies.paper.outcomes import Outcome, Perturbed, Results
    from aqg.studies.paper.plan import PaperRow

    from papers.claims import Finding

_ROOT = Path(__file__).parents[1]
_PAGES = (_ROOT / "results" / "paper.md", _ROOT / "docs" / "explanation" / "reproduction.md")
_CLOSE = 0.1
_HEADINGS = {
    REPRODUCES: "What reproduces, on every seed",
    IN_PART: "What reproduces in part: on some seeds, in the median, or by another amount",
    DOES_NOT: "What does not reproduce",
    UNDECIDED: "What these runs do not decide",
}
_TALLY = {REPRODUCES: "reproduce", IN_PART: "in part", DOES_NOT: "do not", UNDECIDED: "undecided"}
_SECTIONS = {
    "logistic": "logistic regression",
    "softmax": "the network of Table 2",
    "dropouts": "dropouts",
    "network": "784-200-10",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Refresh documents."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("documents", nargs="*", type=Path, default=_PAGES)
    parser.add_argument("--results", type=Path, default=_ROOT / "results")
    parser.add_argument(
        "--beside",
        type=Path,
        help="first add seeds that are missing, and another machine's logistic runs, from here",
    )
    given = parser.parse_args(arguments)
    if given.beside is not None:
        keep_beside(given.results, given.beside)
    results = read_results(given.results)
    tables, passages = all_tables(results), all_passages(results)
    for document in given.documents:
        text = refresh(document.read_text(encoding="utf-8"), tables, passages)
        document.write_text(text, encoding="utf-8")


def all_tables(results: Results) -> list[Table]:
    """Return all tables, those that say more than numbers last."""
    added = (differences_table(results), machine_table(results))
    return [*plain_tables(results), *(table for table in added if table.rows)]


def all_passages(results: Results) -> list[Passage]:
    """Return every passage that the results have runs for."""
    makers = (
        *(coverage, missing, conclusions, verdicts),
        *(expectations, platform, logistic, dropouts, network),
    )
    return [passage for passage in (make(results) for make in makers) if passage.text]


def coverage(results: Results) -> Passage:
    """Return how many runs and seeds stand behind the page."""
    parts = []
    for section, (done, planned) in results.about.get("finished", {}).items():
        seeds = len({o.seed for o in results.select(section=section)})
        text = f"{_SECTIONS[section]}: {done:,} runs, {seeds} seeds"
        if done < planned:
            text += f" (of {planned:,} runs that the command plans)"
        parts.append(text)
    if results.perturbed:
        parts.append(f"data changed in the last bit: {len(results.perturbed)} runs")
    return Passage("coverage", f"Behind this page: {'; '.join(parts)}." if parts else "")


def missing(results: Results) -> Passage:
    """Return which seeds are missing, and how to run them."""
    finished = results.about.get("finished", {})
    lines = []
    for section, (done, planned) in finished.items():
        if done == planned:
            continue
        seeds = len({o.seed for o in results.select(section=section)})
        goal = results.about[f"{section.removesuffix('s')}_seeds"]
        lines.append(
            f"**Not all that the command plans is here: {_SECTIONS[section]}, {seeds} of {goal} "
            f'seeds.** There "on every seed" means on {seeds}, and verdicts may change with the '
            f"{planned - done} runs that are missing. `aqg reproduce --only {section} "
            "--missing-from results --out runs/missing` runs them, and `python -m papers.mao2022 "
            "--beside runs/missing` adds them."
        )
    if finished and not lines:
        lines = ["All runs that the command plans are here."]
    return Passage("missing", "\n\n".join(lines))


def conclusions(results: Results) -> Passage:
    """Return how many settings bear out each claim of the paper."""
    findings = find(results)
    if not findings:
        return Passage("conclusions", "")
    columns = ("settings", "on every seed", "in part", "not", "undecided")
    lines = [_tally(findings), "", f"| claim | {' | '.join(columns)} |", "|---" * 6 + "|"]
    for claim in dict.fromkeys(f.claim for f in findings):
        found = [f.verdict for f in findings if f.claim == claim]
        counts = (len(found), *(found.count(verdict) for verdict in _TALLY))
        lines.append(f"| {claim} | {' | '.join(map(str, counts))} |")
    return Passage("conclusions", "\n".join(lines))


def _tally(findings: list[Finding]) -> str:
    counts = ", ".join(
        f"{sum(f.verdict == verdict for f in findings)} {text}" for verdict, text in _TALLY.items()
    )
    claims = len({f.claim for f in findings})
    return f"{claims} claims of the paper in {len(findings)} settings: {counts}."


def verdicts(results: Results) -> Passage:
    """Return the paper's claims, grouped by what became of them."""
    findings = find(results)
    lines = [_tally(findings) + "\n"] if findings else []
    for verdict, heading in _HEADINGS.items():
        chosen = [f for f in findings if f.verdict == verdict]
        if not chosen:
            continue
        lines.append(f"**{heading}**\n")
        for claim in dict.fromkeys(f.claim for f in chosen):
            where = "; ".join(f"{f.setting} ({f.evidence})" for f in chosen if f.claim == claim)
            lines.append(f"- *{claim}*: {where}.")
        lines.append("")
    return Passage("verdicts", "\n".join(lines).rstrip())


def expectations(results: Results) -> Passage:
    """Return what a reader may expect on a problem like these, every sentence with its settings."""
    residual = results.about["softmax_residual"]
    lines = []
    for recipe in ("lean", "auto"):
        parts = []
        for partition in ("iid", "label"):
            ours = results.select(section="softmax", partition=partition, recipe=recipe)
            base = results.select(section="softmax", partition=partition, recipe="gd")
            ratios = paired_ratios(base, ours, lambda o: o.reached.get(residual), "upload_bytes")
            if ours and len(ratios) == len(ours):
                rounds = paired_ratios(ours, base, lambda o: o.reached.get(residual), "rounds")
                shown = span(ratios, lambda ratio: f"{ratio:,.0f}")
                factor = span(rounds, lambda ratio: f"{ratio:.2f}")
                parts.append(
                    f"{shown} times fewer bytes uploaded, {factor} of the rounds "
                    f"({SPLITS[partition]})"
                )
        if parts:
            lines.append(
                f"- **`{recipe}`**, MNIST, 784→10 softmax, no dropouts, to stay within "
                f"{residual:g} of the minimum, against uncompressed gradient descent: "
                f"{'; '.join(parts)}."
            )
    arrivals = _lean_with_dropouts(results)
    if arrivals:
        lines.append(arrivals)
    lines += _bits_and_bytes(results)
    return Passage("expectations", "\n".join(lines))


def _lean_with_dropouts(results: Results) -> str:
    residual = results.about["dropout_residual"]
    parts = []
    for partition in ("iid", "label"):
        texts = []
        for rate in (rate for split, rate in cells_of(results) if split == partition):
            ours = with_dropouts(results, partition, rate, "lean")
            arrived = out_of(len(costs_to(ours, residual)), len(ours))
            texts.append(f"{arrived} at p = {rate:g}")
        if texts:
            parts.append(f"{SPLITS[partition]} {', '.join(texts)}")
    if not parts:
        return ""
    return (
        f"- **`lean` with dropouts**, the same model, {results.about['dropout_rounds']:,} rounds: "
        f"seeds that come within {residual:g} of the minimum and stay: {'; '.join(parts)}."
    )


def _bits_and_bytes(results: Results) -> list[str]:
    parts = []
    for setting, name in (("network-iid", "IID"), ("network-noniid", "one digit per client")):
        ours, laq = (results.of_setting(setting, recipe) for recipe in ("aqg-2", "laq"))
        bits, spent = (
            paired_ratios(ours, laq, results.cost_of, column)
            for column in ("bits_per_param", "upload_bytes")
        )
        if bits:
            seeds = f", {out_of(len(bits), len(ours))} seeds" if len(bits) < len(ours) else ""
            shown = [span(values, lambda ratio: f"{ratio:.2f}") for values in (bits, spent)]
            parts.append(
                f"{shown[0]} of LAQ's bits but {shown[1]} of its uploaded bytes ({name}{seeds})"
            )
    if not parts:
        return []
    return [
        "- **Bits are not bytes.** The paper counts bits per parameter. In real frames, "
        f"entropy-coded against what both ends know, two-level AQG needs {'; '.join(parts)}; "
        f"MNIST, 784→10, at {results.about['softmax_residual']:g}."
    ]


def platform(results: Results) -> Passage:
    """Return how much the logistic counts depend on the machine and on the last bit."""
    reading = results.reading
    if reading is None:
        return Passage("platform", "")
    lines = machine_sentences(results)
    for partition in ("iid", BY_SOURCE):
        line = _perturbed_sentence(results, partition, reading[1])
        lines += [line] if line else []
    lines += _rounding_sentences(results)
    return Passage("platform", "\n".join(f"- {line}" for line in lines))


def _perturbed_sentence(results: Results, partition: str, alpha: float) -> str:
    parts = []
    for recipe in ("laq", "aqg-2"):
        ours = [
            one
            for one in results.perturbed
            if (one.partition, one.alpha, one.recipe) == (partition, alpha, recipe)
        ]
        if not ours:
            return ""
        good = sum(one.residual < CONVERGED for one in ours)
        before = span([one.uploads_before for one in ours])
        parts.append(
            f"`{recipe}` {span([one.uploads for one in ours])} uploads, of which {before} before "
            f"the loss is within {ROUNDING:g} of its minimum; {out_of(good, len(ours))} converge"
        )
    return (
        f"Logistic, seed 0 ({SPLITS[partition]}, α = {alpha:g}), as it is and with the last bit of "
        f"the data changed at random: {'; '.join(parts)}."
    )


def _rounding_sentences(results: Results) -> list[str]:
    """Say for how many settings the last bit changes the uploads, before and after convergence."""
    settings: dict[tuple[str, str, float], list[Perturbed]] = {}
    for one in results.perturbed:
        settings.setdefault(one.key[:3], []).append(one)
    if not settings:
        return []
    same, same_before = (
        sum(len({getattr(one, name) for one in ours}) == 1 for ours in settings.values())
        for name in ("uploads", "uploads_before")
    )
    draws = max(one.draw for one in results.perturbed)
    return [
        f"Of {len(settings)} combinations of split, α and recipe, each with {draws} perturbations: "
        f"all uploads of 500 rounds are the same in {same}; those before the loss is within "
        f"{ROUNDING:g} of its minimum in {same_before}."
    ]


def _first(partition: str) -> str:
    """Write a split as the first word of a sentence."""
    return SPLITS[partition][0].upper() + SPLITS[partition][1:]


def logistic(results: Results) -> Passage:
    """Return where Table 2's logistic counts lie among the step sizes."""
    runs = [o for o in results.select(section="logistic") if o.scaling == "sum"]
    lines = []
    rows = {row.setting: row.uploads for row in TABLE_2 if row.recipe == "laq"}
    told = {"iid": rows["logistic-iid"], BY_SOURCE: rows["logistic-noniid"]}
    for partition in ("iid", BY_SOURCE):
        counts: dict[float, list[int]] = {}
        for o in runs:
            if (o.partition, o.recipe) == (partition, "laq"):
                counts.setdefault(o.alpha, []).append(o.total.uploads)
        medians = {alpha: median(own) for alpha, own in counts.items()}
        below = [a for a, count in medians.items() if count < told[partition]]
        above = [a for a, count in medians.items() if count >= told[partition]]
        if below and above:
            lines.append(
                f"{_first(partition)}, LAQ's median uploads are {medians[max(below)]:,.0f} at "
                f"α = {max(below):g} and {medians[min(above)]:,.0f} at {min(above):g}; the paper's "
                f"{told[partition]:,} lie between."
            )
        elif medians:
            lines.append(
                f"{_first(partition)}, LAQ's median uploads reach {max(medians.values()):,.0f}, "
                f"the paper's are {told[partition]:,}: no α here has as many."
            )
    return Passage("logistic", " ".join(lines))


def dropouts(results: Results) -> Passage:
    """Return who reaches the target on all seeds, and who diverges on all."""
    residual = results.about["dropout_residual"]
    lines = []
    for recipe in DROPOUT_RECIPES:
        always, some = "reaches the target on every seed at", "on some or none at"
        never = "diverges on every seed at"
        places: dict[str, list[str]] = {always: [], some: [], never: []}
        for partition, rate in cells_of(results):
            ours = with_dropouts(results, partition, rate, recipe)
            if not ours:
                continue
            arrived, away = len(costs_to(ours, residual)), sum(o.ran_away for o in ours)
            place = f"{SPLITS[partition]} {rate:g}"
            if arrived == len(ours):
                places[always].append(place)
            elif away == len(ours):
                places[never].append(place)
            else:
                count = f"({out_of(arrived, len(ours))}" + (f", {away} diverge)" if away else ")")
                places[some].append(f"{place} {count}")
        parts = [f"{text} {', '.join(own)}" for text, own in places.items() if own]
        if parts:
            lines.append(f"- `{recipe}` {'; '.join(parts)}.")
    return Passage("dropouts", "\n".join(lines))


def network(results: Results) -> Passage:
    """Return what became of each rule on the network that is not convex."""
    parts = []
    for recipe in ("laq", "aqg-2", "aqg", "qgd", "lean", "auto"):
        counts = []
        for partition in ("iid", "label"):
            ours = results.select(section="network", partition=partition, recipe=recipe)
            if ours:
                lost = sum(o.ran_away for o in ours)
                counts.append(f"{out_of(lost, len(ours))} ({SPLITS[partition]})")
        if counts:
            parts.append(f"`{recipe}` {' and '.join(counts)}")
    text = f"Seeds that end above their first loss: {'; '.join(parts)}."
    return Passage("network", text if parts else "")


def differences_table(results: Results) -> Table:
    """Return one line per row of the paper's table: how far ours is from it, and why."""
    reasons = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    rows = []
    for row in TABLE_2:
        ours = results.of_setting(row.setting, row.recipe)
        on_network = row.setting.startswith("network")
        if not ours or (on_network and results.about["softmax_residual"] != PAPER_RESIDUAL):
            continue
        label = LABELS[row.setting]
        kind, why = reasons[row.setting][row.recipe].values()
        rows.append((label, f"`{row.recipe}`", compare(results, row, ours, kind), kind, why))
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


def compare(results: Results, row: PaperRow, ours: Sequence[Outcome], kind: str) -> str:
    """Return how our runs of ``row`` compare, one per seed."""
    on_network = row.setting.startswith("network")
    one, many = ("reaches it", "reach it") if on_network else ("converges", "converge")
    counts = results.cost_of if kind == "definition" else results.cost_to_the_end
    costs = [cost for o in ours if (cost := counts(o)) is not None]
    if not costs:
        at = median(o.residual for o in ours)
        return f"no seed of {len(ours)} {one}; at the end {at:.0e}"
    uploads = [cost.uploads / row.uploads for cost in costs]
    bits = [cost.bits_per_param / row.bits for cost in costs]
    if kind == "definition" and all(abs(ratio - 1) <= 0.005 for ratio in (*uploads, *bits)):
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
    if on_network:
        rounds = median(cost.rounds for cost in costs) / row.rounds
        if abs(rounds - 1) > 2 * _CLOSE:
            standing = median(_residual_after(results, o, row.rounds) for o in ours)
            text += f"; ours is at {standing:.0e} after the paper's {row.rounds:,} rounds"
    return text


def _residual_after(results: Results, outcome: Outcome, rounds: int) -> float:
    """Return ``f(θ) - f*`` after about this many rounds, from the thinned curve."""
    curve = results.curves.get(outcome.name)
    if curve is None:
        return math.nan
    index = min(range(len(curve.costs)), key=lambda i: (abs(curve.costs[i].rounds - rounds), i))
    return curve.losses[index] - (outcome.minimum or 0.0)


def _ratio(ratios: Sequence[float]) -> str:
    return span(ratios, lambda ratio: f"{ratio:.2f}")


if __name__ == "__main__":
    main()
