"""When a run is over: reached, diverged, hopeless, too dear; by which samples, and at what cost."""

import math
from dataclasses import replace

import numpy as np
import pytest

from aqg.errors import ConfigError, RunError
from aqg.protocol.digests import DIGEST_BYTES, STATE_DIGEST_BYTES
from aqg.protocol.messages import Order, Reply, to_bytes
from aqg.runs import loop
from aqg.runs.config import resolve
from aqg.runs.cost import FIRST_ORDER_BYTES, ORDER_BYTES, REPLY_BYTES, Meter
from aqg.runs.directory import CHECKPOINT, VALIDATION, read_lines, read_summary
from aqg.runs.executor import Interrupted
from aqg.runs.setup import build_problem, check_target, find_minimum, follow_target, make_simulation
from aqg.runs.stopping import Judge, Target
from aqg.sim.record import RoundRecord
from aqg.weights import BEST

from tests.commands import stop_after
from tests.problems import tiny_problem

LOCAL = resolve(
    {
        "recipe": "lean",
        "partition": "dirichlet:0.3",
        "model": "mlp:32",
        "batch_size": 16,
        "local_steps": 5,
        "alpha": 0.05,
        "l2": 0.0,
        "rounds": 20,
        "target": 0.5,
        "target_kind": "accuracy",
        "hold": 3,
        "eval_every": 5,
    }
)[0]
SOFTMAX = resolve({"recipe": "lean", "rounds": 150, "target": 0.2, "hold": 20, "seed": 3})[0]


def follow(target, values, ceiling=math.inf, num_rounds=1000):
    """Feed a judge one value per round of two uploads and 30 bytes up, 70 down.

    Return how it ends, and the rounds, uploads and bytes.
    """

    target = replace(target, hold=target.hold or 1000)
    judge = Judge(target, num_rounds, minimum=0.0, ceiling=ceiling, validates=True)
    for number, value in enumerate(values, start=1):
        judge.look_after(RoundRecord(number, None, (4, 4, 0), 30, download_bytes=70))
        judge.look_before(number + 1, {VALIDATION: value})
        if judge.ending is not None:
            break
    cost = judge.cost
    assert 70 * cost.upload_bytes == 30 * cost.download_bytes
    return judge.ending, (cost.rounds, cost.uploads, cost.total_bytes)


def test_the_first_of_the_rounds_that_stay_counts():
    target = Target("accuracy", 0.9, hold=3)
    values = [0.5, 0.91, 0.89, 0.9, 0.92, 0.95, 0.2]
    assert follow(target, values) == ("reached", (4, 8, 400))
    assert target.first_reached(values) == 3
    assert replace(target, hold=0).first_reached(values) is None
    assert replace(target, hold=0).first_reached(values[:-1]) == 3


def test_what_leaves_all_use_is_stopped_and_costs_beyond_a_limit_are_of_no_interest():
    lost = {math.nan: "diverged", math.inf: "diverged", 1e21: "diverged", 2e3: "hopeless"}
    for last, ending in lost.items():
        assert follow(Target("loss", 1.0, 20), [2.0, 3.0, last]) == (ending, (3, 6, 300))
    target = Target("accuracy", 0.9, 3)
    assert follow(target, [0.1, 0.0, 0.0]) == (None, (3, 6, 300))  # that is no divergence
    for ceiling, ending in ((250, "beyond"), (900, None)):
        assert follow(target, [0.1] * 9, ceiling)[0] == ending
        # What was met within the limit may still be confirmed beyond it.
        assert follow(target, [0.1, 0.95, 0.95, 0.95], ceiling) == ("reached", (2, 4, 200))


def test_half_of_the_way_by_half_of_the_rounds():
    target = Target("residual", 1e-4, 20)
    assert follow(target, [1.0] * 3 + [0.02] * 5, num_rounds=8) == ("hopeless", (4, 8, 400))
    assert follow(target, [1.0] * 3 + [0.01] * 5, num_rounds=8) == ("hopeless", (6, 12, 600))
    assert follow(target, [1.0] * 3 + [0.0009] * 5, num_rounds=8)[0] is None
    accuracy = Target("accuracy", 0.9)
    assert accuracy.progress(0.0, 0.9) == 1
    assert accuracy.progress(0.1, 0.1) == 0
    assert 0 < accuracy.progress(0.1, 0.7) < accuracy.progress(0.1, 0.89) < 1


def outcome_of(config, directory, contact=None, ceiling=math.inf, minimum=None):
    if not directory.exists():
        loop.create_run(directory, config)
    loop.run(config, build_problem(config), minimum, directory, contact, ceiling, False)
    return read_summary(directory)["outcome"]


def test_costs_are_those_of_the_plain_simulation(tmp_path):
    """Until the target, byte by byte what the reference sends."""
    problem = build_problem(SOFTMAX)
    minimum = find_minimum(SOFTMAX, problem)
    outcome = outcome_of(SOFTMAX, tmp_path / "run", minimum=minimum)
    assert outcome["ending"] == "reached"
    reference = make_simulation(replace(SOFTMAX, engine="reference"), problem)
    meter = Meter(problem.start_bytes, SOFTMAX.training())
    records = [meter.charge(reference.run_round()) for _ in range(outcome["rounds"] + 20)]
    residuals = [record.loss - minimum for record in records]
    assert residuals[outcome["rounds"] - 1] > 0.2
    assert max(residuals[outcome["rounds"] :]) <= 0.2
    spent = records[: outcome["rounds"]]
    for name in ("upload_bytes", "download_bytes", "bits_per_param"):
        assert outcome[name] == sum(getattr(record, name) for record in spent)
    assert outcome["uploads"] == sum(record.num_uploads for record in spent)
    summary = read_summary(tmp_path / "run")
    assert summary["target"]["reached_round"] == outcome["rounds"]
    assert not (tmp_path / "run" / BEST).exists()
    assert not (tmp_path / "run" / CHECKPOINT).exists()


def test_accuracy_is_that_of_the_test_set(tmp_path):
    config = replace(LOCAL, recipe="gd", seed=1)
    outcome = outcome_of(config, tmp_path / "run")
    problem = build_problem(config)
    reference = make_simulation(replace(config, engine="reference"), problem)
    accuracies = []
    for _ in range(outcome["rounds"] + 2):
        reference.run_round()
        accuracies.append(problem.test_accuracy(reference.parameters))
    assert outcome["ending"] == "reached"
    assert min(accuracies[outcome["rounds"] - 1 :]) >= 0.5
    assert outcome["value"] == accuracies[-1]
    lines = read_lines(tmp_path / "run")
    assert [line.metrics["accuracy"] for line in lines[1:]] == accuracies[:-1]


VALIDATED = replace(LOCAL, recipe="fp16", validation=0.2, participation=0.4, rounds=12)


@pytest.mark.parametrize("config", [LOCAL, SOFTMAX, VALIDATED], ids=lambda c: c.target_kind)
def test_a_run_that_was_stopped_ends_the_same(tmp_path, config):
    minimum = find_minimum(SOFTMAX, build_problem(SOFTMAX)) if config is SOFTMAX else None
    whole = outcome_of(config, tmp_path / "whole", minimum=minimum)
    for num_rounds in (1, 4):
        cut = tmp_path / f"cut-{num_rounds}"
        with pytest.raises(Interrupted):
            outcome_of(config, cut, stop_after(num_rounds), minimum=minimum)
        assert outcome_of(config, cut, minimum=minimum) == whole
        for name in ("rounds.jsonl", "summary.json"):
            assert (cut / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_runs_end_beyond_their_ceiling_or_after_their_rounds(tmp_path):
    outcome = outcome_of(LOCAL, tmp_path / "dear", ceiling=1)
    assert (outcome["ending"], outcome["rounds"]) == ("beyond", 1)
    outcome = outcome_of(replace(LOCAL, rounds=4, hold=3, target=0.999), tmp_path / "short")
    assert outcome["ending"] in ("rounds", "hopeless")
    assert 0 < outcome["value"] < 1


def test_targets_that_cannot_be_measured_or_are_met_are_refused():
    config = resolve({"recipe": "gd", "target": 5.0, "target_kind": "loss", "hold": 20})[0]
    with pytest.raises(ConfigError, match="is met before the first round"):
        check_target(config, build_problem(config), None)
    with pytest.raises(RunError, match="the minimum of the loss is unknown"):
        Judge(SOFTMAX.goal, SOFTMAX.rounds)


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
    loop.create_run(tmp_path / "run", config)
    loop.run(config, problem, None, tmp_path / "run", keeps_models=False)
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
    loop.create_run(folder, config)
    loop.run(config, build_problem(config), None, folder, keeps_models=False)
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
    assert len(to_bytes(order)) == FIRST_ORDER_BYTES
    assert len(to_bytes(order, order)) == ORDER_BYTES
    assert len(to_bytes(reply, order.stamp)) == REPLY_BYTES


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
    assert follow(goal, values[:5])[0] is None
    assert follow(goal, values) == ("reached", (4, 8, 400))
    assert goal.first_reached(values) == 3


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
