"""Run directories: complete, resumable after any crash, and repeatable."""

import json
from itertools import count

import numpy as np
import pytest

from aqg.errors import ConfigError, RunError
from aqg.runs import loop
from aqg.runs.config import resolve
from aqg.runs.cost import Cost
from aqg.runs.directory import CHECKPOINT, CONFIG, ROUNDS, SUMMARY, read_toml
from aqg.runs.executor import Contact
from aqg.runs.setup import build_problem, find_minimum
from aqg.runs.stopping import Target, Trace
from aqg.weights import BEST, FINAL

from tests.problems import crossed

SETTINGS = {"recipe": "lean", "rounds": 30, "dropout": 0.2, "target": 0.5}


@pytest.fixture(scope="module")
def config():
    return resolve(SETTINGS)[0]


@pytest.fixture(scope="module")
def problem(config):
    return build_problem(config)


class StopAfter(Exception):  # noqa: N818
    """Stands for a crash."""


def crash_after(number):
    rounds = count(1)

    def count_rounds():
        if next(rounds) == number:
            raise StopAfter

    return Contact(is_stop_asked=count_rounds)


def run_whole(config, problem, directory):
    loop.create_run(directory, config)
    return loop.run(config, problem, find_minimum(config, problem), directory)


def test_a_run_directory_is_complete(config, problem, tmp_path):
    result = run_whole(config, problem, tmp_path / "run")
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == sorted([CONFIG, ROUNDS, CHECKPOINT, SUMMARY, BEST, FINAL])
    lines = [json.loads(line) for line in (tmp_path / "run" / ROUNDS).read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, 31))
    summary = json.loads((tmp_path / "run" / SUMMARY).read_text())
    for name in ("upload_bytes", "download_bytes", "total_bytes"):
        assert summary[name] == sum(line[name] for line in lines)
    assert summary["total_bytes"] == summary["upload_bytes"] + summary["download_bytes"]
    assert sum(summary["client_upload_bytes"]) == summary["upload_bytes"]
    assert sum(summary["client_download_bytes"]) == summary["download_bytes"]
    assert not any(name.startswith("client_") for name in lines[0])
    assert summary["uploads"] == sum(w > 0 for line in lines for w in line["widths"])
    minimum = find_minimum(config, problem)
    assert summary["residual"] == pytest.approx(result["final_loss"] - minimum)
    assert resolve(read_toml(tmp_path / "run" / CONFIG)) == (config,)


@pytest.mark.parametrize(("crash", "engine"), crossed([1, 13, 30], ["fast", "reference"]))
def test_goes_on_after_a_crash_and_ends_the_same(problem, tmp_path, crash, engine, monkeypatch):
    config = resolve({**SETTINGS, "engine": engine})[0]
    whole = run_whole(config, problem, tmp_path / "whole")
    monkeypatch.setattr(loop, "_SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    monkeypatch.setattr(loop, "_LARGEST_SHARE_OF_CHECKPOINTS", 1e9)
    directory = tmp_path / "broken"
    loop.create_run(directory, config)
    with pytest.raises(StopAfter):
        loop.run(config, problem, None, directory, crash_after(crash))
    # The crash came after the line was written and before the checkpoint: cut it mid-line too.
    text = (directory / ROUNDS).read_text()
    (directory / ROUNDS).write_text(text[:-7])
    (directory / f".{CHECKPOINT}.part").write_bytes(b"half")
    minimum = find_minimum(config, problem)
    resumed = loop.run(config, problem, minimum, directory)
    assert resumed == whole
    assert (directory / SUMMARY).read_text() == (tmp_path / "whole" / SUMMARY).read_text()
    for name in (BEST, FINAL):
        assert (directory / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert (directory / ROUNDS).read_text() == (tmp_path / "whole" / ROUNDS).read_text()
    with np.load(directory / CHECKPOINT) as left, np.load(tmp_path / "whole" / CHECKPOINT) as right:
        assert all(np.array_equal(left[key], right[key]) for key in right)


def test_resume_refuses_another_config(config, problem, tmp_path):
    run_whole(config, problem, tmp_path / "run")
    assert loop.read_configs(tmp_path / "run", {}) == (config,)
    assert loop.read_configs(tmp_path / "run", {"rounds": 30}) == (config,)
    with pytest.raises(ConfigError, match=r"with rounds 31: the run has rounds 30"):
        loop.read_configs(tmp_path / "run", {"rounds": 31})
    with pytest.raises(ConfigError, match=r"with recipe gd: the run has recipe lean"):
        loop.read_configs(tmp_path / "run", {"recipe": "gd"})
    with pytest.raises(RunError, match="is not a run directory"):
        loop.read_configs(tmp_path, {})


def test_a_diverging_run_ends_early_and_says_so(tmp_path):
    config = resolve({"recipe": "gd", "rounds": 400, "alpha": 1e6, "l2": 1.0})[0]
    result = run_whole(config, build_problem(config), tmp_path / "run")
    assert result["diverged"]
    assert result["rounds"] < 400
    summary = json.loads((tmp_path / "run" / SUMMARY).read_text())
    assert summary["diverged"] is True
    assert summary["test_accuracy"] is not None
    again = loop.run(config, build_problem(config), None, tmp_path / "run")
    assert again["rounds"] == result["rounds"]


def test_a_target_counts_only_when_the_loss_stays():
    costs = tuple(Cost(k, 10 * k, 20 * k, 30 * k) for k in range(6))
    trace = Trace(costs, (5.0, 0.9, 2.0, 0.8, 1.0, 0.7), (None,) * 6)
    assert trace.cost_to(Target("loss", 1.0)) == costs[3]
    assert trace.cost_to(Target("loss", 0.75)) == costs[5]
    assert trace.cost_to(Target("loss", 0.5)) is None
    assert trace.cost_to(Target("loss", 9.0)) == costs[0]
    lost = Trace(costs[:2], (0.5, float("nan")), ({},) * 2)
    assert lost.cost_to(Target("loss", 1.0)) is None


def test_checkpoints_take_a_tenth_of_the_time_at_most():
    now = [0.0]
    checkpoints = loop.Checkpoints(lambda: now[0])

    def after(seconds):
        now[0] += seconds
        return checkpoints.is_due()

    assert [after(5), after(0.1)] == [False, True]
    checkpoints.time(lambda: after(0.2))
    assert [after(4.9), after(0.2)] == [False, True]
    checkpoints.time(lambda: after(3))
    assert [after(29), after(2)] == [False, True]
