"""What a report says in words: its title, a few facts, and the headline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.report.groups import setting_text
from aqg.report.results import result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from aqg.report.groups import Comparison
    from aqg.report.results import Result


_NAMELESS = ("–", "custom")
"""How a setting reads that is not stored, or that a deployment has not described."""


def title(comparison: Comparison) -> str:
    """Name what is compared: some recipes on some data."""
    recipes = comparison.recipes
    datasets = {setting_text(run.config.get("dataset")): None for run in comparison.runs}
    named = [dataset for dataset in datasets if dataset not in _NAMELESS]
    what = join_words(recipes) if len(recipes) <= 4 else f"{len(recipes)} recipes"
    return f"{what} on {join_words(named)}" if named else what


def facts(comparison: Comparison) -> list[str]:
    """Return what all runs share, in a few words each."""
    runs = comparison.runs
    shared = []
    for name, words in (
        ("model", "{}"),
        ("clients", "{} clients"),
        ("partition", "{} split"),
        ("dropout", "dropout {}"),
    ):
        value = common(run.config.get(name) for run in runs)
        if value != 0 and setting_text(value) not in _NAMELESS:
            shared.append(words.format(setting_text(value)))
    most = max((len(run.rounds) for run in runs), default=0)
    least = min((len(run.rounds) for run in runs), default=0)
    unfinished = sum(run.summary is None for run in runs)
    return [
        f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}",
        *shared,
        f"{most:,} rounds" if least == most else f"{least:,} to {most:,} rounds",
        *([f"{unfinished} not finished"] if unfinished else []),
    ]


def headline(comparison: Comparison) -> str | None:
    """Say in a sentence which recipe reached the target with the fewest bytes; None without one.

    Bytes are those of both directions or, where downloads are not on record, the uploaded ones.
    Only runs with the same settings and the same target are compared: where there are several such
    sets, the sentence gives the range over all, and there is none unless one recipe wins in each.
    """
    results = {id(run): result_of(run) for run in comparison.runs}
    reached = [r for r in results.values() if r.target_upload_bytes is not None]
    is_total = all(result.target_total_bytes is not None for result in reached)
    counted = "target_total_bytes" if is_total else "target_upload_bytes"
    sets: dict[str, dict[str, float]] = {}
    target = common(result.target for result in results.values())
    for group in comparison.groups:
        spread = spread_of([results[id(run)] for run in group.runs], counted)
        if spread is not None:
            config = group.runs[0].config
            others = {
                name: value for name, value in config.items() if name not in ("recipe", "seed")
            }
            sets.setdefault(setting_text(others), {})[group.recipe] = spread[0]
    if target is None or not sets:
        return None
    best = {min(costs, key=lambda recipe: costs[recipe]) for costs in sets.values()}
    rivals = [recipe for recipe in comparison.recipes if recipe not in best]
    rivals = [recipe for recipe in rivals if all(recipe in costs for costs in sets.values())]
    if len(best) > 1 or not rivals:
        return None
    (winner,) = best
    if any(costs[winner] <= 0 for costs in sets.values()):
        return None
    rival = "gd" if "gd" in rivals else max(rivals, key=lambda r: max(c[r] for c in sets.values()))
    spent = _range([costs[winner] for costs in sets.values()], format_size)
    saving = _range([costs[rival] / costs[winner] for costs in sets.values()], "{:.3g}".format)
    return (
        f"{winner} came within {target:g} of the minimum after {spent} "
        f"{'up and down' if is_total else 'of uploads'}, "
        f"{saving} times less than {rival}."
    )


def format_size(num_bytes: float) -> str:
    """Write a size for humans, as the tables of the command line do.

    >>> format_size(812), format_size(48_200.5)
    ('812 B', '48.2 kB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:g} B"


def _range(values: Sequence[float], write: Callable[[float], str]) -> str:
    low, high = write(min(values)), write(max(values))
    return low if low == high else f"{low} to {high}"


def spread_of(results: Sequence[Result], name: str) -> list[float] | None:
    """Return median, smallest and largest of a result; None unless every run has a value."""
    return spread([getattr(result, name) for result in results])


def spread(values: Sequence[float | None]) -> list[float] | None:
    """Return median, smallest and largest; None unless all are known.

    >>> spread([1.0, 4.0, 2.0]), spread([1.0, None])
    ([2.0, 1.0, 4.0], None)
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return [float(np.median(known)), float(min(known)), float(max(known))]


def common(values: Iterable[Any]) -> Any:
    """Return the one value that all share, or None."""
    distinct: list[Any] = []
    for value in values:
        if value not in distinct:
            distinct.append(value)
    return distinct[0] if len(distinct) == 1 else None


def join_words(words: Sequence[str]) -> str:
    """Join words as in a sentence.

    >>> join_words(["lean"]), join_words(["lean", "gd", "laq"])
    ('lean', 'lean, gd and laq')
    """
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"
