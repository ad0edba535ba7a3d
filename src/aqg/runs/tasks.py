"""The work of a sweep, as tasks for worker processes.

First every distinct problem is tried out and its minimum found; nothing is written before all of
that has succeeded. Then the runs, each a task of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from aqg.runs import loop
from aqg.runs.config import load_plugins, to_toml
from aqg.runs.directory import CONFIG, SUMMARY, write_atomically
from aqg.runs.processes import Done, Failed
from aqg.runs.setup import build_problem, find_minimum, minimum_key, try_out
from aqg.runs.sweep import read_summary
from aqg.warmup import warm_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from aqg.errors import AqgError
    from aqg.runs.config import RunConfig
    from aqg.runs.processes import Event, Report, Workers
    from aqg.runs.sweep import SweepRun
    from aqg.sim.problem import Problem

    Key = tuple[tuple[str, Any], ...]
    Minima = Mapping[Key, float | None]

_SECONDS_BETWEEN_REPORTS = 0.2
_NOT_OF_THE_PROBLEM = frozenset(
    {
        "recipe",
        "rounds",
        "alpha",
        "bits",
        "max_staleness",
        "dropout",
        "absences",
        "target",
        "engine",
        "device",
        "eval_every",
        "plugins",
        "batch_size",
        "local_steps",
        "local_epochs",
        "local_rate",
        "participation",
        "optimizer",
    }
)
"""Settings that leave the problem as it is; a setting not listed is taken to shape it."""


def _problem_key(config: RunConfig) -> Key:
    """Return what tells problems apart."""
    return tuple((k, v) for k, v in asdict(config).items() if k not in _NOT_OF_THE_PROBLEM)


def _minimum_key(config: RunConfig) -> Key:
    """Return what tells minima apart."""
    return tuple(minimum_key(config).items())


def by_problem(runs: Iterable[SweepRun]) -> list[SweepRun]:
    """Put runs on the same data next to each other, so that workers seldom load anew."""
    groups: dict[Key, list[SweepRun]] = {}
    for run in runs:
        groups.setdefault(_problem_key(run.config), []).append(run)
    return [run for group in groups.values() for run in group]


def prepare(
    workers: Workers,
    runs: Sequence[SweepRun],
    data_dir: Path | None,
    handle: Callable[[Event, int], None],
) -> Minima:
    """Check that every run can start, and find each distinct minimum ``f*`` once.

    The kernels are compiled first, by one worker for all. ``handle`` is told of every event of the
    rest, and of the number of tasks.
    """
    workers.run([_warm_up], _raise_failure)
    groups: dict[Key, dict[object, RunConfig]] = {}
    for config in (run.config for run in runs):
        start = (_problem_key(config), config.engine, config.device)
        groups.setdefault(_minimum_key(config), {}).setdefault(start, config)
    tasks = [_Prepare(tuple(group.values()), data_dir) for group in groups.values()]
    keys = list(groups)
    minima: dict[Key, float | None] = {}

    def take(event: Event) -> None:
        _raise_failure(event)
        if isinstance(event, Done):
            minima[keys[event.index]] = event.value
        handle(event, len(tasks))

    workers.run(tasks, take)
    return minima


def run_all(
    workers: Workers,
    runs: Sequence[SweepRun],
    minima: Minima,
    directory: Path,
    data_dir: Path | None,
    handle: Callable[[Event], None],
) -> dict[str, AqgError]:
    """Run to the end, each from its checkpoint if it has one; return what failed, by name.

    ``handle`` is told of every event: reports are `loop.Progress`, and results are as in
    ``summary.json``.

    Raises:
        Interrupted: on Ctrl-C, with everything saved.

    """
    failures: dict[str, AqgError] = {}

    def take(event: Event) -> None:
        if isinstance(event, Failed):
            failures[runs[event.index].name] = event.error
        handle(event)

    tasks = [
        _Train(run.config, minima[_minimum_key(run.config)], directory / run.name, data_dir)
        for run in runs
    ]
    workers.run(tasks, take)
    return failures


def _raise_failure(event: Event) -> None:
    if isinstance(event, Failed):
        raise event.error


def _warm_up(report: Report) -> None:  # noqa: ARG001
    warm_up()


@dataclass(frozen=True)
class _Prepare:
    """Try out the start of some runs that share their minimum, and return it."""

    configs: tuple[RunConfig, ...]
    data_dir: Path | None

    def __call__(self, report: Report) -> float | None:
        minimum = None
        for config in self.configs:
            load_plugins(config.plugins)
            problem = _load(config, self.data_dir)
            try_out(config, problem)
            if minimum is None:
                minimum = find_minimum(config, problem)
            report(None)
        return minimum


@dataclass(frozen=True)
class _Train:
    """Run one config in its directory; return its results."""

    config: RunConfig
    minimum: float | None
    directory: Path
    data_dir: Path | None

    def __call__(self, report: Report) -> dict[str, Any]:
        last_report = 0.0

        def watch(progress: loop.Progress) -> None:
            nonlocal last_report
            now = time.monotonic()
            if now - last_report >= _SECONDS_BETWEEN_REPORTS:
                last_report = now
                report(progress)

        load_plugins(self.config.plugins)
        self.directory.mkdir(exist_ok=True)
        with _claimed(self.directory):
            if not (self.directory / SUMMARY).exists():
                content = to_toml((self.config,)).encode()
                write_atomically(self.directory / CONFIG, content)
                problem = _load(self.config, self.data_dir)
                loop.run(self.config, problem, self.minimum, self.directory, watch)
        return read_summary(self.directory)


@contextlib.contextmanager
def _claimed(directory: Path) -> Iterator[None]:
    """Wait until no other process works in ``directory``, such as one left by a killed parent."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


_loaded: dict[Key, Problem] = {}
"""The worker's last problem."""


def _load(config: RunConfig, data_dir: Path | None) -> Problem:
    """Build the problem, or return the last one if it is the same."""
    key = _problem_key(config)
    if key not in _loaded:
        _loaded.clear()  # before the next one takes memory
        _loaded[key] = build_problem(config, data_dir)
    return _loaded[key]
