"""Write the reference pages that come from the code: ``python tools/reference.py``.

``docs/reference/cli.md`` is made of the commands, their options and help texts, and
``docs/reference/configuration.md`` of the settings of a run and their defaults.
"""

from __future__ import annotations

import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import typer

from aqg.cli.app import app
from aqg.core.recipes import RECIPES
from aqg.runs.config import DATASET_DEFAULTS, SETTINGS, STEP_SIZES, RunConfig, resolve

ROOT = Path(__file__).resolve().parents[1]
CLI_PAGE = ROOT / "docs/reference/cli.md"
CONFIG_PAGE = ROOT / "docs/reference/configuration.md"

WITHOUT_FLAG = {
    "absences": "Scripted dropouts: lists of client, first round and first round back.",
    "target_kind": "What `target` is: `residual` (loss above its minimum), `loss` or `accuracy`.",
    "hold": "End the run once the target is met for so many rounds in a row; 0: never.",
    "dtype": "`float32` or `float64`; float32 for torch modules and files.",
    "eval_every": "Compute the loss in every so many rounds.",
    "plugins": "Python files that register recipes.",
    "files": "SHA-256 of the files that the settings name; noted by the run itself.",
    "perturbation": "Change the last bit of the data at random; 0: leave it.",
    "samples": "Use so many training samples only.",
    "reset": "Let a torch module draw its first parameters again from the seed.",
    "validation": "Share of its samples that every client holds out for targets.",
}
"""Settings that `aqg run` takes by ``--set`` and in files only."""
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


def described_settings() -> dict[str, str]:
    """Return what every setting is, from the options of `aqg run` or from the list above."""
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    helped = {p.name: _help(p) for p in command.params}
    return {name: helped.get(name) or WITHOUT_FLAG[name] for name in SETTINGS}


def config_page() -> str:
    """Return the page of all settings."""
    (config,) = resolve({"recipe": "auto"})
    types = {field.name: str(field.type) for field in fields(RunConfig)}
    lines = [
        "# Configuration",
        "",
        "Written by `python tools/reference.py`. Every setting of a run: a key in a TOML file for",
        "`aqg run --config` and `aqg sweep`, `--set KEY=VALUE` on the command line and, where",
        "there is one, an option of `aqg run` with `-` for `_`. Later sources win: the dataset's",
        "defaults, the file, `--set`, options. `config.toml` of every run has them all.",
        "",
        "| setting | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for name, text in described_settings().items():
        lines.append(f"| `{name}` | `{_type(types[name])}` | {_default(name, config)} | {text} |")
    lines += [
        "",
        "Steps are fixed in sweeps and comparisons unless they name `step`.",
        "",
        "## Defaults of the datasets",
        "",
        f"| dataset | {' | '.join(f'`{name}`' for name in _BY_DATASET)} |",
        "|---" * (1 + len(_BY_DATASET)) + "|",
    ]
    for dataset, values in DATASET_DEFAULTS.items():
        row = {**values, "alpha": STEP_SIZES[dataset, "mean"]}
        lines.append(f"| `{dataset}` | {' | '.join(f'`{row[name]}`' for name in _BY_DATASET)} |")
    lines += [
        "",
        'With `scaling = "sum"` the default of `alpha` is another: '
        + ", ".join(f"{STEP_SIZES[name, 'sum']:g} for `{name}`" for name in DATASET_DEFAULTS)
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


def _type(text: str) -> str:
    return text.replace(" | None", "").replace(
        "tuple[tuple[int, int, int], ...]", "lists of 3 ints"
    )


def _default(name: str, config: RunConfig) -> str:
    if name == "recipe":
        (first, *others) = resolve({})
        return f"`{','.join(c.recipe for c in (first, *others))}`"
    if name == "step":
        return "`auto`, or `fixed` with `alpha`"
    if name == "dataset":
        return "`digits`"
    if name == "alpha":
        return "the dataset's; federated averaging's with local steps or batches"
    if name in _BY_DATASET:
        return "the dataset's"
    value: Any = getattr(config, name)
    if value is None or value == ():
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    CLI_PAGE.write_text(cli_page(), encoding="utf-8")
    CONFIG_PAGE.write_text(config_page(), encoding="utf-8")
