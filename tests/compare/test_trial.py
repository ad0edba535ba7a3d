"""One trial: when it ends, and what it is said to have cost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from aqg.compare.problems import Workshop
from aqg.compare.tasks import TASKS, Target
from aqg.compare.trial import Limits, Meter, Outcome, Setting, Trial, run_trial
from aqg.core.recipes import make_recipe
from aqg.sim.record import RoundRecord
from aqg.sim.reference import ReferenceSimulation

SOFTMAX = replace(TASKS["digits-softmax"], target=Target("residual", 0.2), rounds=150)
LOCAL = replace(TASKS["digits-local"], target=Target("accuracy", 0.5), rounds=20)
LEAN = Setting("lean")


@pytest.fixture(scope="module")
def workshop():
    return Workshop()


def follow(target, values, limits=Limits(), num_rounds=1000):  # noqa: B008
    """Feed a meter one value per round of two uploads and 30 bytes up, 70 down.

    Return how it ends, and the rounds, uploads and bytes.
    """

    def paid(costs):
        assert 70 * costs.upload_bytes == 30 * costs.download_bytes
        return costs.rounds, costs.uploads, costs.total_bytes

    meter = Meter(target, num_rounds)
    for number, value in enumerate(values, start=1):
        meter.pay(RoundRecord(number, None, (4, 4, 0), 30, download_bytes=70))
        ending = meter.look(value, limits)
        if ending is not None:
            return ending, paid(meter.costs(ending))
    return None, paid(meter.costs("rounds"))


def test_the_first_of_the_rounds_that_stay_counts():
    target = Target("accuracy", 0.9)
    values = [0.5, 0.91, 0.89, 0.9, 0.92, 0.95, 0.2]
    assert target.hold == 3
    assert follow(target, values) == ("reached", (4, 8, 400))


def test_a_loss_has_to_stay_longer_than_an_accuracy():
    target = Target("loss", 1.0)
    below = [0.9] * (target.hold - 1)
    assert follow(target, [2.0, *below, 1.1, *below])[0] is None
    assert follow(target, [2.0, *below, 1.0]) == ("reached", (2, 4, 200))


@pytest.mark.parametrize("last", [math.nan, math.inf, 2e3])
def test_what_diverges_is_stopped(last):
    assert follow(Target("loss", 1.0), [2.0, 3.0, last]) == ("diverged", (3, 6, 300))


def test_an_accuracy_of_zero_is_no_divergence():
    assert follow(Target("accuracy", 0.9), [0.1, 0.0, 0.0]) == (None, (3, 6, 300))


@pytest.mark.parametrize(
    ("limits", "ending"),
    [
        (Limits(own=250), "costlier"),
        (Limits(ceiling=250), "beyond"),
        (Limits(own=250, ceiling=250), "costlier"),
        (Limits(own=900, ceiling=900), None),
        (Limits(ceiling=75, uploads_only=True), "beyond"),
        (Limits(ceiling=270, uploads_only=True), None),
    ],
)
def test_costs_beyond_a_limit_are_of_no_interest(limits, ending):
    target = Target("accuracy", 0.9)
    assert follow(target, [0.1] * 9, limits)[0] == ending
    # What was met within the limit may still be confirmed beyond it.
    assert follow(target, [0.1, 0.95, 0.95, 0.95], limits) == ("reached", (2, 4, 200))


def test_half_of_the_way_by_half_of_the_rounds():
    target = Target("residual", 1e-4)
    assert follow(target, [1.0] * 3 + [0.02] * 5, num_rounds=8) == ("too slow", (4, 8, 400))
    assert follow(target, [1.0] * 3 + [0.01] * 5, num_rounds=8) == ("too slow", (6, 12, 600))
    assert follow(target, [1.0] * 3 + [0.0009] * 5, num_rounds=8)[0] is None
    accuracy = Target("accuracy", 0.9)
    assert accuracy.progress(0.0, 0.9) == 1
    assert accuracy.progress(0.1, 0.1) == 0
    assert 0 < accuracy.progress(0.1, 0.7) < accuracy.progress(0.1, 0.89) < 1


def test_costs_are_those_of_the_plain_simulation(workshop):
    """Until the target, byte by byte what the reference sends."""
    problem, minimum = workshop.problem(SOFTMAX, 3), workshop.minimum(SOFTMAX, 3)
    trial = Trial(SOFTMAX.name, "lean", LEAN, 3)
    outcome = run_trial(trial, SOFTMAX, problem, minimum)
    assert outcome.is_reached
    reference = ReferenceSimulation(problem, make_recipe("lean"), SOFTMAX.step_size, seed=3)
    records = [reference.run_round() for _ in range(outcome.rounds + SOFTMAX.target.hold)]
    residuals = [record.loss - minimum for record in records]
    assert residuals[outcome.rounds - 1] > SOFTMAX.target.value
    assert max(residuals[outcome.rounds :]) <= SOFTMAX.target.value
    spent = records[: outcome.rounds]
    for name in ("upload_bytes", "download_bytes", "total_bytes"):
        assert getattr(outcome, name) == sum(getattr(record, name) for record in spent)
    assert outcome.cost == outcome.total_bytes
    assert Outcome.from_json(outcome.to_json()) == outcome
    assert outcome.uploads == sum(record.num_uploads for record in spent)


def test_accuracy_is_that_of_the_test_set(workshop):
    problem = workshop.problem(LOCAL, 1)
    outcome = run_trial(Trial(LOCAL.name, "gd", Setting("gd"), 1), LOCAL, problem, None)
    reference = ReferenceSimulation(
        problem, make_recipe("gd"), LOCAL.step_size, seed=1, training=LOCAL.training
    )
    accuracies = []
    for _ in range(outcome.rounds + LOCAL.target.hold - 1):
        reference.run_round()
        accuracies.append(problem.test_accuracy(reference.parameters))
    assert outcome.is_reached
    assert min(accuracies[outcome.rounds - 1 :]) >= 0.5
    assert outcome.value == accuracies[-1]


def test_the_step_size_is_multiplied(workshop):
    problem, minimum = workshop.problem(SOFTMAX, 0), workshop.minimum(SOFTMAX, 0)
    rounds = {}
    for multiplier in (0.5, 1, 1000):
        trial = Trial(SOFTMAX.name, "gd", Setting("gd", multiplier=multiplier), 0)
        outcome = run_trial(trial, SOFTMAX, problem, minimum)
        rounds[multiplier] = outcome.rounds
        assert outcome.ending == ("diverged" if multiplier == 1000 else "reached")
    assert rounds[0.5] > rounds[1]


def test_limits_are_asked_for_while_it_runs(workshop):
    problem = workshop.problem(LOCAL, 0)
    answers = iter([Limits(), Limits(), Limits(ceiling=1)])
    trial = Trial(LOCAL.name, "lean", LEAN, 0)
    outcome = run_trial(trial, LOCAL, problem, None, limits=lambda: next(answers))
    assert (outcome.ending, outcome.rounds) == ("beyond", 3)


def test_rounds_run_out(workshop):
    task = replace(LOCAL, rounds=2, target=Target("accuracy", 0.01))  # met, but not held
    problem = workshop.problem(task, 0)
    outcome = run_trial(Trial(task.name, "lean", LEAN, 0), task, problem, None)
    assert (outcome.ending, outcome.rounds) == ("rounds", 2)
    assert 0 < outcome.value < 1


def test_outcomes_survive_json():
    outcome = Outcome(
        Trial("t", "stc", Setting("stc:keep=0.1", 4, 2), 1), "rounds", 3, 2, 1, None, 0.5
    )
    assert Outcome.from_json(outcome.to_json()) == outcome
