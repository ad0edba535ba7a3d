"""What the plans of both comparisons share: trials handed out, taken back and written down."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from aqg.errors import AqgError, RunError
from aqg.runs.directory import read_summary
from aqg.runs.files import Records
from aqg.runs.plan import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from aqg.runs.config import RunConfig
    from aqg.runs.stopping import Limits
    from aqg.studies.compare.trial import Trial

TRIALS = "trials.jsonl"


@dataclass(frozen=True)
class TrialJob(Job):
    """The run of a trial."""

    trial: Trial


class _Outcome(Protocol):
    @property
    def trial(self) -> Trial:
        """What was run."""


OutcomeType = TypeVar("OutcomeType", bound=_Outcome)
TaskType = TypeVar("TaskType")


def read_records(
    directory: Path, from_json: Callable[[Mapping[str, Any]], OutcomeType]
) -> dict[Trial, OutcomeType]:
    """Return all outcomes on record by trial, the last one of each."""
    records = Records(directory / TRIALS)
    found = {}
    for number, row in enumerate(records.read(), start=1):
        try:
            outcome = from_json(row)
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"{str(records.path)!r} is damaged: line {number} is not a trial ({error!r})"
            ) from None
        found[outcome.trial] = outcome
    return found


class TrialPlan(ABC, Generic[TaskType]):
    """Hands out trials, and writes their outcomes down.

    Args:
        directory: of the comparison, whose lock is held.

    Attributes:
        failures: trials that ended without an outcome, by their directory; they are not handed out
            again, and a search that needs one of them does not go on.

    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._records = Records(directory / TRIALS)
        self._under_way: dict[Trial, float] = {}
        self._failed: set[Trial] = set()
        self.failures: dict[str, AqgError] = {}

    def next(self) -> TrialJob | None:
        """Return what to run now; None while everything left depends on trials under way."""
        while (found := self._next_trial()) is not None:
            trial, task = found
            job = TrialJob(trial.directory, self._config(trial, task), trial)
            place = self._directory / job.name
            self._clear(trial, place)
            summary = read_summary(place)
            if summary is not None:  # stopped between the end of the run and its record
                self._keep(trial, summary, 0.0)
                continue
            self._under_way[trial] = time.monotonic()
            return job
        return None

    def take(self, job: TrialJob, result: Mapping[str, Any] | AqgError) -> None:
        """Write down what came of a trial."""
        started = self._under_way.pop(job.trial)
        if isinstance(result, AqgError):
            self._failed.add(job.trial)
            self.failures[job.name] = result
        else:
            self._keep(job.trial, result, time.monotonic() - started)

    def most_left(self) -> int:
        """Return how many trials have not ended yet, at most: some of them may prove needless."""
        left = set(self._under_way)
        num_later = 0
        for trials, most_later in self._all_pending():
            left.update(trial for trial in trials if trial not in self._failed)
            num_later += most_later if self._failed.isdisjoint(trials) else 0
        return len(left) + num_later

    def _ready(self, trials: Iterable[Trial]) -> list[Trial]:
        """Return those of some pending trials that can be handed out."""
        return [t for t in trials if t not in self._under_way and t not in self._failed]

    @property
    @abstractmethod
    def num_finished(self) -> int:
        """How many trials have an outcome, those of other recipes and tasks among them."""

    @abstractmethod
    def problems(self) -> Iterable[RunConfig]:
        """Return configs with every problem that trials may need."""

    @abstractmethod
    def note(self, job: TrialJob) -> Limits:
        """Return the bytes beyond which the cost of a trial under way is of no interest."""

    @abstractmethod
    def _next_trial(self) -> tuple[Trial, TaskType] | None:
        """Return the trial that comes next, with its task."""

    @abstractmethod
    def _config(self, trial: Trial, task: TaskType) -> RunConfig:
        """Return the config of a trial's run."""

    def _clear(self, trial: Trial, place: Path) -> None:
        """Delete a run that is to be made anew."""

    @abstractmethod
    def _keep(self, trial: Trial, summary: Mapping[str, Any], seconds: float) -> None:
        """Write down a run that is finished."""

    @abstractmethod
    def _all_pending(self) -> Iterable[tuple[list[Trial], int]]:
        """Yield, for each recipe and task, what the finished trials call for, and how many more."""
