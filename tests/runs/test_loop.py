"""Run directories: complete, resumable, repeatable, damaged; when a run is over, at what cost."""

import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from aqg.core.downlink import DIGEST_BYTES, STATE_DIGEST_BYTES
from aqg.errors import ConfigError, RunError
from aqg.protocol.messages import Order, Reply
from aqg.runs import files, loop
from aqg.runs.config import resolve
from aqg.runs.cost import FIRST_ORDER_BYTES, ORDER_BYTES, REPLY_BYTES, Cost, Meter
from aqg.runs.directory import (
    CHECKPOINT,
    CONFIG,
    ROUNDS,
    SUMMARY,
    VALIDATION,
    read_lines,
    read_summary,
    read_toml,
)
from aqg.runs.executor import Contact, Interrupted
from aqg.runs.files import Records, locked, read_arrays, write_arrays
from aqg.runs.setup import build_problem, check_target, find_minimum, follow_target, make_simulation
from aqg.runs.stopping import Judge, Target, Trace
from aqg.sim.record import RoundRecord
from aqg.weights import BEST, FINAL

from tests.commands import contents, run_alone, stop_after
from tests.problems import crossed, tiny_problem

MODEL = {"recipe": "lean", "partition": "dirichlet:0.3", "model": "mlp:32", "l2": 0.0}
GOAL = {"rounds": 20, "target": 0.5, "target_kind": "accuracy", "hold": 3, "eval_every": 5}
LOCAL = resolve(MODEL | GOAL | {"batch_size": 16, "local_steps": 5, "alpha": 0.05})[0]
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


def test_half_of_the_way_by_half_of_the_rounds_and_noisy_curves_by_their_mean():
    target = Target("residual", 1e-4, 20)
    assert follow(target, [1.0] * 3 + [0.02] * 5, num_rounds=8) == ("hopeless", (4, 8, 400))
    assert follow(target, [1.0] * 3 + [0.01] * 5, num_rounds=8) == ("hopeless", (6, 12, 600))
    assert follow(target, [1.0] * 3 + [0.0009] * 5, num_rounds=8)[0] is None
    accuracy = Target("accuracy", 0.9)
    assert accuracy.progress(0.0, 0.9) == 1
    assert accuracy.progress(0.1, 0.1) == 0
    assert 0 < accuracy.progress(0.1, 0.7) < accuracy.progress(0.1, 0.89) < 1

    values = [0.5, 0.9, 0.6, 0.91, 0.89, 0.93, 0.2]
    goal = Target("accuracy", 0.9, hold=3, is_mean=True)
    assert follow(goal, values[:5])[0] is None
    assert follow(goal, values) == ("reached", (4, 8, 400))
    assert goal.first_reached(values) == 3


def summary_of(config, directory, contact=None, ceiling=math.inf, minimum=None):
    """Run, or go on, without keeping models; return what the directory says in the end."""
    if not directory.exists():
        loop.create_run(directory, config)
    loop.run(config, build_problem(config), minimum, directory, contact, ceiling, False)
    return read_summary(directory)


def outcome_of(*arguments, **options):
    return summary_of(*arguments, **options)["outcome"]


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


VALIDATING = {"recipe": "fp16", "model": "mlp:8", "partition": "iid", "clients": 5, "rounds": 80}
VALIDATING |= {"batch_size": 16, "local_steps": 5, "alpha": 0.2}
VALIDATING |= {"target_kind": "accuracy", "validation": 0.2}


def make_config(**changes):
    return resolve(VALIDATING | changes)[0]


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
    summary = summary_of(config, tmp_path / "run")
    values, sizes = summary["curve"]["values"], summary["curve"]["bytes"]
    outcome = summary["outcome"]
    assert outcome["ending"] == "reached"
    goal = Target("accuracy", 0.8, hold=3, is_mean=True)
    reached = goal.first_reached(values)
    assert outcome["rounds"] == reached
    assert len(values) == reached + 3 == summary["rounds"] + 1
    assert sizes[reached] == outcome["upload_bytes"] + outcome["download_bytes"]
    assert summary["curve"]["tests"][-1] == [summary["rounds"], summary["test_accuracy"]]


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
        found, problem = summary_of(config, tmp_path / downlink), build_problem(config)
        frames = sum(frames_of(config))
        model = first * 5 * problem.start_bytes
        assert 4 * problem.num_clients < problem.start_bytes
        total = 5 * (FIRST_ORDER_BYTES + 2 * ORDER_BYTES + 3 * REPLY_BYTES)
        assert found["curve"]["bytes"][-1] == frames + model + total
        assert found["total_bytes"] == found["curve"]["bytes"][-1]


def test_a_client_receives_its_first_model_when_it_first_takes_part(tmp_path):
    config = make_config(rounds=6, participation=0.4, absences=((0, 1, 4),), start="exact")
    found = summary_of(config, tmp_path / "run")
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
    devices = (replace(config, device=device) for device in ("cpu", "torch:cpu"))
    found = [follow_target(config, make_simulation(one, problem))() for one in devices]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert 0 < found[0] < 10


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


def test_a_run_directory_is_complete(config, problem, tmp_path):
    result = run_alone(config, tmp_path / "run")
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
    whole = run_alone(config, tmp_path / "whole")
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
    run_alone(config, tmp_path / "run")
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
    result = run_alone(config, tmp_path / "run")
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


PLAIN = {"recipe": "lean", "rounds": 12, "dropout": 0.2}
SHORT = resolve(PLAIN)[0]


@pytest.fixture(scope="module")
def halfway(tmp_path_factory, problem):
    """Return the directory of a run that was stopped after 7 of 12 rounds."""
    directory = tmp_path_factory.mktemp("run") / "half"
    loop.create_run(directory, SHORT)
    with pytest.raises(Interrupted):
        loop.run(SHORT, problem, None, directory, stop_after(7))
    return directory


@pytest.fixture
def run(halfway, tmp_path):
    shutil.copytree(halfway, tmp_path / "run")
    return tmp_path / "run"


def refused(run, problem, message):
    """Check that the run does not go on, says why in one line, and leaves everything as it is."""
    before = contents(run)
    with pytest.raises(RunError, match=message) as caught:
        loop.run(SHORT, problem, None, run)
    assert "\n" not in str(caught.value)
    assert contents(run) == before


def change_line(run, number, change):
    lines = (run / ROUNDS).read_bytes().splitlines(keepends=True)
    lines[number - 1] = change(lines[number - 1])
    (run / ROUNDS).write_bytes(b"".join(lines))


def replace_the_third(**changes):
    """Put a line there whose checksum is right, with other values; None: without a field."""

    def damage(run):
        row = json.loads((run / ROUNDS).read_text().splitlines()[2]) | changes
        kept = {key: row[key] for key in row if key != "crc32" and row[key] is not None}
        change_line(run, 3, lambda _: (files.seal(json.dumps(kept)) + "\n").encode())

    return damage


def cut(run):
    content = (run / ROUNDS).read_bytes()
    (run / ROUNDS).write_bytes(content[: len(content) // 2])


def flip_a_bit_of_the_model(run):
    content = bytearray((run / BEST).read_bytes())
    content[-3] ^= 16
    (run / BEST).write_bytes(content)


def write(content):
    return lambda run: (run / CHECKPOINT).write_bytes(content)


def third(change):
    return lambda run: change_line(run, 3, change)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run / ROUNDS).unlink(), "rounds.jsonl' is missing, but the checkpoint is at"),
        (cut, r"rounds.jsonl' holds 3 rounds, but the checkpoint is at round 7; delete"),
        (write(b""), r"checkpoint.npz' is damaged \(EOFError: No data left"),
        (write(b"PK\x05\x06" + bytes(18)), r"npz' is damaged \(KeyError: 'about'"),
        (write(b"\x00" * 5000), r"checkpoint.npz' is damaged \(\w+: "),
        (replace_the_third(loss=9.0), "does not hold the rounds that checkpoint.npz counts on"),
        (replace_the_third(widths=3), "line 3: it has no usable 'int' object is not iterable"),
        (replace_the_third(upload_bytes=None), "line 3: it has no usable 'upload_bytes'"),
        (third(lambda line: line + line), r"is damaged: line 4 is of round 3"),
        (third(lambda line: line.replace(b'"up', b'"up\xff')), "line 3: it does not fit its check"),
        (third(lambda line: b"\xff\xfe\xfd\n"), "line 3: it has no checksum"),
        (third(lambda line: line.replace(b"crc32", b"crc33")), "line 3: it has no checksum"),
        (third(lambda line: line[:30] + b"\n"), "line 3: it has no checksum"),
        (third(lambda line: b"\n"), "line 3: it has no checksum"),
        (flip_a_bit_of_the_model, "best.safetensors' is damaged: it does not fit its checksum"),
    ],
)
def test_damage_is_named_and_nothing_changed(run, problem, damage, message):
    damage(run)
    refused(run, problem, message)


def read_flipped(path, places, read):
    """Yield what is read with a bit flipped at each place, but for where that is refused."""
    whole = path.read_bytes()
    for position in places:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with suppress(RunError):
            yield read()


def test_any_flipped_bit_of_a_checkpoint_is_seen(tmp_path):
    path = tmp_path / CHECKPOINT
    write_arrays(path, {"round": np.array(3), "parameters": np.arange(40.0)}, {"run": "r"})
    whole = path.read_bytes()
    arrays, about = read_arrays(path, "")
    assert about == {"run": "r"}
    unseen = list(read_flipped(path, range(len(whole)), lambda: read_arrays(path, "")))
    for found, said in unseen:
        assert said == about  # times and attributes of the archive have no checksum
        assert all(np.array_equal(found[name], arrays[name]) for name in arrays)
    assert len(unseen) < 0.2 * len(whole)
    path.write_bytes(whole[:-1])
    with pytest.raises(RunError, match=r"is damaged"):
        read_arrays(path, "")


def test_any_flipped_bit_of_a_line_is_seen(run):
    whole, rows = (run / ROUNDS).read_bytes(), read_lines(run)
    start, end = (whole.index(f'{{"round": {k},'.encode()) for k in (3, 4))
    for found in read_flipped(run / ROUNDS, range(start, end - 1), lambda: read_lines(run)):
        assert found == rows  # the checksum's own field, or white space


def test_another_runs_checkpoint(run, problem, tmp_path):
    other = resolve({**PLAIN, "seed": 1})[0]
    loop.create_run(tmp_path / "other", other)
    loop.run(other, build_problem(other), None, tmp_path / "other")
    shutil.copy(tmp_path / "other" / CHECKPOINT, run / CHECKPOINT)
    refused(run, problem, r"checkpoint.npz' belongs to another run \(settings [0-9a-f]{12}, and")


def test_a_damaged_summary_is_no_result(run, problem):
    loop.run(SHORT, problem, None, run)
    text = (run / SUMMARY).read_text()
    assert read_summary(run)["rounds"] == 12
    (run / SUMMARY).write_text(text.replace('"rounds": 12', '"rounds": 13'))
    with pytest.raises(RunError, match=r"summary.json' is damaged \(it does not fit its checksum"):
        read_summary(run)
    (run / SUMMARY).write_text("")
    with pytest.raises(RunError, match="is damaged"):
        read_summary(run)


def test_rounds_are_on_disk_before_the_checkpoint_that_counts_on_them(
    tmp_path, problem, monkeypatch
):
    """A power cut keeps what was synced: no checkpoint may be there without its rounds."""
    synced = []
    real_sync = os.fsync

    def sync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_sync(descriptor)

    monkeypatch.setattr(files.os, "fsync", sync)
    directory = tmp_path / "run"
    loop.create_run(directory, SHORT)
    synced.clear()
    with pytest.raises(Interrupted):
        loop.run(SHORT, problem, None, directory, stop_after(5))
    names = [os.path.basename(name) for name in synced]
    assert names.index(ROUNDS) < names.index(f".{CHECKPOINT}.part")
    assert str(directory) in synced[names.index(f".{CHECKPOINT}.part") :]  # the name, too


def test_one_process_at_a_time(run, problem):
    code = f"""
    import sys, time
    from pathlib import Path
    from aqg.runs.files import locked
    with locked(Path({str(run)!r})):
        print("locked", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(RunError, match="is in use by another process"), locked(run):
            pytest.fail("two at a time")
        before = time.monotonic()
        process.kill()  # it leaves nothing behind
        with locked(run, wait_seconds=30):
            assert time.monotonic() - before < 30


def full(descriptor):
    raise OSError(28, "No space left on device")


def test_records_survive_a_write_that_was_cut(tmp_path, monkeypatch):
    records = Records(tmp_path / "trials.jsonl")
    records.add({"number": 1})
    with records.path.open("ab") as file:
        file.write(b'{"number": 2, "cr')  # a kill
    assert records.read() == [{"number": 1}]
    records.add({"number": 3})
    assert records.read() == [{"number": 1}, {"number": 3}]

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(RunError, match="No space left on device"):
            records.add({"number": 4})
    assert records.read() == [{"number": 1}, {"number": 3}]
    content = records.path.read_bytes()
    records.path.write_bytes(content.replace(b'"number": 1', b'"number": 7'))
    with pytest.raises(RunError, match="line 1: it does not fit its checksum"):
        records.read()


def test_a_disk_that_is_full_is_named(tmp_path, problem, monkeypatch):
    loop.create_run(tmp_path / "run", SHORT)
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(RunError, match="cannot be written: No space left on device"):
        loop.run(SHORT, problem, None, tmp_path / "run")
    assert not (tmp_path / "run" / CHECKPOINT).exists()
