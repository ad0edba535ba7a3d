"""Which trial comes next: asked whenever a process is free, answered from what is finished.

Every recipe on every task advances on its own, so that no process waits for the slowest of a
stage. Recipes come in their order, so that a comparison that is cut off is complete for the first
ones, whose costs are also the bar for the rest; within a recipe tasks take turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqg.errors import AqgError
from aqg.runs.executor import carry_out, run_tasks
from aqg.studies.compare.pending import Finished, pending_trials
from aqg.studies.compare.work import Prepare, RunTrial, compile_kernels

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from aqg.runs.executor import Place
    from aqg.studies.compare.ledger import Ledger
    from aqg.studies.compare.plan import Comparison
    from aqg.studies.compare.search import Tuned
    from aqg.studies.compare.tasks import Task
    from aqg.studies.compare.trial import Outcome, Trial

    Handle = Callable[[Outcome | AqgError, Trial, int], None]


class Schedule:
    """Hands out trials, and is told when one has ended.

    Attributes:
        failures: trials that ended without an outcome; they are not handed out again, and a search
            that needs one of them does not go on.

    """

    def __init__(self, comparison: Comparison, ledger: Ledger, tuned: Tuned) -> None:
        self._comparison = comparison
        self._tasks: dict[str, list[Task]] = {}
        for recipe, task in comparison.pairs():
            self._tasks.setdefault(recipe, []).append(task)
        self._ledger = ledger
        self._tuned = tuned
        self._under_way: set[Trial] = set()
        self.failures: dict[Trial, AqgError] = {}

    def next_trial(self) -> Trial | None:
        """Return what to run now; None while everything left depends on trials under way."""
        finished = Finished(self._ledger.outcomes(), self._comparison.seeds)
        for recipe, tasks in self._tasks.items():
            ready = {
                task: trials[0] for task in tasks if (trials := self._ready(recipe, task, finished))
            }
            if ready:
                # What one setting needed shortens the next on a task: better not side by side.
                trial = ready[min(ready, key=lambda task: self._num_under_way(recipe, task))]
                self._under_way.add(trial)
                return trial
        return None

    def end(self, trial: Trial, error: AqgError | None = None) -> None:
        """Take note that a trial has ended: with an outcome in the ledger, or an error."""
        self._under_way.remove(trial)
        if error is not None:
            self.failures[trial] = error

    def most_left(self) -> int:
        """Return how many trials have not ended yet, at most: some of them may prove needless."""
        finished = Finished(self._ledger.outcomes(), self._comparison.seeds)
        # A process writes an outcome down shortly before it says that the trial has ended.
        left = set(self._under_way)
        num_later = 0
        for recipe, tasks in self._tasks.items():
            for task in tasks:
                trials, most_later = self._pending(recipe, task, finished)
                left.update(trial for trial in trials if trial not in self.failures)
                num_later += most_later if self.failures.keys().isdisjoint(trials) else 0
        return len(left) + num_later

    def _ready(self, recipe: str, task: Task, finished: Finished) -> list[Trial]:
        trials, _ = self._pending(recipe, task, finished)
        return [t for t in trials if t not in self._under_way and t not in self.failures]

    def _pending(self, recipe: str, task: Task, finished: Finished) -> tuple[list[Trial], int]:
        return pending_trials(self._comparison, recipe, task, finished, self._tuned)

    def _num_under_way(self, recipe: str, task: Task) -> int:
        return sum((t.recipe, t.task) == (recipe, task.name) for t in self._under_way)


class _Asked:
    """The schedule as a plan for the executor."""

    def __init__(self, schedule: Schedule, handle: Handle) -> None:
        self._schedule = schedule
        self._handle = handle
        self.next = schedule.next_trial

    def take(self, job: Trial, result: Outcome | AqgError) -> None:
        self._schedule.end(job, result if isinstance(result, AqgError) else None)
        self._handle(result, job, self._schedule.most_left())

    def note(self, job: Trial) -> None:
        """Say nothing: trials read the ledger."""


def run_comparison(
    place: Place,
    schedule: Schedule,
    run: Callable[[Trial], RunTrial],
    handle: Handle,
) -> dict[Trial, AqgError]:
    """Run what is not finished; return what failed.

    ``handle`` is told of every outcome or failure, and how many trials are left at most.

    Raises:
        Interrupted: on Ctrl-C; finished trials are saved, those under way are not.

    """
    carry_out(_Asked(schedule, handle), run, place, lambda *_: None)
    return schedule.failures


def prepare(place: Place, comparison: Comparison, data_dir: Path | None) -> None:
    """Compile the kernels, make sure of all data, and find every minimum before it is needed."""
    run_tasks([compile_kernels], place)
    run_tasks([Prepare(task, 0, data_dir) for task in comparison.tasks], place)
    # Only now: seeds may share a minimum, which is cached once the first one has it.
    others = [
        Prepare(task, seed, data_dir)
        for task in comparison.tasks
        if task.target.kind == "residual"
        for seed in range(1, comparison.seeds)
    ]
    run_tasks(others, place)
