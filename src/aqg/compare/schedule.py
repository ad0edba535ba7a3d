"""Which trials a comparison consists of, in which order, across processes, and resumable.

Recipes come one after the other, so that a comparison that is cut off is complete for the first
ones. While the settings of a recipe are searched, the one before it runs its winners with the
remaining seeds.
"""

from __future__ import annotations

import gc
import json
import math
import time
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from aqg.compare.ledger import Ledger
from aqg.compare.problems import Workshop
from aqg.compare.search import (
    SEARCH_SEED,
    applies,
    collect_tuned,
    default_setting,
    parse_recipes,
    settings_to_try,
)
from aqg.compare.tasks import Task, select_tasks
from aqg.compare.trial import Setting, Trial, run_trial
from aqg.errors import ConfigError, RunError
from aqg.experiments.rundir import create_directory, write_atomically
from aqg.experiments.workers import Done, Failed
from aqg.warmup import warm_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from aqg.compare.search import Tuned
    from aqg.compare.trial import Outcome
    from aqg.errors import AqgError
    from aqg.experiments.workers import Event, Report, Workers

PLAN = "compare.json"
_SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        tasks: on what.
        recipes: names, in the order they are run.
        seeds: how many; each makes its own split, start, batches and dropouts.
        search: find every recipe's best setting first, on seed 0.
        quick: search a small part of the grid.

    """

    tasks: tuple[Task, ...]
    recipes: tuple[str, ...]
    seeds: int
    search: bool = False
    quick: bool = False

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ConfigError(f"seeds is {self.seeds}; it must be at least 1")

    def pairs(self) -> Iterator[tuple[str, Task]]:
        """Yield what is measured: every recipe on every task where it makes a difference."""
        for recipe in self.recipes:
            yield from ((recipe, task) for task in self.tasks if applies(recipe, task))

    @property
    def num_trials(self) -> int:
        """How many trials there are, if every recipe reaches every target."""
        if not self.search:
            return self.seeds * len(list(self.pairs()))
        sizes = [len(settings_to_try(*pair, self.quick)) for pair in self.pairs()]
        return sum(sizes) + (self.seeds - 1) * len(sizes)

    def extended(
        self, tasks: Iterable[Task], recipes: Iterable[str], seeds: int | None
    ) -> Comparison:
        """Return the comparison with more tasks and recipes, and another number of seeds."""
        return replace(
            self,
            tasks=select_tasks(task.name for task in (*self.tasks, *tasks)),
            recipes=parse_recipes(",".join(dict.fromkeys((*self.recipes, *recipes)))),
            seeds=self.seeds if seeds is None else seeds,
        )

    def to_json(self) -> str:
        """Return the settings as JSON."""
        row: dict[str, Any] = {
            "tasks": [task.name for task in self.tasks],
            "recipes": list(self.recipes),
            "seeds": self.seeds,
            "search": self.search,
            "quick": self.quick,
        }
        return json.dumps(row, indent=1) + "\n"


def create_comparison(directory: Path, comparison: Comparison) -> None:
    """Make a comparison's directory."""
    create_directory(directory)
    write_comparison(directory, comparison)


def write_comparison(directory: Path, comparison: Comparison) -> None:
    """Write down what is compared."""
    write_atomically(directory / PLAN, comparison.to_json().encode())


def open_comparison(directory: Path) -> Comparison:
    """Read what a directory compares."""
    path = directory / PLAN
    if not path.is_file():
        raise RunError(f"{str(directory)!r} is not a comparison's directory: it has no {PLAN}")
    try:
        row = json.loads(path.read_bytes())
        return Comparison(
            tasks=select_tasks(row["tasks"]),
            recipes=parse_recipes(",".join(row["recipes"])),
            seeds=row["seeds"],
            search=row["search"],
            quick=row["quick"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{str(path)!r} is damaged ({error!r}); start a new comparison") from None


def waves(comparison: Comparison, ledger: Ledger, tuned: Tuned) -> Iterator[list[Trial]]:
    """Yield trials that can run side by side; each wave must be over before the next is asked for.

    Finished trials are left out.
    """
    if not comparison.search:
        settings = {
            (recipe, task): tuned.get(task.name, {}).get(recipe, default_setting(recipe, task))
            for recipe, task in comparison.pairs()
        }
        yield _unfinished(
            ledger,
            [
                Trial(task.name, recipe, setting, seed)
                for seed in range(comparison.seeds)
                for (recipe, task), setting in settings.items()
            ],
        )
        return
    # With one seed nothing waits for the winners, and all recipes make one wave.
    groups = [[recipe] for recipe in comparison.recipes]
    if comparison.seeds == 1:
        groups = [list(comparison.recipes)]
    remaining: list[Trial] = []
    for group in groups:
        tries = {
            (recipe, task): [
                Trial(task.name, recipe, setting, SEARCH_SEED)
                for setting in settings_to_try(recipe, task, comparison.quick)
            ]
            for recipe, task in comparison.pairs()
            if recipe in group
        }
        yield _unfinished(ledger, [*remaining, *_in_turns(tries)])
        tuned = collect_tuned(ledger.outcomes().values())
        remaining = []
        for recipe, task in tries:
            setting = tuned.get(task.name, {}).get(recipe)
            if setting is not None:
                remaining += _other_seeds(comparison, task, recipe, setting)
    yield _unfinished(ledger, remaining)


def _in_turns(tries: Mapping[tuple[str, Task], Sequence[Trial]]) -> list[Trial]:
    """Return the tries recipe by recipe, and within a recipe its tasks in turns.

    What one setting needed shortens the next ones on the same task, so these should not run at the
    same time.
    """
    ordered: list[Trial] = []
    for recipe in dict.fromkeys(recipe for recipe, _ in tries):
        own = [trials for (name, _), trials in tries.items() if name == recipe]
        ordered += [trial for turn in zip_longest(*own) for trial in turn if trial]
    return ordered


def _other_seeds(comparison: Comparison, task: Task, recipe: str, setting: Setting) -> list[Trial]:
    seeds = (seed for seed in range(comparison.seeds) if seed != SEARCH_SEED)
    return [Trial(task.name, recipe, setting, seed) for seed in seeds]


def _unfinished(ledger: Ledger, trials: list[Trial]) -> list[Trial]:
    outcomes = ledger.outcomes()
    return [trial for trial in trials if trial not in outcomes]


def run_comparison(
    workers: Workers,
    comparison: Comparison,
    directory: Path,
    tuned: Tuned,
    device: str,
    data_dir: Path | None,
    handle: Callable[[Outcome | AqgError, Trial], None],
) -> dict[Trial, AqgError]:
    """Run what is not finished; return what failed.

    ``handle`` is told of every outcome or failure.

    Raises:
        Interrupted: on Ctrl-C; finished trials are saved, those under way are not.

    """
    ledger = Ledger(directory)
    tasks = {task.name: task for task in comparison.tasks}
    failures: dict[Trial, AqgError] = {}
    for wave in waves(comparison, ledger, tuned):

        def take(event: Event, wave: list[Trial] = wave) -> None:
            match event:
                case Failed(index, error):
                    failures[wave[index]] = error
                    handle(error, wave[index])
                case Done(index, outcome):
                    handle(outcome, wave[index])

        workers.run(
            [
                RunTrial(trial, tasks[trial.task], directory, device, data_dir, comparison.search)
                for trial in wave
            ],
            take,
        )
    return failures


def prepare(workers: Workers, comparison: Comparison, data_dir: Path | None) -> None:
    """Compile the kernels, make sure of all data, and find every minimum before it is needed."""

    def take(event: Event) -> None:
        if isinstance(event, Failed):
            raise event.error

    workers.run([_warm_up], take)
    workers.run([_Prepare(task, 0, data_dir) for task in comparison.tasks], take)
    # Only now: seeds may share a minimum, which is cached once the first one has it.
    others = [
        _Prepare(task, seed, data_dir)
        for task in comparison.tasks
        if task.target.kind == "residual"
        for seed in range(1, comparison.seeds)
    ]
    workers.run(others, take)


def _warm_up(report: Report) -> None:  # noqa: ARG001
    warm_up()


@dataclass(frozen=True)
class _Prepare:
    task: Task
    seed: int
    data_dir: Path | None

    def __call__(self, report: Report) -> None:  # noqa: ARG002
        workshop = _workshop(self.data_dir)
        workshop.problem(self.task, self.seed)
        workshop.minimum(self.task, self.seed)


@dataclass(frozen=True)
class RunTrial:
    """Run a trial in a worker process and write its outcome down.

    With ``is_search``, it is abandoned when another setting of the same recipe has reached the
    target with fewer bytes: it cannot win any more.
    """

    trial: Trial
    task: Task
    directory: Path
    device: str
    data_dir: Path | None
    is_search: bool

    def __call__(self, report: Report) -> Outcome:  # noqa: ARG002
        """Return the outcome as well."""
        workshop = _workshop(self.data_dir)
        ledger = Ledger(self.directory)
        next_look, fewest = 0.0, math.inf

        def limit() -> float:
            nonlocal next_look, fewest
            if self.is_search and time.monotonic() >= next_look:
                next_look = time.monotonic() + _SECONDS_BETWEEN_LOOKS
                fewest = ledger.fewest_bytes(self.trial)
            return fewest

        outcome = run_trial(
            self.trial,
            self.task,
            workshop.problem(self.task, self.trial.seed),
            workshop.minimum(self.task, self.trial.seed),
            self.device if self.task.uses_device else "cpu",
            limit,
        )
        ledger.add(outcome)
        gc.collect()  # graphs on a GPU hold on to each other, and to its memory
        return outcome


_workshops: dict[Path | None, Workshop] = {}
"""The worker's own, kept from trial to trial."""


def _workshop(data_dir: Path | None) -> Workshop:
    return _workshops.setdefault(data_dir, Workshop(data_dir))
