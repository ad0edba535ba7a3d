"""Commands, in this process and in others, and what they leave."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from aqg.cli.app import run_app
from aqg.runs import loop
from aqg.runs.directory import ROUNDS
from aqg.runs.executor import Contact
from aqg.runs.files import seal
from aqg.runs.setup import build_problem, find_minimum


def run(*command, fails=False, cwd=None, without="", **environment):
    """Run a command to its end; return its output, or its errors where it is to fail."""
    kept = {name: value for name, value in os.environ.items() if name != without}
    done = subprocess.run(command, cwd=cwd, env=kept | environment, capture_output=True, text=True)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


def stop_after(num_rounds):
    rounds = count(1)
    return Contact(is_stop_asked=lambda: next(rounds) == num_rounds)


def run_alone(config, directory):
    """Run a config to its end, without any command."""
    problem = build_problem(config)
    loop.create_run(directory, config)
    return loop.run(config, problem, find_minimum(config, problem), directory)


def contents(directory):
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def refuse(capsys, *arguments, message):
    """The command says what is wrong in one line, and leaves everything as it was."""
    before = _files()
    capsys.readouterr()
    assert run_app(list(map(str, arguments))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aqg: error: ")
    assert message in line
    assert _files() == before


def shown_on(page, name):
    """Return a file as a page of the documentation shows it."""
    text = (Path(__file__).parents[1] / "docs" / page).read_text(encoding="utf-8")
    return text.split(f"<!-- file: {name} -->\n```")[1].split("\n", 1)[1].split("```")[0]


def change_rounds(directory, change):
    """Change the rows of a run's rounds, under checksums that fit."""
    file = directory / ROUNDS
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        del row["crc32"]
        change(row)
    file.write_text("".join(seal(json.dumps(row)) + "\n" for row in rows))


def plugin(name, deed, policy="Always(32)", recipe="gd"):
    """Return a file with a recipe that does something before it decides."""
    base = policy.partition("(")[0]
    return f"""
import os, signal, time
from dataclasses import replace
from pathlib import Path
from aqg.core.policies import {base}
from aqg.core.recipes import make_recipe, register

class {name.title()}({base}):
    def decide(self, case):
        {deed}
        return super().decide(case)

@register("{name}", "does something first")
def _{name}(bits):
    return replace(make_recipe("{recipe}"), policy={policy.replace(base, name.title(), 1)})
"""


def _files():
    return sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts)


@contextmanager
def started(*arguments, cwd):
    """Start a command in a process of its own; it is gone in the end."""
    command = [sys.executable, "-m", "aqg", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=cwd, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process, condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)


def interrupt(process):
    """Press Ctrl-C; return what the command says once everything is saved."""
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "everything is saved" in errors
    assert "Traceback" not in errors
    return errors
