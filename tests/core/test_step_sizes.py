"""Steps that set themselves: the formula, its start, noise, and what is stored of them."""

import math
from dataclasses import replace

import numpy as np
import pytest

from aqg.core.grids import round_up_to_bfloat16
from aqg.core.optimizers import SGD, Momentum
from aqg.core.quantizers import Request
from aqg.core.recipes import make_recipe
from aqg.core.server import Model, Step, init_server, publish_round, take_message
from aqg.core.space import NumpySpace
from aqg.core.step_sizes import DistanceOverGradients, Fixed, resolve_step
from aqg.core.types import from_arrays, to_arrays
from aqg.errors import ConfigError

SPACE = NumpySpace()
SIZE = 100


def fits_bfloat16(number):
    return 0 < number < math.inf and round_up_to_bfloat16(number) == number


REQUEST = Request(width=2, step=0.0, squared_norm=0.0, key=(0, 0, 0))


def steps_of(rule, start, updates, natural=0.01):
    """Return the lengths of the steps that a rule takes with given updates, and its last state."""
    params, state, steps = start, rule.init(start), []
    for update in updates:
        state, step_size = rule.next(SPACE, state, params, update, natural)
        params = params - step_size * update
        steps.append(step_size)
    return steps, state


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 1e4])
def test_the_formula_is_that_of_distance_over_gradients(scale):
    rule, rng = DistanceOverGradients(first=0.3, widest=5.0), np.random.default_rng(5)
    params = start = scale * rng.normal(size=SIZE)
    state = rule.init(params)
    energy, reach = 0.0, None
    for _ in range(20):
        update = rng.normal(size=SIZE) - 1.0
        state, step_size = rule.next(SPACE, state, params, update, 0.01)
        energy += sum(x * x for x in update)
        if reach is None:
            natural = 0.01 * math.sqrt(energy)
            reach = min(0.3 * np.linalg.norm(start), 5.0 * natural) if scale else natural
        reach = max(reach, float(np.linalg.norm(params - start)))
        exact = reach / math.sqrt(energy)
        assert exact * (1 - 1e-12) <= step_size <= exact * (1 + 2**-7)
        assert fits_bfloat16(step_size)
        params = params - step_size * update


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0.0, 0.01), (0.1, 0.2 * 0.1), (0.3, 0.2 * 0.3), (1e3, 16 * 0.01)],
    ids=["no length", "short", "longer", "pretrained"],
)
def test_the_first_step_is_a_part_of_the_model_or_some_natural_ones(size, expected):
    (found,), _ = steps_of(DistanceOverGradients(), np.full(SIZE, size), [np.ones(SIZE)])
    assert expected <= found * (1 + 1e-12) <= expected * (1 + 2**-6)


def test_swings_shrink_steps_noise_does_not_and_agreement_makes_them_grow():
    """What is taken back gets the model nowhere; a walk at random comes as far as it is long."""
    rng, start, count = np.random.default_rng(3), np.full(5000, 10.0), 64
    rule, by_number = DistanceOverGradients(), np.arange(1, count + 1) ** -0.5
    swings, _ = steps_of(rule, start, [(-1.0) ** k * np.ones(5000) for k in range(count)])
    assert swings / by_number == pytest.approx(np.full(count, swings[0]), rel=0.01)
    noise, _ = steps_of(rule, start, rng.normal(size=(count, 5000)))
    assert noise[2:] == pytest.approx([noise[0] / math.sqrt(2)] * (count - 2), rel=0.05)
    same, _ = steps_of(rule, start, [np.ones(5000)] * count)
    assert same[-1] > 4 * same[0]


@pytest.mark.parametrize("natural", [0.001, 0.1, 3.0, 30.0, 1e4])
def test_any_natural_step_is_trained_with(natural):
    """Also beyond 2/L, where fixed steps run away."""
    rule, params = DistanceOverGradients(), np.random.default_rng(1).normal(size=SIZE)
    state = rule.init(params)
    first = np.linalg.norm(params - 1)
    for _ in range(300):
        state, step_size = rule.next(SPACE, state, params, params - 1.0, natural)
        params = params - step_size * (params - 1.0)
    assert np.linalg.norm(params - 1) < 0.1 * first


def test_updates_of_zeros_change_nothing_and_those_beyond_all_numbers_leave_the_state_finite():
    rule, zeros = DistanceOverGradients(), np.zeros(SIZE)
    state = rule.init(zeros)
    after, step_size = rule.next(SPACE, state, zeros, zeros, 0.1)
    assert after is state
    assert 0.1 <= step_size <= 0.1 * (1 + 2**-7)
    with np.errstate(over="ignore", invalid="ignore"):
        for length in (1.0, 1e200, math.nan, math.inf, 1e-200, 1.0):
            state, step_size = rule.next(SPACE, state, zeros, zeros + length, 0.1)
            assert math.isfinite(state.reach + state.energy)
            assert fits_bfloat16(step_size)
        state, step_size = rule.next(SPACE, state, zeros + math.nan, zeros + 1, 0.1)
    assert math.isfinite(state.reach)
    assert fits_bfloat16(step_size)


def test_the_mean_is_that_of_the_last_ninth_of_the_models():
    """Weights of the formula, a mean that no step begins with, and none where none is asked for."""
    recipe, rng = make_recipe("stc:keep=0.1"), np.random.default_rng(9)
    for rule, gamma in ((DistanceOverGradients(), 8.0), (Fixed(average=3.0), 3.0), (Fixed(), 0.0)):
        step = Step(0.1, rule=rule)
        without = step._replace(rule=replace(rule, average=0.0))
        state = init_server(recipe, rng.normal(size=SIZE), 1, step)
        plain = init_server(recipe, state.parameters, 1, without)
        models = []
        for _ in range(30):
            upload = recipe.quantizer.quantize(rng.normal(size=SIZE), REQUEST)
            state, plain = (take_message(recipe, one, 0, upload) for one in (state, plain))
            state, _ = publish_round(recipe, state, step)
            plain, _ = publish_round(recipe, plain, without)
            models.append(state.parameters)
            assert np.array_equal(state.parameters, plain.parameters)
        expected = models[0]
        for count, model in enumerate(models[1:], start=2):
            weight = (gamma + 1) / (gamma + count) if gamma else 1
            expected = (1 - weight) * expected + weight * model
        assert np.allclose(state.averaged, expected, rtol=1e-12)
        assert np.allclose(state.averaged, state.parameters) == (gamma == 0)
        arrays = to_arrays(state.model)
        assert np.array_equal(from_arrays(Model, arrays).averaged, state.averaged)


def test_a_state_for_another_rule_is_refused():
    recipe = make_recipe("stc")
    state = init_server(recipe, np.zeros(SIZE), 1)
    with pytest.raises(ConfigError, match="not made for the step 'dog'"):
        publish_round(recipe, state, Step(0.1, rule=DistanceOverGradients()))


@pytest.mark.parametrize(
    ("recipe", "are_exact", "rule"),
    [
        ("auto", False, DistanceOverGradients(average=8.0, first=0.2, widest=16.0)),
        ("stc", False, DistanceOverGradients()),
        ("qsgd", False, DistanceOverGradients()),
        ("auto", True, Fixed()),
        ("gd", False, Fixed()),
        ("laq", False, Fixed()),
    ],
)
def test_auto_is_the_recipes_own(recipe, are_exact, rule):
    assert resolve_step("auto", make_recipe(recipe), are_exact, SGD()) == rule
    assert resolve_step("auto", make_recipe(recipe), are_exact, Momentum()) == Fixed()
    assert resolve_step("fixed", make_recipe(recipe), are_exact, SGD()) == Fixed()
