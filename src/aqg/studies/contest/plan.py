"""What is compared, and which run comes next: asked whenever a worker is free.

Federated averaging comes first, and is never stopped for its bytes. Where its plateau is the goal
of a task, the step with the best plateau on seed 0 and the one that reaches the target in the
fewest rounds are run with all other seeds. From each seed's runs comes the reference of that seed
(`measure.make_reference`), and only then are other recipes run with it. Where the target is fixed,
all runs end with it, and federated averaging is searched like any other recipe.

A recipe is searched on seed 0, if there is a search (`search.pending_settings`); its best setting
is run with all seeds if it comes close to the best of all, and else with fewer. Recipes come in
their order, so that a comparison that is cut off is complete for the first ones.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aqg.core.downlink import AUTO, make_downlink
from aqg.errors import AqgError, ConfigError, RunError, require
from aqg.runs.config import RunConfig
from aqg.runs.directory import create_directory, read_summary
from aqg.runs.files import Records, write_atomically
from aqg.runs.loop import slug
from aqg.runs.plan import Job, StudyPlan
from aqg.runs.stopping import Target
from aqg.studies.contest import search
from aqg.studies.contest.measure import Curve, Rank, Reference, make_reference, rank
from aqg.studies.contest.search import FEDAVG, SEARCH_SEED, Setting, Tuned, is_ours, parse_recipes
from aqg.studies.contest.tasks import Task, from_row, in_order, select_tasks, to_row

PLAN = "compare.json"
TRIALS = "trials.jsonl"
TARGETS = "targets.json"
CONTENDER = 1.5
"""A recipe is run with all seeds if it needs at most so many times the bytes of the best one."""
FEWER_SEEDS = 3
"""For the others."""


@dataclass(frozen=True)
class Comparison:
    """What is compared; recipes are run in their order, federated averaging first."""

    tasks: tuple[Task, ...]
    recipes: tuple[str, ...]
    seeds: int  # how many; each makes its own split, start, batches, dropouts and targets
    search: bool = False  # find every recipe's best setting first, on seed 0
    quick: bool = False  # in a small part of the grid
    downlink: str = AUTO  # how clients receive the model; by default what suits each recipe

    def __post_init__(self) -> None:
        require(self.seeds >= 1, "seeds", self.seeds, "at least 1")
        if self.downlink != AUTO:
            make_downlink(self.downlink)

    def pairs(self) -> Iterator[tuple[str, Task]]:
        """Yield what is measured: every recipe on every task where it makes a difference."""
        for recipe in self.recipes:
            yield from ((recipe, task) for task in self.tasks if search.applies(recipe, task))

    def extended(
        self, tasks: Sequence[Task], recipes: Sequence[str], seeds: int | None
    ) -> Comparison:
        names = ",".join(dict.fromkeys((*self.recipes, *recipes)))
        seeds = self.seeds if seeds is None else seeds
        tasks = in_order((*self.tasks, *tasks))
        return replace(self, tasks=tasks, recipes=parse_recipes(names), seeds=seeds)

    def narrowed(self, tasks: Sequence[Task], recipes: Sequence[str]) -> Comparison:
        """Return the part with these tasks and recipes; none given means all of them."""
        return replace(
            self,
            tasks=tuple(task for task in self.tasks if not tasks or task in tasks),
            recipes=parse_recipes(",".join(recipes)) if recipes else self.recipes,
        )

    def write(self, directory: Path, *, is_new: bool = False) -> None:
        row: dict[str, Any] = vars(self) | {"tasks": [t.name for t in self.tasks if not t.is_own]}
        if own := [to_row(task) for task in self.tasks if task.is_own]:
            row["own"] = own
        if is_new:
            create_directory(directory)
        write_atomically(directory / PLAN, (json.dumps(row, indent=1) + "\n").encode())

    @staticmethod
    def open(directory: Path) -> Comparison:
        path = directory / PLAN
        if not path.is_file():
            raise RunError(f"{str(directory)!r} is not a comparison's directory: it has no {PLAN}")
        try:
            row = json.loads(path.read_bytes())
            own = tuple(map(from_row, row.get("own", ())))
            rest = {name: row[name] for name in ("seeds", "search", "quick", "downlink")}
            recipes = parse_recipes(",".join(row["recipes"]))
            return Comparison((*select_tasks(row["tasks"]), *own), recipes, **rest)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{str(path)!r} is damaged ({error!r}); start a new comparison"
            ) from None


def safe(text: str) -> str:
    """Make a name that can be read and that a file system takes.

    >>> safe("heart.py:problem:folder=a/b")
    'heart.py_problem_folder-a%2Fb'
    """
    return slug(quote(text, safe=":=+"))


@dataclass(frozen=True)
class Trial:
    task: str
    recipe: str
    setting: Setting
    seed: int

    @property
    def directory(self) -> str:
        setting = str(self.setting).replace("×", "").replace(", ", "-").replace(" ", "-")
        return "/".join(map(safe, (self.task, self.recipe, f"{setting}-seed-{self.seed}")))


@dataclass(frozen=True)
class TrialJob(Job):
    trial: Trial = field(kw_only=True)


@dataclass(frozen=True)
class Outcome:
    trial: Trial
    ending: str  # as in `aqg.runs.stopping`
    curve: Curve  # on the validation set or, without one, of what the target measures
    seconds: float
    upload_bytes: int | None = None  # where the target is fixed

    def to_json(self) -> dict[str, Any]:
        trial, setting = self.trial, self.trial.setting
        row = {"task": trial.task, "recipe": trial.recipe, "seed": trial.seed, **setting.to_json()}
        row |= {"ending": self.ending, "seconds": round(self.seconds, 3)}
        if self.upload_bytes is not None:
            row["upload_bytes"] = self.upload_bytes
        return {**row, "curve": self.curve.to_json()}

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Outcome:
        trial = Trial(row["task"], row["recipe"], Setting.from_json(row), row["seed"])
        curve = Curve.from_json(row["curve"])
        return Outcome(trial, row["ending"], curve, row["seconds"], row.get("upload_bytes"))

    @staticmethod
    def of_run(trial: Trial, summary: Mapping[str, Any], seconds: float = 0.0) -> Outcome:
        found = summary.get("outcome", {"ending": "diverged" if summary["diverged"] else "rounds"})
        curve = Curve.from_json(summary["curve"])
        return Outcome(trial, found["ending"], curve, seconds, found.get("upload_bytes"))

    def is_cut(self, target: Target) -> bool:
        """Tell whether the run ended at an easier target, so that it says nothing of this one."""
        return self.ending == "reached" and self.curve.reach(target) is None


def read_outcomes(directory: Path) -> dict[Trial, Outcome]:
    records = Records(directory / TRIALS)
    found = {}
    for number, row in enumerate(records.read(), start=1):
        try:
            outcome = Outcome.from_json(row)
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"{str(records.path)!r} is damaged: line {number} is not a trial ({error!r})"
            ) from None
        found[outcome.trial] = outcome
    return found


class Findings:
    """Outcomes on a task by recipe, and federated averaging's references by seed."""

    def __init__(self, task: Task, seeds: int, outcomes: Iterable[Outcome]) -> None:
        self.task, self._seeds = task, seeds
        self._is_fixed = task.goal.target is not None
        self._ranks: dict[Trial, Rank] = {}
        self.by_recipe: dict[str, dict[Trial, Outcome]] = {}
        self.references: dict[int, Reference] = {}
        for outcome in outcomes:
            if outcome.trial.task == task.name:
                self._store(outcome)
        self._refer()

    def add(self, outcome: Outcome) -> None:
        self._store(outcome)
        if outcome.trial.recipe == FEDAVG:
            self._ranks.clear()
            self._refer()

    def _store(self, outcome: Outcome) -> None:
        self.by_recipe.setdefault(outcome.trial.recipe, {})[outcome.trial] = outcome

    def _refer(self) -> None:
        """Find the references, as far as federated averaging's runs are finished."""
        self._measure({})
        if not self._is_fixed and self._pending_fixed()[0]:
            return
        curves: dict[int, list[Curve]] = {}
        own, chosen = self._averaging(), self.fedavg_settings()
        for trial, outcome in own.items():
            is_over = all(replace(trial, setting=setting) in own for setting in chosen)
            if is_over and (not self._is_fixed or trial.setting in chosen):
                curves.setdefault(trial.seed, []).append(outcome.curve)
        self._measure(curves)

    def _measure(self, curves: Mapping[int, Sequence[Curve]]) -> None:
        goal, seeds = self.task.goal, range(self._seeds)
        found = {seed: make_reference(goal, curves.get(seed, ())) for seed in seeds}
        self.references = {seed: one for seed, one in found.items() if one is not None}

    def _averaging(self) -> Mapping[Trial, Outcome]:
        return self.by_recipe.get(FEDAVG, {})

    def _searched_curves(self) -> dict[Setting, Curve]:
        own = self._averaging().items()
        return {trial.setting: o.curve for trial, o in own if trial.seed == SEARCH_SEED}

    def counted(self, recipe: str) -> dict[Trial, Outcome]:
        """Leave out runs that ended at an easier target than today's."""
        own = self.by_recipe.get(recipe, {})
        if recipe == FEDAVG or self._is_fixed:
            return own
        targets = {s: one.targets[self.task.goal.name] for s, one in self.references.items()}
        return {
            trial: outcome
            for trial, outcome in own.items()
            if trial.seed not in targets or not outcome.is_cut(targets[trial.seed])
        }

    def ranks(self, recipe: str) -> dict[Setting, Rank]:
        reference = self.references.get(SEARCH_SEED)
        if recipe == FEDAVG and not self._is_fixed:
            reference = None
        elif reference is None:
            return {}
        own = {t: o for t, o in self.counted(recipe).items() if t.seed == SEARCH_SEED}
        for trial in own.keys() - self._ranks.keys():
            self._ranks[trial] = rank(self.task.goal, own[trial].curve, reference)
        return {trial.setting: self._ranks[trial] for trial in own}

    def best(self, recipe: str, with_former: bool = True) -> Setting | None:
        """Return the best setting tried on seed 0; ``with_former`` one that cannot be run now."""
        ranks = self.ranks(recipe)
        if not with_former:
            ranks = {s: found for s, found in ranks.items() if s.multiplier != search.FORMER_STEP}
        return min(ranks, key=lambda setting: (ranks[setting], str(setting)), default=None)

    def pending_fedavg(self) -> tuple[list[Setting], int]:
        """Return what the search for its plateau needs next, and about how many may follow."""
        settings, later = self._pending_fixed()
        adaptive = Setting(FEDAVG, multiplier=search.SELF_SETTING)
        return [*settings, *({adaptive} - self._searched_curves().keys())], later

    def _pending_fixed(self) -> tuple[list[Setting], int]:
        """Search on where the best plateau is at the edge, or what reaches the target first."""
        settings, later = search.pending_settings(FEDAVG, self.task, self.ranks(FEDAVG))
        first = None if settings else self._first_to_reach(fixed_only=True)
        if first is None:
            return settings, later
        tried = [setting.multiplier for setting in self._searched_curves()]
        further = search.fixed_steps(self.task).beyond(tried, first.multiplier)
        return ([] if further is None else [replace(first, multiplier=float(further))]), 0

    def _first_to_reach(self, fixed_only: bool = False) -> Setting | None:
        curves, goal = self._searched_curves(), self.task.goal
        found = make_reference(goal, curves.values())
        if found is None:
            return None
        if fixed_only:
            curves.pop(Setting(FEDAVG, multiplier=search.SELF_SETTING), None)
        target = found.targets[goal.name]
        reached = {s: at.rounds for s, curve in curves.items() if (at := curve.reach(target))}
        return min(reached, key=lambda s: (reached[s], s.multiplier), default=None)

    def fedavg_settings(self) -> list[Setting]:
        """Return the best one and, where its plateau is the goal, the one that reaches it first."""
        chosen = [self.best(FEDAVG), None if self._is_fixed else self._first_to_reach()]
        return list(dict.fromkeys(setting for setting in chosen if setting is not None))

    def lowest_cost(self) -> float:
        """Return the bytes of the best recipe on seed 0; infinity where there is none."""
        others = self.by_recipe.keys() - {FEDAVG}
        ranks = (found for recipe in others for found in self.ranks(recipe).values())
        return min((cost for is_other, cost in ranks if not is_other), default=math.inf)


def pending_trials(
    comparison: Comparison, recipe: str, findings: Findings, tuned: Tuned
) -> tuple[list[Trial], int]:
    """Return the trials that the finished ones call for, and about how many may follow."""
    task, seeds, own = findings.task, comparison.seeds, findings.counted(recipe)
    is_reference = recipe == FEDAVG and task.goal.target is None

    def searched(tried: Mapping[Setting, Rank]) -> tuple[list[Setting], int]:
        if is_reference:
            return findings.pending_fedavg()
        if comparison.search:
            return search.pending_settings(recipe, task, tried, comparison.quick)
        setting = tuned.get(task.name, {}).get(recipe) or search.default_setting(recipe, task)
        return ([] if setting in tried else [setting]), 0

    needs_fedavg = task.goal.target is None and not is_reference
    if needs_fedavg and (SEARCH_SEED not in findings.references or findings.pending_fedavg()[0]):
        settings, later = searched({})
        is_waiting = pending_trials(comparison, FEDAVG, findings, tuned)[0]
        return [], (len(settings) + later + seeds - 1 if is_waiting else 0)
    ranks = findings.ranks(recipe)
    settings, later = searched(ranks)
    if settings:
        trials = [Trial(task.name, recipe, setting, SEARCH_SEED) for setting in settings]
        return trials, later + seeds - 1
    if is_reference:
        chosen = findings.fedavg_settings()
    else:
        best = findings.best(recipe, with_former=False)
        assert best is not None, "a search that is over has tried something"
        chosen = [best]
        is_other, cost = ranks[best]
        is_close = not is_other and cost <= CONTENDER * findings.lowest_cost()
        if recipe != FEDAVG and not is_ours(recipe, task) and not is_close:
            seeds = min(seeds, FEWER_SEEDS)
    wanted = [Trial(task.name, recipe, s, seed) for s in chosen for seed in range(seeds)]
    missing = [trial for trial in wanted if trial not in own]
    ready = [trial for trial in missing if is_reference or trial.seed in findings.references]
    return ready, len(missing) - len(ready)


def make_config(
    trial: Trial, task: Task, target: Target | None, downlink: str = AUTO, device: str = "cpu"
) -> RunConfig:
    """Return the config of a trial's run.

    ``target``, made from federated averaging's, ends the run; None where the task has one of its
    own, and to go to the last round. ``downlink`` is for settings that name none.
    """
    config = task.config if target is None else task.with_target(target)
    setting = trial.setting
    chosen: dict[str, Any] = {"alpha": config.alpha * setting.multiplier, "step": "fixed"}
    if setting.multiplier == search.SELF_SETTING:
        chosen = {"step": AUTO if is_ours(trial.recipe, task) else search.STEP}
    elif setting.multiplier == search.FORMER_STEP:
        raise ConfigError(f"{setting} cannot be run: the rule for its step is no longer there")
    chosen |= {"recipe": setting.spec, "bits": setting.bits, "seed": trial.seed}
    chosen["downlink"] = downlink if setting.downlink == AUTO else setting.downlink
    return replace(config, device=device if task.uses_device else "cpu", **chosen)


class ContestPlan(StudyPlan[TrialJob]):
    """Hands out the runs of a comparison, and writes their outcomes and the targets down.

    The lock of the directory is held. ``tuned`` are settings for a comparison without a search. A
    trial that failed is not handed out again, and a search that needs it does not go on.
    """

    def __init__(
        self,
        comparison: Comparison,
        directory: Path,
        tuned: Tuned | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self._comparison, self._directory = comparison, directory
        self._tuned, self._device = tuned or {}, device
        self._records = Records(directory / TRIALS)
        self._outcomes = read_outcomes(directory)
        found, seeds = self._outcomes.values(), comparison.seeds
        self._findings = {t.name: Findings(t, seeds, found) for t in comparison.tasks}
        self._made: set[Trial] = set()
        self._under_way: dict[Trial, float] = {}
        self._failed: set[Trial] = set()

    @property
    def num_finished(self) -> int:
        return len(self._outcomes)

    def problems(self) -> Iterator[RunConfig]:
        """Yield a config for every problem, and for every minimum that a target is measured from.

        Seeds that share a minimum come after the first one, which computes it.
        """
        for seed in range(self._comparison.seeds):
            for task in self._comparison.tasks:
                if seed == 0 or task.goal.kind == "residual":
                    device = self._device if task.uses_device else "cpu"
                    yield replace(task.config, seed=seed, device=device)

    def next(self) -> TrialJob | None:
        """Return what to run now; None while everything left depends on trials under way."""
        while (trial := self._next_trial()) is not None:
            job = self._job(trial)
            place = self._directory / job.name
            if trial in self._outcomes:  # it ended at an easier target than today's
                shutil.rmtree(place, ignore_errors=True)
            summary = read_summary(place)
            if summary is not None:  # stopped between the end of the run and its record
                self._keep(trial, summary, 0.0)
                continue
            self._under_way[trial] = time.monotonic()
            return job
        return None

    def take(self, job: TrialJob, result: Mapping[str, Any] | AqgError) -> None:
        trial = job.trial
        started = self._under_way.pop(trial)
        if isinstance(result, AqgError):
            self._failed.add(trial)
            self.failures[job.name] = result
        else:
            self._keep(trial, result, time.monotonic() - started)

    def most_left(self) -> int:
        left = set(self._under_way)
        num_later = 0
        for pair in self._comparison.pairs():
            trials, most_later = self._pending(*pair)
            left.update(trial for trial in trials if trial not in self._failed)
            num_later += most_later if self._failed.isdisjoint(trials) else 0
        return len(left) + num_later

    def _job(self, trial: Trial) -> TrialJob:
        """End it at the hardest target and the ceiling, but not averaging itself, and ours."""
        findings, target, ceiling = self._findings[trial.task], None, math.inf
        task, reference = findings.task, findings.references.get(trial.seed)
        if reference is not None and trial.recipe != FEDAVG and not is_ours(trial.recipe, task):
            ceiling = reference.ceiling
            target = reference.hardest if task.goal.target is None else None
        config = make_config(trial, task, target, self._comparison.downlink, self._device)
        return TrialJob(trial.directory, config, ceiling, trial=trial)

    def _next_trial(self) -> Trial | None:
        busy = self._under_way.keys() | self._failed
        pending = (t for pair in self._comparison.pairs() for t in self._pending(*pair)[0])
        return next((trial for trial in pending if trial not in busy), None)

    def _pending(self, recipe: str, task: Task) -> tuple[list[Trial], int]:
        """Return what is pending, but for runs that were made just now: none is made twice."""
        findings = self._findings[task.name]
        trials, later = pending_trials(self._comparison, recipe, findings, self._tuned)
        return [trial for trial in trials if trial not in self._made], later

    def _keep(self, trial: Trial, summary: Mapping[str, Any], seconds: float) -> None:
        outcome = Outcome.of_run(trial, summary, seconds)
        self._records.add(outcome.to_json())
        self._outcomes[trial] = outcome
        self._made.add(trial)
        self._findings[trial.task].add(outcome)
        if trial.recipe == FEDAVG:
            write_targets(self._directory, self._findings.values())


def write_targets(directory: Path, findings: Iterable[Findings]) -> None:
    rows: dict[str, dict[str, Any]] = {}
    for of_task in findings:
        for seed, reference in of_task.references.items():
            if reference.plateau is not None:
                rows.setdefault(of_task.task.name, {})[f"seed {seed}"] = reference.to_json()
    if rows:
        write_atomically(directory / TARGETS, (json.dumps(rows, indent=1) + "\n").encode())


def forget(directory: Path, recipes: Collection[str], tasks: Collection[Task]) -> int:
    """Drop all runs of these recipes on these tasks, and return how many there were.

    With federated averaging's, where its plateau is the goal, go those of all recipes.
    """
    stored = read_outcomes(directory)
    whole = {task.name for task in tasks if FEDAVG in recipes and task.goal.target is None}
    pairs = {(recipe, task.name) for recipe in recipes for task in tasks}
    kept = [t for t in stored if t.task not in whole and (t.recipe, t.task) not in pairs]
    if len(kept) < len(stored):
        Records(directory / TRIALS).replace([stored[trial].to_json() for trial in kept])
    gone = [directory / safe(name) for name in whole]
    for path in (*gone, *(directory / safe(name) / safe(recipe) for recipe, name in pairs)):
        shutil.rmtree(path, ignore_errors=True)
    return len(stored) - len(kept)
