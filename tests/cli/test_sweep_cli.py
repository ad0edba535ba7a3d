"""``aqg sweep`` as a user meets it: files, tables, Ctrl-C, and going on."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from aqg.cli.display import sweep_table
from aqg.cli.options import RunOptions, SweepOptions
from aqg.cli.run import run_command
from aqg.cli.studies import sweep as sweep_command
from aqg.studies.sweep import create_sweep, open_sweep

from tests.commands import contents, interrupt, run_alone, started, wait_for

TEXT = """
rounds = 200
dropout = 0.2
[grid]
recipe = ["lean"]
seed = [0, 1, 2]
"""
FILE = f'downlink = "auto"\n{TEXT}'
"""What a new sweep keeps: today's default is named, so that it stays."""
NAMES = [f"recipe-lean_seed-{seed}" for seed in (0, 1, 2)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a directory with a grid file and what its sweep must give, run by run, in here."""
    directory = tmp_path_factory.mktemp("sweep")
    (directory / "grid.toml").write_text(TEXT)
    create_sweep(directory / "whole", FILE.encode())
    for run in open_sweep(directory / "whole").runs:
        run_alone(run.config, directory / "whole" / run.name)
    assert sweep_command(SweepOptions(resume=directory / "whole")) == 0
    return directory


def is_running(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_are_those_of_aqg_run(whole, capsys):
    # Finished: shown again at once, and no file of a run is touched.
    times = {path: path.stat().st_mtime_ns for path in (whole / "whole").glob("*/*")}
    assert sweep_command(SweepOptions(resume=whole / "whole")) == 0
    assert {path: path.stat().st_mtime_ns for path in (whole / "whole").glob("*/*")} == times
    shown = capsys.readouterr().out
    assert "3 runs (recipe × seed), 3 finished before, in " in shown
    words = ("recipe", "runs", "uploads", "up", "down", "total", "..", "final loss", "test acc")
    assert all(word in shown for word in words)
    assert "seed" not in shown.split("Means over seeds")[0].split("\n", 1)[1]
    assert (whole / "whole" / "sweep.toml").read_text() == FILE
    assert sorted(path.name for path in (whole / "whole").iterdir()) == sorted(
        [*NAMES, "sweep.toml", "summary.csv", "summary.json"]
    )
    assert sweep_command(SweepOptions(resume=whole / "whole", as_json=True)) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["name"] for run in runs] == NAMES
    assert runs[1]["settings"] == {"recipe": "lean", "seed": 1}
    flags = {"recipe": "lean", "seed": 1, "dropout": 0.2, "rounds": 200}
    run_command(RunOptions(flags=flags, out=whole / "alone", as_json=True))
    (alone,) = json.loads(capsys.readouterr().out)["runs"]
    assert {key: runs[1][key] for key in alone} == alone
    lines = (whole / "alone" / "lean" / "rounds.jsonl").read_text()
    assert (whole / "whole" / NAMES[1] / "rounds.jsonl").read_text() == lines


@pytest.mark.soak
def test_interrupted_then_killed_then_resumed_ends_the_same(whole):
    directory = whole / "cut"
    with started("sweep", "grid.toml", "--out", "cut", "--jobs", "1", cwd=whole) as process:
        wait_for(process, (directory / NAMES[1] / "rounds.jsonl").exists)
        errors = interrupt(process)
    assert "aqg sweep --resume cut" in errors
    assert "1 runs finished" in errors
    first = directory / NAMES[0] / "summary.json"
    written = first.stat().st_mtime_ns
    assert (directory / NAMES[1] / "checkpoint.npz").exists()
    assert not (directory / NAMES[1] / "summary.json").exists()
    assert not (directory / "summary.json").exists()

    with started("sweep", "--resume", "cut", "--jobs", "1", cwd=whole) as process:
        wait_for(process, (directory / NAMES[2] / "rounds.jsonl").exists)
    assert not (directory / "summary.json").exists()

    assert sweep_command(SweepOptions(resume=directory, jobs=1)) == 0
    assert first.stat().st_mtime_ns == written
    found, expected = contents(directory), contents(whole / "whole")
    for name, content in expected.items():
        assert name.endswith("checkpoint.npz") or found[name] == content


SLEEPER = """
import os, time
from dataclasses import dataclass, replace
from pathlib import Path
from aqg.core.policies import Always
from aqg.core.recipes import make_recipe, register

class Sleepy(Always):
    def decide(self, case):
        Path("pid").write_text(str(os.getpid()) + " ")
        time.sleep(300)

@register("sleepy", "never ends a round")
def _sleepy(bits):
    return replace(make_recipe("gd"), policy=Sleepy(32))
"""


@pytest.mark.soak
def test_a_second_interrupt_stops_at_once(tmp_path):
    (tmp_path / "plugin.py").write_text(SLEEPER)
    (tmp_path / "grid.toml").write_text('plugins = ["plugin.py"]\n[grid]\nrecipe = ["sleepy"]\n')
    command = ("sweep", "grid.toml", "--out", "out", "--allow-code")
    with started(*command, cwd=tmp_path) as process:
        wait_for(process, lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        worker = int((tmp_path / "pid").read_text())
        os.killpg(process.pid, signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):  # it waits for the round
            process.wait(0.5)
        assert is_running(worker)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not is_running(worker)


def test_a_failed_run_is_named_and_the_exit_code_is_1(tmp_path, capsys):
    (tmp_path / "plugin.py").write_text(SLEEPER.replace("time.sleep(300)", "raise KeyError(3)"))
    grid = f'rounds = 3\nplugins = ["{tmp_path}/plugin.py"]\n[grid]\nrecipe = ["sleepy", "gd"]\n'
    (tmp_path / "grid.toml").write_text(grid)
    with contextlib.chdir(tmp_path):
        options = SweepOptions(grid=Path("grid.toml"), out=Path("out"), jobs=1, allow_code=True)
        assert sweep_command(options) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("aqg: error: 1 of 2 runs failed: recipe-sleepy; ")
    assert "recipe-sleepy: failed: KeyError: 3" in captured.out
    assert "0 of 1" in captured.out


def test_the_table_tells_diverged_failed_and_unreached_apart():
    def row(eta, **results):
        return {"settings": {"recipe": f"lean:eta={eta}", "seed": 0}, **results}

    def result(loss, size, reached):
        sizes = {"upload_bytes": size, "download_bytes": 2 * size, "total_bytes": 3 * size}
        return {
            "diverged": loss is None,
            "final_loss": loss,
            "test_accuracy": 0.5,
            "uploads": 10,
            **sizes,
            "target": {"upload_bytes": reached, "total_bytes": reached and 3 * reached},
        }

    rows = [
        row(1, **result(0.25, 100, 50)),
        row(1, **result(0.75, 300, None)),
        row(2, **result(None, 100, None)),
        row(3, error="no"),
    ]
    table = sweep_table(("recipe", "seed"), rows).to_terminal()
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns == {
        "recipe": ["lean:eta=1", "lean:eta=2", "lean:eta=3"],
        "runs": ["2", "1", "0 of 1"],
        "final loss": ["0.500000\n0.250000..0.750000", "diverged\n(1 of 1)", "failed"],
        "test acc": ["50.0%", "50.0%", "-"],
        "uploads": ["10", "10", "-"],
        "up": ["200 B\n100 B..300 B", "100 B", "-"],
        "down": ["400 B\n200 B..600 B", "200 B", "-"],
        "total": ["600 B\n300 B..900 B", "300 B", "-"],
        "total to target": ["150 B\n1 of 2 reached", "not reached", "-"],
    }
