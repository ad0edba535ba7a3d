"""``aqg run``: resolve, run, show."""

import functools
import json
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from aqg.cli import display
from aqg.cli.display import say
from aqg.cli.options import RunOptions
from aqg.core.step_sizes import AUTO
from aqg.errors import AqgError, ConfigError, RunError
from aqg.jit import when_compiling
from aqg.report.pictures import draw_comparison
from aqg.report.runs import compare as group_runs
from aqg.report.runs import read_runs
from aqg.runs import loop
from aqg.runs.config import RunConfig, names_step, resolve, to_toml
from aqg.runs.directory import CONFIG, ROUNDS, SUMMARY, create_directory, output_directory
from aqg.runs.executor import Contact, Interrupted, stop_requests
from aqg.runs.files import locked, write_atomically
from aqg.runs.plan import COMPILING
from aqg.runs.setup import find_minimum, load_problem, try_out
from aqg.sim.engine import check_device
from aqg.sim.problem import Problem
from aqg.spec import in_words
from aqg.weights import BEST

FIGURE = "comparison.png"
CLIENTS = "clients.txt"


@dataclass(frozen=True)
class _Plan:
    directory: Path
    configs: tuple[RunConfig, ...]
    is_batch: bool

    def place(self, config: RunConfig) -> Path:
        return self.directory / loop.slug(config.recipe) if self.is_batch else self.directory


def _make_finder(
    config: RunConfig, problem: Problem, console: Console, stop: threading.Event
) -> Callable[[], float | None]:
    """Return what finds the minimum when it is first asked for, and says how far it is.

    That is when the first run has been trained, unless the minimum decides when runs end.
    """
    percent = 0

    def report(share: float) -> None:
        nonlocal percent
        if stop.is_set():
            raise Interrupted
        while 100 * share >= percent + 10:
            percent += 10
            say(console, f"Finding the minimum of the loss (once, then cached): {percent} %")

    return functools.cache(lambda: find_minimum(config, problem, report))


def run_command(options: RunOptions) -> None:
    """Train with one or more recipes and compare what they cost.

    Without options: auto, gd and laq on scikit-learn's digits, one digit per client.
    """
    with (
        _planned(options) as plan,
        when_compiling(lambda: print(COMPILING, file=sys.stderr, flush=True)),
    ):
        _carry_out(plan, options)


def _carry_out(plan: _Plan, options: RunOptions) -> None:
    console = Console(stderr=options.as_json)
    config = plan.configs[0]
    check_device(config.device)
    with console.status(f"Loading {config.data_name} ..."):
        problem, table = load_problem(config, options.data_dir)
        try_out(config, problem)
    stop, minimum = threading.Event(), None
    if problem.objective.convex:
        minimum = _make_finder(config, problem, console, stop)
    else:
        find_minimum(config, problem)  # an error where one is needed
    _create(plan, resume=options.resume is not None)
    write_atomically(plan.directory / CLIENTS, table.encode())

    names = [one.recipe for one in plan.configs]
    # A single run's directory is locked by the run itself.
    lock = locked(plan.directory) if plan.is_batch else nullcontext()
    rows = []
    with lock, display.progress_bars(console, names, config.rounds) as watcher, stop_requests(stop):
        try:
            for one in plan.configs:
                if stop.is_set():
                    raise Interrupted
                contact = Contact(watcher(one.recipe), stop.is_set)
                rows.append(_train(one, problem, minimum, plan.place(one), contact))
        except Interrupted:
            raise Interrupted(
                f"stopped; everything is saved. Go on with: aqg run --resume {plan.directory}"
            ) from None

    shown = group_runs(read_runs([plan.directory]))
    dropout = f", dropout {config.dropout:g}" if config.dropout else ""
    write_atomically(plan.directory / FIGURE, draw_comparison(shown, config.title + dropout))
    text = json.dumps({"runs": rows}, indent=2, allow_nan=False) + "\n"
    if plan.is_batch:
        write_atomically(plan.directory / SUMMARY, text.encode())
    if options.as_json:
        sys.stdout.write(text)
        return
    display.widen(console, 120)
    console.print(display.result_table(rows, console.width).to_terminal())
    note = display.DIRECTIONS_NOTE
    if any(row["recipe"] in display.BASELINES for row in rows):
        note += " vs: how many times fewer, in total."
    console.print(f"{note}\n", style="dim")
    if sentence := display.headline(rows):
        say(console, f"{sentence}\n")
    for seen, row in zip(shown.runs, rows, strict=True):
        if row["worse_than_start"]:
            end = math.inf if row["final_loss"] is None else row["final_loss"]
            text = (
                f"{seen.recipe} got worse: its loss began at {seen.losses[0]:.4g} and ended at "
                f"{end:.4g}; try a smaller local rate or step"
            )
            say(console, f"{text}\n", style="yellow")
    if config.target is not None:
        console.print(f"Cost until the loss stays within {config.target:g} of its minimum:")
        console.print(display.target_table(rows).to_terminal())
    say(console, f"Picture: {plan.directory / FIGURE}")
    say(console, f"Clients: {plan.directory / CLIENTS} (who holds what)")
    say(console, f"Models: {plan.place(config) / BEST} and so on")
    say(console, f"Results: {plan.directory}")
    say(console, f"Look at: aqg report {plan.directory}")


def _train(
    config: RunConfig, problem: Problem, minimum: loop.Minimum, directory: Path, contact: Contact
) -> display.Row:
    try:
        return loop.run(config, problem, minimum, directory, contact)
    except (AqgError, Interrupted):
        raise
    except Exception as error:  # of the user's own model, as far as we know
        text = f"{config.recipe} on {config.title} failed: {in_words(error)}"
        raise RunError(f"{text}; what it did so far is in {directory}") from error


@contextmanager
def _planned(options: RunOptions) -> Iterator[_Plan]:
    """Check every setting before anything is touched."""
    resume = options.resume
    if resume is not None and options.out is not None:
        raise ConfigError("--resume and --out exclude each other: a run stays where it is")
    settings = options.settings(resume)
    if resume is not None:
        configs = loop.read_configs(resume, settings, options.data_dir)
        yield _Plan(resume, configs, is_batch=not (resume / ROUNDS).exists())
        return
    if not names_step(settings):
        settings["step"] = AUTO
    configs = resolve(settings, options.data_dir)
    with output_directory(options.out, Path(configs[0].data_name).stem) as directory:
        yield _Plan(directory, configs, is_batch=True)


def _create(plan: _Plan, resume: bool) -> None:
    if not resume:
        create_directory(plan.directory)
        write_atomically(plan.directory / CONFIG, to_toml(plan.configs).encode())
    for config in plan.configs:
        if not (plan.place(config) / CONFIG).exists():
            loop.create_run(plan.place(config), config)
