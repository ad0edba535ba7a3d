"""What every command with many runs does: prepare, run what is left, show how far it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console

from aqg.cli.display import Overview
from aqg.errors import AqgError, ConfigError
from aqg.runs.config import RunConfig
from aqg.runs.executor import (
    Interrupted,
    Place,
    Plan,
    Processes,
    carry_out,
    default_jobs,
    visible_gpus,
)
from aqg.runs.files import locked
from aqg.runs.plan import Job, Train, prepare, train
from aqg.studies.contest.plan import ContestPlan


@dataclass(frozen=True)
class Where:
    """Where runs run.

    Attributes:
        jobs: how many at a time; by default one per core.
        cluster: the address of a Ray cluster; by default on this machine.
        data_dir: where datasets are kept.

    """

    jobs: int | None = None
    cluster: str | None = None
    data_dir: Path | None = None

    def check(self) -> None:
        """Refuse a number of jobs that is none."""
        if self.jobs is not None and self.jobs < 1:
            raise ConfigError(f"jobs is {self.jobs}; it must be at least 1")

    def processes(self, configs: Iterable[RunConfig]) -> Processes:
        """Return processes on this machine; with CUDA, each sees one GPU."""
        gpus = visible_gpus() if any(c.device.startswith("cuda") for c in configs) else ()
        jobs = default_jobs() if self.jobs is None or self.cluster is not None else self.jobs
        return Processes(jobs, gpus)

    def describe(self, num_left: int) -> str:
        """Say how many runs there are at a time."""
        if self.cluster is not None:
            return f"on the Ray cluster at {self.cluster}"
        jobs = default_jobs() if self.jobs is None else self.jobs
        return f"{min(jobs, num_left)} at a time"


JobType = TypeVar("JobType", bound=Job)


class StudyPlan(Plan[JobType], Protocol[JobType]):
    """A plan that can be shown."""

    @property
    def failures(self) -> Mapping[str, AqgError]:
        """What went wrong, by the job's name."""

    def problems(self) -> Iterable[RunConfig]:
        """Return configs with every problem that runs may need."""

    def most_left(self) -> int:
        """Return how many jobs have not ended yet, at most."""


def lock(directory: Path) -> ExitStack:
    """Keep other commands from a directory, if it exists already."""
    stack = ExitStack()
    if directory.is_dir():
        stack.enter_context(locked(directory))
    return stack


def run_study(
    console: Console,
    plan: StudyPlan[JobType],
    directory: Path,
    where: Where,
    overview: Callable[[], Overview],
    create: Callable[[], None] = lambda: None,
    how_to_go_on: Callable[[], str] = str,
    keeps_models: bool = True,
) -> None:
    """Run what a plan wants.

    Args:
        console: where to show what happens.
        plan: asked what comes next.
        directory: holds the directories of the runs.
        where: to run.
        overview: makes the display, once everything is prepared.
        create: makes the study's directory; called when everything is prepared.
        how_to_go_on: what to say after Ctrl-C.
        keeps_models: leave models and checkpoints of finished runs.

    Raises:
        Interrupted: on Ctrl-C, with everything saved.

    """
    problems = list(plan.problems())
    text = "Preparing data and the minimum of each loss (cached for next time) ..."
    with ExitStack() as stack:
        try:
            place: Place = stack.enter_context(where.processes(problems))
            with console.status(text) as status:
                minima = prepare(
                    place,
                    problems,
                    where.data_dir,
                    lambda done, total: status.update(f"{text} {done} of {total}"),
                )
            is_new = not directory.is_dir()
            create()
            if is_new:
                stack.enter_context(lock(directory))
            if where.cluster is not None:
                from aqg.contrib.ray_cluster import RayCluster

                uses_gpus = any(config.device.startswith("cuda") for config in problems)
                cluster = RayCluster(where.cluster, where.jobs, uses_gpus)
                place = stack.enter_context(cluster)
            shown = stack.enter_context(overview())

            def make_task(job: JobType) -> Train:
                folder, limits = directory / job.name, plan.note(job)
                return train(job.config, minima, folder, where.data_dir, limits, keeps_models)

            carry_out(plan, make_task, place, shown.show)
        except Interrupted:
            raise Interrupted(how_to_go_on()) from None


def run_comparison(
    console: Console,
    plan: ContestPlan,
    directory: Path,
    where: Where,
    size: str,
    create: Callable[[], None],
) -> int:
    """Run what is left of a comparison; return the exit code.

    Args:
        console: where to show what happens.
        plan: asked what comes next.
        directory: of the comparison.
        where: to run.
        size: how many recipes and tasks there are, in words.
        create: makes the directory, or writes down what was added to the comparison.

    """
    from aqg.studies.contest.plan import PLAN

    num_before, most = plan.num_finished, plan.most_left()
    console.print(
        f"{size}, up to {most} runs, {num_before} finished before, {where.describe(most)}, "
        f"in {directory}",
        highlight=False,
        soft_wrap=True,
    )
    again = f"aqg compare --resume {directory}"

    def how_to_go_on() -> str:
        if not (directory / PLAN).exists():
            return "stopped before the first run; nothing was written"
        return f"stopped with {plan.num_finished} runs finished; go on with: {again}"

    if most:
        run_study(
            console,
            plan,
            directory,
            where,
            lambda: Overview(console, plan, "compare"),
            create,
            how_to_go_on,
            keeps_models=False,
        )
    else:
        create()
    total = plan.num_finished - num_before + len(plan.failures)
    return report_failures(plan, total, f"try them again with: {again}")


def report_failures(plan: StudyPlan[Any], total: int, how_to_try_again: str) -> int:
    """Name what failed on standard error; return the exit code."""
    if not plan.failures:
        return 0
    names = ", ".join(plan.failures)
    print(
        f"aqg: error: {len(plan.failures)} of {total} runs failed: {names}; {how_to_try_again}",
        file=sys.stderr,
    )
    return 1
