"""L and μ against dense Hessians, Lemma 1 against a search, V along runs, and ``aqg theory``."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqg.cli.app import run_app
from aqg.contrib import theory
from aqg.contrib.theory import global_constants, local_curvature, step_weights, watch_run
from aqg.core.policies import Always
from aqg.core.recipe import Movement
from aqg.core.recipes import make_recipe
from aqg.errors import ConfigError
from aqg.objectives.optimum import find_optimum
from aqg.sim.engine import FastSimulation

from papers import lemmas
from tests.problems import tiny_problem

RHOS1 = np.geomspace(1e-6, 0.9, 12)
RHOS2 = np.concatenate([np.geomspace(1e-2, 1e2, 100), np.linspace(0.45, 0.55, 101)])


def found_by_search(alpha, weights, smoothness):
    pairs = itertools.product(RHOS1, RHOS2)
    return any(lemmas.inequalities_hold(alpha, weights, smoothness, *pair) for pair in pairs)


@pytest.mark.parametrize("weight_sum", [0.02, 0.1, 0.16])
@pytest.mark.parametrize("smoothness", [0.3, 50.0])
def test_the_largest_step_size_is_what_a_search_finds(weight_sum, smoothness):
    weights = np.array([4.0, 3, 2, 1]) * weight_sum / 10
    largest = theory.largest_step_size(weight_sum, smoothness)
    assert found_by_search(0.95 * largest, weights, smoothness)
    assert not found_by_search(1.0001 * largest, weights, smoothness)
    # No step size fits the paper's weights.
    assert theory.largest_step_size(1.0, 1.0) == 0
    assert not found_by_search(1e-6, (0.1,) * 10, 1.0)
    assert not found_by_search(1e-6, (1 / 60 + 1e-4,) * 10, 1.0)
    assert found_by_search(1e-6, (1 / 60 - 1e-3,) * 10, 1.0)


@pytest.mark.parametrize("rho1", [0.0, 0.1, 0.7])
def test_the_best_rho2_is_the_best(rho1):
    best = lemmas.capacity(rho1, lemmas.best_rho2(rho1))
    assert best >= max(lemmas.capacity(rho1, rho2) for rho2 in RHOS2)
    assert best == pytest.approx((1 - rho1) / (6 - 2 * rho1))


@given(weight_sum=st.floats(0.001, 0.15), part=st.floats(0.05, 0.95), condition=st.floats(1.0, 1e4))
@settings(max_examples=50, deadline=None)
def test_the_contraction_is_the_best_over_rho2(weight_sum, part, condition):
    weights = (weight_sum / 5,) * 5
    smoothness, strong = 2.0, 2.0 / condition
    alpha = part * theory.largest_step_size(weight_sum, smoothness)
    found = theory.contraction(alpha, weights, smoothness, strong)
    load = smoothness * alpha + 2 * weight_sum
    ours = strong * alpha * (1 - 2 * load * (1 + RHOS2))
    theirs = theory.slowest_share(weights) * (0.5 - load / 2 * (1 + 1 / RHOS2))
    by_search = np.max(np.minimum(ours, theirs))
    assert 0 < found < 1
    assert found >= by_search - 1e-12
    assert found <= strong * alpha


EIGENVALUES = np.array([3.0, 1.0, 0.05])
SMOOTHNESS, STRONG = 3.0, 0.05


def descend_with_errors(alpha, weights, num_rounds, seed, fill="zero"):
    """Descend on a quadratic with errors as large as the tolerance allows.

    Return the loss before each round, and the squared length of each round's step.
    """
    movement, random = Movement(tuple(weights), fill), np.random.default_rng(seed)
    point, losses, steps = random.standard_normal(len(EIGENVALUES)), [], []
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


@pytest.mark.parametrize("fill", ["zero", "mean"])
@given(
    weight_sum=st.floats(0.01, 0.99),
    part=st.floats(0.05, 1.0),
    depth=st.integers(1, 10),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_the_wider_region_descends_whatever_the_errors(fill, weight_sum, part, depth, seed):
    """With missing steps filled in, once none is missing."""
    weights = (weight_sum / depth,) * depth
    alpha = part * theory.largest_step_size_within_tolerance(weight_sum, SMOOTHNESS)
    values = run_with_errors(alpha, weights, 60, seed, fill)
    first = depth if fill == "mean" else 0
    assert (np.diff(values[first:]) <= 1e-12 * values.max()).all()


@given(
    shape=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=10),
    early=st.floats(0.1, 0.99),
    part=st.floats(0.05, 1.0),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_with_smaller_weights_the_first_rounds_descend_too(shape, early, part, seed):
    weights = np.array(shape) * early / theory.early_weight_sum(shape)
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
    alpha = part * theory.largest_step_size_within_tolerance(0.3, SMOOTHNESS)
    promised = theory.contraction_within_tolerance(alpha, weights, SMOOTHNESS, STRONG)
    # The promise is for the largest admissible γ, of which the halved weights are a special case.
    gamma = (1 - alpha * SMOOTHNESS) / (2 * 0.3)
    scaled = run_with_errors(alpha, weights, 60, seed)
    assert gamma >= 0.5
    assert scaled[-1] <= 2 * gamma * (1 - promised) ** 59 * scaled[0] * (1 + 1e-9)


def make_problem(model, scaling="mean"):
    return tiny_problem(num_clients=3, l2=0.05, unequal=True, model=model, scaling=scaling)


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
@pytest.mark.parametrize("model", ["logistic", "softmax"])
def test_no_model_is_more_or_less_curved(model, scaling):
    problem = make_problem(model, scaling)
    constants = global_constants(problem, WEIGHTS)
    random = np.random.default_rng(0)
    for scale in (0.0, 0.3, 3.0, 30.0):
        params = scale * random.standard_normal(problem.objective.num_params)
        values = np.linalg.eigvalsh(dense_hessian(problem, params, WEIGHTS))
        assert values[-1] <= constants.smoothness * (1 + 1e-6)
        assert values[0] >= constants.strong_convexity - 1e-6
        if model == "logistic" and not scale:
            assert constants.smoothness == pytest.approx(values[-1], rel=1e-6)
    assert constants.strong_convexity == pytest.approx(0.05 * 3)


def test_softmax_constants_are_approached():
    problem = make_problem("softmax")
    largest, smallest = global_constants(problem, WEIGHTS)
    params = np.zeros(problem.objective.num_params)
    # two classes share everything, by their biases alone; one class has it all
    for biases, expected in ([20.0, 20.0, 0.0], largest), ([40.0, 0.0, 0.0], smallest):
        params[-3:] = biases
        values = np.linalg.eigvalsh(dense_hessian(problem, params, WEIGHTS))
        assert values[-1] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("model", ["logistic", "softmax", "mlp:3"])
@pytest.mark.parametrize("scaling", ["mean", "sum"])
def test_local_curvature_is_the_hessians(model, scaling):
    problem = make_problem(model, scaling)
    params = problem.initial_params + 0.1
    curvature = local_curvature(problem, params, WEIGHTS)
    values = np.linalg.eigvalsh(dense_hessian(problem, params, WEIGHTS))
    assert curvature.largest == pytest.approx(values[-1], rel=1e-3)
    assert curvature.smallest == pytest.approx(values[0], abs=1e-3 * values[-1])


def test_float32_samples_and_numbers_that_make_no_sense():
    single, double = (global_constants(tiny_problem(d), np.ones(4)) for d in ("float32", "float64"))
    assert single.smoothness == pytest.approx(double.smoothness, rel=1e-5)
    with pytest.raises(ConfigError, match="3 weights for 4 clients"):
        global_constants(tiny_problem(), np.ones(3))
    for alpha, smoothness in ((0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)):
        with pytest.raises(ConfigError, match="must be above 0"):
            theory.contraction(alpha, (0.01,), smoothness, 0.1)


@pytest.fixture(scope="module")
def watch():
    """Return a function that runs a recipe and measures V."""
    problem = tiny_problem()
    minimum = find_optimum(problem.objective, problem.clients).value

    def run(recipe, alpha, num_rounds):
        simulation = FastSimulation(problem, recipe, alpha)
        weights = () if recipe.policy == Always(32) else recipe.movement.weights
        return watch_run(simulation, num_rounds, 4, minimum, weights, alpha), minimum

    return run


def test_it_is_the_papers_formula_and_a_diverging_run_ends_the_trace(watch):
    recipe, alpha = make_recipe("laq"), 0.05
    trace, minimum = watch(recipe, alpha, 15)
    simulation = FastSimulation(tiny_problem(), recipe, alpha)
    models, beta = [simulation.parameters.copy()], step_weights(recipe.movement.weights, alpha)
    for k in range(15):
        steps = np.square(np.diff(models, axis=0)).sum(axis=1)[::-1][: len(beta)]
        value = 4 * (simulation.run_round().loss - minimum) + beta[: len(steps)] @ steps
        models.append(simulation.parameters.copy())
        assert trace.values[k] == pytest.approx(value, rel=1e-12)
    trace, _ = watch(make_recipe("gd"), 50.0, 300)  # diverges
    assert np.isfinite(trace.values).all()
    assert trace.decrease_share < 1 or len(trace.values) < 300


def test_lean_inside_its_region_always_descends_and_as_fast_as_promised(watch):
    constants = global_constants(tiny_problem(), np.ones(4))
    recipe = make_recipe("lean:xi=0.5", bits=8)  # with 8 bits the tolerance is always met
    alpha = theory.largest_step_size_within_tolerance(0.5, constants.smoothness)
    assert watch(recipe, alpha, 400)[0].decrease_share == 1.0
    inside = 0.9 * alpha
    promised = theory.contraction_within_tolerance(inside, recipe.movement.weights, *constants)
    assert watch(recipe, inside, 400)[0].fitted_rate <= 1 - promised


@pytest.fixture
def said(capsys):
    """Return a function that runs a command and returns its words, or its rows as JSON."""

    def run(*arguments):
        assert run_app(list(arguments)) == 0
        out = capsys.readouterr().out
        return json.loads(out)["theory"] if "--json" in arguments else " ".join(out.split())

    return run


def test_the_command_on_settings_and_on_a_run(tmp_path, said):
    lean, gd = said("theory", "--recipe", "lean,gd", "--json")
    assert (lean["weight_sum"], lean["largest_guaranteed_alpha"]) == (1.0, 0.0)
    assert not lean["is_guaranteed"]
    assert gd["largest_guaranteed_alpha"] == pytest.approx(1 / (2 * gd["smoothness"]))

    alpha, run = str(0.4 / lean["smoothness"]), str(tmp_path / "run")
    said("run", "--recipe", "lean:xi=0.5", "--alpha", alpha, "--rounds", "30", "--out", run)
    (row,) = said("theory", f"{run}/lean_xi-0.5", "--json")
    assert row["is_guaranteed"]
    assert row["lyapunov"]["decrease_share"] == 1.0
    assert row["lyapunov"]["fitted_rate"] <= row["rate_bound"] < 1
    words = said("theory", run)
    assert "is inside" in words
    assert "did not rise in 100.0%" in words


def test_the_command_says_what_is_outside_the_theory(tmp_path, said, capsys):
    said("run", "--recipe", "gd", "--alpha", "50", "--rounds", "8", "--out", f"{tmp_path}/run")
    assert "the run does not converge" in said("theory", f"{tmp_path}/run/gd")
    words = said("theory", "--model", "mlp:4", "--recipe", "aqg-2", "--set", "dropout=0.5")
    assert "not convex" in words
    assert "the paper's own setting, Σξ = 1, is outside its guarantee" in words
    assert "drop out with probability 0.5" in words
    assert run_app(["theory", "nowhere"]) == 2
    assert "not a run directory" in capsys.readouterr().err


NUMBERS = {"rho1": 0.1, "rho2": 0.5}


def test_theorem_1_asks_for_finer_uploads_than_the_papers():
    """With four bits no P and no rate fit, for any width above one; with enough bits they do."""
    smoothness, convexity, clients, weights = 1.0, 0.5, 2, (1e-4,) * 10
    fewest = theory.fewest_bits_of_theorem_1(clients, smoothness, convexity)
    rate = 1 - 1e-6

    def holds(widths, max_width):
        setting = (0.05, weights, smoothness, convexity, clients, widths, max_width)
        constants = ({"constant": c, "rate": rate, **NUMBERS} for c in np.geomspace(1e-6, 1e6, 200))
        tried = (lemmas.theorem_1(*setting, **numbers) for numbers in constants)
        return any(all(one) for one in tried)

    assert holds((fewest + 8,), fewest + 11)
    assert not holds((fewest + 8,), fewest + 10)  # less than three bits below b_max
    assert not holds((fewest - 1,), 40)
    for width in (1, 2, 3, 4):
        assert not holds((width,), 4)
    # It has a step that is too short as well.
    numbers = {**NUMBERS, "constant": 1.0, "rate": 0.9}
    shortest = 0.5 / (4 * 2.0**2 * 3**2)
    for alpha in (0.99 * shortest, 1.01 * shortest):
        found = lemmas.theorem_1(alpha, (0.01,), 2.0, 0.5, 3, (1,), 8, **numbers)
        assert found.step_is_long == (alpha > shortest)
