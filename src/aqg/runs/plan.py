"""What a study runs next, and what workers do for it: try out, find minima, train.

Nothing of a study is written before every distinct problem was tried out and its minimum found.
Then come the runs, each a task of its own.
"""

import gc
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from aqg.errors import AqgError
from aqg.jit import when_compiling
from aqg.runs import loop
from aqg.runs.config import (
    RunConfig,
    check_files,
    load_plugins,
    read_stored,
    refuse_changes,
    to_toml,
)
from aqg.runs.directory import CONFIG, read_config, read_summary
from aqg.runs.executor import Contact, Done, Event, Place, run_tasks
from aqg.runs.files import write_atomically
from aqg.runs.setup import build_problem, check_target, find_minimum, minimum_key, try_out
from aqg.sim.problem import Problem


@dataclass(frozen=True)
class Job:
    name: str  # of its directory, below that of the study
    config: RunConfig
    ceiling: float = math.inf  # the bytes beyond which it is of no interest


JobType = TypeVar("JobType", bound=Job)


class StudyPlan(ABC, Generic[JobType]):
    """What a study runs next, and what came of it so far."""

    num_before = 0  # how many jobs were finished before
    bytes_before = 0  # what these sent and received

    def __init__(self) -> None:
        self.failures: dict[str, AqgError] = {}  # by the job's name

    @property
    @abstractmethod
    def num_finished(self) -> int: ...

    @abstractmethod
    def problems(self) -> Iterable[RunConfig]:
        """Return configs with every problem that runs may need."""

    @abstractmethod
    def next(self) -> JobType | None:
        """Return a job to start now; None while everything left depends on jobs under way."""

    @abstractmethod
    def take(self, job: JobType, result: Any) -> None:
        """Take what came of a job: its summary, or an `AqgError`."""

    @abstractmethod
    def most_left(self) -> int:
        """Return how many jobs have not ended yet, at most."""


class Batch(StudyPlan[Job]):
    """Runs that do not depend on each other; ``left`` are those that are not finished.

    Runs on the same data come one after the other, so that workers seldom load anew.
    """

    def __init__(self, jobs: Iterable[Job], directory: Path) -> None:
        super().__init__()
        groups: dict[object, list[Job]] = {}
        for job in jobs:
            _refuse_another(directory / job.name, job.config)
            summary = read_summary(directory / job.name)
            if summary is None:
                groups.setdefault(problem_key(job.config), []).append(job)
            else:
                self.num_before += 1
                self.bytes_before += summary["total_bytes"]
        self.left: Sequence[Job] = [job for group in groups.values() for job in group]
        self._waiting = iter(self.left)
        self._num_ended = 0

    @property
    def num_finished(self) -> int:
        return self.num_before + self._num_ended - len(self.failures)

    def problems(self) -> Iterable[RunConfig]:
        return (job.config for job in self.left)

    def next(self) -> Job | None:
        return next(self._waiting, None)

    def take(self, job: Job, result: Any) -> None:
        self._num_ended += 1
        if isinstance(result, AqgError):
            self.failures[job.name] = result

    def most_left(self) -> int:
        return len(self.left) - self._num_ended


def _refuse_another(place: Path, config: RunConfig) -> None:
    """Refuse a directory where a run with another config was begun; no code of it is run."""
    stored = read_stored(read_config(place)) if (place / CONFIG).exists() else config
    if stored != config:
        check_files(stored)
        refuse_changes(place, asdict(stored), asdict(config), "run", "start a new one")


Key = tuple[tuple[str, Any], ...]
Minima = Mapping[Key, float | None]
_MOST_KEPT_BYTES = 1 << 30
"""Samples that a worker keeps for its next runs, beside those of the run under way."""
_NOT_OF_THE_PROBLEM = {
    *("recipe", "rounds", "alpha", "step", "bits", "max_staleness", "optimizer", "downlink"),
    *("dropout", "absences", "participation", "target", "target_kind", "hold", "eval_every"),
    *("batch_size", "local_steps", "local_epochs", "local_rate", "speeds", "buffer_size"),
    *("outages", "link_mbit", "engine", "device", "plugins"),
}
"""Settings that leave the problem as it is; a setting not listed is taken to shape it."""


def problem_key(config: RunConfig) -> Key:
    return tuple((k, v) for k, v in asdict(config).items() if k not in _NOT_OF_THE_PROBLEM)


def prepare(
    place: Place,
    configs: Iterable[RunConfig],
    data_dir: Path | None,
    handle: Callable[[int, int], None] = lambda *_: None,
) -> Minima:
    """Check that every run can start, and find each distinct minimum ``f*`` once.

    ``handle`` is told how many problems are ready, of how many.
    """
    groups: dict[Key, dict[object, RunConfig]] = {}
    for config in configs:
        start = (problem_key(config), config.engine, config.device)
        groups.setdefault(_minimum_key(config), {}).setdefault(start, config)
    num_ready = count(1)

    def take(event: Event) -> None:
        if isinstance(event, Done):
            handle(next(num_ready), len(groups))

    tasks = [_Prepare(tuple(group.values()), data_dir) for group in groups.values()]
    return dict(zip(groups, run_tasks(tasks, place, take), strict=True))


def _minimum_key(config: RunConfig) -> Key:
    return tuple(minimum_key(config).items())


@dataclass(frozen=True)
class _Prepare:
    """Try out the start of some runs that share their minimum, and return it."""

    configs: tuple[RunConfig, ...]
    data_dir: Path | None

    def __call__(self, contact: Contact) -> float | None:
        minimum = None
        for config in self.configs:
            load_plugins(config.plugins)
            try_out(config, load(config, self.data_dir))
            is_followed = config.hold or config.validation
            if minimum is None and (config.target_kind == "residual" or not is_followed):
                # That of the data as they are: perturbed ones are measured against it.
                plain = replace(config, perturbation=0)
                minimum = find_minimum(plain, load(plain, self.data_dir))
            check_target(config, load(config, self.data_dir), minimum)
            contact.tell(None)
        return minimum


COMPILING = "Compiling kernels (once per install, then cached) ..."
"""What a run tells when kernels are not in numba's cache yet."""


@dataclass(frozen=True)
class Train:
    """Run one config in its directory, from its checkpoint if it has one; return its results.

    What it tells is `loop.Progress` and `COMPILING`.
    """

    saves: ClassVar[bool] = True

    config: RunConfig
    minimum: float | None
    directory: Path
    data_dir: Path | None
    ceiling: float = math.inf
    keeps_models: bool = True

    def __call__(self, contact: Contact) -> dict[str, Any]:
        load_plugins(self.config.plugins)
        with when_compiling(lambda: contact.tell(COMPILING)):
            return self.run(lambda: load(self.config, self.data_dir), contact)

    def run(self, make_problem: Callable[[], Problem], contact: Contact) -> dict[str, Any]:
        """Run it on a problem, which is made unless the run is finished."""
        config, directory = self.config, self.directory
        directory.mkdir(parents=True, exist_ok=True)
        summary = read_summary(directory)
        if summary is None:
            write_atomically(directory / CONFIG, to_toml((config,)).encode())
            options = contact, self.ceiling, self.keeps_models
            loop.run(config, make_problem(), self.minimum, directory, *options)
            gc.collect()  # graphs on a GPU hold on to each other, and to its memory
            summary = read_summary(directory)
            assert summary is not None, "a run that was not stopped leaves its results"
        return summary


def train(
    job: Job, minima: Minima, directory: Path, data_dir: Path | None, keeps_models: bool = True
) -> Train:
    minimum, place = minima.get(_minimum_key(job.config)), directory / job.name
    return Train(job.config, minimum, place, data_dir, job.ceiling, keeps_models)


_loaded: dict[Key, Problem] = {}
"""The worker's last problems."""


def load(config: RunConfig, data_dir: Path | None) -> Problem:
    key = problem_key(config)
    if key not in _loaded:
        while sum(map(_size, _loaded.values())) > _MOST_KEPT_BYTES:
            del _loaded[next(iter(_loaded))]  # before the next one takes memory
        _loaded[key] = build_problem(config, data_dir)
    return _loaded[key]


def _size(problem: Problem) -> int:
    return sum(samples.features.nbytes for samples in problem.clients)
