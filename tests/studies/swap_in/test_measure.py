"""Plateaus, goals, cost and delay."""

from __future__ import annotations

import math

import pytest

from aqg.studies.swap_in.measure import (
    PLATEAU,
    Crossing,
    Curve,
    arithmetic_mean,
    geometric_mean,
    goals_of,
    make_reference,
    plateau_of,
    points_above,
    score,
)

ROUNDS = 40


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
    reference = make_reference("accuracy", ROUNDS, [slow, fast])
    assert reference.plateau == plateau_of(slow, ROUNDS) == pytest.approx(0.919, abs=1e-3)
    goal = reference.goals[PLATEAU]
    assert goal.value == pytest.approx(reference.plateau - 0.01)
    assert reference.crossings[PLATEAU] == fast.reach(goal)
    assert slow.reach(goal).rounds > fast.reach(goal).rounds
    assert reference.hardest.value == max(goal.value for goal in reference.goals.values())


def test_a_run_that_was_cut_off_makes_no_reference():
    assert make_reference("accuracy", ROUNDS, [rising(ROUNDS - 1, half=2)]) is None
    assert make_reference("accuracy", ROUNDS, []) is None
    diverged = Curve((0.1, math.nan), (0, 10))
    reference = make_reference("accuracy", ROUNDS, [diverged, rising(ROUNDS, half=2)])
    assert reference.plateau == plateau_of(rising(ROUNDS, half=2), ROUNDS)


def test_losses_are_measured_the_other_way_round():
    reference = make_reference("loss", ROUNDS, [falling(ROUNDS, half=2), falling(ROUNDS, half=6)])
    assert reference.plateau == pytest.approx(0.5, abs=1e-3)
    assert reference.goals[PLATEAU].value == pytest.approx(0.505, abs=1e-3)
    assert reference.goals["90%"].value == pytest.approx(0.55, abs=1e-3)
    later = score(falling(ROUNDS, half=3, size=1), reference)
    assert later.delay == pytest.approx(1.5, abs=0.1)
    assert later.savings == pytest.approx(10 / later.delay)


def test_cost_savings_and_delay():
    reference = make_reference("accuracy", ROUNDS, [rising(ROUNDS, half=2)])
    theirs = reference.crossings[PLATEAU]
    ours = rising(50, half=3, size=1)
    found = score(ours, reference)
    reached = ours.reach(reference.goals[PLATEAU])
    assert reached == Crossing(reached.rounds, reached.rounds, 0.8)
    assert found.cost == reached.total_bytes
    assert found.delay == reached.rounds / theirs.rounds
    assert found.savings == theirs.total_bytes / reached.total_bytes
    assert score(rising(50, half=3, top=0.85), reference) is None
    easier = score(rising(50, half=3, top=0.85, size=1), reference, "90%")
    assert easier.delay > 1


def test_goals_get_harder():
    for kind in ("accuracy", "loss"):
        values = [goal.value for goal in goals_of(kind, 0.6, ROUNDS).values()]
        assert values == sorted(values, reverse=kind == "loss")


def test_a_curve_is_read_as_it_was_written():
    curve = Curve((0.1, math.nan, 0.3), (0, 5, 9), ((0, 0.1), (2, 0.35)))
    again = Curve.from_json(curve.to_json())
    assert again.to_json() == curve.to_json()
    assert math.isnan(again.values[1])
    assert (again.test_after(1), again.test_after(3)) == (0.35, None)


def test_a_single_seed_has_no_interval():
    mean = geometric_mean([3.0])
    assert (mean.value, mean.low, mean.high) == (pytest.approx(3.0), None, None)


def test_intervals_are_students_for_any_number_of_seeds():
    mean = arithmetic_mean([0.0, 2.0] * 10)
    spread = (20 / 19 / 20) ** 0.5
    assert mean.high - mean.value == pytest.approx(2.093 * spread, rel=1e-3)  # 19 degrees
    assert mean.includes(1.2)
    assert not mean.includes(2.0)
    ratio = geometric_mean([2.0, 2.0, 2.0])
    assert not ratio.includes(1)


def test_a_plateau_is_that_of_the_tasks_rounds():
    """A run that went on for longer, or not as long, is looked at where averaging ended."""
    longer = Curve(tuple(k / 100 for k in range(51)), tuple(range(51)))
    assert plateau_of(longer, ROUNDS) == pytest.approx((0.37 + 0.38 + 0.39 + 0.40) / 4)
    assert math.isnan(plateau_of(longer, 60))
    assert points_above("accuracy", 0.5, 0.52) == pytest.approx(-2)
    assert points_above("loss", 0.55, 0.5) == pytest.approx(-10)
