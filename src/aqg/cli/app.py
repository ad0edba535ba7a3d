"""The commands; those with many runs do their work in `aqg.cli.studies`, and `run` in its own."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import click
import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from aqg import __version__
from aqg.cli import studies
from aqg.cli.display import measured, metric_title, progress_bars, say
from aqg.cli.options import DemoOptions, ReportOptions, TheoryOptions, takes
from aqg.cli.run import run_command
from aqg.core.recipe import widest_weights
from aqg.core.recipes import RECIPES, make_recipe
from aqg.data import DATASETS
from aqg.errors import AqgError, ConfigError
from aqg.runs.config import RunConfig, resolve
from aqg.runs.cost import BYTES
from aqg.runs.directory import Line, output_directory, read_metrics
from aqg.runs.executor import Interrupted
from aqg.runs.loop import Progress as RunProgress
from aqg.runs.loop import read_configs
from aqg.runs.setup import build_problem, find_minimum, make_simulation
from aqg.runs.table import Table, format_bytes
from aqg.settings import RunSettings, table
from aqg.sim.problem import Problem

if TYPE_CHECKING:  # these take their time to import
    from aqg.contrib.theory import Curvature, LyapunovTrace
    from aqg.flower.demo import Demo

app = typer.Typer(
    name="aqg",
    help="Federated learning that uploads only what the server does not know yet.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
flower_app = typer.Typer(name="flower", help="Run on Flower.", no_args_is_help=True)


def run_app(arguments: list[str]) -> int:
    """Run the command line and return its exit code; no traceback for what can be explained."""
    try:
        result = app(arguments, standalone_mode=False)
    except (Interrupted, KeyboardInterrupt, click.exceptions.Abort) as stopped:
        text = str(stopped) if isinstance(stopped, Interrupted) else "stopped"
        print(f"aqg: {text}", file=sys.stderr)
        return 128 + signal.SIGINT
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return 2
    except (AqgError, click.ClickException) as error:
        text = str(error) if isinstance(error, AqgError) else error.format_message()
        is_click = isinstance(error, click.ClickException)
        print(f"aqg: error: {' '.join(text.split()) if is_click else text}", file=sys.stderr)
        return 2
    return result if isinstance(result, int) else 0


def _show_version(asked: bool) -> None:
    if asked:
        print(f"aqg {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    del version


_SETTINGS = (name for name, row in table(RunSettings).items() if row.group)
app.command("run")(takes(*_SETTINGS)(run_command))


@app.command()
def recipes() -> None:
    """List the recipes, a line each."""
    _print_lines(
        (entry.name, entry.summary + "".join(f" [{k}={v:g}]" for k, v in entry.options.items()))
        for entry in RECIPES.values()
    )


@app.command()
def datasets() -> None:
    """List the datasets, a line each."""
    _print_lines((name, summary) for name, (summary, _) in DATASETS.items())


def _print_lines(rows: Iterable[tuple[str, str]]) -> None:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    console = Console()
    for name, summary in rows:
        console.print(Text.assemble((name.ljust(width), "bold"), "  ", summary), soft_wrap=True)


app.command()(takes("dataset", "model", "problem", "init")(studies.sweep))
app.add_typer(flower_app)
app.command()(takes("problem", "dataset", "model")(studies.compare))


@app.command()
@takes()
def report(options: ReportOptions) -> None:
    """Make one HTML file to look at runs with: it needs no network and opens from disk.

    Runs that differ only in the seed are shown as one curve with a band. Unfinished runs are shown
    as far as they came.
    """
    from aqg.report.write import write_report

    begun = time.perf_counter()
    console = Console()
    with console.status("Reading runs ..."):
        given = options.directories, options.out, options.png, options.csv
        files, num_runs = write_report(*given)
    seconds = time.perf_counter() - begun
    for path in files:
        say(console, f"{path} ({format_bytes(path.stat().st_size)})")
    runs = "1 run" if num_runs == 1 else f"{num_runs} runs"
    console.print(f"{runs} in {seconds:.1f} s", style="dim", highlight=False)


app.command()(takes()(studies.reproduce))


@app.command()
@takes("recipe", "dataset", "partition", "model", "clients", "l2", "scaling", "alpha")
def theory(options: TheoryOptions) -> None:
    """Say which step sizes are guaranteed to converge, and what the current one is.

    With a run's directory, also whether the Lyapunov function fell, and how fast.
    """
    from aqg.contrib.theory import advise, sentences, survey

    directory, data_dir = options.directory, options.data_dir
    settings, console = options.settings(directory), Console(stderr=options.as_json)
    read = resolve if directory is None else partial(read_configs, directory)
    configs = read(settings, data_dir)
    with console.status(f"Loading {configs[0].data_name} ..."):
        problem = build_problem(configs[0], data_dir)
    with console.status("Measuring the curvature of the loss ..."):
        landscape = survey(problem, configs[0].training().client_weights(problem))
    found = []
    for one in configs:
        trace, end = None, None
        if directory is not None and problem.objective.convex:
            trace, end = _follow(console, one, problem, options.rounds or one.rounds)
        advice = advise(one, problem.num_clients, landscape, trace, end)
        found.append(advice.row)
        if not options.as_json:
            console.print(f"\n[bold]{one.recipe}, {one.title}[/bold]", highlight=False)
            for line in sentences(advice):
                console.print(f"- {line}", highlight=False)
    if options.as_json:
        studies.print_json({"theory": found})


def _follow(
    console: Console, config: RunConfig, problem: Problem, most_rounds: int
) -> tuple[LyapunovTrace, Curvature | None]:
    """Repeat the run, whose directory holds losses but no models; return V, and where it ended."""
    from aqg.contrib.theory import local_curvature, watch_run

    minimum = find_minimum(config, problem)
    recipe = make_recipe(config.recipe, config.bits, config.max_staleness)
    simulation, num_rounds = make_simulation(config, problem), min(config.rounds, most_rounds)
    with Progress(console=console, transient=True) as bars:
        task = bars.add_task(f"Repeating {config.recipe}", total=num_rounds)
        given = problem.num_clients, minimum or 0.0, widest_weights(recipe), config.alpha
        trace = watch_run(
            simulation, num_rounds, *given, lambda number: bars.update(task, completed=number)
        )
    model = simulation.parameters
    if not np.isfinite(model).all():
        return trace, None
    weights = config.training().client_weights(problem)
    return trace, local_curvature(problem, model, weights, smallest=False)


@flower_app.callback()
def _flower() -> None:
    """Keep ``demo`` a command of its own, although it is the only one."""


@flower_app.command()
@takes()
def demo(options: DemoOptions) -> None:
    """Train on digits in Flower's own simulation on this machine, and count every byte.

    All processes end with the command, also on Ctrl-C.
    """
    if find_spec("flwr") is None:
        raise ConfigError("aqg flower needs the package flwr: pip install 'aqg[flower,sim]'")
    from aqg.flower.demo import Demo

    make_recipe(options.recipe)  # or say what is wrong with it
    console = Console(stderr=options.as_json)
    with output_directory(options.out, "flower") as directory:
        chosen = {name: getattr(options, name) for name in ("nodes", "rounds", "recipe", "seed")}
        running = Demo(directory=directory, **chosen)
        rows = running.byte_table(_train(console, running))
        summary = running.summary()
    if options.as_json:
        studies.print_json({**summary, "nodes": rows, "directory": str(directory)})
        return
    found = read_metrics(summary)
    metrics = [f"{metric_title(m)} {m.format(found[m.name])}" for m in measured([summary])]
    console.print(
        f"\nLoss {summary['final_loss']:.4f} after {options.rounds} rounds, {', '.join(metrics)}."
    )
    console.print(_byte_table(rows).to_terminal())
    console.print(
        "up, down: what Flower was handed, heads and metrics included, and both (total); as "
        "float32: what plain gradients and models would take in total.",
        style="dim",
    )
    say(console, f"Results: {running.run_directory}")


def _train(console: Console, running: Demo) -> list[dict[str, Any]]:
    say(console, f"Flower's simulation of {running.nodes} nodes:")
    with progress_bars(console, [running.recipe], running.rounds) as watcher:
        watch, progress = watcher(running.recipe), RunProgress()

        def show(line: dict[str, Any]) -> None:
            progress.add(Line.of(line).record)
            watch(progress)

        return running.run(show)


def _byte_table(nodes: list[dict[str, int]]) -> Table:
    names = ("uploads", *BYTES, "plain_bytes")
    counts = [[node[name] for name in names] for node in nodes]
    counts.append([sum(column) for column in zip(*counts, strict=True)])
    rows = []
    for label, (uploads, *sizes) in zip([*(n["node"] for n in nodes), "all"], counts, strict=True):
        ratio = f"{sizes[-1] / sizes[-2]:.3g}×" if sizes[-2] else "-"
        rows.append((str(label), str(uploads), *map(format_bytes, sizes), ratio))
    header = ("node", "uploads", "up", "down", "total", "as float32", "smaller")
    return Table("nodes", "Nodes", "", header, tuple(rows), num_labels=1)
