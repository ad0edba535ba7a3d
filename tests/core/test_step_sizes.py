"""Steps that set themselves: scale, bounds, a diverging start, and what is stored of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aqg.core.downlink import make_downlink
from aqg.core.hearing import ServerState, hear, init_server, publish_round
from aqg.core.optimizers import SGD, Momentum
from aqg.core.persistence import model_from_arrays, model_to_arrays
from aqg.core.public import advance, init_public
from aqg.core.quantizers import Request
from aqg.core.recipes import make_recipe
from aqg.core.space import NumpySpace
from aqg.core.step_sizes import (
    DistanceOverGradients,
    Fixed,
    StepState,
    is_short,
    make_step,
    resolve_step,
)
from aqg.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.core.types import Float64Array, FloatArray

SPACE = NumpySpace()
SIZE = 100
REQUEST = Request(width=2, step=0.0, squared_norm=0.0, key=(0, 0, 0))


def descend(
    rule: DistanceOverGradients, natural: float, params: Float64Array, rounds: int, scale: float = 1
) -> tuple[Float64Array, list[float]]:
    """Minimize ``scale·‖θ - 1‖²/2`` and return the model and the steps."""
    state: StepState | None = rule.init(params)
    steps = []
    for _ in range(rounds):
        update = scale * (params - 1.0)
        state, step_size = rule.next(SPACE, state, params, update, natural)
        params = params - step_size * update
        steps.append(step_size)
    return params, steps


def test_the_formula_is_that_of_distance_over_gradients() -> None:
    rule = DistanceOverGradients(first=1.0, is_sparse=False, most=100.0)
    rng = np.random.default_rng(5)
    params = start = rng.normal(size=SIZE)
    state: StepState | None = rule.init(params)
    energy, reach = 0.0, None
    for _ in range(20):
        update = rng.normal(size=SIZE) - 1.0
        state, step_size = rule.next(SPACE, state, params, update, 0.01)
        energy += float(update @ update)
        reach = 0.01 * math.sqrt(update @ update) if reach is None else reach
        reach = max(reach, float(np.linalg.norm(params - start)))
        exact = max(0.01, reach / math.sqrt(energy))
        assert exact <= step_size <= exact * (1 + 2**-7)
        assert is_short(step_size)
        params = params - step_size * update


@pytest.mark.parametrize("norm", [0.0, 1e-6, 1.0, 1e6])
def test_the_norm_of_the_starting_model_sets_no_scale(norm: float) -> None:
    """The same updates from another starting model make the same steps."""
    rule, rng = DistanceOverGradients(), np.random.default_rng(3)
    updates = rng.normal(size=(30, SIZE)) - 0.5
    found = []
    for start in (np.zeros(SIZE), norm * rng.normal(size=SIZE)):
        params, steps = start, []
        state: StepState | None = rule.init(params)
        for update in updates:
            state, step_size = rule.next(SPACE, state, params, update, 0.01)
            params = params - step_size * update
            steps.append(step_size)
        found.append(steps)
    assert found[1] == pytest.approx(found[0], rel=2**-6)


def test_sparse_updates_begin_as_if_all_coordinates_moved() -> None:
    update = np.zeros(SIZE)
    update[:4] = 1.0
    rule, params = DistanceOverGradients(first=1.0), np.ones(SIZE)
    _, step_size = rule.next(SPACE, rule.init(params), params, update, 0.5)
    assert step_size == 0.5 * 5
    dense = DistanceOverGradients(first=1.0, is_sparse=False)
    _, step_size = dense.next(SPACE, dense.init(params), params, update, 0.5)
    assert step_size == 0.5


@pytest.mark.parametrize(("size", "expected"), [(2.0, 4.0), (0.25, 1.0), (0.125, 0.5), (0.1, 4.0)])
def test_no_step_moves_coordinates_by_many_times_their_size(size: float, expected: float) -> None:
    """Unless the natural step does: then the size of the model is no measure."""
    update = np.zeros(400 * SIZE)
    update[:400] = 1.0
    rule, params = DistanceOverGradients(first=1.0), np.full(400 * SIZE, size)
    _, step_size = rule.next(SPACE, rule.init(params), params, update, 0.5)
    assert step_size == expected


@pytest.mark.parametrize(
    ("density", "expected"), [(0.001, 16), (0.0049, 1 / 0.07), (0.01, 8), (0.04, 2), (0.2, 1.6)]
)
def test_the_first_step_is_shorter_where_many_coordinates_move(
    density: float, expected: float
) -> None:
    """In large models; and longer again where nearly all move."""
    rule = DistanceOverGradients(first=1.0, most=16.0, jump=1000.0)
    for length, factor in ((100_000, expected), (10_000, min(16, 1 / math.sqrt(density)))):
        update, params = np.zeros(length), np.full(length, 10.0)
        update[: round(density * length)] = 1.0
        _, step_size = rule.next(SPACE, rule.init(params), params, update, 0.5)
        assert step_size == pytest.approx(0.5 * factor, rel=2**-7)
        _, step_size = rule.next(SPACE, rule.init(params), params, np.ones(length), 0.5)
        assert step_size == pytest.approx(0.5 * 3.2, rel=2**-7)


@pytest.mark.parametrize(
    ("num_moved", "factor", "size", "waiting"),
    [
        (900, 0.5, 1.0, range(2, 9)),
        (900, 0.5, 0.05, range(9)),
        (900, 0.5, 0.0, range(2, 9)),
        (900, 1.0, 1.0, ()),
        (900, 1.0, 0.05, range(2)),
        (500, 0.5, 0.05, ()),
    ],
    ids=["weaker", "large", "from zero", "constant", "large and constant", "sparse"],
)
def test_long_steps_wait_while_updates_with_many_coordinates_weaken(
    num_moved: int, factor: float, size: float, waiting: Sequence[int]
) -> None:
    """Natural steps move coordinates by 0.01, or less, of models with parameters of a size."""
    rule, natural = DistanceOverGradients(jump=1000.0), 0.01
    params, update = np.full(30_000, size), np.zeros(30_000)
    update[:num_moved] = 1.0
    state: StepState | None = rule.init(params)
    found = []
    for index in range(9):
        state, step_size = rule.next(SPACE, state, params, update, natural)
        found += [index] if step_size <= 1.26 * (1 + index / 5) * natural else []
        params = params - step_size * update
        update = update * factor
    assert found == list(waiting)


def test_steps_stay_between_the_natural_one_and_a_multiple() -> None:
    params, steps = descend(DistanceOverGradients(), 0.001, np.zeros(SIZE), 500)
    assert min(steps) >= 0.001
    assert max(steps) <= 0.004 * (1 + 2**-7)
    assert np.linalg.norm(params - 1) < 0.3 * np.linalg.norm(np.ones(SIZE))


@pytest.mark.parametrize("factor", [3.0, 30.0, 1e4])
def test_a_diverging_start_is_stepped_back_from(factor: float) -> None:
    """The natural step is beyond 2/L, where fixed steps run away."""
    start = np.zeros(SIZE)
    params, steps = descend(DistanceOverGradients(), factor, start, 300)
    assert np.linalg.norm(params - 1) < 1e-3
    assert steps[-1] < 2.0
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(300):
            start = start - factor * (start - 1)
    assert not np.linalg.norm(start - 1) < 1e3


def test_a_round_in_which_many_more_answer_is_no_divergence() -> None:
    rule, params = DistanceOverGradients(), np.zeros(SIZE)
    state: StepState | None = rule.init(params)
    for senders in (1, 10, 10, 1, 10):
        update = senders * np.ones(SIZE)
        state, step_size = rule.next(SPACE, state, params, update, 0.01)
        params = params - step_size * update
        assert state is not None
        assert state.scale == 1.0


def test_rounds_without_an_update_change_nothing() -> None:
    rule, zeros = DistanceOverGradients(), np.zeros(SIZE)
    before = rule.init(zeros)
    after, step_size = rule.next(SPACE, before, zeros, zeros, 0.1)
    assert after is before
    assert 0.1 <= step_size <= 0.1 * (1 + 2**-7)


def test_values_beyond_all_numbers_leave_the_state_finite() -> None:
    rule, zeros = DistanceOverGradients(), np.zeros(SIZE)
    state: StepState | None = rule.init(zeros)
    for length in (1.0, 1e200, 1e-200, 1.0):
        state, step_size = rule.next(SPACE, state, zeros, zeros + length, 0.1)
        assert state is not None
        numbers = (state.reach, state.energy, state.num_updates, state.scale)
        assert all(map(math.isfinite, numbers))
        assert is_short(step_size)


def test_the_mean_is_that_of_the_last_ninth_of_the_models() -> None:
    """Weights of the formula, a mean that no step begins with, and none where none is asked for."""
    recipe, rng = make_recipe("stc:keep=0.1"), np.random.default_rng(9)
    for rule, gamma in ((DistanceOverGradients(), 8.0), (Fixed(average=3.0), 3.0), (Fixed(), 0.0)):
        state: ServerState = init_server(recipe, rng.normal(size=SIZE), 1, rule=rule)
        plain: ServerState = init_server(
            recipe, state.parameters, 1, rule=replace(rule, average=0.0)
        )
        models: list[FloatArray] = []
        for _ in range(30):
            upload = recipe.quantizer.quantize(rng.normal(size=SIZE), REQUEST)
            state, plain = (hear(recipe, one, 0, upload) for one in (state, plain))
            state, _ = publish_round(recipe, state, 0.1, rule=rule)
            plain, _ = publish_round(recipe, plain, 0.1, rule=replace(rule, average=0.0))
            models.append(state.parameters)
            assert np.array_equal(state.parameters, plain.parameters)
        expected = models[-1]
        if gamma:
            expected = models[0]
            for count, model in enumerate(models[1:], start=2):
                weight = (gamma + 1) / (gamma + count)
                expected = (1 - weight) * expected + weight * model
            assert not np.allclose(state.averaged, state.parameters)
        assert np.allclose(state.averaged, expected, rtol=1e-12)
        arrays = model_to_arrays(state.model)
        assert np.array_equal(model_from_arrays(arrays).averaged, state.averaged)


@pytest.mark.parametrize("downlink", ["exact", "condensed"])
def test_followers_reach_the_servers_model(downlink: str) -> None:
    recipe, rule = make_recipe("stc:keep=0.1"), DistanceOverGradients()
    kind, rng = make_downlink(downlink), np.random.default_rng(8)
    state: ServerState = init_server(recipe, rng.normal(size=SIZE), 3, SGD(), kind, rule)
    public = init_public(recipe, state.parameters, SGD())
    seen = set()
    for number in range(12):
        for client in range(3):
            upload = recipe.quantizer.quantize(rng.normal(size=SIZE), REQUEST)
            state = hear(recipe, state, client, upload)
        state, entry = publish_round(recipe, state, 0.1, downlink=kind, rule=rule)
        assert (entry.rates is None) == (number > 0)
        public = advance(public, entry, recipe.movement, SGD())
        assert public.parameters.tobytes() == state.parameters.tobytes()
        assert public.rates is not None
        seen.add(public.rates.step_size)
    assert len(seen) > 3


def test_a_state_for_another_rule_is_refused() -> None:
    recipe = make_recipe("stc")
    state = init_server(recipe, np.zeros(SIZE), 1)
    with pytest.raises(ConfigError, match="not made for the step 'dog'"):
        publish_round(recipe, state, 0.1, rule=DistanceOverGradients())


@pytest.mark.parametrize(
    ("recipe", "are_exact", "rule"),
    [
        ("auto", False, DistanceOverGradients()),
        ("stc", False, DistanceOverGradients()),
        ("qsgd", False, DistanceOverGradients(first=4.0, is_sparse=False)),
        ("auto", True, Fixed()),
        ("gd", False, Fixed()),
        ("laq", False, Fixed()),
    ],
)
def test_auto_suits_the_recipe(recipe: str, are_exact: bool, rule: object) -> None:
    assert resolve_step("auto", make_recipe(recipe), are_exact, SGD()) == rule
    assert resolve_step("auto", make_recipe(recipe), are_exact, Momentum()) == Fixed()
    assert resolve_step("fixed", make_recipe(recipe), are_exact, SGD()) == Fixed()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("long", "unknown step 'long'; choose from auto, fixed, dog"),
        ("dog:rho=1", "step 'dog' has no option 'rho'; it has: average, first"),
        ("dog:most=x", "option most of step 'dog' is 'x', not a number"),
        ("dog:most=0.5", "most is 0.5; it must be at least 1 and finite"),
        ("dog:first=0", "first is 0.0; it must be above 0 and finite"),
        ("fixed:most=1", "step 'fixed' has no option 'most'; it has: average"),
        ("fixed:average=-1", "average is -1.0; it must be at least 0 and finite"),
    ],
)
def test_bad_settings_are_named(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_step(spec)


def test_only_bfloat16_numbers_are_short() -> None:
    assert not any(map(is_short, (0.1, 0.0, -0.5, math.inf, math.nan, 2.0**125)))
    assert is_short(2.0**-20)
