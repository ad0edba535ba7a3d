"""What commands take: a table of options each, and the settings of runs from theirs."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from aqg.data.datasets import ENVIRONMENT_VARIABLE
from aqg.errors import ConfigError
from aqg.runs.config import guard_file, named_settings
from aqg.runs.directory import CONFIG, read_toml
from aqg.settings import FROM_0, FROM_1, RunSettings, Setting, check_bounds, setting, table, types

ARGUMENT, _OWN = "argument", "A task of your own"


# fmt: off
@dataclass(frozen=True, kw_only=True)
class Given:
    flags: Mapping[str, Any] = field(default_factory=dict)  # settings that have an option

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, kw_only=True)
class DataOptions(Given):
    data_dir: Path | None = setting(None, "Where datasets are kept.")


@dataclass(frozen=True, kw_only=True)
class StudyOptions(DataOptions):
    jobs: int | None = setting(None, "Runs at a time; one per core by default.", bound=FROM_1)
    cluster: str | None = setting(None, "Run on the Ray cluster there.", metavar="ADDRESS")

    def refuse(self, reason: str, *names: str) -> None:
        """Refuse options that were given and have no place beside another."""
        for name in names:
            if getattr(self, name) not in (None, False):
                row = table(type(self))[name]
                shown = name if row.group == ARGUMENT else row.key or f"--{name}"
                raise ConfigError(f"{reason} {shown}")


@dataclass(frozen=True, kw_only=True)
class Options(DataOptions):
    as_json: bool = setting(False, "Print one JSON object.", key="--json")
    allow_code: bool = setting(False,
        "Run Python files that only a file or --resume names.")


@dataclass(frozen=True, kw_only=True)
class ConfigOptions(Options):
    config: Path | None = setting(None, "A TOML file with settings.")
    assignments: list[str] | None = setting(None,
        "Any setting; repeatable.", metavar="KEY=VALUE", key="--set")

    def settings(self, directory: Path | None) -> dict[str, Any]:
        """Return the file's settings and those named; no file here or there runs code unasked."""
        named = named_settings(self.assignments, self.flags)
        if directory is not None:
            guard_file(directory / CONFIG, named, allowed=self.allow_code)
        if self.config is None:
            return named
        guard_file(self.config, named, overrides=named, allowed=self.allow_code)
        return read_toml(self.config) | named


@dataclass(frozen=True, kw_only=True)
class RunOptions(ConfigOptions):
    out: Path | None = setting(None, "Directory for the results (new or empty).")
    resume: Path | None = setting(None, "Go on with the run in this directory.")


@dataclass(frozen=True, kw_only=True)
class TheoryOptions(ConfigOptions):
    directory: Path | None = setting(None,
        "A directory of `aqg run`: its rounds are repeated and the Lyapunov function is followed.",
        ARGUMENT, metavar="[RUNDIR]")
    rounds: int | None = setting(None,
        "Follow a run for this many rounds at most.", bound=FROM_1)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Given):
    directories: list[Path] = setting(...,
        "Runs, comparisons or sweeps; any number, mixed.", ARGUMENT, metavar="DIR...")
    out: Path = setting(Path("report.html"), "The HTML file to write.")
    png: Path | None = setting(None, "Also write the plots here, as PNG.", metavar="DIR")
    csv: Path | None = setting(None, "Also write summary.csv and curves.csv here.", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Given):
    nodes: int = setting(3, "How many SuperNodes.", bound=FROM_1)
    rounds: int = setting(20, "How many rounds.", bound=FROM_1)
    recipe: str = setting("auto", "See `aqg recipes`.")
    seed: int = setting(0, "Makes a run repeatable.", bound=FROM_0)
    out: Path | None = setting(None, "Directory for results (new or empty).")
    as_json: bool = setting(False, "Print one JSON object.", key="--json")


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Options, StudyOptions):
    grid: Path | None = setting(None,
        "Settings and a table [grid], or tables [[run]]; or a function that yields the settings of "
        "runs.", ARGUMENT, metavar="GRID.toml|FILE.py:FUNCTION")
    out: Path | None = setting(None, "Directory for the results (new or empty).")
    resume: Path | None = setting(None, "Go on with the sweep in this directory.")


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions(StudyOptions):
    quick: bool = setting(False,
        "Shortened for a laptop: minutes on two cores.")
    out: Path | None = setting(None,
        "Directory for runs, tables and pictures; goes on with what is there. runs/reproduce or "
        "runs/reproduce-quick by default.")
    device: str | None = setting(None,
        "For MNIST; the GPU by default if there is one.", metavar="cpu|cuda")
    only: str | None = setting(None, "Only these parts, separated by commas.",
        metavar="table2|logistic|rounding|softmax|dropouts|network")
    saved: Path | None = setting(None,
        "Run nothing: show the results in this directory.", key="--from")
    missing: Path | None = setting(None,
        "Only runs that the results in this directory lack.", key="--missing-from")


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Options, StudyOptions):
    recipes: str | None = setting(None,
        "Names separated by commas, or all; by default the best-known ones. With options, as in "
        "stc:keep=0.001, a recipe is run as told. Federated averaging is run in any case.",
        ARGUMENT)
    task: str | None = setting(None,
        "On what; two quick tasks on digits by default. A task says what its goal is: a target, or "
        "to be as good as federated averaging in full precision (averaging: all of those). "
        "--problem, --dataset and --model are for a task of your own, in place of it or beside it.",
        metavar="NAME[,NAME]|all|averaging")
    assignments: list[str] | None = setting(None,
        "Any other setting of its runs, as in `aqg run`; repeatable.", _OWN,
        metavar="KEY=VALUE", key="--set")
    target: float | None = setting(None, "It is learned when its loss is at most this.", _OWN)
    target_accuracy: float | None = setting(None,
        "It is learned when its test accuracy is at least this share, such as 0.9; with "
        "--set validation=0.1 its accuracy on such a share of the samples.", _OWN)
    seeds: int | None = setting(None, "Runs per recipe and task; 5, and 3 of who is far behind.")
    out: Path | None = setting(None, "Directory for the results (new or empty).")
    resume: Path | None = setting(None,
        "Go on with the comparison in this directory: with everything unfinished, or with the "
        "recipes and tasks named, which are added to it.")
    again: str | None = setting(None,
        "With --resume: forget what these recipes did on the tasks named, or on all, and run them "
        "anew.", metavar="NAME[,NAME]")
    device: str = setting("cpu", "Where to compute the larger tasks.", metavar="cpu|cuda")
    downlink: str | None = setting(None,
        "How clients receive the model; what suits each recipe by default.",
        metavar="auto|full|exact|condensed")
    search: bool = setting(False,
        "Find every recipe's best step and parameters first, on seed 0.")
    quick: bool = setting(False, "One seed, and a small part of the search.")
    saved: Path | None = setting(None,
        "Run nothing: show what is finished in this directory.", key="--from")
    tuned: Path | None = setting(None,
        "Settings that a search found; by default those of the package.")


# fmt: on
Result = TypeVar("Result")


def takes(*settings: str) -> Callable[[Callable[[Any], Result]], Callable[..., Result]]:
    """Make a command of a function of options; those of the settings named are its ``flags``."""

    def decorate(run: Callable[[Any], Result]) -> Callable[..., Result]:
        kind: Any = get_type_hints(run)["options"]
        rows, hints, flag_hints = table(RunSettings), types(kind), types(RunSettings)
        parameters = [
            _parameter(each.name, table(kind)[each.name], hints[each.name], _default(each))
            for each in fields(kind)
            if each.name in table(kind)
        ]
        # One that is not given stays None, and is not shown with a default.
        parameters += [
            _parameter(name, replace(rows[name], key=""), flag_hints[name] | None)
            for name in settings
        ]

        @functools.wraps(run)
        def command(**values: Any) -> Result:
            given = {name: values.pop(name) for name in settings}
            flags = {name: value for name, value in given.items() if value is not None}
            return run(kind(flags=flags, **values))

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def _default(option: Field[Any]) -> Any:
    return ... if option.default is MISSING else option.default


def _parameter(name: str, row: Setting, hint: Any, default: Any = None) -> inspect.Parameter:
    """Return an option or an argument as typer reads it."""
    metavar = "|".join(row.bound) if isinstance(row.bound, tuple) else row.metavar
    how: Any
    if row.group == ARGUMENT:
        how = typer.Argument(metavar=metavar, help=row.help)
    else:
        key = row.key or (f"--{name.replace('_', '-')}" if hint is bool else "")
        how = typer.Option(
            *([key] if key else []),
            metavar=metavar,
            help=row.help,
            rich_help_panel=row.group or None,
            envvar=ENVIRONMENT_VARIABLE if name == "data_dir" else None,
            show_default=default is not None,
        )
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[hint, how])
