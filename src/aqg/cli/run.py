"""``aqg run``: resolve, run, show."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from aqg.cli.display import (
    BASELINES,
    DIRECTIONS_NOTE,
    headline,
    progress_bars,
    result_table,
    target_table,
    warnings_of,
)
from aqg.core.step_sizes import AUTO
from aqg.errors import AqgError, ConfigError, RunError
from aqg.jit import when_compiling
from aqg.runs import loop
from aqg.runs.config import (
    RunConfig,
    names_step,
    parse_assignment,
    read_settings,
    refuse_unnamed_code,
    resolve,
    to_toml,
)
from aqg.runs.directory import CONFIG, ROUNDS, SUMMARY, create_directory, output_directory
from aqg.runs.executor import Contact, Event, Interrupted, Reported, ThisProcess, run_tasks
from aqg.runs.files import locked, write_atomically
from aqg.runs.plan import Compiling
from aqg.runs.setup import find_minimum, load_problem, try_out
from aqg.runs.summary import Result, draw_comparison
from aqg.sim.backends import check_device
from aqg.sim.problem import Problem
from aqg.weights import BEST

FIGURE = "comparison.png"
CLIENTS = "clients.txt"


@dataclass(frozen=True)
class RunOptions:
    """The command line of ``aqg run``; ``flags`` holds only the settings that were given."""

    flags: Mapping[str, Any] = field(default_factory=dict)
    config: Path | None = None
    assignments: tuple[str, ...] = ()
    out: Path | None = None
    resume: Path | None = None
    data_dir: Path | None = None
    as_json: bool = False
    allow_code: bool = False


@dataclass(frozen=True)
class _Plan:
    """What to run, and in which directories."""

    directory: Path
    runs: tuple[tuple[RunConfig, Path], ...]
    is_batch: bool


@dataclass(frozen=True)
class _Run:
    """One of the runs, as a task."""

    config: RunConfig
    problem: Problem
    minimum: loop.Minimum
    directory: Path

    def __call__(self, contact: Contact) -> Result:
        try:
            return loop.run(self.config, self.problem, self.minimum, self.directory, contact)
        except (AqgError, Interrupted):
            raise
        except Exception as error:  # of the user's own model, as far as we know
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise RunError(
                f"{self.config.recipe} on {self.config.title} failed: {text}; what it did so far "
                f"is in {self.directory}"
            ) from error


class Minimum:
    """Finds the minimum of the loss when it is first asked for, and says how far it is.

    That is when the first run has been trained, unless the minimum decides when runs end.
    """

    def __init__(self, config: RunConfig, problem: Problem, console: Console) -> None:
        self._config, self._problem = config, problem
        self._console = console
        self._next_percent = 10
        self._found: float | None = None
        self.is_stop_asked: Callable[[], bool] = lambda: False

    def __call__(self) -> float | None:
        if self._found is None:
            self._found = find_minimum(self._config, self._problem, self._progress)
        return self._found

    def _progress(self, share: float) -> None:
        if self.is_stop_asked():
            raise Interrupted
        while 100 * share >= self._next_percent:
            text = f"Finding the minimum of the loss (once, then cached): {self._next_percent} %"
            self._console.print(text, highlight=False, soft_wrap=True)
            self._next_percent += 10


def run_command(options: RunOptions) -> None:
    """Run the recipes one after the other, then show and save the comparison."""
    with _planned(options) as plan, when_compiling(_say_so):
        _carry_out(plan, options)


def _say_so() -> None:
    print(Compiling.text, file=sys.stderr, flush=True)


def _carry_out(plan: _Plan, options: RunOptions) -> None:
    console = Console(stderr=options.as_json)
    config = plan.runs[0][0]
    check_device(config.device)
    with console.status(f"Loading {config.data_name} ..."):
        problem, table = load_problem(config, options.data_dir)
        try_out(config, problem)
    minimum = Minimum(config, problem, console) if problem.objective.convex else None
    if minimum is None:
        find_minimum(config, problem)  # an error where one is needed
    _create(plan, resume=options.resume is not None)
    write_atomically(plan.directory / CLIENTS, table.encode())

    names = [run_config.recipe for run_config, _ in plan.runs]
    tasks = [_Run(run_config, problem, minimum, place) for run_config, place in plan.runs]
    # A single run's directory is locked by the run itself.
    lock = locked(plan.directory) if plan.is_batch else nullcontext()
    place = ThisProcess()
    with lock, progress_bars(console, names, config.rounds) as watcher:

        def show(event: Event) -> None:
            if isinstance(event, Reported):
                watcher(names[event.index])(event.value)

        try:
            if minimum is not None:
                minimum.is_stop_asked = place.stop.is_set
            results = run_tasks(tasks, place, show)
        except Interrupted:
            raise Interrupted(
                f"stopped; everything is saved. Go on with: aqg run --resume {plan.directory}"
            ) from None

    summaries = [result.summary for result in results]
    write_atomically(
        plan.directory / FIGURE, draw_comparison(results, minimum() if minimum else None)
    )
    text = loop.batch_summary(summaries)
    if plan.is_batch:
        write_atomically(plan.directory / SUMMARY, text.encode())
    if options.as_json:
        sys.stdout.write(text)
        return
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a file has no edge to wrap at
    console.print(result_table(summaries, console.width).to_terminal())
    note = DIRECTIONS_NOTE
    if any(summary.recipe in BASELINES for summary in summaries):
        counted = "in total" if all(s.total_bytes is not None for s in summaries) else "up"
        note += f" vs: how many times fewer, {counted}."
    console.print(f"{note}\n", style="dim")
    sentence = headline(summaries)
    if sentence is not None:
        console.print(f"{sentence}\n", highlight=False, soft_wrap=True)
    for line in warnings_of(summaries):
        console.print(f"{line}\n", style="yellow", highlight=False, soft_wrap=True)
    if config.target is not None:
        console.print(f"Cost until the loss stays within {config.target:g} of its minimum:")
        console.print(target_table(summaries).to_terminal())
    console.print(f"Picture: {plan.directory / FIGURE}", highlight=False, soft_wrap=True)
    console.print(
        f"Clients: {plan.directory / CLIENTS} (who holds what)", highlight=False, soft_wrap=True
    )
    console.print(f"Models: {plan.runs[0][1] / BEST} and so on", highlight=False, soft_wrap=True)
    console.print(f"Results: {plan.directory}", highlight=False, soft_wrap=True)
    console.print(f"Look at: aqg report {plan.directory}", highlight=False, soft_wrap=True)


@contextmanager
def _planned(options: RunOptions) -> Iterator[_Plan]:
    """Check every setting before anything is touched."""
    named: dict[str, Any] = dict(parse_assignment(text) for text in options.assignments)
    named.update(options.flags)
    if options.resume is not None:
        if options.out is not None:
            raise ConfigError("--resume and --out exclude each other: a run stays where it is")
        _guard(options.resume / CONFIG, {}, named, options)
    settings: dict[str, Any] = {}
    if options.config is not None:
        _guard(options.config, named, named, options)
        settings = read_settings(options.config)
    settings.update(named)
    if options.resume is not None:
        configs = loop.read_configs(options.resume, settings, options.data_dir)
        yield _lay_out(options.resume, configs, is_batch=not (options.resume / ROUNDS).exists())
        return
    if not names_step(settings):
        settings["step"] = AUTO
    configs = resolve(settings, options.data_dir)
    with output_directory(options.out, Path(configs[0].data_name).stem) as directory:
        yield _lay_out(directory, configs, is_batch=True)


def _guard(
    file: Path, overrides: Mapping[str, Any], named: Mapping[str, Any], options: RunOptions
) -> None:
    """Refuse a file that would run code which the command line does not name."""
    if file.is_file():  # what is missing is reported where it is read
        settings = {**read_settings(file), **overrides}
        where = repr(str(file))
        refuse_unnamed_code(settings, named, allowed=options.allow_code, where=where)


def _lay_out(directory: Path, configs: tuple[RunConfig, ...], is_batch: bool) -> _Plan:
    runs = tuple(
        (config, directory / loop.slug(config.recipe) if is_batch else directory)
        for config in configs
    )
    return _Plan(directory, runs, is_batch)


def _create(plan: _Plan, resume: bool) -> None:
    """Make the directories; on resume, only those that an early crash left out."""
    if not resume:
        create_directory(plan.directory)
        text = to_toml(tuple(config for config, _ in plan.runs))
        write_atomically(plan.directory / CONFIG, text.encode())
    for config, directory in plan.runs:
        if not (directory / CONFIG).exists():
            loop.create_run(directory, config)
