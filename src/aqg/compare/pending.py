"""What a comparison has yet to run for a recipe on a task, given all that is finished.

A search (`aqg.compare.search`) is followed by the other seeds of its winner, and by a final.
"""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from aqg.compare.search import (
    CONTENDER,
    MORE_SEEDS,
    SEARCH_SEED,
    best_setting,
    costs_by_setting,
    default_setting,
    finalists,
    pending_settings,
)
from aqg.compare.trial import CEILING, Trial

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aqg.compare.plan import Comparison
    from aqg.compare.search import Tuned
    from aqg.compare.tasks import Task
    from aqg.compare.trial import Outcome, Setting


class Finished:
    """The outcomes so far, and by task the bytes of the best recipe.

    Attributes:
        by_pair: the outcomes by recipe and task.
        fewest_bytes: by task, on seed 0.
        lowest_median: by task, over the first ``num_seeds`` seeds.

    """

    def __init__(self, outcomes: Mapping[Trial, Outcome], num_seeds: int) -> None:
        self.by_pair: dict[tuple[str, str], dict[Trial, Outcome]] = {}
        self.fewest_bytes: dict[str, int] = {}
        self.lowest_median: dict[str, float] = {}
        for trial, outcome in outcomes.items():
            self.by_pair.setdefault((trial.recipe, trial.task), {})[trial] = outcome
            if outcome.is_reached and trial.seed == SEARCH_SEED:
                fewest = self.fewest_bytes.get(trial.task, outcome.cost)
                self.fewest_bytes[trial.task] = min(fewest, outcome.cost)
        for (_, task), own in self.by_pair.items():
            costs = costs_by_setting(own.values(), num_seeds)
            lowest = self.lowest_median.get(task, math.inf)
            self.lowest_median[task] = min(lowest, *map(median, costs.values()), math.inf)


def pending_trials(
    comparison: Comparison, recipe: str, task: Task, finished: Finished, tuned: Tuned
) -> tuple[list[Trial], int]:
    """Return the trials that the finished ones call for, and how many may follow at most.

    Without a search these are all seeds of the setting in ``tuned``. With one, its winner is run
    with all seeds unless it is beyond the ceiling, and a contender has a final.
    """
    own = finished.by_pair.get((recipe, task.name), {})
    num_seeds = comparison.seeds

    def missing(settings: Iterable[Setting], num_seeds: int) -> list[Trial]:
        trials = [Trial(task.name, recipe, s, seed) for s in settings for seed in range(num_seeds)]
        return [t for t in trials if t not in own or own[t].ending == "costlier"]

    if not comparison.search:
        setting = tuned.get(task.name, {}).get(recipe, default_setting(recipe, task))
        return missing([setting], num_seeds), 0
    has_finals = num_seeds > 1 and not comparison.quick
    most_in_final = 2 * num_seeds + 3 * MORE_SEEDS if has_finals else 0
    tried = {t.setting: o for t, o in own.items() if t.seed == SEARCH_SEED}
    settings, most_later = pending_settings(recipe, task, tried, comparison.quick)
    if settings:
        trials = [Trial(task.name, recipe, s, SEARCH_SEED) for s in settings]
        return trials, most_later + num_seeds - 1 + most_in_final
    best = best_setting(tried.values())
    ceiling = CEILING * finished.fewest_bytes.get(task.name, math.inf)
    if best is None or tried[best].cost > ceiling:
        return [], 0
    if trials := missing([best], num_seeds):
        return trials, most_in_final
    cost = median(costs_by_setting(own.values(), num_seeds)[best])
    if not has_finals or cost > CONTENDER * finished.lowest_median[task.name]:
        return [], 0
    return missing(finalists(recipe, task, best), num_seeds + MORE_SEEDS), 0
