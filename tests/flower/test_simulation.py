"""The apps in Flower's own simulation engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from aqg import make_recipe
from aqg.core.downlink import Condensed
from aqg.sim.engine import FastSimulation
from aqg.sim.training import Training

from tests.flower.simulated_run import ALPHA, NUM_CLIENTS
from tests.problems import tiny_problem

ROOT = Path(__file__).parents[2]
ROUNDS = 6


def test_flowers_simulation_ends_with_the_same_model_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    command = [sys.executable, str(ROOT / "tests/flower/simulated_run.py")]
    finished = subprocess.run(
        [*command, str(tmp_path), "lean", str(ROUNDS)],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ADDRESS": "local",  # not a cluster that happens to run here
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    problem = tiny_problem(num_clients=NUM_CLIENTS)
    simulation = FastSimulation(
        problem, make_recipe("lean"), ALPHA, training=Training(downlink=Condensed())
    )
    records = [simulation.run_round() for _ in range(ROUNDS)]
    assert np.array_equal(np.load(tmp_path / "parameters.npy"), simulation.parameters)
    rows = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [row["widths"] for row in rows] == [list(record.widths) for record in records]
    for name in ("upload_bytes", "download_bytes", "total_bytes"):
        assert [row[name] for row in rows] == [getattr(record, name) for record in records]
    assert not any(row.get("incidents") for row in rows)
