"""When a run is over: reached, diverged, hopeless, too dear; and what it is said to have cost."""

import math
from dataclasses import replace

import pytest

from aqg.errors import ConfigError, RunError
from aqg.runs import loop
from aqg.runs.config import resolve
from aqg.runs.cost import Meter
from aqg.runs.directory import CHECKPOINT, VALIDATION, read_lines, read_summary
from aqg.runs.executor import Interrupted
from aqg.runs.setup import build_problem, check_target, find_minimum, make_simulation
from aqg.runs.stopping import Judge, Target
from aqg.sim.record import RoundRecord
from aqg.weights import BEST

from tests.commands import stop_after

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


@pytest.mark.parametrize(
    ("last", "ending"),
    [(math.nan, "diverged"), (math.inf, "diverged"), (1e21, "diverged"), (2e3, "hopeless")],
)
def test_what_leaves_all_use_is_stopped(last, ending):
    assert follow(Target("loss", 1.0, 20), [2.0, 3.0, last]) == (ending, (3, 6, 300))


def test_an_accuracy_of_zero_is_no_divergence():
    assert follow(Target("accuracy", 0.9, 3), [0.1, 0.0, 0.0]) == (None, (3, 6, 300))


def test_costs_beyond_a_limit_are_of_no_interest():
    target = Target("accuracy", 0.9, 3)
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


def run(config, directory, contact=None, ceiling=math.inf, minimum=None):
    if not directory.exists():
        loop.create_run(directory, config)
    loop.run(config, build_problem(config), minimum, directory, contact, ceiling, False)
    return read_summary(directory)["outcome"]


def test_costs_are_those_of_the_plain_simulation(tmp_path):
    """Until the target, byte by byte what the reference sends."""
    problem = build_problem(SOFTMAX)
    minimum = find_minimum(SOFTMAX, problem)
    outcome = run(SOFTMAX, tmp_path / "run", minimum=minimum)
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
    outcome = run(config, tmp_path / "run")
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
    whole = run(config, tmp_path / "whole", minimum=minimum)
    for num_rounds in (1, 4):
        cut = tmp_path / f"cut-{num_rounds}"
        with pytest.raises(Interrupted):
            run(config, cut, stop_after(num_rounds), minimum=minimum)
        assert run(config, cut, minimum=minimum) == whole
        for name in ("rounds.jsonl", "summary.json"):
            assert (cut / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_runs_end_beyond_their_ceiling_or_after_their_rounds(tmp_path):
    outcome = run(LOCAL, tmp_path / "dear", ceiling=1)
    assert (outcome["ending"], outcome["rounds"]) == ("beyond", 1)
    outcome = run(replace(LOCAL, rounds=4, hold=3, target=0.999), tmp_path / "short")
    assert outcome["ending"] in ("rounds", "hopeless")
    assert 0 < outcome["value"] < 1


def test_targets_that_cannot_be_measured_or_are_met_are_refused():
    config = resolve({"recipe": "gd", "target": 5.0, "target_kind": "loss", "hold": 20})[0]
    with pytest.raises(ConfigError, match="is met before the first round"):
        check_target(config, build_problem(config), None)
    with pytest.raises(RunError, match="the minimum of the loss is unknown"):
        Judge(SOFTMAX.goal, SOFTMAX.rounds)
