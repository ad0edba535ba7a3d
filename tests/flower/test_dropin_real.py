"""The drop-in in Flower's own simulation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
def test_every_strategy_in_flowers_simulation(tmp_path):
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
    for name, bound in (("FedAvg", 1.75), ("FedProx", 1.75), ("AQG", 1.75)):
        assert results[name]["distance"] < bound, results[name]
