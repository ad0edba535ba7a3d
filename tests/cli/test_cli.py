"""The command line as a user meets it: real processes, real files, Ctrl-C, and going on."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aqg.cli import run as run_module
from aqg.cli.app import run_app
from aqg.cli.display import sweep_table
from aqg.cli.options import RunOptions, SweepOptions
from aqg.cli.run import run_command
from aqg.cli.studies import sweep as sweep_command
from aqg.core.recipes import RECIPES
from aqg.studies.sweep import create_sweep, open_sweep

from tests.commands import contents, interrupt, plugin, run_alone, started, wait_for

QUICK = ("--rounds", "25")


def aqg(*arguments, cwd, check=True):
    command = [sys.executable, "-m", "aqg", *map(str, arguments)]
    environment = os.environ | {"COLUMNS": "100"}
    options = {"capture_output": True, "text": True, "check": check}
    return subprocess.run(command, cwd=cwd, env=environment, **options)


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """Return a function that runs a command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments, code=0):
        capsys.readouterr()
        assert run_app(list(map(str, arguments))) == code
        return capsys.readouterr()

    return run


@pytest.mark.soak
def test_the_first_run(tmp_path, here):
    done = aqg("run", *QUICK, cwd=tmp_path)
    assert "Traceback" not in done.stderr
    words = ("auto", "gd", "laq", "final loss", "test acc", "uploads", "bits/param", "up", "down")
    for word in (*words, "total", "vs gd", "bytes that all clients sent and received"):
        assert word in done.stdout
    (directory,) = (tmp_path / "runs").iterdir()
    assert f"runs/{directory.name}" in done.stdout
    assert (directory / "comparison.png").read_bytes().startswith(b"\x89PNG")
    holdings = (directory / "clients.txt").read_text()
    assert len(holdings.splitlines()) >= 11
    assert "clients.txt" in done.stdout
    for recipe in ("auto", "gd", "laq"):
        files = {path.name for path in (directory / recipe).iterdir()}
        models = {"model.safetensors", "best.safetensors"}
        records = {"config.toml", "rounds.jsonl", "summary.json", "checkpoint.npz"}
        assert files == models | records
    # The run repeats from its own directory, to the last byte.
    here("run", "--config", directory / "config.toml", "--out", tmp_path / "again")
    for recipe in ("auto", "gd", "laq"):
        first = (directory / recipe / "rounds.jsonl").read_text()
        assert (tmp_path / "again" / recipe / "rounds.jsonl").read_text() == first


def test_json_is_one_object_on_stdout(tmp_path, here):
    options = ("--recipe", "lean,gd", "--target", "0.6", "--dropout", "0.1", "--out", "x")
    runs = json.loads(here("run", *QUICK, *options, "--json").out)["runs"]
    assert [run["recipe"] for run in runs] == ["lean", "gd"]
    for run in runs:
        target = run["target"]
        assert run["rounds"] == 25 >= target["reached_round"] > 0
        assert 0 < run["test_accuracy"] <= 1
        assert run["residual"] > 0
        for row in (run, target):
            assert row["total_bytes"] == row["upload_bytes"] + row["download_bytes"]
        assert 0 < target["upload_bytes"] < run["upload_bytes"]
        assert target["total_bytes"] < run["total_bytes"]
        assert target["uploads"] * 32 >= target["bits_per_param"]
    unreached = here("run", *QUICK, "--recipe", "lean", "--target", "1e-9", "--json")
    assert set(json.loads(unreached.out)["runs"][0]["target"].values()) == {1e-9, None}
    options = ("--model", "mlp:4", "--partition", "dirichlet:0.5", "--bits", 3, "--l2", 0.05)
    words = ("run", *QUICK, "--recipe", "aqg-2", *options, "--json", "--engine")
    plain = [here(*words, engine).out for engine in ("fast", "reference")]
    assert plain[0] == plain[1]
    (run,) = json.loads(plain[0])["runs"]
    assert run["residual"] is None
    assert "target" not in run


def test_listings(tmp_path, here):
    recipes, datasets = here("recipes").out, here("datasets").out
    assert all(name in recipes for name in (*RECIPES, "[xi=1] [eta=0.5]"))
    assert all(name in datasets for name in ("digits", "mnist", "heterogeneous"))
    assert aqg("--version", cwd=tmp_path).stdout.startswith("aqg ")
    done = aqg("run", "--recipe", "nope", cwd=tmp_path, check=False)  # in no process of ours
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("aqg: error: unknown recipe 'nope'; choose from")


@pytest.mark.soak
def test_interrupt_then_resume_ends_as_if_nothing_had_happened(tmp_path, here):
    options = ("--recipe", "lean,laq", "--rounds", "300", "--dropout", "0.2")
    here("run", *options, "--out", "whole")
    lines = tmp_path / "cut" / "lean" / "rounds.jsonl"
    with started("run", *options, "--out", "cut", cwd=tmp_path) as process:
        wait_for(process, lambda: lines.exists() and lines.stat().st_size > 2000)
        errors = interrupt(process)
    assert "aqg run --resume cut" in errors
    assert not (tmp_path / "cut" / "lean" / "summary.json").exists()
    changed = here("run", "--resume", "cut", "--alpha", "0.01", code=2)
    assert "cannot resume 'cut' with alpha 0.01: the run has alpha 0.1" in changed.err
    here("run", "--resume", "cut")
    for recipe in ("lean", "laq"):
        for name in ("rounds.jsonl", "summary.json"):
            expected = (tmp_path / "whole" / recipe / name).read_text()
            assert (tmp_path / "cut" / recipe / name).read_text() == expected


def test_runs_that_diverge_at_once_have_a_picture(tmp_path, here):
    here("run", *["--recipe", "gd,qsgd", "--alpha", "1e200", "--rounds", "3", "--out", "out"])
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    runs = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert all(run["diverged"] for run in runs)


def test_the_minimum_is_found_after_the_first_training(tmp_path, monkeypatch, here):
    monkeypatch.setenv("AQG_CACHE_DIR", str(tmp_path / "cache"))
    arguments = ("run", "--recipe", "lean", "--rounds", "4", "--seed", "3", "--out")
    trained = []
    find = run_module.find_minimum

    def watched(config, problem, progress):
        trained.append(len((tmp_path / "out/lean/rounds.jsonl").read_text().splitlines()))
        return find(config, problem, progress)

    monkeypatch.setattr(run_module, "find_minimum", watched)
    said = re.findall(r"minimum of the loss .*: (\d+) %", here(*arguments, "out").out)
    assert trained == [4]
    assert len(said) >= 5
    assert said == sorted(said, key=int)
    residual = json.loads((tmp_path / "out/summary.json").read_text())["runs"][0]["residual"]
    assert residual > 0
    assert "minimum of the loss" not in here(*arguments, "again").out  # from the cache


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


NOTES = 'Path("pid").write_text(str(os.getpid()) + " "); '


@pytest.mark.soak
def test_a_second_interrupt_stops_at_once(tmp_path):
    (tmp_path / "plugin.py").write_text(plugin("sleepy", NOTES + "time.sleep(300)"))
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
    (tmp_path / "plugin.py").write_text(plugin("sleepy", "raise KeyError(3)"))
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
        target = {"upload_bytes": reached, "total_bytes": reached and 3 * reached}
        found = {"diverged": loss is None, "final_loss": loss, "test_accuracy": 0.5, "uploads": 10}
        return found | sizes | {"target": target}

    rows = [row(1, **result(0.25, 100, 50)), row(1, **result(0.75, 300, None))]
    rows += [row(2, **result(None, 100, None)), row(3, error="no")]
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
