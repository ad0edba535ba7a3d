"""Sweeps on a real Ray cluster of several nodes on this machine, one of which is killed."""

import operator
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from aqg.cli.options import SweepOptions
from aqg.cli.studies import sweep as sweep_command
from aqg.contrib.ray_cluster import RayCluster
from aqg.errors import ConfigError

from tests.commands import contents, interrupt, plugin, started, wait_for

pytestmark = pytest.mark.filterwarnings("default")
GRID = """
rounds = 160
dropout = 0.2
target = 1.0
[grid]
recipe = ["slow"]
seed = [0, 1]
"""


@pytest.fixture(scope="module")
def cluster():
    """Start a head that runs nothing and two nodes with a core each."""
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    root = Path(__file__).parents[2]
    folder = tempfile.mkdtemp(prefix="ray-")  # short, for sockets, and for this cluster alone
    os.environ |= {
        "PYTHONPATH": str(root / "src"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": folder,
        "RAY_health_check_period_ms": "500",  # a node that is dead is noticed sooner
    }
    head = {"num_cpus": 0, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    nodes.add_node(num_cpus=1)
    yield nodes
    nodes.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Return a folder with a grid and what its sweep gives on this machine."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "slow.py").write_text(plugin("slow", "time.sleep(0.06)", "Tolerance()", "lean"))
    (folder / "grid.toml").write_text(f'plugins = ["{folder}/slow.py"]\n{GRID}')
    options = SweepOptions(grid=folder / "grid.toml", out=folder / "local", jobs=2, allow_code=True)
    assert sweep_command(options) == 0
    return folder


@pytest.mark.soak
def test_a_node_that_dies_and_a_head_that_is_interrupted_change_nothing(cluster, local):
    doomed = cluster.add_node(num_cpus=1)
    directory = local / "away"
    command = ("sweep", "--allow-code", "--cluster", cluster.address)
    with started(*command, "grid.toml", "--out", "away", cwd=local) as process:
        # Two runs under way, one on each node, both with a checkpoint here.
        wait_for(process, lambda: len(list(directory.glob("*/checkpoint.npz"))) >= 2)
        cluster.remove_node(doomed, allow_graceful=False)
        time.sleep(1)
        interrupt(process)
    assert not (directory / "summary.json").exists()

    with started(*command, "--resume", "away", cwd=local) as process:
        output, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors
    assert contents(directory) == contents(local / "local")
    assert f"on the Ray cluster at {cluster.address}" in output


@pytest.mark.soak
def test_an_idle_worker_gives_its_place_to_one_that_waits(cluster):
    """Two places were counted just before a node died; there is one."""
    with RayCluster(cluster.address) as place:
        place._counted = time.monotonic(), 2
        for index in range(2):
            place.start(index, operator.attrgetter("__class__.__name__"))
        events = []
        deadline = time.monotonic() + 120
        while len(events) < 2:
            assert time.monotonic() < deadline
            place.wait(0.2, events.append)
    assert {event.index for event in events} == {0, 1}


def test_without_a_cluster_there_is_one_line():
    with (
        pytest.raises(ConfigError, match=r"no Ray cluster at '127\.0\.0\.1:1': .*refused"),
        RayCluster("127.0.0.1:1"),
    ):
        pytest.fail("there is one")
