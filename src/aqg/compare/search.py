"""The search for every recipe's best setting on every task, and what came of it.

``grid.toml`` says what is tried, the same for everyone: some step sizes, times the values of one
knob of the recipe's own. A setting's score is the bytes it needs on seed 0. ``tuned.json`` holds
the winners; `aqg compare` uses them for all seeds.
"""

from __future__ import annotations

import functools
import json
import tomllib
from dataclasses import asdict
from importlib import resources
from typing import TYPE_CHECKING, Any

from aqg.compare.trial import Setting
from aqg.core.recipes import RECIPES, make_recipe
from aqg.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from aqg.compare.tasks import Task
    from aqg.compare.trial import Outcome

    Tuned = Mapping[str, Mapping[str, Setting]]

GRID = "grid.toml"
TUNED = "tuned.json"
SEARCH_SEED = 0
DEFAULT_RECIPES = ("auto", "lean", "stc", "ef21", "qsgd", "gd")
"""What a comparison without names shows."""


@functools.cache
def read_grid() -> dict[str, Any]:
    """Return the content of ``grid.toml``."""
    text = resources.files("aqg.compare").joinpath(GRID).read_text(encoding="utf-8")
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


def settings_to_try(recipe: str, task: Task, quick: bool = False) -> list[Setting]:
    """Return every setting of the grid; a recipe with options of its own keeps them.

    With ``quick``, only the first two step sizes and the first two values of the knob.

    >>> from aqg.compare.tasks import TASKS
    >>> [str(s) for s in settings_to_try("lean", TASKS["softmax-iid"], quick=True)]
    ['lean:xi=1, step ×2', 'lean:xi=3, step ×2', 'lean:xi=1', 'lean:xi=3']
    """
    grid = read_grid()["local" if task.is_local else "full-batch"]
    steps = grid["steps"]
    knob, values = next(iter(grid["knobs"].get(recipe, {"factor": [1]}).items()))
    if quick:
        steps, values = steps[:2], values[:2]
    return [_setting(recipe, step, knob, value) for step in steps for value in values]


def _setting(recipe: str, step: float, knob: str, value: float) -> Setting:
    match knob:
        case "factor":
            return Setting(recipe, multiplier=step * value)
        case "bits":
            return Setting(recipe, bits=int(value), multiplier=step)
    return Setting(f"{recipe}:{knob}={value:g}", multiplier=step)


def best_setting(outcomes: Iterable[Outcome]) -> Setting | None:
    """Return the setting that reached the target with the fewest bytes; None if none did."""
    reached = [outcome for outcome in outcomes if outcome.is_reached]
    if not reached:
        return None
    best = min(reached, key=lambda outcome: (outcome.upload_bytes, str(outcome.trial.setting)))
    return best.trial.setting


def default_setting(recipe: str, task: Task) -> Setting:
    """Return what is used where nothing was searched: the recipe as it is, the task's step.

    >>> from aqg.compare.tasks import TASKS
    >>> str(default_setting("signsgd", TASKS["softmax-iid"]))
    'signsgd, step ×0.001'
    """
    knob = read_grid()["local" if task.is_local else "full-batch"]["knobs"].get(recipe, {})
    return Setting(recipe, multiplier=knob.get("factor", [1.0])[0])


def write_tuned(tuned: Tuned) -> str:
    """Return the winners as JSON, by task and recipe."""
    rows = {
        task: {recipe: asdict(setting) for recipe, setting in recipes.items()}
        for task, recipes in tuned.items()
    }
    return json.dumps(rows, indent=1) + "\n"


def read_tuned(path: Path | None = None) -> Tuned:
    """Read winners from a file, by default those that come with the package."""
    if path is None:
        file = resources.files("aqg.compare").joinpath(TUNED)
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


def collect_tuned(outcomes: Iterable[Outcome]) -> Tuned:
    """Return the best setting of every recipe and task that reached its target."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.trial.seed == SEARCH_SEED:
            groups.setdefault((outcome.trial.task, outcome.trial.recipe), []).append(outcome)
    tuned: dict[str, dict[str, Setting]] = {}
    for (task, recipe), group in groups.items():
        best = best_setting(group)
        if best is not None:
            tuned.setdefault(task, {})[recipe] = best
    return tuned
