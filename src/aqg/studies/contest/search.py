"""The search for every recipe's best setting on a task: the server's step and its parameters.

``grid.toml`` says what is tried, the same for everyone. The search goes along one axis after the
other, the rest staying at the best value so far: steps, the parameters of the recipe, the length of
what the server publishes, and at last the steps beside the best. While the best value is the
outermost one tried, the next one is tried as well. With local training all recipes, federated
averaging among them, are also tried with our step, which sets itself; our own recipe then has
nothing to set, and is run as it is.
"""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

from aqg.core.downlink import AUTO
from aqg.core.recipes import RECIPES, make_recipe
from aqg.core.step_sizes import Fixed
from aqg.errors import ConfigError
from aqg.runs.config import RunConfig
from aqg.studies.contest.tasks import Task

FEDAVG = "fedavg"
OURS = "auto"
STEP = "dog"
"""The step that sets itself, as it is tried with every recipe but ours, which names its own."""
SELF_SETTING = 0.0
"""In place of a multiple of the step: one that the server sets itself."""
FORMER_STEP = -1.0
"""The same with a rule that is gone: such stored runs are ranked, and no more can be made."""
TUNED = "tuned.json"
SEARCH_SEED = 0
_DEFAULT_RECIPES = (OURS, "lean", "stc", "qsgd", "topk", "eden")
_QUICK = 2
"""So many values of each axis are tried in a quick search."""

Point: TypeAlias = tuple[float, ...]
"""A value on each ladder."""


@dataclass(frozen=True)
class Setting:
    """A recipe with its parameters and its step, a multiple of the task's or `SELF_SETTING`."""

    spec: str
    bits: int = 4
    multiplier: float = 1.0
    downlink: str = AUTO  # what the comparison says

    def __str__(self) -> str:
        text = self.spec if self.bits == 4 else f"{self.spec}, {self.bits} bits"
        if self.downlink != AUTO:
            text += f", {self.downlink}"
        named = {SELF_SETTING: ", step of its own", FORMER_STEP: ", former adaptive step", 1: ""}
        return text + named.get(self.multiplier, f", step ×{self.multiplier:g}")

    def to_json(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if (k, v) != ("downlink", AUTO)}

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Setting:
        return Setting(row["spec"], row["bits"], row["multiplier"], row.get("downlink", AUTO))


@functools.cache
def read_grid() -> dict[str, Any]:
    text = resources.files("aqg.studies.contest").joinpath("grid.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def parse_recipes(text: str | None) -> tuple[str, ...]:
    """Return recipes in the order of the search, federated averaging first; None is a choice."""
    names = [name for name in _DEFAULT_RECIPES if name in RECIPES]
    if text is not None:
        all_of_them = text.strip() == "all"
        names = list(RECIPES) if all_of_them else [name.strip() for name in text.split(",")]
    for position, name in enumerate(names):
        make_recipe(name)
        if name in names[:position]:
            raise ConfigError(f"recipe {name!r} is named twice in {text}")
    first = [name for name in read_grid()["order"] if name in names]
    return tuple(dict.fromkeys((FEDAVG, *first, *names)))


def applies(recipe: str, task: Task) -> bool:
    """Tell whether a recipe differs from all others on the task: some act on dropouts only."""
    return task.config.dropout > 0 or not make_recipe(recipe).amplify_dropouts


@functools.cache
def _sets_its_step(recipe: str, config: RunConfig) -> bool:
    """Tell whether a recipe comes with a step that sets itself, where the clients train so."""
    return not isinstance(replace(config, recipe=recipe, step=AUTO).training().step, Fixed)


def is_ours(recipe: str, task: Task) -> bool:
    """Tell whether a recipe is our default, with or without options, and has nothing to set."""
    return recipe.partition(":")[0] == OURS and _sets_its_step(recipe, task.config)


@dataclass(frozen=True)
class Ladder:
    """One axis of a search: ``values`` that may be tried, increasing, and likely ones, ``first``.

    A likely one that is not among the values has no neighbors, such as a step that sets itself.
    """

    name: str
    values: tuple[float, ...]
    first: tuple[float, ...]

    def beside(self, value: float) -> list[float]:
        if value not in self.values:
            return []
        place = self.values.index(value)
        return [*self.values[max(0, place - 1) : place], *self.values[place + 1 : place + 2]]

    def beyond(self, tried: Sequence[float], best: float) -> float | None:
        """Return what to try next where the best value is the outermost tried; else None."""
        others = [value for value in self.beside(best) if value not in tried]
        known = [value for value in tried if value in self.values and value != best]
        return next(
            (v for v in others if not any((v < best) == (other < best) for other in known)), None
        )


def next_points(ladders: Sequence[Ladder], rank: Callable[[Point], Any | None]) -> list[Point]:
    """Return what the search needs next; nothing when it is over.

    ``rank`` is that of a point that was tried, the best being the smallest; else None.
    """
    best = [ladder.first[0] for ladder in ladders]
    axes = list(range(len(ladders)))
    for turn, axis in enumerate([*axes, 0] if len(axes) > 1 else axes):
        ladder = ladders[axis]
        values = list(ladder.first)
        if turn >= len(axes):
            values = [best[0], *ladder.beside(best[0])]
        while True:
            points = {value: (*best[:axis], value, *best[axis + 1 :]) for value in values}
            ranks: dict[float, Any] = {value: rank(point) for value, point in points.items()}
            if needed := [points[value] for value, found in ranks.items() if found is None]:
                return needed
            winner = min(values, key=ranks.__getitem__)
            further = ladder.beyond(values, winner)
            if further is None:
                break
            values.append(further)
        best[axis] = winner
    return []


def _parameters(recipe: str, task: Task) -> dict[str, Any]:
    return read_grid()[task.regime]["parameters"].get(recipe, {})


def fixed_steps(task: Task) -> Ladder:
    grid = read_grid()
    return Ladder("step", tuple(grid["ladders"]["step"]), tuple(grid[task.regime]["steps"]))


def ladders_of(recipe: str, task: Task, quick: bool = False) -> list[Ladder]:
    steps = fixed_steps(task)
    if _sets_its_step(OURS, task.config):
        steps = replace(steps, first=(*steps.first, SELF_SETTING))
    known = read_grid()["ladders"]
    ladders = [steps] + [
        Ladder(name, tuple(known.get(name, sorted(values))), tuple(values))
        for name, values in _parameters(recipe, task).items()
    ]
    return [Ladder(each.name, (), each.first[:_QUICK]) for each in ladders] if quick else ladders


def make_setting(recipe: str, ladders: Sequence[Ladder], point: Point) -> Setting:
    """Return the setting at a point of the grid.

    >>> ladders = [Ladder(name, (), (1,)) for name in ("step", "bits", "xi")]
    >>> str(make_setting("laq", ladders, (2, 8, 0.1)))
    'laq:xi=0.1, 8 bits, step ×2'
    """
    spec, bits, multiplier, downlink = recipe, 4, 1.0, AUTO
    for ladder, value in zip(ladders, point, strict=True):
        match ladder.name:
            case "step" | "factor":
                multiplier *= value
            case "bits":
                bits = int(value)
            case "ratio":
                downlink = AUTO if value == 1 else f"condensed:ratio={value:g}"
            case _:
                spec += f":{ladder.name}={value:g}"
    return Setting(spec, bits, multiplier, downlink)


def default_setting(recipe: str, task: Task) -> Setting:
    """Return a recipe as it is, with the step that sets itself or, without one, the task's."""
    if _sets_its_step(recipe, task.config):
        return Setting(recipe, multiplier=SELF_SETTING)
    return Setting(recipe, multiplier=_parameters(recipe, task).get("factor", [1.0])[0])


def pending_settings(
    recipe: str, task: Task, tried: Mapping[Setting, Any], quick: bool = False
) -> tuple[list[Setting], int]:
    """Return what a search needs next, and about how many settings may follow.

    ``tried`` holds the rank of each one tried on seed 0. Where federated averaging's plateau is the
    goal, its search is that of its fixed steps (`plan.Findings.pending_fedavg`).
    """
    if is_ours(recipe, task):
        setting = default_setting(recipe, task)
        return ([] if setting in tried else [setting]), 0
    is_reference = recipe == FEDAVG and task.goal.target is None
    ladders = [fixed_steps(task)] if is_reference else ladders_of(recipe, task, quick)
    points = next_points(ladders, lambda point: tried.get(make_setting(recipe, ladders, point)))
    settings = list(dict.fromkeys(make_setting(recipe, ladders, point) for point in points))
    most = sum(len(ladder.first) for ladder in ladders) + 2
    return settings, max(0, most - len(tried) - len(settings)) if settings else 0


Tuned: TypeAlias = Mapping[str, Mapping[str, Setting]]
"""Settings that a search found, by task and recipe."""


def write_tuned(tuned: Tuned) -> str:
    tasks = []
    for task, recipes in tuned.items():
        rows = [f"  {json.dumps(name)}: {json.dumps(s.to_json())}" for name, s in recipes.items()]
        tasks.append(f" {json.dumps(task)}: {{\n" + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(tasks) + "\n}\n"


def read_tuned(path: Path | None = None) -> Tuned:
    try:
        file = path or resources.files("aqg.studies.contest").joinpath(TUNED)
        rows = json.loads(file.read_text(encoding="utf-8"))
        return {
            task: {recipe: Setting.from_json(row) for recipe, row in recipes.items()}
            for task, recipes in rows.items()
        }
    except OSError as error:
        raise ConfigError(f"settings {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"settings {str(path)!r} are damaged: {error!r}") from None
