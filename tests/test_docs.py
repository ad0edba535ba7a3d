"""Every block in the documents is run, read or checked.

Python sessions are doctests, run by pytest itself. Here: shell blocks of README.md and of our own
pages are run in a temporary directory, with few rounds; every ``aqg`` command in any page must be
one that the command line takes; TOML must be readable as what it is; plain Python must run.

Comments steer this: ``<!-- file: NAME -->`` before a block puts it into the directory under that
name, and ``<!-- not run: why -->`` leaves a shell block unrun.
"""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import typer

from aqg.cli.app import app, run_app
from aqg.runs.config import SETTINGS, resolve
from aqg.studies.sweep import expand

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_RUN = (
    "tutorial.md",
    "theory.md",
    "algorithm.md",
    "results.md",
    "own-model.md",
    "own-recipe.md",
)
RUN_PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in _RUN),
]
ROUNDS = "3"
_BLOCK = re.compile(
    r"(?:<!-- (?P<word>file|not run): (?P<text>[^>]*?) -->\n)?"
    r"^```(?P<kind>[a-z]*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_DATED = re.compile(r"\S*/[a-z]+-\d{8}-\d{6}")
_OTHER_TOOLS = ("pip install", "make ", "pip ", "cd ", "git ")


@dataclass(frozen=True)
class Block:
    """A fenced block and the comment before it."""

    kind: str
    body: str
    file: str | None
    is_run: bool


def blocks(page):
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        is_file = match["word"] == "file"
        yield Block(
            match["kind"],
            match["body"],
            match["text"].strip() if is_file else None,
            match["word"] != "not run",
        )


def commands(block):
    """Return the lines of a shell block, without comments."""
    joined = block.body.replace("\\\n", " ")
    lines = (line.strip().removeprefix("$ ") for line in joined.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def shell_blocks(page):
    return [block for block in blocks(page) if block.kind in ("sh", "console", "bash", "shell")]


def aqg_commands(page):
    lines = []
    for block in blocks(page):
        if block.kind in ("sh", "console", "bash", "shell", ""):
            lines += [line for line in commands(block) if line.startswith("aqg ")]
    return lines


def arguments_of(line):
    return shlex.split(line, comments=True)[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_one_that_there_is(page):
    root = typer.main.get_command(app)
    for line in aqg_commands(page):
        if "…" in line:
            continue
        command, arguments = root, arguments_of(line)
        context = click.Context(root)
        while isinstance(command, click.Group):
            assert arguments, line
            name = arguments.pop(0)
            command = command.get_command(context, name)
            assert command is not None, f"{line}: there is no command {name}"
        # Paths need not exist here; options and their values must be right.
        command.make_context("aqg", arguments, resilient_parsing=False)


@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.name)
def test_shell_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", "examples", ignore=shutil.ignore_patterns("flower*"))
    grid = Path("examples/sweep.toml")
    short = grid.read_text().replace("rounds = 200", "rounds = 2").replace("[0, 1, 2]", "[0]")
    grid.write_text(short)
    for block in blocks(page):
        if block.file is not None:
            Path(block.file).write_text(block.body, encoding="utf-8")
        if block not in shell_blocks(page) or not block.is_run:
            continue
        for line in commands(block):
            if line.startswith(_OTHER_TOOLS):
                continue
            assert line.startswith("aqg "), f"{page.name}: {line!r} is neither run nor marked"
            arguments = _shortened(arguments_of(line))
            assert run_app(arguments) == 0, f"{line}: {capsys.readouterr().err}"


def _shortened(arguments):
    """Let a command run for few rounds, on data that is there, and resume what was run last."""
    if any(_DATED.fullmatch(argument) for argument in arguments):
        latest = max(Path("runs").iterdir(), key=lambda path: path.stat().st_mtime)
        return [_DATED.sub(str(latest), argument) for argument in arguments]
    if arguments[0] == "run":
        arguments = ["digits" if argument == "mnist" else argument for argument in arguments]
        arguments += ["--rounds", ROUNDS]
    return arguments


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_toml_blocks_are_what_they_say(page):
    for block in blocks(page):
        if block.kind != "toml":
            continue
        document = tomllib.loads(block.body)
        if "grid" in document:
            expand(document)
        elif set(document) <= set(SETTINGS):
            resolve(document)


@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page):
    namespace = {"__name__": "document"}
    for block in blocks(page):
        if block.kind == "python" and ">>>" not in block.body and block.is_run:
            exec(compile(block.body, str(page), "exec", dont_inherit=True), namespace)
