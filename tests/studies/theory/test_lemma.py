"""Lemma 1 against a search over ρ1 and ρ2, and both regions against errors made on purpose."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqg.core.movement import Movement
from aqg.errors import ConfigError
from aqg.studies.theory import lemma
from aqg.studies.theory.lyapunov import step_weights

RHOS1 = np.geomspace(1e-6, 0.9, 12)
RHOS2 = np.concatenate([np.geomspace(1e-2, 1e2, 100), np.linspace(0.45, 0.55, 101)])


def found_by_search(alpha, weights, smoothness):
    pairs = itertools.product(RHOS1, RHOS2)
    return any(lemma.inequalities_hold(alpha, weights, smoothness, *pair) for pair in pairs)


@pytest.mark.parametrize("weight_sum", [0.02, 0.1, 0.16])
@pytest.mark.parametrize("smoothness", [0.3, 50.0])
def test_the_largest_step_size_is_what_a_search_finds(weight_sum, smoothness):
    weights = np.array([4.0, 3, 2, 1]) * weight_sum / 10
    largest = lemma.largest_step_size(weight_sum, smoothness)
    assert found_by_search(0.95 * largest, weights, smoothness)
    assert not found_by_search(1.0001 * largest, weights, smoothness)


def test_no_step_size_fits_the_papers_weights():
    assert lemma.largest_step_size(1.0, 1.0) == 0
    assert not found_by_search(1e-6, (0.1,) * 10, 1.0)
    assert not found_by_search(1e-6, (1 / 60 + 1e-4,) * 10, 1.0)
    assert found_by_search(1e-6, (1 / 60 - 1e-3,) * 10, 1.0)


@pytest.mark.parametrize("rho1", [0.0, 0.1, 0.7])
def test_the_best_rho2_is_the_best(rho1):
    best = lemma.capacity(rho1, lemma.best_rho2(rho1))
    assert best >= max(lemma.capacity(rho1, rho2) for rho2 in RHOS2)
    assert best == pytest.approx((1 - rho1) / (6 - 2 * rho1))


@given(
    weight_sum=st.floats(0.001, 0.15),
    part=st.floats(0.05, 0.95),
    condition=st.floats(1.0, 1e4),
)
@settings(max_examples=50, deadline=None)
def test_the_contraction_is_the_best_over_rho2(weight_sum, part, condition):
    weights = (weight_sum / 5,) * 5
    smoothness, strong = 2.0, 2.0 / condition
    alpha = part * lemma.largest_step_size(weight_sum, smoothness)
    found = lemma.contraction(alpha, weights, smoothness, strong)
    load = smoothness * alpha + 2 * weight_sum
    by_search = np.max(
        np.minimum(
            strong * alpha * (1 - 2 * load * (1 + RHOS2)),
            lemma.slowest_share(weights) * (0.5 - load / 2 * (1 + 1 / RHOS2)),
        )
    )
    assert 0 < found.c < 1
    assert found.c >= by_search - 1e-12
    assert found.c <= strong * alpha


EIGENVALUES = np.array([3.0, 1.0, 0.05])
SMOOTHNESS, STRONG = 3.0, 0.05


def descend_with_errors(alpha, weights, num_rounds, seed, fill="zero"):
    """Descend on a quadratic with errors as large as the tolerance allows.

    Return the loss before each round, and the squared length of each round's step.
    """
    movement = Movement(tuple(weights), fill)
    random = np.random.default_rng(seed)
    point = random.standard_normal(len(EIGENVALUES))
    losses, steps = [], []
    for _ in range(num_rounds):
        losses.append(0.5 * np.sum(EIGENVALUES * point**2))
        allowed = movement.of(tuple(steps[: -len(weights) - 1 : -1])) / alpha**2
        gradient = EIGENVALUES * point
        error = random.standard_normal(len(point))
        if random.random() < 0.5:
            error = -gradient  # the worst direction: it stops the descent
        norm = np.linalg.norm(error)
        error *= np.sqrt(allowed) / norm if norm else 0.0
        change = -alpha * (gradient + error)
        point = point + change
        steps.append(float(change @ change))
    return np.array(losses), np.array(steps)


def run_with_errors(alpha, weights, num_rounds, seed, fill="zero"):
    """Return V, with half of the paper's β, before each round."""
    losses, steps = descend_with_errors(alpha, weights, num_rounds, seed, fill)
    beta = step_weights(weights, alpha) / 2
    for number in range(num_rounds):
        recent = steps[:number][::-1][: len(beta)]
        losses[number] += beta[: len(recent)] @ recent
    return losses


@given(
    weight_sum=st.floats(0.0, 0.99),
    part=st.floats(0.05, 1.0),
    depth=st.integers(1, 10),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_the_wider_region_descends_whatever_the_errors(weight_sum, part, depth, seed):
    weights = (weight_sum / depth,) * depth
    alpha = part * lemma.largest_step_size_within_tolerance(weight_sum, SMOOTHNESS)
    values = run_with_errors(alpha, weights, 60, seed)
    assert (np.diff(values) <= 1e-12 * values[0]).all()


@given(
    weight_sum=st.floats(0.05, 0.99),
    part=st.floats(0.05, 1.0),
    depth=st.integers(1, 10),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_with_missing_steps_filled_it_descends_once_none_is_missing(weight_sum, part, depth, seed):
    weights = (weight_sum / depth,) * depth
    alpha = part * lemma.largest_step_size_within_tolerance(weight_sum, SMOOTHNESS)
    values = run_with_errors(alpha, weights, 60, seed, fill="mean")
    assert (np.diff(values[depth:]) <= 1e-12 * values.max()).all()


def test_with_missing_steps_filled_it_can_rise_before():
    weights = (0.09,) * 10
    alpha = lemma.largest_step_size_within_tolerance(0.9, SMOOTHNESS)
    early = [run_with_errors(alpha, weights, 11, seed, fill="mean") for seed in range(20)]
    assert (np.diff(early) > 0).any()
    assert lemma.early_weight_sum(weights) + alpha * SMOOTHNESS > 1


@given(
    shape=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=10),
    early=st.floats(0.1, 0.99),
    part=st.floats(0.05, 1.0),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_with_smaller_weights_the_first_rounds_descend_too(shape, early, part, seed):
    weights = np.array(shape) * early / lemma.early_weight_sum(shape)
    alpha = part * (1 - early) / SMOOTHNESS
    losses, steps = descend_with_errors(alpha, weights, 60, seed, fill="mean")
    # Every step is charged with what all tolerances still to come make of it.
    depth = len(weights)
    charges = np.zeros((60, 60))
    for now in range(60):
        known = min(now, depth)
        factor = weights.sum() / weights[:known].sum() if known else 0.0
        for back in range(1, known + 1):
            charges[now, now - back] = weights[back - 1] * factor
    to_come = charges[::-1].cumsum(axis=0)[::-1]
    assert to_come.max() <= early * (1 + 1e-12)
    values = [loss + to_come[k, :k] @ steps[:k] / (2 * alpha) for k, loss in enumerate(losses)]
    shown = 60 - depth  # beyond it, some of what is to come lies after the last round
    assert (np.diff(values[:shown]) <= 1e-12 * values[0]).all()


@given(part=st.floats(0.05, 0.99), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_the_wider_region_contracts_as_promised(part, seed):
    weights = (0.03,) * 10
    alpha = part * lemma.largest_step_size_within_tolerance(0.3, SMOOTHNESS)
    promised = lemma.contraction_within_tolerance(alpha, weights, SMOOTHNESS, STRONG)
    # The promise is for the largest admissible γ, of which the halved weights are a special case.
    gamma = (1 - alpha * SMOOTHNESS) / (2 * 0.3)
    scaled = run_with_errors(alpha, weights, 60, seed)
    assert gamma >= 0.5
    assert scaled[-1] <= 2 * gamma * (1 - promised) ** 59 * scaled[0] * (1 + 1e-9)


def test_outside_the_wider_region_it_can_rise():
    values = run_with_errors(0.6, (0.095,) * 10, 60, 0)
    assert (np.diff(values) > 0).any()


@pytest.mark.parametrize(("alpha", "smoothness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_numbers_that_make_no_sense(alpha, smoothness):
    with pytest.raises(ConfigError, match="must be above 0"):
        lemma.contraction(alpha, (0.01,), smoothness, 0.1)
