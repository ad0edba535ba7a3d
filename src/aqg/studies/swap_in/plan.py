"""Which run comes next: federated averaging first, then everyone else against it.

On a task, federated averaging's step is searched on seed 0, for the best plateau: fixed ones, and
our own, which sets itself. Its runs go to the last round, and are never stopped for their bytes.
The step with the best plateau and the one that reaches the goal in the fewest rounds are run with
all other seeds. From each seed's runs comes the reference of that seed (`measure.make_reference`),
and only then are other recipes run with it. Ours goes to the last round as well, so that plateaus
can be compared; the others go to the hardest goal or to a quarter more rounds. A recipe is searched
on seed 0, if there is a search; its best setting is run with all seeds if it comes close to the
best of all, and else with fewer.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from aqg.core.downlink import AUTO
from aqg.errors import ConfigError
from aqg.runs.files import Records, write_atomically
from aqg.runs.stopping import Limits
from aqg.studies.compare.search import CONTENDER, SEARCH_SEED
from aqg.studies.compare.trial import FORMER_STEP, SELF_SETTING, Setting, Trial, safe
from aqg.studies.swap_in.measure import PLATEAU, Curve, make_reference
from aqg.studies.swap_in.search import (
    FEDAVG,
    STEP,
    Rank,
    fixed_steps,
    is_ours,
    pending_settings,
    rank,
    rank_of_fedavg,
)
from aqg.studies.trials import TRIALS, TrialPlan, read_records

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from aqg.runs.config import RunConfig
    from aqg.runs.stopping import Target
    from aqg.studies.swap_in.comparison import SwapIn
    from aqg.studies.swap_in.measure import Reference
    from aqg.studies.swap_in.tasks import SwapTask
    from aqg.studies.trials import TrialJob

TARGETS = "targets.json"
FEWER_SEEDS = 3
"""For a recipe that is far from the best."""


@dataclass(frozen=True)
class Outcome:
    """What came of a trial: why it ended, its curve, and how long it took."""

    trial: Trial
    ending: str
    curve: Curve
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return one object, for a line of the file."""
        trial, setting = self.trial, self.trial.setting
        row = {"task": trial.task, "recipe": trial.recipe, "seed": trial.seed, **setting.to_json()}
        seconds = round(self.seconds, 3)
        return {**row, "ending": self.ending, "seconds": seconds, "curve": self.curve.to_json()}

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Outcome:
        """Read what `to_json` wrote."""
        trial = Trial(row["task"], row["recipe"], Setting.from_json(row), row["seed"])
        return Outcome(trial, row["ending"], Curve.from_json(row["curve"]), row["seconds"])

    @staticmethod
    def of_run(trial: Trial, summary: Mapping[str, Any], seconds: float = 0.0) -> Outcome:
        """Return what a finished run says of itself in its ``summary.json``."""
        diverged = "diverged" if summary["diverged"] else "rounds"
        ending = summary.get("outcome", {}).get("ending", diverged)
        return Outcome(trial, ending, Curve.from_json(summary["curve"]), seconds)

    def is_cut(self, goal: Target) -> bool:
        """Tell whether the run ended at an easier goal, so that it says nothing of this one."""
        return self.ending == "reached" and self.curve.reach(goal) is None


def read_outcomes(directory: Path) -> dict[Trial, Outcome]:
    """Return all outcomes on record by trial."""
    return read_records(directory, Outcome.from_json)


class Findings:
    """What is known of a comparison from its outcomes.

    Attributes:
        by_pair: outcomes by recipe and task.
        references: federated averaging's, by task and seed, where its runs are finished.

    """

    def __init__(self, comparison: SwapIn, outcomes: Mapping[Trial, Outcome]) -> None:
        self._tasks = {task.name: task for task in comparison.tasks}
        self._num_seeds = comparison.seeds
        self._ranks: dict[Trial, Rank] = {}
        self.by_pair: dict[tuple[str, str], dict[Trial, Outcome]] = {}
        self.references: dict[tuple[str, int], Reference] = {}
        for trial, outcome in outcomes.items():
            self.by_pair.setdefault((trial.recipe, trial.task), {})[trial] = outcome
        for task in comparison.tasks:
            self._refer(task)

    def add(self, outcome: Outcome) -> None:
        """Take in one more outcome."""
        trial = outcome.trial
        self.by_pair.setdefault((trial.recipe, trial.task), {})[trial] = outcome
        if trial.recipe == FEDAVG:
            self._ranks = {t: found for t, found in self._ranks.items() if t.task != trial.task}
            self._refer(self._tasks[trial.task])

    def _refer(self, task: SwapTask) -> None:
        """Find the references of a task, as far as federated averaging's runs are finished."""
        own = self.by_pair.get((FEDAVG, task.name), {})
        for seed in range(self._num_seeds):
            self.references.pop((task.name, seed), None)
        if self._pending_fixed(task)[0]:
            return
        by_seed: dict[int, list[Curve]] = {}
        for trial, outcome in own.items():
            by_seed.setdefault(trial.seed, []).append(outcome.curve)
        chosen = self.fedavg_settings(task)
        for seed in range(self._num_seeds):
            trials = [Trial(task.name, FEDAVG, setting, seed) for setting in chosen]
            if all(trial in own for trial in trials):
                found = make_reference(task.kind, task.config.rounds, by_seed[seed])
                if found is not None:
                    self.references[task.name, seed] = found

    def _searched_curves(self, task: SwapTask) -> dict[Setting, Curve]:
        own = self.by_pair.get((FEDAVG, task.name), {}).items()
        return {trial.setting: o.curve for trial, o in own if trial.seed == SEARCH_SEED}

    def _searched_reference(self, task: SwapTask) -> Reference | None:
        """Return the reference that federated averaging's runs on seed 0 make so far."""
        curves = self._searched_curves(task).values()
        return make_reference(task.kind, task.config.rounds, curves)

    def counted(self, recipe: str, task: SwapTask) -> dict[Trial, Outcome]:
        """Return the outcomes that count: not those that ended at an easier goal than today's."""
        own = self.by_pair.get((recipe, task.name), {})
        if recipe == FEDAVG:  # whose runs have no goal
            return own
        found = {}
        for trial, outcome in own.items():
            reference = self.references.get((task.name, trial.seed))
            if reference is None or not outcome.is_cut(reference.goals[PLATEAU]):
                found[trial] = outcome
        return found

    def ranks(self, recipe: str, task: SwapTask) -> dict[Setting, Rank]:
        """Return the ranks of the settings that were tried on seed 0."""
        reference = self.references.get((task.name, SEARCH_SEED))
        if reference is None and recipe != FEDAVG:
            return {}
        found = {}
        for trial, outcome in self.counted(recipe, task).items():
            if trial.seed == SEARCH_SEED:
                if trial not in self._ranks:
                    self._ranks[trial] = (
                        rank_of_fedavg(task, outcome.curve)
                        if reference is None or recipe == FEDAVG
                        else rank(task, outcome.curve, reference)
                    )
                found[trial.setting] = self._ranks[trial]
        return found

    def best(self, recipe: str, task: SwapTask, with_former: bool = True) -> Setting | None:
        """Return the best setting on seed 0; None where none was tried.

        ``with_former`` are those whose step can no longer be run.
        """
        ranks = self.ranks(recipe, task)
        if not with_former:
            ranks = {s: found for s, found in ranks.items() if s.multiplier != FORMER_STEP}
        return min(ranks, key=lambda setting: (ranks[setting], str(setting)), default=None)

    def pending_fedavg(self, task: SwapTask) -> tuple[list[Setting], int]:
        """Return what federated averaging's search needs next, and about how many may follow.

        The step that sets itself is one of them.
        """
        settings, later = self._pending_fixed(task)
        adaptive = Setting(FEDAVG, multiplier=SELF_SETTING)
        is_tried = adaptive in self._searched_curves(task)
        return [*settings, *([] if is_tried else [adaptive])], later

    def _pending_fixed(self, task: SwapTask) -> tuple[list[Setting], int]:
        """Return what the search of its fixed steps needs next.

        It goes on where the best plateau is at the edge of the steps that were tried, and where the
        step that reaches the goal first is.
        """
        settings, later = pending_settings(FEDAVG, self.ranks(FEDAVG, task))
        first = None if settings else self._first_to_reach(task, fixed_only=True)
        if first is None:
            return settings, later
        tried = [setting.multiplier for setting in self._searched_curves(task)]
        further = fixed_steps().beyond(tried, first.multiplier)
        return ([] if further is None else [replace(first, multiplier=float(further))]), 0

    def _first_to_reach(self, task: SwapTask, fixed_only: bool = False) -> Setting | None:
        """Return federated averaging's setting that reaches the goal in the fewest rounds."""
        found = self._searched_reference(task)
        if found is None:
            return None
        goal, curves = found.goals[PLATEAU], self._searched_curves(task)
        if fixed_only:
            curves = {s: curve for s, curve in curves.items() if s.multiplier != SELF_SETTING}
        reached = {s: at for s, curve in curves.items() if (at := curve.reach(goal)) is not None}
        return min(reached, key=lambda s: (reached[s].rounds, s.multiplier), default=None)

    def fedavg_settings(self, task: SwapTask) -> list[Setting]:
        """Return federated averaging's settings for all seeds, after its search.

        These are the one with the best plateau, and the one that reaches the goal first.
        """
        chosen = (self.best(FEDAVG, task), self._first_to_reach(task))
        return list(dict.fromkeys(setting for setting in chosen if setting is not None))

    def lowest_cost(self, task: SwapTask) -> float:
        """Return the bytes of the cheapest swap-in on seed 0; infinity where there is none."""
        costs = [math.inf]
        for recipe, name in self.by_pair:
            if name == task.name and recipe != FEDAVG:
                costs += [
                    value for is_other, value in self.ranks(recipe, task).values() if not is_other
                ]
        return min(costs)


def pending_trials(
    comparison: SwapIn, recipe: str, task: SwapTask, findings: Findings
) -> tuple[list[Trial], int]:
    """Return the trials that the finished ones call for, and about how many may follow."""
    own = findings.counted(recipe, task)
    reference = findings.references.get((task.name, SEARCH_SEED))
    if recipe != FEDAVG and (reference is None or findings.pending_fedavg(task)[0]):
        settings, later = pending_settings(recipe, {}, comparison.search)
        is_waiting = pending_trials(comparison, FEDAVG, task, findings)[0]
        return [], (len(settings) + later + comparison.seeds - 1 if is_waiting else 0)
    ranks = findings.ranks(recipe, task)
    if recipe == FEDAVG:
        settings, later = findings.pending_fedavg(task)
    else:
        settings, later = pending_settings(recipe, ranks, comparison.search)
    if settings:
        trials = [Trial(task.name, recipe, setting, SEARCH_SEED) for setting in settings]
        return trials, later + comparison.seeds - 1
    if recipe == FEDAVG:
        chosen, num_seeds = findings.fedavg_settings(task), comparison.seeds
    else:
        best = findings.best(recipe, task, with_former=False)
        assert best is not None, "a search that is over has tried something"
        chosen, num_seeds = [best], comparison.seeds
        is_other, cost = ranks[best]
        is_close = not is_other and cost <= CONTENDER * findings.lowest_cost(task)
        if not is_ours(recipe) and not is_close:
            num_seeds = min(num_seeds, FEWER_SEEDS)
    wanted = [Trial(task.name, recipe, s, seed) for s in chosen for seed in range(num_seeds)]
    missing = [trial for trial in wanted if trial not in own]
    if recipe == FEDAVG:
        return missing, 0
    ready = [trial for trial in missing if (task.name, trial.seed) in findings.references]
    return ready, len(missing) - len(ready)


def make_config(
    trial: Trial, task: SwapTask, goal: Target | None, downlink: str = AUTO, device: str = "cpu"
) -> RunConfig:
    """Return the config of a trial's run.

    Args:
        trial: what is run.
        task: that the trial names.
        goal: with which the run ends; None for federated averaging and for ours, which go to the
            last round.
        downlink: where the trial's setting does not name one.
        device: where to compute, if the task is one of the larger ones.

    """
    config = task.config if goal is None else task.with_goal(goal)
    setting = trial.setting
    chosen: dict[str, Any] = {"alpha": config.alpha * setting.multiplier}
    if setting.multiplier == SELF_SETTING:
        chosen = {"step": AUTO if is_ours(trial.recipe) else STEP}
    elif setting.multiplier == FORMER_STEP:
        raise ConfigError(f"{setting} cannot be run: the rule for its step is no longer there")
    return replace(
        config,
        recipe=setting.spec,
        bits=setting.bits,
        seed=trial.seed,
        downlink=downlink if setting.downlink == AUTO else setting.downlink,
        device=device if task.uses_device else "cpu",
        **chosen,
    )


class SwapPlan(TrialPlan["SwapTask"]):
    """Hands out the runs of a comparison, and writes their outcomes and the targets down.

    Args:
        comparison: what is to be run now.
        directory: of the comparison, whose lock is held.
        device: where to compute the larger tasks.

    """

    def __init__(self, comparison: SwapIn, directory: Path, device: str = "cpu") -> None:
        super().__init__(directory)
        self._comparison = comparison
        self._device = device
        self._outcomes = read_outcomes(directory)
        self._findings = Findings(comparison, self._outcomes)
        self._made: set[Trial] = set()

    @property
    def num_finished(self) -> int:
        """How many runs have an outcome."""
        return len(self._outcomes)

    def problems(self) -> Iterator[RunConfig]:
        """Yield a config for every problem."""
        for task in self._comparison.tasks:
            yield replace(task.config, device=self._device if task.uses_device else "cpu")

    def _next_trial(self) -> tuple[Trial, SwapTask] | None:
        for recipe in self._comparison.recipes:
            for task in self._comparison.tasks_of(recipe):
                for trial in self._ready(self._pending(recipe, task)[0]):
                    return trial, task
        return None

    def _config(self, trial: Trial, task: SwapTask) -> RunConfig:
        goal = None
        if trial.recipe != FEDAVG and not is_ours(trial.recipe):
            goal = self._findings.references[task.name, trial.seed].hardest
        return make_config(trial, task, goal, self._comparison.downlink, self._device)

    def _clear(self, trial: Trial, place: Path) -> None:
        if trial in self._outcomes:  # it ended at an easier goal than today's
            shutil.rmtree(place, ignore_errors=True)

    def _keep(self, trial: Trial, summary: Mapping[str, Any], seconds: float) -> None:
        outcome = Outcome.of_run(trial, summary, seconds)
        self._records.add(outcome.to_json())
        self._outcomes[trial] = outcome
        self._made.add(trial)
        self._findings.add(outcome)
        if trial.recipe == FEDAVG:
            write_targets(self._directory, self._findings)

    def note(self, job: TrialJob) -> Limits:
        """Return the bytes beyond which a run is of no interest: those of a whole reference run.

        Federated averaging itself is not stopped for its bytes, and neither is ours.
        """
        reference = self._findings.references.get((job.trial.task, job.trial.seed))
        if reference is None or job.trial.recipe == FEDAVG or is_ours(job.trial.recipe):
            return Limits()
        return Limits(ceiling=float(reference.all_bytes))

    def _all_pending(self) -> Iterator[tuple[list[Trial], int]]:
        for recipe in self._comparison.recipes:
            for task in self._comparison.tasks_of(recipe):
                yield self._pending(recipe, task)

    def _pending(self, recipe: str, task: SwapTask) -> tuple[list[Trial], int]:
        """Return what is pending, but for runs that were made just now: none is made twice."""
        trials, later = pending_trials(self._comparison, recipe, task, self._findings)
        return [trial for trial in trials if trial not in self._made], later


def write_targets(directory: Path, findings: Findings) -> None:
    """Write federated averaging's plateaus and goals, for people to read."""
    rows: dict[str, dict[str, Any]] = {}
    for (task, seed), reference in findings.references.items():
        rows.setdefault(task, {})[f"seed {seed}"] = reference.to_json()
    write_atomically(directory / TARGETS, (json.dumps(rows, indent=1) + "\n").encode())


def forget(directory: Path, recipes: tuple[str, ...], tasks: tuple[str, ...]) -> int:
    """Drop all runs of these recipes on these tasks, and return how many there were.

    Where federated averaging is among the recipes, runs of all recipes are dropped: their targets
    are.
    """
    stored = read_outcomes(directory)
    every = FEDAVG in recipes
    kept = [
        o for t, o in stored.items() if t.task not in tasks or not (every or t.recipe in recipes)
    ]
    if len(kept) < len(stored):
        Records(directory / TRIALS).replace([outcome.to_json() for outcome in kept])
    for task in tasks:
        if every:
            shutil.rmtree(directory / safe(task), ignore_errors=True)
        for recipe in recipes:
            shutil.rmtree(directory / safe(task) / safe(recipe), ignore_errors=True)
    return len(stored) - len(kept)
