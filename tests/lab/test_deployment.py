"""Real processes, real connections, real signals."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from aqg.flower.demo import digits_config
from aqg.runs.setup import build_problem, make_simulation

from tests import commands
from tests.lab.deployment import HOST, Deployment, make_node_key
from tests.lab.watch import APP, PATIENCE_SECONDS, PRELOAD, WatchedRun, clean_losses, incidents_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes as Linux does")

DROPIN_APP = Path(__file__).parents[1] / "flower" / "dropin_app"
ROUND_SECONDS = 8.0
DELAY_SECONDS = 9.5
RESTARTED = {"lease_seconds": 5.0, "restart": True, "preload": PRELOAD}
FOREVER = 10_000
FINISHED = "finished:completed"


@pytest.fixture(scope="session")
def deployment(tmp_path_factory):
    """Start one for all tests: encrypted, with registered nodes that are started again."""
    path = tmp_path_factory.mktemp("deployment")
    with Deployment(path, tls=True, **RESTARTED) as started:
        started.start()
        yield started


def simulated(config):
    """Return the simulator's run of the same, and its rounds."""
    found = digits_config(config)
    simulation = make_simulation(found, build_problem(found))
    return simulation, [simulation.run_round() for _ in range(config["num-server-rounds"])]


def assert_same(directory, simulation, records):
    """Compare a run with the simulator's, bit for bit; return its summary."""
    with np.load(directory / "checkpoint.npz") as checkpoint:
        model = checkpoint["parameters"]
    assert model.tobytes() == simulation.parameters.tobytes()
    rows = [json.loads(line) for line in (directory / "rounds.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == [record.loss for record in records]
    assert [row["widths"] for row in rows] == [list(record.widths) for record in records]
    assert not any(row.get("incidents") for row in rows)
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["final_loss"] == simulation.loss()
    assert summary["upload_bytes"] > sum(record.upload_bytes for record in records)
    return summary


def completed(deployment, app, config):
    """Run an app to its end; return what moved for each node, and what the server said."""
    before = [deployment.traffic(node) for node in range(3)]
    start = len(deployment.processes.read_log("superlink-worker"))
    assert deployment.wait_for_run(deployment.run(app, config), PATIENCE_SECONDS) == FINISHED
    moved = [deployment.traffic(node) - before[node] for node in range(3)]
    return moved, deployment.processes.read_log("superlink-worker")[start:]


def test_a_deployment_ends_with_the_simulators_model_bit_for_bit(deployment, tmp_path):
    config = {"num-clients": 3, "num-server-rounds": 4, "seed": 5, "run-dir": str(tmp_path / "run")}
    config |= {"recipe": "auto", "exact": True}
    config["alpha"] = digits_config(config).alpha
    moved, _ = completed(deployment, APP, config)
    summary = assert_same(tmp_path / "run", *simulated(config))
    for traffic, up, down in zip(
        moved, summary["client_upload_bytes"], summary["client_download_bytes"], strict=True
    ):
        assert traffic.up_bytes > up > 0
        assert traffic.down_bytes > down > 0


@pytest.mark.parametrize(
    ("strategy", "bound"),
    [("FedAvg", 1.6), pytest.param("FedAdam", 3.0, marks=pytest.mark.soak), ("AQG", 1.6)],
)
def test_one_app_with_any_strategy(deployment, strategy, bound):
    config = {"strategy": strategy, "rounds": 2, "num-clients": 3}
    moved, log = completed(deployment, DROPIN_APP, config)
    said = rf"{strategy}: distance ([\d.]+), refused (\d+), up (\d+), (.*)"
    [(distance, refused, up, evaluated)] = re.findall(said, log)
    assert float(distance) < bound
    assert int(refused) == 0
    assert all(traffic.up_bytes > int(up) / 3 / 4 for traffic in moved)
    assert evaluated == "[1, 2]"


@pytest.mark.soak
def test_late_replies_of_real_nodes_count(deployment):
    """Rounds end with two of three replies; the first node is slow, and its update is taken."""
    config = {"rounds": 8, "num-clients": 3, "buffer-size": 2, "slow-seconds": 8.0}
    _, log = completed(deployment, DROPIN_APP, config)
    assert "round 1 ends with 2 replies; 1 nodes are at work" in log
    assert re.search(r"node \d+ began in round 1; its update is relative to the model it had", log)
    [(distance, refused)] = re.findall(r"FedAvg: distance ([\d.]+), refused (\d+)", log)
    assert float(distance) < 1.6
    assert int(refused) == 0


def test_only_registered_nodes_are_let_in_and_traffic_is_encrypted(deployment, tmp_path):
    with pytest.raises((OSError, http.client.HTTPException)):
        urllib.request.urlopen(f"http://{HOST}:{deployment.port}/health", timeout=60)
    make_node_key(tmp_path / "forged")
    assert "Exit Code: 305" in deployment.try_key(tmp_path / "forged")


def test_training_survives_a_lost_reply_and_a_killed_node(deployment, tmp_path):
    run = WatchedRun(deployment, tmp_path / "run", round_timeout=ROUND_SECONDS)
    run.submit(FOREVER)
    run.wait_for_clean_round(after=1)
    disturb(run, {1: ("drop", "error", "rollback")})
    for _ in range(5):  # between two rounds a node may be back before anyone misses it
        before = run.last_round
        deployment.kill_node(2)
        back = run.wait_for_clean_round(after=before + 2)["round"]
        happened = {kind for row in run.rows()[before:back] for kind in incidents_of(row, 2)}
        assert not happened & {"resync", "lost"}
        if happened & {"missing", "error"}:
            break
    assert happened & {"missing", "error"}
    deployment.stop_run(run.number)
    for client in range(3):
        assert run.mirrors_settle(client)
    losses = clean_losses(run.rows())
    assert losses[-1] < losses[0]


@pytest.mark.soak
def test_training_survives_every_fault(tmp_path):
    """Of processes and connections; what else goes wrong is tried in memory (`test_faults`)."""
    with Deployment(tmp_path / "deployment", **RESTARTED) as deployment:
        deployment.start()
        run = WatchedRun(deployment, tmp_path / "run", round_timeout=ROUND_SECONDS)
        run.submit(FOREVER)
        run.wait_for_clean_round(after=1)
        faults = {0: (f"delay {DELAY_SECONDS}", "missing|error", "rollback")}
        disturb(run, faults | {1: ("drop", "error", "rollback")})
        killed_nodes_go_on_where_they_were(run)
        # A round's checkpoint is written after its row.
        old = run.last_round - 1, (run.directory / "checkpoint.npz").read_bytes()
        run.wait_for_round(run.last_round + 3)
        a_server_from_an_older_time_is_found_out(run, *old)
        restarted(run, deployment.kill_link)
        restarted(run, deployment.kill_server, more_rounds=4)
        assert deployment.wait_for_run(run.number, PATIENCE_SECONDS) == FINISHED
        for client in range(3):
            assert run.is_forgotten(client)
    rows = run.rows()
    assert [row["round"] for row in rows] == list(range(1, len(rows) + 1))
    losses = clean_losses(rows)
    assert losses[-1] < losses[len(losses) // 2] < losses[0]


def disturb(run, faults):
    """Let every client misbehave once.

    ``faults`` has, for each client, the order and the incidents that must follow. Two rounds after
    the last of them, or earlier, mirrors are equal again; and the loss goes on falling.
    """
    before = run.last_round
    loss = clean_losses(run.rows())[-1]
    for client, (deed, *_) in faults.items():
        run.order(client, deed)
    for client, (_, *kinds) in faults.items():
        at = before
        for kind in kinds:
            at = run.wait_for_incident(kind, client, after=at)
        assert run.wait_for_agreement(client, after=at) <= at + 2
    assert run.wait_for_clean_round(after=run.last_round)["loss"] < loss


def killed_nodes_go_on_where_they_were(run):
    """Kill a node that has announced a reply and sent nothing of it, and one about to save."""
    processes = run.deployment.processes
    upload = run.wait_for_round(run.last_round + 1)
    run.order(2, "announce")
    processes.wait_for(lambda: not run.has_order(2), PATIENCE_SECONDS, "an upload")
    processes.wait_for(lambda: is_sending(processes.read_log("node2")), PATIENCE_SECONDS, "a reply")
    run.order(0, "linger")
    run.deployment.kill_node(2)
    gone = run.wait_for_incident("missing|error", 2, after=upload["round"])
    assert run.rows()[gone - 1]["round_seconds"] < 2 * ROUND_SECONDS, "it held up the round"
    processes.wait_for(lambda: not run.has_order(0), PATIENCE_SECONDS, "an order")
    run.deployment.kill_node(0)
    gone = run.wait_for_incident("missing|error", 0, after=upload["round"])
    back = run.wait_for_clean_round(after=gone)
    between = [row for row in run.rows() if upload["round"] < row["round"] <= back["round"]]
    happened = {kind for row in between for client in (0, 2) for kind in incidents_of(row, client)}
    assert not happened & {"resync", "lost"}


def a_server_from_an_older_time_is_found_out(run, number, saved):
    """Put an old checkpoint back, while the nodes are ahead of it."""
    now = run.wait_for_clean_round(after=run.last_round)["round"]
    run.deployment.kill_server()
    run.deployment.stop_run(run.number)
    (run.directory / "checkpoint.npz").write_bytes(saved)
    run.submit(FOREVER)
    wait_for = run.deployment.processes.wait_for
    wait_for(lambda: run.last_round < now, PATIENCE_SECONDS, "the server's past")
    for client in range(3):
        found = run.wait_for_incident("lost", client, after=number)
        assert run.wait_for_agreement(client, after=found) <= found + 2
        assert run.model_agrees(client)


def is_sending(log):
    """Whether a SuperNode has announced a reply that it has not sent yet."""
    return log.rfind("Sending:") > log.rfind("Sent successfully")


def restarted(run, kill, more_rounds=FOREVER):
    """Kill the server's side and start it again: the run goes on from its checkpoint."""
    before = run.wait_for_clean_round(after=run.last_round)
    kill()
    for client in range(3):
        assert run.mirrors_settle(client)
    if run.deployment.processes.is_running("superlink"):
        run.deployment.stop_run(run.number)  # Flower itself finds out after about a minute
    else:
        run.deployment.start_link()
    run.submit(run.last_round + more_rounds)
    after = run.wait_for_clean_round(after=before["round"] + 2)
    assert after["loss"] < before["loss"]
    resumed = [row for row in run.rows() if row["round"] > before["round"]]
    assert not any("resync" in incidents_of(row, client) for row in resumed for client in range(3))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 128 + signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["interrupted", "killed"],
)
def test_the_demonstration_leaves_no_process_behind(tmp_path, signum, code):
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "aqg", "flower", "demo", "--nodes", "1"]
    with subprocess.Popen(
        [*command, "--rounds", str(FOREVER), "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"AQG_DEMO": str(out)},
        # Whoever runs the tests in the background of a shell ignores interrupts, and so would this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as demo:
        try:
            written = out / "auto/rounds.jsonl"
            commands.wait_for(demo, lambda: written.exists() and written.stat().st_size > 0)
            assert processes_with(str(out))
            demo.send_signal(signum)
            _, errors = demo.communicate(timeout=PATIENCE_SECONDS)
        finally:
            demo.kill()
    assert demo.returncode == code
    assert "Traceback" not in errors
    end = time.monotonic() + PATIENCE_SECONDS
    while processes_with(str(out)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not processes_with(str(out))


@pytest.mark.soak
def test_the_demonstration_counts_its_bytes(tmp_path):
    """It runs Flower's simulation, which ends with the simulator's model as well."""
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "aqg", "flower", "demo", "--nodes", "2", "--rounds", "4"]
    result = json.loads(commands.run(*command, "--json", "--out", str(out)))
    simulation, records = simulated({"num-clients": 2, "num-server-rounds": 4, "seed": 0})
    assert_same(out / "auto", simulation, records)
    for node in result["nodes"]:
        counts = [record.client_upload_bytes[node["node"]] for record in records]
        assert node["upload_bytes"] > sum(counts) > 0
        assert node["download_bytes"] > 4 * 650  # the whole model, once
        assert node["total_bytes"] == node["upload_bytes"] + node["download_bytes"]
        assert node["plain_bytes"] == 4 * 2 * 4 * 650
    for name in ("upload_bytes", "download_bytes", "total_bytes"):
        assert result[name] == sum(node[name] for node in result["nodes"])
    assert result["final_loss"] < records[0].loss


def processes_with(text):
    """Return the processes that were started with a text among their environment variables."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found
