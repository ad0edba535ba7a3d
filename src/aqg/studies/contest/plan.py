"""What is compared, and which run comes next: asked whenever a worker is free.

Federated averaging comes first. Where its plateau is the goal of a task, its step is searched on
seed 0 for the best plateau: fixed ones, and our own, which sets itself. Its runs go to the last
round, and are never stopped for their bytes. The step with the best plateau and the one that
reaches the target in the fewest rounds are run with all other seeds. From each seed's runs comes
the reference of that seed (`measure.make_reference`), and only then are other recipes run with it.
Ours goes to the last round as well, so that plateaus can be compared; the others go to the hardest
target or to a quarter more rounds. Where the target is fixed, all runs end with it, and federated
averaging is searched like any other recipe.

A recipe is searched on seed 0, if there is a search (`search.pending_settings`); its best setting
is run with all seeds if it comes close to the best of all, and else with fewer. Recipes come in
their order, so that a comparison that is cut off is complete for the first ones.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aqg.core.downlink import AUTO, make_downlink
from aqg.errors import AqgError, ConfigError, RunError
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
        if self.seeds < 1:
            raise ConfigError(f"seeds is {self.seeds}; it must be at least 1")
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
    """Outcomes by recipe and task, and federated averaging's references by task and seed."""

    def __init__(self, comparison: Comparison, outcomes: Mapping[Trial, Outcome]) -> None:
        self._seeds = range(comparison.seeds)
        self._ranks: dict[Trial, Rank] = {}
        self.by_pair: dict[tuple[str, str], dict[Trial, Outcome]] = {}
        self.references: dict[tuple[str, int], Reference] = {}
        for outcome in outcomes.values():
            self._store(outcome)
        for task in comparison.tasks:
            self._refer(task)

    def add(self, outcome: Outcome, task: Task) -> None:
        self._store(outcome)
        if outcome.trial.recipe == FEDAVG:
            self._ranks = {t: found for t, found in self._ranks.items() if t.task != task.name}
            self._refer(task)

    def _store(self, outcome: Outcome) -> None:
        trial = outcome.trial
        self.by_pair.setdefault((trial.recipe, trial.task), {})[trial] = outcome

    def _refer(self, task: Task) -> None:
        """Find the references of a task, as far as federated averaging's runs are finished."""
        is_fixed = task.goal.target is not None
        self._measure(task, {})
        if not is_fixed and self._pending_fixed(task)[0]:
            return
        curves: dict[int, list[Curve]] = {}
        own, chosen = self._averaging(task), self.fedavg_settings(task)
        for trial, outcome in own.items():
            is_over = all(replace(trial, setting=setting) in own for setting in chosen)
            if is_over and (not is_fixed or trial.setting in chosen):
                curves.setdefault(trial.seed, []).append(outcome.curve)
        self._measure(task, curves)

    def _measure(self, task: Task, curves: Mapping[int, Sequence[Curve]]) -> None:
        for seed in self._seeds:
            self.references.pop((task.name, seed), None)
            if (found := make_reference(task.goal, curves.get(seed, ()))) is not None:
                self.references[task.name, seed] = found

    def _averaging(self, task: Task) -> Mapping[Trial, Outcome]:
        return self.by_pair.get((FEDAVG, task.name), {})

    def _searched_curves(self, task: Task) -> dict[Setting, Curve]:
        own = self._averaging(task).items()
        return {trial.setting: o.curve for trial, o in own if trial.seed == SEARCH_SEED}

    def counted(self, recipe: str, task: Task) -> dict[Trial, Outcome]:
        """Leave out runs that ended at an easier target than today's."""
        own = self.by_pair.get((recipe, task.name), {})
        if recipe == FEDAVG or task.goal.target is not None:
            return own
        name, references = task.goal.name, self.references
        return {
            trial: outcome
            for trial, outcome in own.items()
            if (reference := references.get((task.name, trial.seed))) is None
            or not outcome.is_cut(reference.targets[name])
        }

    def ranks(self, recipe: str, task: Task) -> dict[Setting, Rank]:
        reference = self.references.get((task.name, SEARCH_SEED))
        if recipe == FEDAVG and task.goal.target is None:
            reference = None
        elif reference is None:
            return {}
        own = {t: o for t, o in self.counted(recipe, task).items() if t.seed == SEARCH_SEED}
        for trial in own.keys() - self._ranks.keys():
            self._ranks[trial] = rank(task.goal, own[trial].curve, reference)
        return {trial.setting: self._ranks[trial] for trial in own}

    def best(self, recipe: str, task: Task, with_former: bool = True) -> Setting | None:
        """Return the best setting tried on seed 0; ``with_former`` one that cannot be run now."""
        ranks = self.ranks(recipe, task)
        if not with_former:
            ranks = {s: found for s, found in ranks.items() if s.multiplier != search.FORMER_STEP}
        return min(ranks, key=lambda setting: (ranks[setting], str(setting)), default=None)

    def pending_fedavg(self, task: Task) -> tuple[list[Setting], int]:
        """Return what the search for its plateau needs next, and about how many may follow."""
        settings, later = self._pending_fixed(task)
        adaptive = Setting(FEDAVG, multiplier=search.SELF_SETTING)
        return [*settings, *({adaptive} - self._searched_curves(task).keys())], later

    def _pending_fixed(self, task: Task) -> tuple[list[Setting], int]:
        """Search on where the best plateau is at the edge, or what reaches the target first."""
        settings, later = search.pending_settings(FEDAVG, task, self.ranks(FEDAVG, task))
        first = None if settings else self._first_to_reach(task, fixed_only=True)
        if first is None:
            return settings, later
        tried = [setting.multiplier for setting in self._searched_curves(task)]
        further = search.fixed_steps(task).beyond(tried, first.multiplier)
        return ([] if further is None else [replace(first, multiplier=float(further))]), 0

    def _first_to_reach(self, task: Task, fixed_only: bool = False) -> Setting | None:
        curves = self._searched_curves(task)
        found = make_reference(task.goal, curves.values())
        if found is None:
            return None
        target = found.targets[task.goal.name]
        if fixed_only:
            curves.pop(Setting(FEDAVG, multiplier=search.SELF_SETTING), None)
        reached = {s: at.rounds for s, curve in curves.items() if (at := curve.reach(target))}
        return min(reached, key=lambda s: (reached[s], s.multiplier), default=None)

    def fedavg_settings(self, task: Task) -> list[Setting]:
        """Return the best one and, where its plateau is the goal, the one that reaches it first."""
        chosen = [self.best(FEDAVG, task)]
        if task.goal.target is None:
            chosen.append(self._first_to_reach(task))
        return list(dict.fromkeys(setting for setting in chosen if setting is not None))

    def lowest_cost(self, task: Task) -> float:
        """Return the bytes of the best recipe on seed 0; infinity where there is none."""
        others = (r for r, name in self.by_pair if name == task.name and r != FEDAVG)
        ranks = (found for recipe in others for found in self.ranks(recipe, task).values())
        return min((cost for is_other, cost in ranks if not is_other), default=math.inf)


def pending_trials(
    comparison: Comparison, recipe: str, task: Task, findings: Findings, tuned: Tuned
) -> tuple[list[Trial], int]:
    """Return the trials that the finished ones call for, and about how many may follow."""
    own = findings.counted(recipe, task)
    is_reference = recipe == FEDAVG and task.goal.target is None
    seeds = comparison.seeds

    def searched(tried: Mapping[Setting, Rank]) -> tuple[list[Setting], int]:
        if is_reference:
            return findings.pending_fedavg(task)
        if comparison.search:
            return search.pending_settings(recipe, task, tried, comparison.quick)
        setting = tuned.get(task.name, {}).get(recipe) or search.default_setting(recipe, task)
        return ([] if setting in tried else [setting]), 0

    has_reference = (task.name, SEARCH_SEED) in findings.references
    needs_fedavg = task.goal.target is None and not is_reference
    if needs_fedavg and (not has_reference or findings.pending_fedavg(task)[0]):
        settings, later = searched({})
        is_waiting = pending_trials(comparison, FEDAVG, task, findings, tuned)[0]
        return [], (len(settings) + later + seeds - 1 if is_waiting else 0)
    ranks = findings.ranks(recipe, task)
    settings, later = searched(ranks)
    if settings:
        trials = [Trial(task.name, recipe, setting, SEARCH_SEED) for setting in settings]
        return trials, later + seeds - 1
    if is_reference:
        chosen = findings.fedavg_settings(task)
    else:
        best = findings.best(recipe, task, with_former=False)
        assert best is not None, "a search that is over has tried something"
        chosen = [best]
        is_other, cost = ranks[best]
        is_close = not is_other and cost <= CONTENDER * findings.lowest_cost(task)
        if recipe != FEDAVG and not is_ours(recipe, task) and not is_close:
            seeds = min(seeds, FEWER_SEEDS)
    wanted = [Trial(task.name, recipe, s, seed) for s in chosen for seed in range(seeds)]
    missing = [trial for trial in wanted if trial not in own]
    if is_reference:
        return missing, 0
    ready = [trial for trial in missing if (task.name, trial.seed) in findings.references]
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
        self._findings = Findings(comparison, self._outcomes)
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
        task, target, ceiling = self._task_of(trial), None, math.inf
        reference = self._findings.references.get((trial.task, trial.seed))
        if reference is not None and trial.recipe != FEDAVG and not is_ours(trial.recipe, task):
            ceiling = reference.ceiling
            target = reference.hardest if task.goal.target is None else None
        config = make_config(trial, task, target, self._comparison.downlink, self._device)
        return TrialJob(trial.directory, config, ceiling, trial=trial)

    def _task_of(self, trial: Trial) -> Task:
        return next(task for task in self._comparison.tasks if task.name == trial.task)

    def _next_trial(self) -> Trial | None:
        busy = self._under_way.keys() | self._failed
        pending = (t for pair in self._comparison.pairs() for t in self._pending(*pair)[0])
        return next((trial for trial in pending if trial not in busy), None)

    def _pending(self, recipe: str, task: Task) -> tuple[list[Trial], int]:
        """Return what is pending, but for runs that were made just now: none is made twice."""
        found = pending_trials(self._comparison, recipe, task, self._findings, self._tuned)
        return [trial for trial in found[0] if trial not in self._made], found[1]

    def _keep(self, trial: Trial, summary: Mapping[str, Any], seconds: float) -> None:
        outcome = Outcome.of_run(trial, summary, seconds)
        self._records.add(outcome.to_json())
        self._outcomes[trial] = outcome
        self._made.add(trial)
        self._findings.add(outcome, self._task_of(trial))
        if trial.recipe == FEDAVG:
            write_targets(self._directory, self._findings)


def write_targets(directory: Path, findings: Findings) -> None:
    rows: dict[str, dict[str, Any]] = {}
    for (task, seed), reference in findings.references.items():
        if reference.plateau is not None:
            rows.setdefault(task, {})[f"seed {seed}"] = reference.to_json()
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
