"""Runs of our own server that end before their last round, and what is measured when."""

import math

import numpy as np
import pytest

from aqg.errors import ConfigError
from aqg.flower.settings import read_settings

from tests.flower.federation import PROBLEM, Federation


def test_time_is_up(tmp_path):
    federation = Federation(tmp_path, rounds=500, max_seconds=0.5)
    federation.run()
    assert 1 <= len(federation.rows()) < 100
    assert (tmp_path / "run/model.safetensors").exists()


def test_enough_bytes(tmp_path):
    federation = Federation(tmp_path, rounds=100, max_bytes=8000)
    federation.run()
    totals = np.cumsum([row["total_bytes"] for row in federation.rows()])
    assert totals[-1] >= 8000
    assert totals[-2] < 8000


@pytest.mark.parametrize(("monitor", "sign"), [("accuracy", 1), ("-error", -1), ("score", 1)])
def test_no_progress(tmp_path, monitor, sign):
    """Rises, then stays: patience counts from the best on; NaN is no progress, and null on file."""
    values = iter([0.1, 0.2, 0.3, 0.3, math.nan, 0.2, *[0.1] * 50])
    federation = Federation(tmp_path, rounds=40, patience=3, monitor=monitor, metrics_every=1)
    name = monitor.removeprefix("-")
    federation.run(evaluate=lambda _: {name: sign * next(values), "other": 1.0})
    rows = federation.rows()
    assert len(rows) == 6
    assert rows[4][f"test_{name}"] is None
    assert rows[0]["test_other"] == 1.0
    assert federation.summary["rounds"] == 6


def test_which_rounds_are_measured(tmp_path):
    federation = Federation(tmp_path, rounds=7, metrics_every=3)
    federation.run(evaluate=PROBLEM.test_accuracy)
    measured = [row["round"] for row in federation.rows() if "test_accuracy" in row]
    assert measured == [1, 4, 7]


def test_the_round_is_told():
    torch = pytest.importorskip("torch")
    from aqg.flower import FlowerTask

    seen = []

    def train(net, number):
        seen.append(number)
        return 0.5

    task = FlowerTask.from_training(torch.nn.Linear(2, 1), train, 3)
    task.train(np.zeros(3, np.float32), 7, (0, 0, 7))
    assert seen == [7]


@pytest.mark.parametrize("key", ["metrics-every", "max-bytes", "patience"])
def test_bad_settings(key):
    with pytest.raises(ConfigError, match=f"{key} is -1; it must be at least 0"):
        read_settings({"num-clients": 2, "num-server-rounds": 3, key: -1})
