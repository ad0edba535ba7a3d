"""Write the reference pages that come from the code: ``python tools/reference.py``.

``docs/reference/cli.md`` is made of the commands, their options and help texts, and
``docs/reference/configuration.md`` of the settings of a run and their defaults.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import click
import typer

from aqg.cli.app import app
from aqg.core.recipes import RECIPES
from aqg.flower.strategy import KEYS
from aqg.runs.config import DATASET_FACTS, SETTINGS
from aqg.settings import CommonSettings, FlowerSettings, RunSettings, Setting, table

ROOT = Path(__file__).resolve().parents[1]
CLI_PAGE = ROOT / "docs/reference/cli.md"
CONFIG_PAGE = ROOT / "docs/reference/configuration.md"

_BY_DATASET = ("partition", "model", "clients", "rounds", "alpha")


def cli_page() -> str:
    """Return the page of all commands."""
    root = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        "Written by `python tools/reference.py` from the commands themselves; `aqg COMMAND --help`",
        "says the same. Exit codes: 0 for success, 1 if runs failed, 2 for a mistake in the",
        "command (with one line that says which), 130 after Ctrl-C.",
        "",
        *_command(root, "aqg"),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _command(command: click.Command, name: str) -> list[str]:
    if isinstance(command, click.Group):
        parts = [_command(part, f"{name} {key}") for key, part in command.commands.items()]
        return [line for part in parts for line in part]
    context = click.Context(command, info_name=name)
    lines = [f"## `{name}`", "", *_paragraphs(command.help or ""), ""]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    if arguments:
        lines += ["| argument | meaning |", "|---|---|"]
        lines += [f"| {_choices(p.make_metavar(context))} | {_help(p)} |" for p in arguments]
        lines.append("")
    if options:
        lines += ["| option | meaning |", "|---|---|"]
        lines += [f"| {_flags(p, context)} | {_help(p)} |" for p in options if not _hidden(p)]
        lines.append("")
    return lines


def _paragraphs(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _flags(option: click.Parameter, context: click.Context) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if getattr(option, "is_flag", False):
        return names
    return f"{names} {_choices(option.make_metavar(context))}"


def _help(parameter: click.Parameter) -> str:
    text = " ".join((getattr(parameter, "help", None) or "").split())
    default = parameter.default
    if default not in (None, False, ()) and not callable(default) and "default" not in text:
        text += f" Default: `{default}`."
    return _escape(text)


def _hidden(parameter: click.Parameter) -> bool:
    return bool(getattr(parameter, "hidden", False))


def _choices(metavar: str) -> str:
    """Write choices as code each: a table has no way to write a bar within code."""
    return " \\| ".join(f"`{choice}`" for choice in metavar.split("|"))


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def config_page() -> str:
    """Return the page of all settings."""
    lines = [
        "# Configuration",
        "",
        "Written by `python tools/reference.py` from the table in `aqg.settings`.",
        "",
        "## Settings of a run",
        "",
        "A key in a TOML file for `aqg run --config` and `aqg sweep`, `--set KEY=VALUE` on the",
        "command line and, where there is one, an option of `aqg run` with `-` for `_`. Later",
        "sources win: the dataset's defaults, the file, `--set`, options. `config.toml` of every",
        "run has them all.",
        "",
        *_settings(RunSettings, {name: name for name in SETTINGS}),
        "",
        "Steps are fixed in sweeps and comparisons unless they name `step`.",
        "",
        "## Settings of a deployment with Flower",
        "",
        "Keys under `[tool.flwr.app.config]`, for `make_server_app` and `AQG.from_run_config`;",
        "`flwr run --run-config` overrides them (Flower accepts only keys that the app's",
        "`pyproject.toml` has). Arguments of `AQG` are the same with `_` for `-`, but `rounds` for",
        "`num-server-rounds` and `participation` for `fraction-train`. The clients have one of",
        "their own: below `client-state-dir` nodes keep their state, each in its own directory.",
        "",
        *_settings(FlowerSettings, KEYS),
        "",
        "## Variables of the environment",
        "",
        "| variable | meaning |",
        "|---|---|",
        "| `AQG_DATA_DIR` | Where datasets are kept; `--data-dir` comes first. |",
        "| `AQG_CACHE_DIR` | Where minima of losses are kept, once found; by default the user's "
        "cache directory. |",
        "| `OMP_NUM_THREADS`, `NUMBA_NUM_THREADS` | How many threads compute; all cores by "
        "default, and one in every process of a sweep. |",
        "",
        "## Defaults of the datasets",
        "",
        f"| dataset | {' | '.join(f'`{name}`' for name in _BY_DATASET)} |",
        "|---" * (1 + len(_BY_DATASET)) + "|",
    ]
    for dataset, facts in DATASET_FACTS.items():
        row = {**facts.settings, "alpha": facts.step_sizes["mean"]}
        lines.append(f"| `{dataset}` | {' | '.join(f'`{row[name]}`' for name in _BY_DATASET)} |")
    lines += [
        "",
        'With `scaling = "sum"` the default of `alpha` is another: '
        + ", ".join(f"{f.step_sizes['sum']:g} for `{name}`" for name, f in DATASET_FACTS.items())
        + ".",
        "Torch modules and files have the step of federated averaging, no L2 term and float32.",
        "",
        "## Recipes",
        "",
        "`recipe` takes a name, or several with commas, each with options after colons, as in "
        "`lean:xi=2:eta=0.3`:",
        "",
        *textwrap.wrap(", ".join(f"`{name}`" for name in sorted(RECIPES)) + ".", 110),
        "",
        "[Recipes](recipes.md) has the formulas.",
    ]
    return "\n".join(lines) + "\n"


def _settings(kind: type[CommonSettings], names: Mapping[str, str]) -> list[str]:
    """Return the table of settings, by the names that they have there."""
    lines = ["| setting | type | default | allowed | meaning |", "|---|---|---|---|---|"]
    for field in fields(kind):
        row = table(kind)[field.name]
        what = str(field.type).replace(" | None", "")
        what = what.replace("tuple[tuple[int, int, int], ...]", "lists of 3 ints")
        lines.append(
            f"| `{names[field.name]}` | `{what}` | {_default(kind, field, row)} | {_allowed(row)} "
            f"| {_escape(row.help)} |"
        )
    return lines


def _allowed(row: Setting) -> str:
    if isinstance(row.bound, tuple) or (row.metavar and "|" in row.metavar):
        choices = row.bound if isinstance(row.bound, tuple) else (row.metavar or "").split("|")
        return ", ".join(f"`{choice}`" for choice in choices)
    return str(row.bound or "")


def _default(kind: type[CommonSettings], field: Field[Any], row: Setting) -> str:
    if row.shown and kind is RunSettings:
        return row.shown
    if field.default is MISSING:
        return "required"
    if field.default is None or field.default in ((), ""):
        return "none"
    value = field.default
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    CLI_PAGE.write_text(cli_page(), encoding="utf-8")
    CONFIG_PAGE.write_text(config_page(), encoding="utf-8")
