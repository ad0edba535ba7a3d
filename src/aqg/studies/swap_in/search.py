"""The search for every recipe's best setting on a task: the server's step and its parameters.

``grid.toml`` says what is tried, the same for everyone (`aqg.studies.compare.ladders`). Our own
recipes have nothing to set, and are run as they are. All others, federated averaging among them,
are also tried with our step, which sets itself.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aqg.core.recipes import RECIPES, make_recipe
from aqg.core.step_sizes import AUTO, Fixed
from aqg.errors import ConfigError
from aqg.studies.compare.ladders import Ladder, most_points, next_points
from aqg.studies.compare.search import make_setting, parameter_ladders, read_grid
from aqg.studies.compare.trial import SELF_SETTING, Setting
from aqg.studies.swap_in.measure import MOST_DELAY, plateau_of, score
from aqg.studies.swap_in.tasks import SWAP_TASKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aqg.studies.swap_in.measure import Curve, Reference
    from aqg.studies.swap_in.tasks import SwapTask

FEDAVG = "fedavg"
OURS = ("auto",)
STEP = "dog"
"""The step that sets itself, as it is tried with every recipe but ours, which names its own."""
_LEFT_OUT = ("gd", "lag")
"""With local training these sum stale updates in full precision; `fedavg` stands for them."""


def parse_swap_recipes(text: str | None) -> tuple[str, ...]:
    """Return recipes in the order of the search, federated averaging first; all without names.

    >>> parse_swap_recipes("stc:keep=0.01,auto")
    ('fedavg', 'auto', 'stc:keep=0.01')
    """
    names = [name for name in RECIPES if name not in _LEFT_OUT]
    if text is not None and text.strip() != "all":
        names = [name.strip() for name in text.split(",")]
    for position, name in enumerate(names):
        make_recipe(name)
        if name in names[:position]:
            raise ConfigError(f"recipe {name!r} is named twice in {text}")
    first = [name for name in read_grid()["swap-in"]["order"] if name in names]
    chosen = dict.fromkeys((FEDAVG, *first, *names))
    return tuple(chosen)


def is_ours(recipe: str) -> bool:
    """Tell whether a recipe is our default, with or without options: it has no settings to try."""
    return recipe.partition(":")[0] in OURS


def fixed_steps() -> Ladder:
    """Return the multiples of federated averaging's step."""
    grid = read_grid()
    return Ladder("step", tuple(grid["ladders"]["step"]), tuple(grid["swap-in"]["steps"]))


def ladders_of(recipe: str) -> list[Ladder]:
    """Return what a recipe can be tried with: steps, and the values of each of its parameters."""
    fixed = fixed_steps()
    steps = Ladder(fixed.name, fixed.values, (*fixed.first, SELF_SETTING))
    return [steps, *parameter_ladders(read_grid()["swap-in"]["parameters"].get(recipe, {}))]


def default_setting(recipe: str) -> Setting:
    """Return what is run without a search: the recipe as it is, and the step that sets itself.

    Where a recipe does not come with such a step, it is that of federated averaging.
    """
    factor = read_grid()["swap-in"]["parameters"].get(recipe, {}).get("factor", [1.0])[0]
    return Setting(recipe, multiplier=SELF_SETTING if _sets_its_step(recipe) else factor)


def _sets_its_step(recipe: str) -> bool:
    """Tell whether a recipe comes with a step that sets itself, with local training."""
    config = replace(next(iter(SWAP_TASKS.values())).config, recipe=recipe, step=AUTO)
    return not isinstance(config.training().step, Fixed)


def pending_settings(
    recipe: str, tried: Mapping[Setting, Any], searches: bool = True
) -> tuple[list[Setting], int]:
    """Return what a search needs next, and about how many settings may follow.

    ``tried`` holds the rank of every setting that was tried on seed 0. Federated averaging's
    search is that of its fixed steps; the step that sets itself is tried in any case
    (`aqg.studies.swap_in.plan.Findings.pending_fedavg`).
    """
    if is_ours(recipe) or not (searches or recipe == FEDAVG):
        setting = default_setting(recipe)
        return ([] if setting in tried else [setting]), 0
    ladders = [fixed_steps()] if recipe == FEDAVG else ladders_of(recipe)
    points = next_points(ladders, lambda point: tried.get(make_setting(recipe, ladders, point)))
    settings = list(dict.fromkeys(make_setting(recipe, ladders, point) for point in points))
    return settings, max(0, most_points(ladders) - len(tried) - len(settings)) if settings else 0


Rank = tuple[int, float]


def rank(task: SwapTask, curve: Curve, reference: Reference) -> Rank:
    """Order runs of one seed: swap-ins by cost, then by delay, then by how far they came."""
    found = score(curve, reference)
    if found is None:
        return 2, _shortfall(task, curve)
    return (0, found.cost) if found.delay <= MOST_DELAY else (1, found.delay)


def rank_of_fedavg(task: SwapTask, curve: Curve) -> Rank:
    """Order runs of federated averaging by their plateaus; those that did not end come last."""
    plateau = plateau_of(curve, task.config.rounds)
    if math.isnan(plateau):
        return 1, 0.0
    return 0, -plateau if task.kind == "accuracy" else plateau


def _shortfall(task: SwapTask, curve: Curve) -> float:
    """Return the best value as a number that is smaller the better it is."""
    values = [value for value in curve.values if math.isfinite(value)]
    if not values:
        return math.inf
    return -max(values) if task.kind == "accuracy" else min(values)
