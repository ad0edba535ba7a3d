"""Which trial comes next, and why: asked whenever a worker is free, answered from what is finished.

Without a search, every recipe is run with all seeds of the setting that a search found before.
With one, a recipe on a task is first tried with some settings on seed 0
(`search.pending_settings`). The best is run with all seeds, unless it is beyond the ceiling. A
recipe that comes close to the best of all then has a final, with two seeds more, against the
settings next to its own.

Every recipe on every task advances on its own, so that no worker waits for the slowest of a stage.
Recipes come in their order, so that a comparison that is cut off is complete for the first ones,
whose costs are also the bar for the rest; within a recipe tasks take turns.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from aqg.runs.files import Records
from aqg.runs.stopping import Limits
from aqg.studies.compare.search import (
    CONTENDER,
    MORE_SEEDS,
    SEARCH_SEED,
    best_setting,
    costs_by_setting,
    default_setting,
    finalists,
    pending_settings,
)
from aqg.studies.compare.trial import CEILING, Outcome, Trial, safe
from aqg.studies.trials import TRIALS, TrialJob, TrialPlan, read_records

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from aqg.runs.config import RunConfig
    from aqg.studies.compare.comparison import Comparison
    from aqg.studies.compare.search import Tuned
    from aqg.studies.compare.tasks import Task
    from aqg.studies.compare.trial import Setting


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
    """Return the trials that the finished ones call for, and how many may follow at most."""
    own = finished.by_pair.get((recipe, task.name), {})
    num_seeds = comparison.seeds

    def missing(settings: Iterable[Setting], num_seeds: int) -> list[Trial]:
        trials = [Trial(task.name, recipe, s, seed) for s in settings for seed in range(num_seeds)]
        return [t for t in trials if t not in own or own[t].ending == "costlier"]

    if not comparison.search:
        setting = tuned.get(task.name, {}).get(recipe, default_setting(recipe, task))
        return missing([setting], num_seeds), 0
    most_in_final = 2 * num_seeds + 3 * MORE_SEEDS if comparison.has_finals else 0
    tried = {t.setting: o for t, o in own.items() if t.seed == SEARCH_SEED}
    settings, most_later = pending_settings(
        recipe, task, tried, comparison.quick, comparison.extends
    )
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
    if not comparison.has_finals or cost > CONTENDER * finished.lowest_median[task.name]:
        return [], 0
    settings = finalists(recipe, task, best, comparison.extends)
    return missing(settings, num_seeds + MORE_SEEDS), 0


def read_outcomes(directory: Path) -> dict[Trial, Outcome]:
    """Return all outcomes on record by trial, the last one of each."""
    return read_records(directory, Outcome.from_json)


def comparable(outcomes: Mapping[Trial, Outcome]) -> dict[Trial, Outcome]:
    """Return outcomes whose costs count the same: both directions, or uploads alone.

    A comparison from before downloads were counted has trials without; all of its trials are then
    returned without, also those that were run since.
    """
    if all(outcome.download_bytes is not None for outcome in outcomes.values()):
        return dict(outcomes)
    return {trial: replace(o, download_bytes=None) for trial, o in outcomes.items()}


class ComparePlan(TrialPlan["Task"]):
    """Hands out the trials of a comparison, and writes their outcomes down.

    Args:
        comparison: what is to be run now.
        directory: of the comparison, whose lock is held.
        tuned: settings that a search found before.
        device: where to compute the larger tasks.

    """

    def __init__(
        self, comparison: Comparison, directory: Path, tuned: Tuned, device: str = "cpu"
    ) -> None:
        super().__init__(directory)
        self._comparison = comparison
        self._tasks: dict[str, list[Task]] = {}
        for recipe, task in comparison.pairs():
            self._tasks.setdefault(recipe, []).append(task)
        self._tuned = tuned
        self._device = device
        self._stored = read_outcomes(directory)
        self._outcomes = comparable(self._stored)

    @property
    def num_finished(self) -> int:
        """How many trials have an outcome, those of other recipes and tasks among them."""
        return len(self._outcomes)

    def problems(self) -> Iterator[RunConfig]:
        """Yield a config for every problem, and for every minimum that a target is measured from.

        Seeds that share a minimum come after the first one, which computes it.
        """
        comparison = self._comparison
        num_seeds = comparison.seeds + (MORE_SEEDS if comparison.has_finals else 0)
        for seed in range(num_seeds):
            for task in comparison.tasks:
                if seed == 0 or task.target.kind == "residual":
                    device = self._device if task.uses_device else "cpu"
                    yield replace(task.config, seed=seed, device=device)

    def _config(self, trial: Trial, task: Task) -> RunConfig:
        return trial.config(task, self._device, self._comparison.downlink)

    def _clear(self, trial: Trial, place: Path) -> None:
        if trial in self._outcomes:  # too expensive then, wanted now
            shutil.rmtree(place, ignore_errors=True)

    def _next_trial(self) -> tuple[Trial, Task] | None:
        finished = Finished(self._outcomes, self._comparison.seeds)
        for recipe, tasks in self._tasks.items():
            ready: dict[str, tuple[Trial, Task]] = {}
            for task in tasks:
                left = self._ready(self._pending(recipe, task, finished)[0])
                if left:
                    ready[task.name] = left[0], task
            if ready:
                # What one setting needed shortens the next on a task: better not side by side.
                at_work = [trial.task for trial in self._under_way if trial.recipe == recipe]
                return ready[min(ready, key=at_work.count)]
        return None

    def _keep(self, trial: Trial, summary: Mapping[str, Any], seconds: float) -> None:
        outcome = Outcome.of_run(trial, summary, seconds)
        self._records.add(outcome.to_json())
        self._stored[trial] = outcome
        self._outcomes = comparable(self._stored)

    def note(self, job: TrialJob) -> Limits:
        """Return the bytes beyond which the cost of a trial under way is of no interest.

        For a setting of the search: what the best setting of the same recipe needs, unless it was
        abandoned for that before and is run again, for a final. For all: so many times what the
        best recipe needs on the same task. Both are taken from seed 0, on which all are measured.
        """
        if not self._comparison.search:
            return Limits()
        return self.limits(job.trial)

    def limits(self, trial: Trial) -> Limits:
        """Return the limits of a trial."""
        before = self._outcomes.get(trial)
        is_search = trial.seed == SEARCH_SEED and (before is None or before.ending != "costlier")
        own = every = math.inf
        for other, outcome in self._outcomes.items():
            if outcome.is_reached and (other.task, other.seed) == (trial.task, SEARCH_SEED):
                every = min(every, outcome.cost)
                if other.recipe == trial.recipe:
                    own = min(own, outcome.cost)
        uploads_only = any(o.download_bytes is None for o in self._outcomes.values())
        return Limits(own if is_search else math.inf, CEILING * every, uploads_only)

    def _all_pending(self) -> Iterator[tuple[list[Trial], int]]:
        finished = Finished(self._outcomes, self._comparison.seeds)
        for recipe, tasks in self._tasks.items():
            for task in tasks:
                yield self._pending(recipe, task, finished)

    def _pending(self, recipe: str, task: Task, finished: Finished) -> tuple[list[Trial], int]:
        return pending_trials(self._comparison, recipe, task, finished, self._tuned)


def forget(directory: Path, recipes: Collection[str], tasks: Collection[str]) -> int:
    """Drop all trials of these recipes on these tasks, and return how many there were."""
    stored = read_outcomes(directory)
    kept = [
        outcome
        for trial, outcome in stored.items()
        if trial.recipe not in recipes or trial.task not in tasks
    ]
    if len(kept) < len(stored):
        Records(directory / TRIALS).replace([outcome.to_json() for outcome in kept])
    for task in tasks:
        for recipe in recipes:
            shutil.rmtree(directory / safe(task) / safe(recipe), ignore_errors=True)
    return len(stored) - len(kept)
