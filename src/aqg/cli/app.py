"""The commands and their options; what they do is in the modules beside this one."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from aqg import __version__
from aqg.cli.compare import compare
from aqg.cli.flower import flower_app
from aqg.cli.listing import list_datasets, list_recipes
from aqg.cli.report import report
from aqg.cli.reproduce import reproduce
from aqg.cli.run import RunOptions, run_command
from aqg.cli.theory import theory
from aqg.errors import AqgError
from aqg.runs.executor import Interrupted

app = typer.Typer(
    name="aqg",
    help="Federated learning that uploads only what the server does not know yet.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_PROBLEM = "What to learn"
_ALGORITHM = "How to learn it"
_TRAINING = "Practical federated training"
_OUTPUT = "Where results go"


def run_app(arguments: list[str]) -> int:
    """Run the command line and return its exit code; no traceback for what can be explained."""
    try:
        result = app(arguments, standalone_mode=False)
    except Interrupted as interrupted:
        print(f"aqg: {interrupted}", file=sys.stderr)
        return 128 + signal.SIGINT
    except (KeyboardInterrupt, click.exceptions.Abort):
        print("aqg: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except AqgError as error:
        print(f"aqg: error: {error}", file=sys.stderr)
        return 2
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return 2
    except click.ClickException as error:
        message = " ".join(error.format_message().split())
        print(f"aqg: error: {message}", file=sys.stderr)
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


@app.command()
def run(
    recipe: Annotated[
        str | None,
        typer.Option(
            help="One or more, as in lean,laq,gd; see `aqg recipes`.", rich_help_panel=_ALGORITHM
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.npz",
            help="See `aqg datasets`; or a file with x_train, y_train, x_test, y_test and, if "
            "clients are given, client.",
            rich_help_panel=_PROBLEM,
        ),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            metavar="iid|label|source|source:shuffled|natural|dirichlet:A|shards:K",
            help="How samples are split among clients.",
            rich_help_panel=_PROBLEM,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.py:FUNCTION",
            help="What is trained: logistic, softmax, mlp:H; cnn, resnet8, transformer; or a "
            "function that returns a torch module.",
            rich_help_panel=_PROBLEM,
        ),
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="A function that makes clients, model and all; in place of dataset and model.",
            rich_help_panel=_PROBLEM,
        ),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Start from this model: safetensors, or a saved state_dict.",
            rich_help_panel=_PROBLEM,
        ),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="How many clients.", rich_help_panel=_PROBLEM)
    ] = None,
    l2: Annotated[
        float | None, typer.Option(help="Weight of the regularizer.", rich_help_panel=_PROBLEM)
    ] = None,
    scaling: Annotated[
        str | None,
        typer.Option(
            metavar="mean|sum",
            help="A client's loss is the mean or the sum over its samples.",
            rich_help_panel=_PROBLEM,
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="How many rounds.", rich_help_panel=_ALGORITHM)
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(help="Step size.", rich_help_panel=_ALGORITHM)
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            metavar="auto|fixed|dog",
            help="How long steps are: found where updates are noisy, unless --alpha is given.",
            rich_help_panel=_ALGORITHM,
        ),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(help="b_max, the most bits per parameter.", rich_help_panel=_ALGORITHM),
    ] = None,
    max_staleness: Annotated[
        int | None,
        typer.Option(
            help="Force an upload after this many skipped rounds.", rich_help_panel=_ALGORITHM
        ),
    ] = None,
    dropout: Annotated[
        float | None,
        typer.Option(
            help="Probability that a client drops out of a round, from 0 to below 1.",
            rich_help_panel=_ALGORITHM,
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            help="Report the cost until the loss stays within this of its minimum.",
            rich_help_panel=_ALGORITHM,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Makes a run repeatable.", rich_help_panel=_ALGORITHM)
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="fast|reference",
            help="The fast engine, or the plain one it is tested against.",
            rich_help_panel=_ALGORITHM,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda", help="Where to compute.", rich_help_panel=_ALGORITHM),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Samples per gradient; all of a client's by default.", rich_help_panel=_TRAINING
        ),
    ] = None,
    local_steps: Annotated[
        int | None,
        typer.Option(help="Steps a client takes in a round.", rich_help_panel=_TRAINING),
    ] = None,
    local_epochs: Annotated[
        int | None,
        typer.Option(
            help="Passes over its samples instead, in a round.", rich_help_panel=_TRAINING
        ),
    ] = None,
    local_rate: Annotated[
        float | None,
        typer.Option(help="Step size of local steps.", rich_help_panel=_TRAINING),
    ] = None,
    weighting: Annotated[
        str | None,
        typer.Option(
            metavar="equal|samples",
            help="Clients count alike, or by their number of samples.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    participation: Annotated[
        float | None,
        typer.Option(
            help="Fraction of clients sampled in a round, above 0 to 1.", rich_help_panel=_TRAINING
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="sgd|momentum|adam",
            help="How the server takes its step.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    downlink: Annotated[
        str | None,
        typer.Option(
            metavar="auto|full|exact|condensed",
            help="How clients receive the model: whole, or what changed of it.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file with settings.", rich_help_panel=_OUTPUT),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Any setting; repeatable.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for the results (new or empty).", rich_help_panel=_OUTPUT),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with the run in this directory.", rich_help_panel=_OUTPUT),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="AQG_DATA_DIR", help="Where datasets are kept.", rich_help_panel=_PROBLEM
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=_OUTPUT)
    ] = False,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            help="Run Python files that only --config or --resume names.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
) -> None:
    """Train with one or more recipes and compare what they cost.

    Without options: auto, gd and laq on scikit-learn's digits, one digit per client.
    """
    given: dict[str, Any] = {
        "recipe": recipe,
        "dataset": dataset,
        "partition": partition,
        "model": model,
        "problem": problem,
        "init": init,
        "clients": clients,
        "l2": l2,
        "scaling": scaling,
        "rounds": rounds,
        "alpha": alpha,
        "step": step,
        "bits": bits,
        "max_staleness": max_staleness,
        "dropout": dropout,
        "target": target,
        "seed": seed,
        "engine": engine,
        "device": device,
        "batch_size": batch_size,
        "local_steps": local_steps,
        "local_epochs": local_epochs,
        "local_rate": local_rate,
        "weighting": weighting,
        "participation": participation,
        "optimizer": optimizer,
        "downlink": downlink,
    }
    run_command(
        RunOptions(
            flags={name: value for name, value in given.items() if value is not None},
            config=config,
            assignments=tuple(assignments or ()),
            out=out,
            resume=resume,
            data_dir=data_dir,
            as_json=as_json,
            allow_code=allow_code,
        )
    )


@app.command()
def recipes() -> None:
    """List the recipes, a line each."""
    list_recipes()


@app.command()
def datasets() -> None:
    """List the datasets, a line each."""
    list_datasets()


@app.command()
def sweep(
    grid: Annotated[
        Path | None,
        typer.Argument(
            metavar="GRID.toml|FILE.py:FUNCTION",
            help="Settings and a table [grid], or tables [[run]]; or a function that yields the "
            "settings of runs.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for the results (new or empty).")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the sweep in this directory.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time; one per core by default.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(envvar="AQG_DATA_DIR", help="Where datasets are kept.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    dataset: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.npz", help="For all runs, as in `aqg run`.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.py:FUNCTION", help="For all runs.")
    ] = None,
    problem: Annotated[
        str | None, typer.Option(metavar="FILE.py:FUNCTION", help="For all runs.")
    ] = None,
    init: Annotated[str | None, typer.Option(metavar="FILE", help="For all runs.")] = None,
    allow_code: Annotated[
        bool,
        typer.Option("--allow-code", help="Run Python files that only the grid or --resume names."),
    ] = False,
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on the Ray cluster there.")
    ] = None,
) -> int:
    """Run every combination of the settings in a grid file, or a study of your own, across cores.

    Ctrl-C saves everything; --resume goes on and repeats nothing that is finished.
    """
    from aqg.cli.sweep import SweepOptions, sweep_command  # needs Linux or macOS

    given = {"dataset": dataset, "model": model, "problem": problem, "init": init}
    flags = {name: value for name, value in given.items() if value is not None}
    return sweep_command(
        SweepOptions(grid, out, resume, jobs, data_dir, as_json, flags, allow_code, cluster)
    )


app.add_typer(flower_app)
app.command()(compare)
app.command()(report)
app.command()(reproduce)
app.command()(theory)
