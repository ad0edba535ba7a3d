"""The two state machines: mirrors, faults, staleness, and what does not fit, which is refused."""

import tracemalloc

import numpy as np
import pytest

import aqg
from aqg.core.arrays import to_arrays
from aqg.core.grids import Grid
from aqg.core.messages import DenseUpload, Skip, Upload
from aqg.core.recipes import RECIPES, make_recipe
from aqg.core.round import respond
from aqg.core.server import take_message
from aqg.errors import ConfigError, GradientError, MessageError, WireError
from aqg.exchange import broadcast, client_step, finish_round, init_client, init_server, receive

SIZE = 12


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
    with pytest.raises(MessageError, match="client 2 sent 11 coordinates; the model has 12"):
        take_message(recipe, state, 2, upload(11))
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


LEAN = make_recipe("lean")


def start(name="lean", num_clients=3):
    recipe = make_recipe(name)
    client = init_client(recipe, SIZE, "float64")
    return recipe, client, init_server(recipe, np.zeros(SIZE), num_clients)


@pytest.mark.parametrize("name", ["lean", "qsgd", "stc", "auto", "gd", "ef21-m"])
@pytest.mark.parametrize(
    ("gradient", "complaint"),
    [
        (np.ones(1), "gradient has 1 values, the client's state is for 12"),
        (np.ones(13), "gradient has 13 values"),
        (np.float64(1.0), "a gradient is a NumPy array, not float64"),
        (np.array(1.0), r"of shape \(n,\), not \(\)"),
        (np.ones((1, SIZE)), r"of shape \(n,\), not \(1, 12\)"),
        ([1.0] * SIZE, "a gradient is a NumPy array, not list"),
        (None, "a gradient is a NumPy array, not NoneType"),
        (np.ones(SIZE, np.float16), "gradient is float16, the client's state float64"),
        (np.ones(SIZE, np.float32), "gradient is float32, the client's state float64"),
        (np.ones(SIZE, np.int64), "gradient is int64"),
    ],
)
def test_bad_gradients(name, gradient, complaint):
    recipe, client, server = start(name)
    with pytest.raises(GradientError, match=complaint):
        client_step(recipe, client, gradient, broadcast(recipe, server))


BAD = {
    "client": (-1, 3, 10**9, 0.0, "0", None, True),
    "weight": (np.nan, np.inf, "1", None),
    "frame": (None, "frame", 7, b"", b"\xff", [1, 2]),
}
COMPLAINTS = {
    "client": (MessageError, r"it must be a whole number in 0\.\.2"),
    "weight": (MessageError, "weight of client 1 is"),
    "frame": (WireError, None),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_what_a_server_is_told(name, value):
    recipe, state, server = start()
    _, frame = client_step(recipe, state, np.ones(SIZE), broadcast(recipe, server))
    error, complaint = COMPLAINTS[name]
    with pytest.raises(error, match=complaint):
        receive(recipe, server, **{"client": 1, "frame": frame, "weight": 1.0, name: value})
    assert server.num_clients == 3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"step_size": np.nan}, "step_size is nan"),
        ({"step_size": np.inf}, "step_size is inf"),
        ({"step_size": "0.1"}, "step_size is '0.1'"),
        ({"step_size": 0.1, "dropout_rate": 1.0}, "dropout_rate is 1.0"),
        ({"step_size": 0.1, "sampled": 0.0}, "sampled is 0.0"),
    ],
)
def test_bad_steps(arguments, complaint):
    recipe, _, server = start()
    with pytest.raises(ConfigError, match=complaint):
        finish_round(recipe, server, **arguments)


@pytest.mark.parametrize("name", ["lean", "qsgd", "auto"])
def test_the_same_upload_counts_once(name):
    recipe, client, server = start(name)
    _, frame = client_step(recipe, client, np.ones(SIZE), broadcast(recipe, server))
    server = receive(recipe, server, 1, frame)
    heard = server.model.total.copy()
    with pytest.raises(MessageError, match="client 1 has sent a message in round 1 already"):
        receive(recipe, server, 1, frame)
    assert np.array_equal(server.model.total, heard)
    server = finish_round(recipe, server, 0.1)
    receive(recipe, server, 1, aqg.encode(aqg.Skip()))


@pytest.mark.parametrize("message", [None, b"", "skip", 3, np.ones(SIZE)])
def test_what_is_no_message(message):
    with pytest.raises(MessageError, match="no message"):
        aqg.encode(message)
    recipe, _, server = start()
    with pytest.raises(MessageError, match=r"client 0 sent a .*, which is no message"):
        take_message(recipe, server, 0, message)


@pytest.mark.parametrize("length", [3.0, "3", None, True, -1])
def test_bad_lengths_of_frames(length):
    with pytest.raises(WireError, match="expected_length is"):
        aqg.decode(aqg.encode(aqg.Skip()), length)


def test_no_clients_and_no_parameters():
    for count in (0, -1, 2.0, None):
        with pytest.raises(ConfigError, match="num_clients is"):
            init_server(LEAN, np.zeros(SIZE), count)
    for parameters in (np.zeros((2, 2)), np.zeros(0), [0.0], None, 0.0):
        with pytest.raises(ConfigError, match="parameters are"):
            init_server(LEAN, parameters, 1)
    for dtype in ("float16", "int64"):
        with pytest.raises(ConfigError, match=f"dtype is {dtype}; choose from float32, float64"):
            init_server(LEAN, np.zeros(SIZE, dtype), 1)
        with pytest.raises(ConfigError, match=f"dtype is {dtype}"):
            init_client(LEAN, SIZE, dtype)
    for count in (0, -3, 2.5):
        with pytest.raises(ConfigError, match="num_params is"):
            init_client(LEAN, count)
    with pytest.raises(MessageError, match="news is a float"):
        client_step(LEAN, init_client(LEAN, SIZE), np.zeros(SIZE, np.float32), 0.5)


@pytest.mark.parametrize("name", ["lean", "auto", "stc", "ef21-m", "clag", "gd", "onebit"])
def test_inputs_are_never_changed(name):
    recipe, client, server = start(name)
    rng = np.random.default_rng(0)
    for _ in range(6):
        gradient = rng.standard_normal(SIZE)
        gradient.flags.writeable = False
        news = broadcast(recipe, server)
        held = [to_arrays(client), to_arrays(server.model)]
        saved = [{name: np.copy(value) for name, value in arrays.items()} for arrays in held]
        after, frame = client_step(recipe, client, gradient, news)
        after_server = receive(recipe, server, 0, frame)
        for arrays, copies in zip(held, saved, strict=True):
            assert all(np.array_equal(arrays[name], copies[name]) for name in copies)
        client, server = after, finish_round(recipe, after_server, 0.1)


def test_a_server_that_lost_a_frame_refuses_the_next_one_that_leans_on_it():
    """Uploads are coded with the mirror both ends hold: another mirror is noticed."""
    recipe = make_recipe("qgd")
    base = np.random.default_rng(1).standard_normal(4000)
    client = init_client(recipe, 4000, "float64")
    server = init_server(recipe, np.zeros(4000), 1)
    for number in range(6):
        news = broadcast(recipe, server)
        client, frame = client_step(recipe, client, base * 0.5**number, news)
        if number == 5:
            with pytest.raises(WireError, match="written with another reference"):
                receive(recipe, server, 0, frame)
        elif number != 4:  # lost
            server = receive(recipe, server, 0, frame)
        server = finish_round(recipe, server, 0.01)


def test_a_message_costs_the_same_for_any_number_of_clients():
    recipe = make_recipe("lean")
    client = init_client(recipe, 1000, "float32")
    peaks = {}
    for num_clients in (10, 100_000):
        server = init_server(recipe, np.zeros(1000, np.float32), num_clients)
        news = broadcast(recipe, server)
        _, message = respond(recipe, client, np.ones(1000, np.float32), news.movement, (0, 0, 1))
        server = take_message(recipe, server, 1, message)
        tracemalloc.start()
        take_message(recipe, server, num_clients - 1, message)
        peaks[num_clients] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[100_000] < peaks[10] + 20_000  # a row, not a list of all clients


def test_clients_without_a_mirror_take_no_memory():
    recipe = make_recipe("stc")
    tracemalloc.start()
    server = init_server(recipe, np.zeros(1000, np.float32), 1_000_000)
    frame = aqg.encode(aqg.Skip())
    for client in range(0, 1_000_000, 100_000):
        server = receive(recipe, server, client, frame)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used < 500_000
