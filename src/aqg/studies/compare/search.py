"""The search for every recipe's best setting on every task, and what came of it.

``grid.toml`` says what can be tried, the same for everyone: some step sizes, times the values of
one parameter of the recipe's own. A setting's score is the bytes it needs on seed 0. The search
goes along one axis after the other:

1. every step size, with the first value of the parameter;
2. the other values of the parameter, with the best of these steps;
3. with the best of these values, the step sizes next to the best that it was not tried with.

In a comparison that *extends* its searches, as new ones do, a recipe may have several parameters,
and a search whose best value is the outermost one tried goes on (`aqg.studies.compare.ladders`).

The best on seed 0 is run with all seeds. One seed can mislead, so a recipe that comes close to the
best of all then has a final, with two seeds more: its best setting meets those with the step sizes
next to its own, and whichever fails on the fewest seeds wins or, of equals, has the lowest median.
``tuned.json`` holds the winners, which is what `aqg compare` uses without a search.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from statistics import median
from typing import TYPE_CHECKING, Any

from aqg.core.downlink import AUTO
from aqg.core.recipes import RECIPES, make_recipe
from aqg.errors import ConfigError
from aqg.studies.compare.ladders import Ladder, most_points, next_points
from aqg.studies.compare.trial import Setting

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from aqg.studies.compare.ladders import Point
    from aqg.studies.compare.tasks import Task
    from aqg.studies.compare.trial import Outcome

    Tuned = Mapping[str, Mapping[str, Setting]]

GRID = "grid.toml"
TUNED = "tuned.json"
SEARCH_SEED = 0
CONTENDER = 1.5
"""A recipe has a final if it needs at most so many times the bytes of the best one."""
MORE_SEEDS = 2
"""In a final."""
DEFAULT_RECIPES = ("auto", "lean", "stc", "ef21", "qsgd", "gd")
"""What a comparison without names shows."""


@functools.cache
def read_grid() -> dict[str, Any]:
    """Return the content of ``grid.toml``."""
    text = resources.files("aqg.studies.compare").joinpath(GRID).read_text(encoding="utf-8")
    return tomllib.loads(text)


def parse_recipes(text: str | None) -> tuple[str, ...]:
    """Return recipes in the order of the search: those named, ``all``, or a choice without names.

    >>> parse_recipes("gd,lean:xi=3,stc")
    ('stc', 'gd', 'lean:xi=3')
    """
    if text is None:
        names = [name for name in DEFAULT_RECIPES if name in RECIPES]
    elif text.strip() == "all":
        names = list(RECIPES)
    else:
        names = [name.strip() for name in text.split(",")]
    for position, name in enumerate(names):
        make_recipe(name)
        if name in names[:position]:
            raise ConfigError(f"recipe {name!r} is named twice in {text}")
    first = [name for name in read_grid()["order"] if name in names]
    return (*first, *(name for name in names if name not in first))


def applies(recipe: str, task: Task) -> bool:
    """Tell whether a recipe differs from all others on the task: some act on dropouts only."""
    return task.dropout > 0 or not make_recipe(recipe).amplify_dropouts


@dataclass(frozen=True)
class Axes:
    """What a recipe can be tried with on a task, in the order it is tried.

    Attributes:
        recipe: its name; one with options of its own keeps them.
        steps: multiples of the task's step size.
        parameter: an option of the recipe, ``"bits"``, or ``"factor"``, a factor on the step.
        values: of the parameter.

    """

    recipe: str
    steps: tuple[float, ...]
    parameter: str
    values: tuple[float, ...]

    def setting(self, step: float, value: float) -> Setting:
        """Return one point of the grid."""
        match self.parameter:
            case "factor":
                return Setting(self.recipe, multiplier=step * value)
            case "bits":
                return Setting(self.recipe, bits=int(value), multiplier=step)
        return Setting(f"{self.recipe}:{self.parameter}={value:g}", multiplier=step)

    def beside(self, step: float) -> list[float]:
        """Return the next smaller and the next larger step, as far as there are any."""
        ordered = sorted(self.steps)
        position = ordered.index(step)
        return [*ordered[max(0, position - 1) : position], *ordered[position + 1 : position + 2]]


def axes_of(recipe: str, task: Task, quick: bool = False) -> Axes:
    """Return the part of the grid that is the recipe's own.

    With ``quick``, only the first two step sizes and the first two values of the parameter.

    >>> from aqg.studies.compare.tasks import TASKS
    >>> axes_of("lean", TASKS["softmax-iid"], quick=True)
    Axes(recipe='lean', steps=(2, 1), parameter='xi', values=(1, 3))
    """
    grid = read_grid()["local" if task.is_local else "full-batch"]
    parameter, values = next(iter(grid["parameters"].get(recipe, {"factor": [1]}).items()))
    most = 2 if quick else None
    return Axes(recipe, tuple(grid["steps"][:most]), parameter, tuple(values[:most]))


def parameter_ladders(parameters: Mapping[str, Sequence[float]]) -> list[Ladder]:
    """Return a ladder for every parameter: the values to begin with, and what they go on to."""
    known = read_grid()["ladders"]
    return [
        Ladder(name, tuple(known.get(name, sorted(values))), tuple(values))
        for name, values in parameters.items()
    ]


def make_setting(recipe: str, ladders: Sequence[Ladder], point: Point) -> Setting:
    """Return the setting at a point of the grid.

    >>> own = parameter_ladders({"bits": [4, 8], "xi": [1, 0.1]})
    >>> ladders = [Ladder("step", (1, 2), (1,)), *own]
    >>> str(make_setting("laq", ladders, (2, 8, 0.1)))
    'laq:xi=0.1, 8 bits, step ×2'
    """
    spec, bits, multiplier, downlink = recipe, 4, 1.0, AUTO
    for ladder, value in zip(ladders, point, strict=True):
        match ladder.name:
            case "step":
                multiplier *= value
            case "factor":
                multiplier *= value
            case "bits":
                bits = int(value)
            case "ratio":
                downlink = AUTO if value == 1 else f"condensed:ratio={value:g}"
            case _:
                spec += f":{ladder.name}={value:g}"
    return Setting(spec, bits, multiplier, downlink)


def _extending_settings(
    recipe: str, task: Task, tried: Mapping[Setting, Outcome]
) -> tuple[list[Setting], int]:
    """Return what a search needs next that goes on at edges, and about how many may follow."""
    grid = read_grid()
    own = grid["local" if task.is_local else "full-batch"]
    steps = Ladder("step", tuple(grid["ladders"]["step"]), tuple(own["steps"]))
    ladders = [steps, *parameter_ladders(own["parameters"].get(recipe, {}))]

    def rank(point: Point) -> tuple[bool, float] | None:
        outcome = tried.get(make_setting(recipe, ladders, point))
        return None if outcome is None else _rank(outcome, task)

    settings = [make_setting(recipe, ladders, point) for point in next_points(ladders, rank)]
    later = max(0, most_points(ladders) - len(tried) - len(settings)) if settings else 0
    return settings, later


def pending_settings(
    recipe: str,
    task: Task,
    tried: Mapping[Setting, Outcome],
    quick: bool = False,
    extends: bool = False,
) -> tuple[list[Setting], int]:
    """Return what the search needs next, and how many settings may follow at most.

    ``tried`` holds what was tried on seed 0, in this search or before. The search is over when
    nothing is needed.

    >>> from aqg.studies.compare.tasks import TASKS
    >>> settings, most_later = pending_settings("lean", TASKS["softmax-iid"], {})
    >>> [str(setting) for setting in settings], most_later
    (['lean:xi=1, step ×2', 'lean:xi=1', 'lean:xi=1, step ×4', 'lean:xi=1, step ×0.5'], 4)
    """
    if extends and not quick:
        return _extending_settings(recipe, task, tried)
    axes = axes_of(recipe, task, quick)
    most_beside = min(2, len(axes.steps) - 1) if len(axes.values) > 1 else 0

    def missing(settings: Iterable[Setting]) -> list[Setting]:
        return [setting for setting in settings if setting not in tried]

    by_step = {step: axes.setting(step, axes.values[0]) for step in axes.steps}
    if needed := missing(by_step.values()):
        return needed, len(axes.values) - 1 + most_beside
    step = _best_of(by_step, task, tried)
    by_value = {value: axes.setting(step, value) for value in axes.values}
    if needed := missing(by_value.values()):
        return needed, most_beside
    value = _best_of(by_value, task, tried)
    return missing(axes.setting(other, value) for other in axes.beside(step)), 0


def _best_of(
    settings: Mapping[float, Setting], task: Task, tried: Mapping[Setting, Outcome]
) -> float:
    """Return the step or value whose setting did best; of equals, the first."""
    return min(settings, key=lambda number: _rank(tried[settings[number]], task))


def _rank(outcome: Outcome, task: Task) -> tuple[bool, float]:
    """Order outcomes: the fewest bytes to the target; without it, the value that came closest."""
    if outcome.is_reached:
        return False, outcome.cost
    if outcome.value is None:
        return True, math.inf
    return True, -outcome.value if task.target.kind == "accuracy" else outcome.value


def finalists(recipe: str, task: Task, best: Setting, extends: bool = False) -> list[Setting]:
    """Return the best setting of the search and those with the step sizes next to its own.

    Where searches go on at edges, these are half and twice its own.

    >>> from aqg.studies.compare.tasks import TASKS
    >>> best = Setting("lean:xi=3", multiplier=2)
    >>> [str(setting) for setting in finalists("lean", TASKS["softmax-iid"], best)]
    ['lean:xi=3, step ×2', 'lean:xi=3', 'lean:xi=3, step ×4']
    """
    if extends:
        beside = (best.multiplier / 2, best.multiplier * 2)
        return [best, *(replace(best, multiplier=multiplier) for multiplier in beside)]
    axes = axes_of(recipe, task)
    points = ((step, value) for value in axes.values for step in axes.steps)
    point = next((point for point in points if axes.setting(*point) == best), None)
    if point is None:  # an earlier grid's
        return [best]
    return [best, *(axes.setting(step, point[1]) for step in axes.beside(point[0]))]


def leading_setting(outcomes: Iterable[Outcome], task: Task) -> Setting:
    """Return the setting that reached the target with the fewest bytes, or else came closest."""
    best = min(outcomes, key=lambda o: (_rank(o, task), str(o.trial.setting)))
    return best.trial.setting


def costs_by_setting(
    outcomes: Iterable[Outcome], num_seeds: int | None = None
) -> dict[Setting, list[float]]:
    """Return the bytes on the first seeds, of every setting that was run with them all.

    By default as many seeds as any setting was run with. A seed that did not reach the target
    counts as infinite, one that was abandoned as not run.
    """
    costs: dict[Setting, dict[int, float]] = {}
    for outcome in outcomes:
        if outcome.ending != "costlier":
            cost = outcome.cost if outcome.is_reached else math.inf
            costs.setdefault(outcome.trial.setting, {})[outcome.trial.seed] = cost
    run = {
        setting: [own[seed] for seed in itertools.takewhile(own.__contains__, itertools.count())]
        for setting, own in costs.items()
    }
    if num_seeds is None:
        num_seeds = max(map(len, run.values()), default=0)
    return {s: own[:num_seeds] for s, own in run.items() if len(own) >= num_seeds > 0}


def best_setting(outcomes: Iterable[Outcome]) -> Setting | None:
    """Return the setting that failed on the fewest seeds and, of these, has the lowest median.

    Of those that were run with the most seeds; None if the median is infinite.
    """
    costs = costs_by_setting(outcomes)
    best = min(
        costs, key=lambda s: (costs[s].count(math.inf), median(costs[s]), str(s)), default=None
    )
    return None if best is None or math.isinf(median(costs[best])) else best


def default_setting(recipe: str, task: Task) -> Setting:
    """Return what is used where nothing was searched: the recipe as it is, the task's step.

    >>> from aqg.studies.compare.tasks import TASKS
    >>> str(default_setting("signsgd", TASKS["softmax-iid"]))
    'signsgd, step ×0.001'
    """
    grid = read_grid()["local" if task.is_local else "full-batch"]
    return Setting(recipe, multiplier=grid["parameters"].get(recipe, {}).get("factor", [1.0])[0])


def write_tuned(tuned: Tuned) -> str:
    """Return the winners as JSON, by task and recipe."""
    rows = {
        task: {recipe: setting.to_json() for recipe, setting in recipes.items()}
        for task, recipes in tuned.items()
    }
    return json.dumps(rows, indent=1) + "\n"


def read_tuned(path: Path | None = None) -> Tuned:
    """Read winners from a file, by default those that come with the package."""
    if path is None:
        file = resources.files("aqg.studies.compare").joinpath(TUNED)
        text = file.read_text(encoding="utf-8") if file.is_file() else "{}"
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"settings {str(path)!r} cannot be read: {error.strerror}") from None
    try:
        rows = json.loads(text)
        return {
            task: {recipe: Setting(**setting) for recipe, setting in recipes.items()}
            for task, recipes in rows.items()
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"settings {str(path)!r} are damaged: {error}") from None


def winning_setting(outcomes: Sequence[Outcome]) -> Setting | None:
    """Return the best setting over all seeds or, where it fails on half of them, on seed 0."""
    on_seed_zero = (outcome for outcome in outcomes if outcome.trial.seed == SEARCH_SEED)
    return best_setting(outcomes) or best_setting(on_seed_zero)


def collect_tuned(outcomes: Iterable[Outcome]) -> Tuned:
    """Return the best setting of every recipe and task that reached its target."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.trial.task, outcome.trial.recipe), []).append(outcome)
    tuned: dict[str, dict[str, Setting]] = {}
    for (task, recipe), group in groups.items():
        best = winning_setting(group)
        if best is not None:
            tuned.setdefault(task, {})[recipe] = best
    return tuned
