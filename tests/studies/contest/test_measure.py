"""Plateaus, goals, cost and delay."""

import math

import pytest

from aqg.runs.stopping import Target
from aqg.studies.contest.measure import (
    FIXED,
    MOST_DELAY,
    PLATEAU,
    Crossing,
    Curve,
    Goal,
    arithmetic_mean,
    geometric_mean,
    make_reference,
    plateau_of,
    points_above,
    rank,
    score,
)

ROUNDS = 40
ACCURACY, LOSS = Goal("accuracy", ROUNDS), Goal("loss", ROUNDS)


def rising(rounds, half, top=0.9, size=10):
    """A curve that has half of its way behind after ``half`` rounds."""
    values = tuple(top * (1 - 0.5 ** (k / half)) for k in range(rounds + 1))
    return Curve(values, tuple(size * k for k in range(rounds + 1)), ((0, 0.1), (rounds, 0.8)))


def falling(rounds, half, low=0.5, size=10):
    values = tuple(low + 0.5 ** (k / half) for k in range(rounds + 1))
    return Curve(values, tuple(size * k for k in range(rounds + 1)))


def test_the_reference_is_the_best_plateau_and_the_fewest_rounds():
    """One step ends highest, another is there first: the target comes from the first of them."""
    slow, fast = rising(ROUNDS, half=4, top=0.92), rising(ROUNDS, half=2, top=0.915)
    reference = make_reference(ACCURACY, [slow, fast])
    assert reference.plateau == plateau_of(slow, ROUNDS) == pytest.approx(0.919, abs=1e-3)
    goal = reference.targets[PLATEAU]
    assert goal.value == pytest.approx(reference.plateau - 0.01)
    assert reference.crossings[PLATEAU] == fast.reach(goal)
    assert slow.reach(goal).rounds > fast.reach(goal).rounds
    assert reference.hardest.value == max(goal.value for goal in reference.targets.values())


def test_a_run_that_was_cut_off_makes_no_reference():
    assert make_reference(ACCURACY, [rising(ROUNDS - 1, half=2)]) is None
    assert make_reference(ACCURACY, []) is None
    diverged = Curve((0.1, math.nan), (0, 10))
    reference = make_reference(ACCURACY, [diverged, rising(ROUNDS, half=2)])
    assert reference.plateau == plateau_of(rising(ROUNDS, half=2), ROUNDS)


def test_losses_are_measured_the_other_way_round():
    reference = make_reference(LOSS, [falling(ROUNDS, half=2), falling(ROUNDS, half=6)])
    assert reference.plateau == pytest.approx(0.5, abs=1e-3)
    assert reference.targets[PLATEAU].value == pytest.approx(0.505, abs=1e-3)
    assert reference.targets["90%"].value == pytest.approx(0.55, abs=1e-3)
    later = score(falling(ROUNDS, half=3, size=1), reference, PLATEAU)
    assert later.delay == pytest.approx(1.5, abs=0.1)
    assert later.savings == pytest.approx(10 / later.delay)
    for goal in (ACCURACY, LOSS):  # they get harder
        values = [target.value for target in goal.targets(0.6).values()]
        assert values == sorted(values, reverse=goal == LOSS)


def test_cost_savings_and_delay():
    reference = make_reference(ACCURACY, [rising(ROUNDS, half=2)])
    theirs = reference.crossings[PLATEAU]
    ours = rising(50, half=3, size=1)
    found = score(ours, reference, PLATEAU)
    reached = ours.reach(reference.targets[PLATEAU])
    assert reached == Crossing(reached.rounds, reached.rounds, 0.8)
    assert found.total_bytes == reached.total_bytes
    assert found.delay == reached.rounds / theirs.rounds
    assert found.savings == theirs.total_bytes / reached.total_bytes
    assert score(rising(50, half=3, top=0.85), reference, PLATEAU) is None
    easier = score(rising(50, half=3, top=0.85, size=1), reference, "90%")
    assert easier.delay > 1


def test_a_fixed_target_needs_no_reference_and_takes_what_there_is():
    """Only bytes rank; savings and delay are there once federated averaging reaches the target."""
    goal = Goal("accuracy", ROUNDS, Target("accuracy", 0.8, 3))
    alone = make_reference(goal, [])
    slow, fast = rising(ROUNDS, half=6, size=1), rising(ROUNDS, half=2, size=5)
    found = score(slow, alone, FIXED)
    assert (found.savings, found.delay, alone.ceiling) == (None, None, math.inf)
    assert score(rising(ROUNDS, half=2, top=0.7), alone, FIXED) is None
    reference = make_reference(goal, [rising(ROUNDS, half=2)])
    assert reference.plateau is None
    assert reference.ceiling == 2 * reference.crossings[FIXED].total_bytes
    assert score(slow, reference, FIXED).delay > MOST_DELAY
    assert score(fast, reference, FIXED).savings == 2
    assert rank(goal, slow, reference) < rank(goal, fast, reference)  # though it is later
    later = rising(60, half=6, size=1)
    assert rank(ACCURACY, later, make_reference(ACCURACY, [fast]))[0] == 1
    assert rank(goal, rising(9, half=9), reference)[0] == 2


def test_a_curve_is_read_as_it_was_written():
    curve = Curve((0.1, math.nan, 0.3), (0, 5, 9), ((0, 0.1), (2, 0.35)))
    again = Curve.from_json(curve.to_json())
    assert again.to_json() == curve.to_json()
    assert math.isnan(again.values[1])
    assert (again.test_after(1), again.test_after(3)) == (0.35, None)


def test_intervals_are_students_for_any_number_of_seeds():
    mean = geometric_mean([3.0])
    assert (mean.value, mean.low, mean.high) == (pytest.approx(3.0), None, None)
    mean = arithmetic_mean([0.0, 2.0] * 10)
    spread = (20 / 19 / 20) ** 0.5
    assert mean.high - mean.value == pytest.approx(2.093 * spread, rel=1e-3)  # 19 degrees
    assert (mean.includes(1.2), mean.includes(2.0)) == (True, False)
    assert not geometric_mean([2.0, 2.0, 2.0]).includes(1)


def test_a_plateau_is_that_of_the_tasks_rounds():
    """A run that went on for longer, or not as long, is looked at where averaging ended."""
    longer = Curve(tuple(k / 100 for k in range(51)), tuple(range(51)))
    assert plateau_of(longer, ROUNDS) == pytest.approx((0.37 + 0.38 + 0.39 + 0.40) / 4)
    assert math.isnan(plateau_of(longer, 60))
    assert points_above("accuracy", 0.5, 0.52) == pytest.approx(-2)
    assert points_above("loss", 0.55, 0.5) == pytest.approx(-10)
