"""The command line as a user meets it: real processes, real files."""

import json
import os
import re
import subprocess
import sys

import pytest

from aqg.cli import run as run_module
from aqg.cli.app import run_app
from aqg.core.recipes import RECIPES

from tests.commands import interrupt, started, wait_for

QUICK = ("--rounds", "25")


def aqg(*arguments, cwd, check=True):
    return subprocess.run(
        [sys.executable, "-m", "aqg", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=check,
    )


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
    plain = [
        here("run", *QUICK, "--recipe", "aqg-2", *options, "--engine", engine, "--json").out
        for engine in ("fast", "reference")
    ]
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


def test_a_corrupted_cache_file_is_named(tmp_path, here, monkeypatch):
    data = tmp_path / "data" / "mnist"
    data.mkdir(parents=True)
    (data / "train-images-idx3-ubyte.gz").write_bytes(b"not what it should be")
    monkeypatch.setenv("AQG_DATA_DIR", str(tmp_path / "data"))
    (line,) = here("run", "--dataset", "mnist", code=2).err.splitlines()
    assert "train-images-idx3-ubyte.gz" in line
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


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
