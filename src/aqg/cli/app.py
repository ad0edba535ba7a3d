"""The commands and their options; longer ones do their work in the modules beside this one."""

from __future__ import annotations

import functools
import inspect
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import click
import typer
from rich.console import Console
from rich.text import Text

from aqg import __version__
from aqg.cli.compare import compare
from aqg.cli.flower import flower_app
from aqg.cli.reproduce import reproduce
from aqg.cli.run import RunOptions, run_command
from aqg.cli.theory import theory
from aqg.core.recipes import RECIPES
from aqg.data import DATASETS
from aqg.errors import AqgError
from aqg.runs.executor import Interrupted
from aqg.settings import RunSettings, Setting, table, types

app = typer.Typer(
    name="aqg",
    help="Federated learning that uploads only what the server does not know yet.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Command = TypeVar("Command", bound=Callable[..., Any])


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


def with_settings(*names: str) -> Callable[[Command], Command]:
    """Give a command options for all settings, or for those named; its ``flags`` are those given.

    What they are called, take and mean is in the table of `aqg.settings`.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def called(**arguments: Any) -> Any:
            given = {name: arguments.pop(name) for name in chosen}
            flags = {name: value for name, value in given.items() if value is not None}
            return command(flags=flags, **arguments)

        rows = table(RunSettings)
        chosen = names or tuple(name for name, row in rows.items() if row.group)
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != "flags"]
        kind = inspect.Parameter.KEYWORD_ONLY
        options = [
            inspect.Parameter(name, kind, default=None, annotation=_option(name, rows[name]))
            for name in chosen
        ]
        called.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *options], return_annotation=int | None
        )
        called.__annotations__ = {p.name: p.annotation for p in (*own, *options)}
        return called  # type: ignore[return-value]

    return decorate


def _option(name: str, row: Setting) -> Any:
    hint = types(RunSettings)[name]
    choices = "|".join(row.bound) if isinstance(row.bound, tuple) else None
    option = typer.Option(
        metavar=row.metavar or choices, help=row.help, rich_help_panel=row.group, show_default=False
    )
    return Annotated[hint if type(None) in get_args(hint) else hint | None, option]


DataDir = Annotated[
    Path | None, typer.Option(envvar="AQG_DATA_DIR", help="Where datasets are kept.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Run Python files that only a file or --resume names.")
]
Out = Annotated[Path | None, typer.Option(help="Directory for the results (new or empty).")]


@app.command()
@with_settings()
def run(
    *,
    flags: Mapping[str, Any],
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting; repeatable."),
    ] = None,
    out: Out = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this directory.")
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    allow_code: AllowCode = False,
) -> None:
    """Train with one or more recipes and compare what they cost.

    Without options: auto, gd and laq on scikit-learn's digits, one digit per client.
    """
    assigned = tuple(assignments or ())
    run_command(RunOptions(flags, config, assigned, out, resume, data_dir, as_json, allow_code))


@app.command()
def recipes() -> None:
    """List the recipes, a line each."""
    list_recipes()


@app.command()
def datasets() -> None:
    """List the datasets, a line each."""
    list_datasets()


@app.command()
@with_settings("dataset", "model", "problem", "init")
def sweep(
    grid: Annotated[
        Path | None,
        typer.Argument(
            metavar="GRID.toml|FILE.py:FUNCTION",
            help="Settings and a table [grid], or tables [[run]]; or a function that yields the "
            "settings of runs.",
        ),
    ] = None,
    *,
    flags: Mapping[str, Any],
    out: Out = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the sweep in this directory.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time; one per core by default.")
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
    allow_code: AllowCode = False,
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on the Ray cluster there.")
    ] = None,
) -> int:
    """Run every combination of the settings in a grid file, or a study of your own, across cores.

    Settings that are given as options hold for all runs. Ctrl-C saves everything; --resume goes on
    and repeats nothing that is finished.
    """
    from aqg.cli.sweep import SweepOptions, sweep_command  # needs Linux or macOS

    return sweep_command(
        SweepOptions(grid, out, resume, jobs, data_dir, as_json, flags, allow_code, cluster)
    )


def list_recipes() -> None:
    """Print name, summary and options of every recipe."""
    _print_lines(
        (
            entry.name,
            entry.summary
            + "".join(f" [{name}={value:g}]" for name, value in entry.options.items()),
        )
        for entry in RECIPES.values()
    )


def list_datasets() -> None:
    """Print name and summary of every dataset."""
    _print_lines((info.name, info.summary) for info in DATASETS.values())


def _print_lines(rows: Iterable[tuple[str, str]]) -> None:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    console = Console()
    for name, summary in rows:
        console.print(Text.assemble((name.ljust(width), "bold"), "  ", summary), soft_wrap=True)


def report(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Runs, comparisons or sweeps; any number, mixed."),
    ],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    png: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write the plots here, as PNG.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write summary.csv and curves.csv here.")
    ] = None,
) -> None:
    """Make one HTML file to look at runs with: it needs no network and opens from disk.

    Runs that differ only in the seed are shown as one curve with a band. Unfinished runs are shown
    as far as they came.
    """
    from rich.console import Console

    from aqg.report.write import Outputs, check_outputs, write_report
    from aqg.runs.table import format_bytes

    outputs = Outputs(out, png, csv)
    check_outputs(outputs)
    begun = time.perf_counter()
    console = Console()
    with console.status("Reading runs ..."):
        written = write_report(directories, outputs)
    seconds = time.perf_counter() - begun
    for path in written.files:
        size = format_bytes(path.stat().st_size)
        console.print(f"{path} ({size})", highlight=False, soft_wrap=True)
    runs = "1 run" if written.num_runs == 1 else f"{written.num_runs} runs"
    console.print(f"{runs} in {seconds:.1f} s", style="dim", highlight=False)


app.add_typer(flower_app)
app.command()(compare)
app.command()(report)
app.command()(reproduce)
app.command()(theory)
