"""Runs that differ in the seed only are one group; what else differs tells groups apart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from aqg.report.runs import Run

COLORS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555", "#8C510A"),
    *("#332288", "#882255", "#999933", "#00A9B5"),
)
"""The first eight are told apart with any color vision (after Okabe and Ito)."""
_RESERVED = ("lean", "gd", "laq", "aqg-2", "aqg", "qgd", "lag", "qsgd")
"""Recipes that look the same in every report, if nobody else has taken their color."""
_LEADING = ("dataset", "partition", "model", "clients", "dropout")


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed only.

    Attributes:
        runs: at least one.
        label: the recipe and, where needed, the settings that tell the group from others.
        settings: the values of `Comparison.telling` for this group.
        color: index into `COLORS`.
        dash: index of the line style; groups with the same color have different ones.

    """

    runs: tuple[Run, ...]
    label: str
    settings: tuple[Any, ...]
    color: int
    dash: int

    @property
    def recipe(self) -> str:
        """The recipe that all runs share."""
        return self.runs[0].recipe


@dataclass(frozen=True)
class Comparison:
    """All groups, and the settings beside the recipe that it takes to tell them apart."""

    groups: tuple[Group, ...]
    telling: tuple[str, ...]

    @property
    def recipes(self) -> tuple[str, ...]:
        """The recipes, in order of appearance."""
        return tuple(dict.fromkeys(group.recipe for group in self.groups))

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, group by group."""
        return tuple(run for group in self.groups for run in group.runs)


def compare(runs: Iterable[Run]) -> Comparison:
    """Group runs and give every group its label and looks."""
    together: dict[str, list[Run]] = {}
    for run in runs:
        settings = {key: value for key, value in run.config.items() if key != "seed"}
        together.setdefault(_text(settings), []).append(run)
    members = [tuple(sorted(group, key=_seed_key)) for group in together.values()]
    telling = telling_settings([group[0] for group in members])
    recipes = list(dict.fromkeys(group[0].recipe for group in members))
    colors = assign_colors(recipes)
    dash_of: dict[object, int] = {}
    groups = []
    for group in members:
        values = tuple(group[0].config.get(name) for name in telling)
        color = colors[group[0].recipe]
        looks = (recipes.index(group[0].recipe) // len(COLORS), _text(values))
        dash = dash_of.setdefault(looks, len(dash_of))
        groups.append(Group(group, _label(group[0], telling), values, color, dash))
    return Comparison(tuple(groups), telling)


def telling_settings(runs: Sequence[Run]) -> tuple[str, ...]:
    """Choose settings that, with the recipe, tell all runs apart; none that adds nothing.

    Settings that always change together, as a dataset and its model do, need only one of them.
    """
    names = dict.fromkeys((*_LEADING, *(name for run in runs for name in run.config)))
    chosen: list[str] = []
    num_distinct = len({run.recipe for run in runs})
    for name in names:
        if name in ("recipe", "seed"):
            continue
        asked = ("recipe", *chosen, name)
        distinct = len({_text([run.config.get(key) for key in asked]) for run in runs})
        if distinct > num_distinct:
            chosen.append(name)
            num_distinct = distinct
    return tuple(chosen)


def assign_colors(recipes: Sequence[str]) -> dict[str, int]:
    """Give every recipe an index into `COLORS`: no two the same before all are in use.

    >>> assign_colors(["gd", "own", "lean:xi=0.5"])
    {'gd': 1, 'own': 2, 'lean:xi=0.5': 0}
    """
    colors: dict[str, int] = {}
    for recipe in recipes[: len(COLORS)]:
        name = recipe.partition(":")[0]
        wanted = _RESERVED.index(name) if name in _RESERVED else None
        if wanted is not None and wanted not in colors.values():
            colors[recipe] = wanted
    for position, recipe in enumerate(recipes):
        if recipe not in colors:
            free = [index for index in range(len(COLORS)) if index not in colors.values()]
            colors[recipe] = free[0] if free else position % len(COLORS)
    return {recipe: colors[recipe] for recipe in recipes}


def setting_text(value: object) -> str:
    """Write a setting's value for humans.

    >>> setting_text(0.5), setting_text("iid"), setting_text([[3, 1, 9]]), setting_text(None)
    ('0.5', 'iid', '[[3, 1, 9]]', '–')
    """
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else _text(value)


def _label(run: Run, telling: Sequence[str]) -> str:
    parts = [run.recipe]
    for name in telling:
        text = setting_text(run.config.get(name))
        if name in ("rounds", "clients"):
            parts.append(f"{text} {name}")
        elif name in ("dataset", "partition", "model"):
            parts.append(text)
        else:
            parts.append(f"{name.replace('_', ' ')} {text}")
    return " · ".join(parts)


def _seed_key(run: Run) -> tuple[bool, float, str]:
    is_number = isinstance(run.seed, int | float)
    return (not is_number, float(run.seed) if is_number else 0.0, run.name)  # type: ignore[arg-type]


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
