"""What commands take: a dataclass of options each, and the settings of runs from their table."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from aqg.errors import ConfigError
from aqg.settings import RunSettings, Setting, table, types

DataDir = Annotated[
    Path | None, typer.Option(envvar="AQG_DATA_DIR", help="Where datasets are kept.")
]
Jobs = Annotated[int | None, typer.Option(help="Runs at a time; one per core by default.")]
Cluster = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Run on the Ray cluster there.")
]
Config = Annotated[Path | None, typer.Option(help="A TOML file with settings.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting; repeatable.")
]
Out = Annotated[Path | None, typer.Option(help="Directory for the results (new or empty).")]
_OWN = "A task of your own"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What most commands take; ``flags`` holds the settings that have an option and were given."""

    flags: Mapping[str, Any] = field(default_factory=dict)
    data_dir: DataDir = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
    allow_code: Annotated[
        bool,
        typer.Option("--allow-code", help="Run Python files that only a file or --resume names."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    config: Config = None
    assignments: Assignments = None
    out: Out = None
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this directory.")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class TheoryOptions(Options):
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUNDIR]",
            help="A directory of `aqg run`: its rounds are repeated and the Lyapunov function "
            "is followed.",
        ),
    ] = None
    config: Config = None
    assignments: Assignments = None
    rounds: Annotated[
        int | None, typer.Option(help="Follow a run for this many rounds at most.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Options):
    grid: Annotated[
        Path | None,
        typer.Argument(
            metavar="GRID.toml|FILE.py:FUNCTION",
            help="Settings and a table [grid], or tables [[run]]; or a function that yields the "
            "settings of runs.",
        ),
    ] = None
    out: Out = None
    resume: Annotated[Path | None, typer.Option(help="Go on with the sweep in this directory.")] = (
        None
    )
    jobs: Jobs = None
    cluster: Cluster = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Options):
    recipes: Annotated[
        str | None,
        typer.Argument(
            help="Names separated by commas, or all; by default the best-known ones. With options, "
            "as in stc:keep=0.001, a recipe is run as told. Federated averaging is run in any case."
        ),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]|all|averaging",
            help="On what; two quick tasks on digits by default. A task says what its goal is: a "
            "target, or to be as good as federated averaging in full precision (averaging: all of "
            "those). --problem, --dataset and --model are for a task of your own, in place of it "
            "or beside it.",
        ),
    ] = None
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any other setting of its runs, as in `aqg run`; repeatable.",
            rich_help_panel=_OWN,
        ),
    ] = None
    target: Annotated[
        float | None,
        typer.Option(help="It is learned when its loss is at most this.", rich_help_panel=_OWN),
    ] = None
    target_accuracy: Annotated[
        float | None,
        typer.Option(
            help="It is learned when its test accuracy is at least this share, such as 0.9; with "
            "--set validation=0.1 its accuracy on such a share of the samples.",
            rich_help_panel=_OWN,
        ),
    ] = None
    seeds: Annotated[
        int | None, typer.Option(help="Runs per recipe and task; 5, and 3 of who is far behind.")
    ] = None
    out: Out = None
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Go on with the comparison in this directory: with everything unfinished, or with "
            "the recipes and tasks named, which are added to it."
        ),
    ] = None
    again: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help="With --resume: forget what these recipes did on the tasks named, or on all, and "
            "run them anew.",
        ),
    ] = None
    jobs: Jobs = None
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="Where to compute the larger tasks.")
    ] = "cpu"
    downlink: Annotated[
        str | None,
        typer.Option(
            metavar="auto|full|exact|condensed",
            help="How clients receive the model; what suits each recipe by default.",
        ),
    ] = None
    search: Annotated[
        bool,
        typer.Option(
            "--search", help="Find every recipe's best step and parameters first, on seed 0."
        ),
    ] = False
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed, and a small part of the search.")
    ] = False
    saved: Annotated[
        Path | None,
        typer.Option("--from", help="Run nothing: show what is finished in this directory."),
    ] = None
    tuned: Annotated[
        Path | None,
        typer.Option(help="Settings that a search found; by default those of the package."),
    ] = None
    cluster: Cluster = None

    def refuse(self, reason: str, *names: str) -> None:
        """Refuse options that were given and have no place beside another."""
        for name in names:
            if getattr(self, name) not in (None, False):
                raise ConfigError(f"{reason} {name if name == 'recipes' else f'--{name}'}")


Kind = TypeVar("Kind", bound=Options)
Result = TypeVar("Result")


def takes(
    kind: type[Kind], *settings: str
) -> Callable[[Callable[[Kind], Result]], Callable[..., Result]]:
    """Make a command of a function of options; those of the settings named are its ``flags``.

    What these are called, take and mean is in the table of `aqg.settings`.
    """
    rows, hints = table(RunSettings), get_type_hints(kind, include_extras=True)
    options = {each.name: (hints[each.name], each.default) for each in fields(kind)}
    del options["flags"]
    options |= {name: (_option(name, rows[name]), None) for name in settings}

    def decorate(run: Callable[[Kind], Result]) -> Callable[..., Result]:
        @functools.wraps(run)
        def command(**values: Any) -> Result:
            given = {name: values.pop(name) for name in settings}
            flags = {name: value for name, value in given.items() if value is not None}
            return run(kind(flags=flags, **values))

        parameters = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
            )
            for name, (hint, default) in options.items()
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def _option(name: str, row: Setting) -> Any:
    hint = types(RunSettings)[name]
    choices = "|".join(row.bound) if isinstance(row.bound, tuple) else None
    option = typer.Option(
        metavar=row.metavar or choices, help=row.help, rich_help_panel=row.group, show_default=False
    )
    return Annotated[hint if type(None) in get_args(hint) else hint | None, option]
