"""``aqg theory``: what is guaranteed for a config, and what a run did."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

if TYPE_CHECKING:
    from rich.console import Console

    from aqg.contrib.theory import Curvature, LyapunovTrace
    from aqg.runs.config import RunConfig
    from aqg.sim.problem import Problem


def theory(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUNDIR]",
            help="A directory of `aqg run`: its rounds are repeated and the Lyapunov function "
            "is followed.",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    recipe: Annotated[str | None, typer.Option(help="One or more, as in lean,laq.")] = None,
    dataset: Annotated[str | None, typer.Option(help="See `aqg datasets`.")] = None,
    partition: Annotated[
        str | None, typer.Option(metavar="iid|label|source|dirichlet:A|shards:K", help="The split.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="logistic|softmax|mlp:H", help="What is trained.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="How many clients.")] = None,
    l2: Annotated[float | None, typer.Option(help="Weight of the regularizer.")] = None,
    scaling: Annotated[
        str | None, typer.Option(metavar="mean|sum", help="A client's loss is its mean or sum.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Step size.")] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Follow a run for this many rounds at most.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting; repeatable."),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(envvar="AQG_DATA_DIR", help="Where datasets are kept.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Run Python files that only a run or config names.")
    ] = False,
) -> None:
    """Say which step sizes are guaranteed to converge, and what the current one is.

    With a run's directory, also whether the Lyapunov function fell, and how fast.
    """
    from rich.console import Console

    from aqg.contrib.advice import advise, sentences, survey
    from aqg.runs.config import parse_assignment, read_settings, refuse_unnamed_code, resolve
    from aqg.runs.directory import CONFIG
    from aqg.runs.loop import read_configs
    from aqg.runs.setup import build_problem

    given = {
        "recipe": recipe,
        "dataset": dataset,
        "partition": partition,
        "model": model,
        "clients": clients,
        "l2": l2,
        "scaling": scaling,
        "alpha": alpha,
    }
    named: dict[str, Any] = dict(parse_assignment(text) for text in assignments or ())
    named.update({name: value for name, value in given.items() if value is not None})
    for file in (config, directory / CONFIG if directory is not None else None):
        if file is not None and file.is_file():
            where = repr(str(file))
            refuse_unnamed_code(read_settings(file), named, allowed=allow_code, where=where)
    settings = {**(read_settings(config) if config is not None else {}), **named}
    console = Console(stderr=as_json)
    if directory is not None:
        configs = read_configs(directory, settings, data_dir)
    else:
        configs = resolve(settings, data_dir)
    with console.status(f"Loading {configs[0].data_name} ..."):
        problem = build_problem(configs[0], data_dir)
    with console.status("Measuring the curvature of the loss ..."):
        landscape = survey(problem, configs[0].training().client_weights(problem))
    found = []
    for one in configs:
        trace, end = None, None
        if directory is not None and problem.objective.convex:
            num_rounds = min(one.rounds, rounds or one.rounds)
            trace, end = _follow(console, one, problem, num_rounds)
        advice = advise(one, problem.num_clients, landscape, trace, end)
        found.append(advice.to_json())
        if not as_json:
            console.print(f"\n[bold]{one.recipe}, {one.title}[/bold]", highlight=False)
            for line in sentences(advice):
                console.print(f"- {line}", highlight=False)
    if as_json:
        sys.stdout.write(json.dumps({"theory": found}, indent=2, allow_nan=False) + "\n")


def _follow(
    console: Console, config: RunConfig, problem: Problem, num_rounds: int
) -> tuple[LyapunovTrace, Curvature | None]:
    """Repeat the run, whose directory holds losses but no models; return V, and where it ended."""
    from rich.progress import Progress

    from aqg.contrib.theory import local_curvature, watch_run
    from aqg.core.recipes import make_recipe
    from aqg.core.stages.wider_tolerance import widest_weights
    from aqg.runs.setup import find_minimum, make_simulation

    minimum = find_minimum(config, problem)
    recipe = make_recipe(config.recipe, config.bits, config.max_staleness)
    simulation = make_simulation(config, problem)
    with Progress(console=console, transient=True) as bars:
        task = bars.add_task(f"Repeating {config.recipe}", total=num_rounds)
        trace = watch_run(
            simulation,
            num_rounds,
            problem.num_clients,
            0.0 if minimum is None else minimum,
            widest_weights(recipe),
            config.alpha,
            lambda number: bars.update(task, completed=number),
        )
    model = simulation.parameters
    if not np.isfinite(model).all():
        return trace, None
    weights = config.training().client_weights(problem)
    return trace, local_curvature(problem, model, weights, smallest=False)
