"""L and μ against dense Hessians, and the local curvature against theirs."""

from __future__ import annotations

import numpy as np
import pytest

from aqg.errors import ConfigError
from aqg.objectives import make_objective
from aqg.sim.problem import Problem, Samples
from aqg.studies.theory.constants import global_constants, local_curvature

from tests.problems import tiny_problem


def make_problem(model, scaling, num_classes=3, l2=0.05):
    random = np.random.default_rng(5)
    objective = make_objective(model, 4, num_classes, l2, scaling)
    clients = tuple(
        Samples(
            random.standard_normal((size, 4)) * [1, 2, 0.5, 1],
            random.integers(0, num_classes, size),
        )
        for size in (7, 12, 9)
    )
    return Problem(objective, clients, objective.init_params(1))


def dense_hessian(problem, params, weights, step=1e-5):
    def gradient(at):
        pairs = zip(problem.clients, weights, strict=True)
        return sum(w * problem.objective.losses_and_gradients(at, *c)[1] for c, w in pairs)

    units = np.eye(len(params)) * step
    columns = [(gradient(params + u) - gradient(params - u)) / (2 * step) for u in units]
    hessian = np.column_stack(columns)
    return (hessian + hessian.T) / 2


WEIGHTS = np.array([0.75, 1.5, 0.75])


@pytest.mark.parametrize("scaling", ["mean", "sum"])
def test_logistic_constant_is_the_curvature_at_zero(scaling):
    problem = make_problem("logistic", scaling, num_classes=2)
    constants = global_constants(problem, WEIGHTS)
    values = np.linalg.eigvalsh(dense_hessian(problem, np.zeros(4), WEIGHTS))
    assert constants.smoothness == pytest.approx(values[-1], rel=1e-6)
    assert constants.strong_convexity == pytest.approx(0.05 * 3)


@pytest.mark.parametrize("scaling", ["mean", "sum"])
@pytest.mark.parametrize(("model", "num_classes"), [("logistic", 2), ("softmax", 3)])
def test_no_model_is_more_or_less_curved(model, num_classes, scaling):
    problem = make_problem(model, scaling, num_classes)
    constants = global_constants(problem, WEIGHTS)
    random = np.random.default_rng(0)
    for scale in (0.0, 0.3, 3.0, 30.0):
        params = scale * random.standard_normal(problem.objective.num_params)
        values = np.linalg.eigvalsh(dense_hessian(problem, params, WEIGHTS))
        assert values[-1] <= constants.smoothness * (1 + 1e-6)
        assert values[0] >= constants.strong_convexity - 1e-6


def test_softmax_constants_are_approached():
    problem = make_problem("softmax", "mean")
    constants = global_constants(problem, WEIGHTS)
    params = np.zeros(problem.objective.num_params)
    params[-3:] = [20.0, 20.0, 0.0]  # two classes share everything, by their biases alone
    values = np.linalg.eigvalsh(dense_hessian(problem, params, WEIGHTS))
    assert values[-1] == pytest.approx(constants.smoothness, rel=1e-5)
    params[-3:] = [40.0, 0.0, 0.0]  # one class has it all
    values = np.linalg.eigvalsh(dense_hessian(problem, params, WEIGHTS))
    assert values[-1] == pytest.approx(constants.strong_convexity, rel=1e-4)


@pytest.mark.parametrize("model", ["logistic", "softmax", "mlp:3"])
@pytest.mark.parametrize("scaling", ["mean", "sum"])
def test_local_curvature_is_the_hessians(model, scaling):
    problem = make_problem(model, scaling, 2 if model == "logistic" else 3)
    params = problem.initial_params + 0.1
    curvature = local_curvature(problem, params, WEIGHTS)
    values = np.linalg.eigvalsh(dense_hessian(problem, params, WEIGHTS))
    assert curvature.largest == pytest.approx(values[-1], rel=1e-3)
    assert curvature.smallest == pytest.approx(values[0], abs=1e-3 * values[-1])


def test_a_network_has_no_global_constants():
    assert global_constants(make_problem("mlp:3", "mean"), WEIGHTS) is None


def test_float32_samples_and_wrong_weights():
    single, double = tiny_problem("float32"), tiny_problem("float64")
    weights = np.ones(4)
    assert global_constants(single, weights).smoothness == pytest.approx(
        global_constants(double, weights).smoothness, rel=1e-5
    )
    with pytest.raises(ConfigError, match="3 weights for 4 clients"):
        global_constants(double, np.ones(3))
