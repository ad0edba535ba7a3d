"""Every block in the documents is run, read or checked, and every link leads somewhere.

Python sessions are doctests, run by pytest itself. Here: shell blocks are run in a temporary
directory, with few rounds; every ``aqg`` command in any page must be one that the command line
takes; TOML must be readable as what it is; plain Python must run.

Comments steer this: ``<!-- file: NAME -->`` before a block puts it into the directory under that
name, and ``<!-- not run: why -->`` leaves a block unrun.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
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
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALL_MARKDOWN = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *(
            p
            for d in ("docs", "examples", "results", "benchmarks")
            for p in (ROOT / d).rglob("*.md")
        ),
    )
)
ROUNDS = "3"
_SHELLS = ("sh", "console", "bash", "shell")
_BLOCK = re.compile(
    r"(?:<!-- (?P<word>file|not run): (?P<text>[^>]*?) -->\n)?"
    r"^```(?P<kind>[a-z]*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_DATED = re.compile(r"\S*/[a-z]+-\d{8}-\d{6}")


def name_of(page):
    return page.relative_to(ROOT).as_posix()


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


def arguments_of(line):
    return shlex.split(line, comments=True)[1:]


def has_runnable_blocks(page):
    return any(block.is_run and block.kind in (*_SHELLS, "python") for block in blocks(page))


RUN_PAGES = [page for page in PAGES if has_runnable_blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_is_one_that_there_is(page):
    root = typer.main.get_command(app)
    for block in blocks(page):
        if block.kind not in _SHELLS:
            unmarked = [line for line in commands(block) if line.startswith(("aqg ", "python -m "))]
            assert block.kind or not unmarked, (
                f"{name_of(page)}: {unmarked} in a block without `sh`"
            )
            continue
        for line in commands(block):
            if not line.startswith("aqg "):
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


@pytest.mark.parametrize(
    "page",
    [
        page
        if page.name in ("README.md", "own-model.md")
        else pytest.param(page, marks=pytest.mark.soak)
        for page in RUN_PAGES
    ],
    ids=name_of,
)
def test_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(ROOT / "examples", "examples", ignore=shutil.ignore_patterns("flower*"))
    grid = Path("examples/sweep.toml")
    short = grid.read_text().replace("rounds = 200", "rounds = 2").replace("[0, 1, 2]", "[0]")
    short = short.replace('["iid", "label"]', '["label"]')
    grid.write_text(short)
    namespace = {"__name__": "document"}
    for block in blocks(page):
        if block.file is not None:
            Path(block.file).write_text(block.body, encoding="utf-8")
        elif block.is_run and block.kind in _SHELLS:
            for line in commands(block):
                run_line(page, line, capsys)
        elif block.is_run and block.kind == "python" and ">>>" not in block.body:
            exec(compile(block.body, str(page), "exec", dont_inherit=True), namespace)


def run_line(page, line, capsys):
    """Run a line of a shell block; of other tools, see that what they are told exists."""
    words = shlex.split(line, comments=True)
    match words:
        case ["aqg", *arguments]:
            arguments = shortened(arguments)
            assert run_app(arguments) == 0, f"{line}: {capsys.readouterr().err}"
        case ["python", file] if file.endswith(".py"):
            runpy.run_path(file, run_name="__main__")
        case ["make", target]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), line
        case ["pip", "install", *packages]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
            extras = project["project"]["optional-dependencies"]
            for name in re.findall(r"aqg\[([a-z,]+)\]", " ".join(packages)):
                assert set(name.split(",")) <= set(extras), line
        case _:
            pytest.fail(f"{name_of(page)}: {line!r} is neither run nor marked as not run")


def shortened(arguments):
    """Let a command run for few rounds, on data that is there, and resume what was run last."""
    if any(_DATED.fullmatch(argument) for argument in arguments):
        latest = max(Path("runs").iterdir(), key=lambda path: path.stat().st_mtime)
        return [_DATED.sub(str(latest), argument) for argument in arguments]
    if arguments[0] == "run" and "--resume" not in arguments:
        arguments = ["digits" if argument == "mnist" else argument for argument in arguments]
        arguments += ["--rounds", ROUNDS]
    return arguments


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_can_be_read(page):
    for block in blocks(page):
        if block.kind == "python" and ">>>" not in block.body:
            ast.parse(block.body)
        if block.kind != "toml":
            continue
        document = tomllib.loads(block.body)
        if "grid" in document:
            expand(document)
        elif set(document) <= set(SETTINGS):
            resolve(document)


_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(text):
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    found = []
    for heading in re.findall(r"^#+ (.*)$", _FENCED.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.append(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", ALL_MARKDOWN, ids=name_of)
def test_links_lead_somewhere(page):
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    for target in _LINK.findall(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = Path(os.path.normpath(page.parent / path)) if path else page
        assert file.exists(), f"{name_of(page)}: {target} does not exist"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{name_of(page)}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_are_named_for_the_reader(page):
    """The comment that names a file is not shown; the text before the block must name it, too."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"<!-- file: (\S+) -->", text):
        before = text[max(0, match.start() - 400) : match.start()]
        assert f"`{match[1]}`" in before, f"{name_of(page)}: {match[1]}"
