"""The drop-in in Flower's own simulation, and on real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aqg.flower.deploy.deployment import Deployment, DeploymentOptions

from tests.flower.deployment_run import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
APP = Path(__file__).parent / "dropin_app"


def test_every_strategy_in_flowers_simulation(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    out = tmp_path / "results.json"
    finished = subprocess.run(
        [sys.executable, str(ROOT / "tests/flower/dropin_simulation.py"), str(out)],
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
        timeout=400,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    results = json.loads(out.read_text())
    assert len(results) == 9
    for name, result in results.items():
        assert result["trained"] == result["evaluated"] == [1, 2], name
        assert result["refused"] == result["lost"] == 0, name
        assert result["up"] < result["plain_up"] / 20, name
    for name, bound in (("FedAvg", 0.8), ("FedProx", 0.8), ("AQG", 1.6)):
        assert results[name]["distance"] < bound, results[name]


@pytest.mark.skipif(sys.platform != "linux", reason="starts processes as Linux does")
def test_one_app_with_three_strategies_on_real_processes(tmp_path: Path) -> None:
    with Deployment(
        tmp_path / "deployment",
        DeploymentOptions(preload=("aqg.flower.compressed", "aqg.flower.mod")),
    ) as deployment:
        deployment.start()
        for strategy, bound in (("FedAvg", 0.8), ("FedAdam", 3.0), ("AQG", 1.2)):
            before = [deployment.traffic(node) for node in range(3)]
            run = deployment.run(APP, {"strategy": strategy, "rounds": 2, "num-clients": 3})
            assert deployment.wait_for_run(run, PATIENCE_SECONDS) == "finished:completed"
            log = deployment.processes.read_log("superlink-worker")
            found = re.findall(rf"{strategy}: distance ([\d.]+), refused (\d+), up (\d+)", log)
            (distance, refused, up) = found[-1]
            assert float(distance) < bound
            assert int(refused) == 0
            for node in range(3):
                moved = deployment.traffic(node) - before[node]
                assert moved.up_bytes > int(up) / 3 / 4
        assert re.search(r"AQG: .*, \[1, 2\]", log)  # evaluated after both rounds
