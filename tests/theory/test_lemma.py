"""Lemma 1 against a search over ρ1 and ρ2, and both regions against errors made on purpose."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqg.errors import ConfigError
from aqg.theory import lemma
from aqg.theory.lyapunov import step_weights

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


def run_with_errors(alpha, weights, eigenvalues, num_rounds, seed, halved):
    """Descend on a quadratic with errors as large as the tolerance allows; return V."""
    random = np.random.default_rng(seed)
    beta = step_weights(weights, alpha) * (0.5 if halved else 1.0)
    point = random.standard_normal(len(eigenvalues))
    steps, values = [], []
    for _ in range(num_rounds):
        recent = steps[: len(weights)]
        values.append(
            0.5 * np.sum(eigenvalues * point**2)
            + sum(b * s for b, s in zip(beta, recent, strict=False))
        )
        allowed = sum(w * s for w, s in zip(weights, recent, strict=False)) / alpha**2
        gradient = eigenvalues * point
        error = random.standard_normal(len(point))
        if random.random() < 0.5:
            error = -gradient  # the worst direction: it stops the descent
        norm = np.linalg.norm(error)
        error *= np.sqrt(allowed) / norm if norm else 0.0
        change = -alpha * (gradient + error)
        point = point + change
        steps.insert(0, float(change @ change))
    return np.array(values)


@given(
    weight_sum=st.floats(0.0, 0.99),
    part=st.floats(0.05, 1.0),
    depth=st.integers(1, 10),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_the_wider_region_descends_whatever_the_errors(weight_sum, part, depth, seed):
    smoothness = 3.0
    weights = (weight_sum / depth,) * depth
    alpha = part * lemma.largest_step_size_within_tolerance(weight_sum, smoothness)
    eigenvalues = np.array([smoothness, 1.0, 0.05])
    values = run_with_errors(alpha, weights, eigenvalues, 60, seed, halved=True)
    assert (np.diff(values) <= 1e-12 * values[0]).all()


@given(part=st.floats(0.05, 0.99), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_the_wider_region_contracts_as_promised(part, seed):
    smoothness, strong = 3.0, 0.05
    weights = (0.03,) * 10
    alpha = part * lemma.largest_step_size_within_tolerance(0.3, smoothness)
    promised = lemma.contraction_within_tolerance(alpha, weights, smoothness, strong)
    # The promise is for the largest admissible γ, of which the halved weights are a special case.
    gamma = (1 - alpha * smoothness) / (2 * 0.3)
    eigenvalues = np.array([smoothness, 1.0, strong])
    scaled = run_with_errors(alpha, weights, eigenvalues, 60, seed, halved=True)
    assert gamma >= 0.5
    assert scaled[-1] <= 2 * gamma * (1 - promised) ** 59 * scaled[0] * (1 + 1e-9)


def test_outside_the_wider_region_it_can_rise():
    values = run_with_errors(0.6, (0.095,) * 10, np.array([3.0, 1.0, 0.05]), 60, 0, halved=True)
    assert (np.diff(values) > 0).any()


@pytest.mark.parametrize(("alpha", "smoothness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_numbers_that_make_no_sense(alpha, smoothness):
    with pytest.raises(ConfigError, match="must be above 0"):
        lemma.contraction(alpha, (0.01,), smoothness, 0.1)
