"""The two state machines: mirrors, faults, staleness, amplification."""

import numpy as np
import pytest

from aqg.core.arrays import to_arrays
from aqg.core.grids import Grid
from aqg.core.messages import DenseUpload, Skip, Upload
from aqg.core.recipes import RECIPES, make_recipe
from aqg.core.round import init_client, respond
from aqg.core.server import (
    broadcast,
    finish_round,
    init_server,
    take_message,
)
from aqg.errors import MessageError

SIZE = 30


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e30])
def test_a_bad_gradient_is_reported_and_changes_nothing(name, bad):
    recipe = make_recipe(name)
    rng = np.random.default_rng(0)
    state = init_client(recipe, SIZE, np.dtype("float64"))
    state, _ = respond(recipe, state, rng.standard_normal(SIZE), 0.0, (0, 0, 1))
    before = to_arrays(state)
    gradient = rng.standard_normal(SIZE)
    gradient[7] = bad
    after, message = respond(recipe, state, gradient, 0.0, (0, 0, 2))
    assert isinstance(message, Skip)
    assert message.fault is not None
    assert ("1 non-finite" in message.fault) == (not np.isfinite(bad))
    for key, value in to_arrays(after).items():
        assert np.array_equal(value, before[key])


@pytest.mark.parametrize("name", ["lag", "laq", "aqg", "aqg-2", "lean"])
def test_a_silent_client_must_speak_after_max_staleness_rounds(name):
    recipe = make_recipe(name, max_staleness=5)
    gradient = np.random.default_rng(1).standard_normal(SIZE)
    state = init_client(recipe, SIZE, np.dtype("float64"))
    spoke = []
    for k in range(1, 14):
        state, message = respond(recipe, state, gradient, 1e9, (0, 0, k))
        spoke.append(not isinstance(message, Skip))
    # Five silent rounds, then a forced upload, again and again.
    assert spoke == [False] * 5 + [True] + [False] * 5 + [True] + [False]


def upload(size=SIZE, level=2):
    return Upload(np.full(size, level, np.uint8), 0.5, 2, Grid.MIDTREAD)


def test_server_refuses_a_bad_message_and_keeps_its_state():
    recipe = make_recipe("lean")
    state = init_server(recipe, np.zeros(SIZE), 3)
    state = take_message(recipe, state, 1, upload())
    with pytest.raises(MessageError, match="client 2 sent 29 coordinates; the model has 30"):
        take_message(recipe, state, 2, upload(29))
    with pytest.raises(MessageError, match="level 3 is not below 3"):
        take_message(recipe, state, 2, upload(level=3))
    with pytest.raises(MessageError, match="NaN"):
        take_message(recipe, state, 2, DenseUpload(np.full(SIZE, np.nan, np.float32)))
    assert np.array_equal(state.mirror(1), np.full(SIZE, 0.5))
    assert np.array_equal(state.model.total, np.full(SIZE, 0.5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, "width 0 is outside 1..16"),
        ({"step": 0.3}, "step 0.3 is not a bfloat16"),
        ({"step": float("nan")}, "step nan"),
        ({"levels": np.zeros((2, 2), np.uint8)}, r"levels are uint8 of shape \(2, 2\)"),
        ({"levels": np.zeros(4, np.uint16)}, r"levels are uint16 .*; they must be uint8"),
    ],
)
def test_uploads_check_their_parts(changes, message):
    parts = {"levels": np.zeros(4, np.uint8), "step": 0.5, "width": 2, "grid": Grid.MIDTREAD}
    with pytest.raises(MessageError, match=message):
        Upload(**{**parts, **changes})


def test_server_steps_along_the_sum_and_reports_its_movement():
    recipe = make_recipe("laq")
    state = init_server(recipe, np.zeros(2), num_clients=2)
    assert broadcast(recipe, state).movement == 0.0
    for client in range(2):
        message = Upload(np.array([3, 0], np.uint8), 1.0, 2, Grid.MIDRISE)  # +1.5, -1.5
        state = take_message(recipe, state, client, message)
    state = finish_round(recipe, state, step_size=0.1)
    assert state.parameters.tolist() == pytest.approx([-0.3, 0.3])
    # (1/α²M²)·ξ_1·‖θ² − θ¹‖² with ξ_1 = 1/10
    assert broadcast(recipe, state).movement == pytest.approx(0.1 * (0.3**2 * 2) / (0.1**2 * 4))
    # Nobody speaks: the server goes on with what it knows.
    again = finish_round(recipe, state, step_size=0.1)
    assert again.parameters.tolist() == pytest.approx([-0.6, 0.6])


def test_augmented_amplifies_the_sum_but_not_the_mirrors():
    recipe = make_recipe("aqg-augmented")
    state = init_server(recipe, np.zeros(SIZE), 1)
    state = take_message(recipe, state, 0, upload())
    stepped = finish_round(recipe, state, step_size=1.0, dropout_rate=0.75)
    assert stepped.parameters.tolist() == [-2.0] * SIZE
    assert stepped.mirror(0).tolist() == [0.5] * SIZE


def test_memoryless_uploads_are_used_once():
    recipe = make_recipe("signsgd")
    state = init_server(recipe, np.zeros(SIZE), 2)
    state = finish_round(recipe, take_message(recipe, state, 0, upload()), step_size=1.0)
    assert state.parameters.tolist() == [-0.5] * SIZE
    assert finish_round(recipe, state, step_size=1.0).parameters.tolist() == [-0.5] * SIZE
