"""Plans: what a study runs next. Here the plan whose jobs are known from the start."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from aqg.errors import AqgError, ConfigError
from aqg.runs.config import check_files, read_stored
from aqg.runs.directory import CONFIG, read_config, read_summary
from aqg.runs.tasks import problem_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from aqg.runs.config import RunConfig


@dataclass(frozen=True)
class Job:
    """One run of a study: its directory's name, below that of the study, and its config."""

    name: str
    config: RunConfig


class Batch:
    """Runs that do not depend on each other, without those that are finished.

    Runs on the same data come one after the other, so that workers seldom load anew.

    Attributes:
        left: the jobs that are still to do, when the plan was made.
        failures: by the job's name, what went wrong.

    """

    def __init__(self, jobs: Iterable[Job], directory: Path) -> None:
        groups: dict[object, list[Job]] = {}
        for job in unfinished(jobs, directory):
            groups.setdefault(problem_key(job.config), []).append(job)
        self.left: Sequence[Job] = [job for group in groups.values() for job in group]
        self._waiting = iter(self.left)
        self.failures: dict[str, AqgError] = {}
        self._num_ended = 0

    def problems(self) -> Iterator[RunConfig]:
        """Yield the configs of all jobs."""
        return (job.config for job in self.left)

    def next(self) -> Job | None:
        """Return the next job; None after the last."""
        return next(self._waiting, None)

    def take(self, job: Job, result: Any) -> None:
        """Count a result, and keep an error."""
        self._num_ended += 1
        if isinstance(result, AqgError):
            self.failures[job.name] = result

    def note(self, job: Job) -> None:
        """Say nothing: no run depends on another."""

    def most_left(self) -> int:
        """Return how many jobs have not ended yet."""
        return len(self.left) - self._num_ended


def unfinished(jobs: Iterable[Job], directory: Path) -> list[Job]:
    """Return the jobs that are still to do; those that were begun must match their config."""
    left = []
    for job in jobs:
        place = directory / job.name
        if (place / CONFIG).exists():
            _check_unchanged(place, job.config)
        if read_summary(place) is None:
            left.append(job)
    return left


def _check_unchanged(directory: Path, config: RunConfig) -> None:
    """Refuse to go on with a run that was begun with other settings; no code of it is run."""
    stored = read_stored(read_config(directory))
    if stored != config:
        check_files(stored)
        before, after = asdict(stored), asdict(config)
        key = next(key for key in before if before[key] != after[key])
        raise ConfigError(
            f"cannot resume {str(directory)!r} with {key} {after[key]}: "
            f"the run has {key} {before[key]}; start a new one"
        )
