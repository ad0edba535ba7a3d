"""A validation set: held out from the clients, decides when a run is over, and leaves a curve."""

from dataclasses import replace

import numpy as np
import pytest

from aqg.core.downlink import DIGEST_BYTES, STATE_DIGEST_BYTES
from aqg.protocol.messages import Order, Reply
from aqg.runs.config import resolve
from aqg.runs.cost import FIRST_ORDER_BYTES, ORDER_BYTES, REPLY_BYTES
from aqg.runs.directory import VALIDATION, read_summary
from aqg.runs.loop import create_run, run
from aqg.runs.setup import build_problem, check_target, follow_target, make_simulation
from aqg.runs.stopping import Judge, Target
from aqg.sim.record import RoundRecord

from tests.problems import tiny_problem

SETTINGS = {
    "recipe": "fp16",
    "model": "mlp:8",
    "partition": "iid",
    "clients": 5,
    "rounds": 80,
    "batch_size": 16,
    "local_steps": 5,
    "alpha": 0.2,
    "target_kind": "accuracy",
    "validation": 0.2,
}


def make_config(**changes):
    return resolve(SETTINGS | changes)[0]


def test_every_client_holds_out_its_share():
    config = make_config()
    whole = build_problem(replace(config, validation=0.0, target_kind="residual"))
    problem = build_problem(config)
    for before, after in zip(whole.clients, problem.clients, strict=True):
        assert len(after.labels) == len(before.labels) - round(0.2 * len(before.labels))
    count = sum(len(client.labels) for client in problem.clients)
    assert count + len(problem.validation.labels) == 1442
    rows = {row.tobytes() for row in problem.validation.features}
    assert all(row.tobytes() not in rows for row in problem.test.features)
    other = build_problem(replace(config, seed=1))
    assert not np.array_equal(other.validation.labels, problem.validation.labels)


def test_a_run_ends_by_its_validation_set_and_leaves_a_curve(tmp_path):
    config = make_config(target=0.8, hold=3)
    problem = build_problem(config)
    check_target(config, problem, None)
    create_run(tmp_path / "run", config)
    run(config, problem, None, tmp_path / "run", keeps_models=False)
    summary = read_summary(tmp_path / "run")
    values, sizes = summary["curve"]["values"], summary["curve"]["bytes"]
    outcome = summary["outcome"]
    assert outcome["ending"] == "reached"
    goal = Target("accuracy", 0.8, hold=3, is_mean=True)
    reached = goal.first_reached(values)
    assert outcome["rounds"] == reached
    assert len(values) == reached + 3 == summary["rounds"] + 1
    assert sizes[reached] == outcome["upload_bytes"] + outcome["download_bytes"]
    assert summary["curve"]["tests"][-1] == [summary["rounds"], summary["test_accuracy"]]


def curve_of(config, folder):
    create_run(folder, config)
    run(config, build_problem(config), None, folder, keeps_models=False)
    return read_summary(folder)


def frames_of(config):
    simulation = make_simulation(config, build_problem(config))
    return [simulation.run_round().total_bytes for _ in range(config.rounds)]


def test_heads_are_as_long_as_those_of_real_messages():
    digest, other = b"\1" * STATE_DIGEST_BYTES, b"\2" * STATE_DIGEST_BYTES
    both = {"incarnation": 1, "round": 100, "epoch": 0, "uploads": 100}
    agreed = {"recipe": "auto", "bits": 4, "max_staleness": 100, "seed": 0, "dtype": "float32"}
    agreed |= {"run": "0" * 16, "fingerprint": bytes(DIGEST_BYTES), "num_params": 100_000}
    order = Order(**both, **agreed, client=10, digest=digest, noise=1.5, public=digest)
    said = {"stale": False, "restarted": False, "rolled_back": False, "fault": "", "frame": b""}
    said |= {"loss": float(np.float32(0.1)), "num_samples": 1000, "work_seconds": 0.5}
    reply = Reply(**both, **said, base_digest=digest, digest=other, held_round=100)
    assert len(order.to_bytes()) == FIRST_ORDER_BYTES
    assert len(order.to_bytes(order)) == ORDER_BYTES
    assert len(reply.to_bytes(order.stamp)) == REPLY_BYTES


def test_whole_models_have_no_first_one_besides(tmp_path):
    for downlink, first in (("full", 0), ("exact", 1)):
        config = make_config(rounds=3, downlink=downlink, start="exact")
        found, problem = curve_of(config, tmp_path / downlink), build_problem(config)
        frames = sum(frames_of(config))
        model = first * 5 * problem.start_bytes
        assert 4 * problem.num_clients < problem.start_bytes
        total = 5 * (FIRST_ORDER_BYTES + 2 * ORDER_BYTES + 3 * REPLY_BYTES)
        assert found["curve"]["bytes"][-1] == frames + model + total
        assert found["total_bytes"] == found["curve"]["bytes"][-1]


def test_a_client_receives_its_first_model_when_it_first_takes_part(tmp_path):
    config = make_config(rounds=6, participation=0.4, absences=((0, 1, 4),), start="exact")
    found = curve_of(config, tmp_path / "run")
    begun, expected, orders = set(), [], 0
    for k in range(1, 7):
        away = config.training().unsampled(k, 5, 0) | config.dropout_schedule().dropped(k, 5)
        here = set(np.flatnonzero(~away).tolist())
        begun |= here
        orders += len(here)
        expected.append(len(begun))
    first = build_problem(config).start_bytes
    total = sum(frames_of(config)) + orders * (ORDER_BYTES + REPLY_BYTES)
    total += (first + FIRST_ORDER_BYTES - ORDER_BYTES) * expected[-1]
    assert found["curve"]["bytes"][-1] == total
    assert sum(found["client_upload_bytes"]) == found["upload_bytes"]
    assert sum(found["client_download_bytes"]) == found["download_bytes"]
    steps = np.diff(found["curve"]["bytes"])
    is_first = np.diff([0, *expected]) > 0
    assert (steps[is_first] > first).all()


def test_a_noisy_curve_is_judged_by_its_mean():
    values = [0.5, 0.9, 0.6, 0.91, 0.89, 0.93, 0.2]
    goal = Target("accuracy", 0.9, hold=3, is_mean=True)
    judge = Judge(goal, 100, validates=True)
    record = RoundRecord(1, None, (4,), 7, (), 0, 0, 3)
    endings = []
    for value in values[:6]:
        judge.look_after(record)
        judge.look_before(2, {VALIDATION: value})
        endings.append(judge.ending)
    assert endings == [None] * 5 + ["reached"]
    assert judge.cost.rounds == 4 == goal.first_reached(values) + 1


def test_loss_on_the_validation_set():
    from aqg.runs.setup import hold_out

    problem = hold_out(tiny_problem(), 0.25, seed=0)
    start = problem.initial_params
    expected = float(problem.objective.losses(start, *problem.validation))
    assert problem.validate(start, problem.validation, "loss") == pytest.approx(expected)
    assert hold_out(problem, 0.5, seed=1) is problem


@pytest.mark.parametrize("model", ["mlp:8", "cnn"])
@pytest.mark.parametrize("kind", ["accuracy", "loss"])
def test_the_validation_set_is_measured_where_the_model_is(model, kind):
    """Torch's backend has the samples on its device; the numbers are those of NumPy."""
    config = make_config(model=model, target_kind=kind, dtype="float32")
    if model == "cnn":
        config = replace(config, l2=0.0)
    problem = build_problem(config)
    found = [
        follow_target(config, make_simulation(replace(config, device=device), problem))()
        for device in ("cpu", "torch:cpu")
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert 0 < found[0] < 10
