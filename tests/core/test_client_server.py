"""The two state machines: mirrors, faults, staleness, and what does not fit, which is refused."""

import tracemalloc

import numpy as np
import pytest

import aqg
from aqg.core.grids import Grid
from aqg.core.messages import DenseUpload, Skip, Upload
from aqg.core.recipes import RECIPES, make_recipe
from aqg.core.round import respond
from aqg.core.server import take_message
from aqg.core.types import to_arrays
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
def test_a_client_must_upload_after_max_staleness_rounds(name):
    recipe = make_recipe(name, max_staleness=5)
    gradient = np.random.default_rng(1).standard_normal(SIZE)
    state = init_client(recipe, SIZE, np.dtype("float64"))
    sent = []
    for k in range(1, 14):
        state, message = respond(recipe, state, gradient, 1e9, (0, 0, k))
        sent.append(not isinstance(message, Skip))
    # Five rounds without, then a forced upload, again and again.
    assert sent == [False] * 5 + [True] + [False] * 5 + [True] + [False]


def upload(size=SIZE, level=2):
    return Upload(np.full(size, level, np.uint8), 0.5, 2, Grid.MIDTREAD)


def uploaded(**changes):
    levels = np.zeros(4, np.uint8)
    return Upload(**{"levels": levels, "step": 0.5, "width": 2, "grid": Grid.MIDTREAD, **changes})


@pytest.mark.parametrize(
    ("name", "dropout_rate", "after_one", "after_two"),
    [("signsgd", 0.0, -0.5, -0.5), ("lean", 0.0, -0.5, -1.0), ("aqg-augmented", 0.75, -2.0, -4.0)],
)
def test_sums_are_amplified_and_used_once_or_kept(name, dropout_rate, after_one, after_two):
    """A mirror is what was sent, whatever the step."""
    recipe = make_recipe(name)
    state = take_message(recipe, init_server(recipe, np.zeros(SIZE), 2), 0, upload())
    for expected in after_one, after_two:
        state = finish_round(recipe, state, 1.0, dropout_rate)
        assert state.parameters.tolist() == [expected] * SIZE
    assert state.mirror(0).tolist() == ([] if name == "signsgd" else [0.5] * SIZE)


LEAN = make_recipe("lean")
CLIENT, SERVER = init_client(LEAN, SIZE, "float64"), init_server(LEAN, np.zeros(SIZE), 3)
NEWS = broadcast(LEAN, SERVER)
_, FRAME = client_step(LEAN, CLIENT, np.ones(SIZE), NEWS)


def answer(gradient):
    return client_step(LEAN, CLIENT, gradient, NEWS)


def take(message):
    return take_message(LEAN, SERVER, 0, message)


def told(client=1, frame=FRAME, weight=1.0):
    return receive(LEAN, SERVER, client, frame, weight)


def finish(*arguments):
    return finish_round(LEAN, SERVER, *arguments)


def begin(parameters, num_clients=1):
    return init_server(LEAN, parameters, num_clients)


def client_of(*arguments):
    return init_client(LEAN, *arguments)


def length_is(length):
    return aqg.decode(aqg.encode(aqg.Skip()), length)


LEVELS = {"levels": np.zeros((2, 2), np.uint8)}, {"levels": np.zeros(4, np.uint16)}
NAN = np.full(SIZE, np.nan, np.float32)
# What does what; on what arguments; what the error says.
REFUSED = [
    (answer, (np.ones(1),), "gradient has 1 values, the client's state is for 12"),
    (answer, (np.ones(13),), "gradient has 13 values"),
    (answer, (np.float64(1.0),), "a gradient is a NumPy array, not float64"),
    (answer, (np.array(1.0),), r"of shape \(n,\), not \(\)"),
    (answer, (np.ones((1, SIZE)),), r"of shape \(n,\), not \(1, 12\)"),
    (answer, ([1.0] * SIZE,), "a gradient is a NumPy array, not list"),
    (answer, (np.ones(SIZE, np.float16),), "gradient is float16, the client's state float64"),
    (answer, (np.ones(SIZE, np.int64),), "gradient is int64"),
    (take, (upload(11),), "client 0 sent 11 coordinates; the model has 12"),
    (take, (upload(level=3),), "level 3 is not below 3"),
    (take, (DenseUpload(NAN),), "NaN"),
    *((take, (m,), r"client 0 sent a .*, which is no message") for m in (None, b"", np.ones(3))),
    *((aqg.encode, (m,), "no message") for m in (None, b"", "skip", 3, np.ones(SIZE))),
    *((told, (m,), r"whole number in 0\.\.2") for m in (-1, 3, 10**9, 0.0, "0", None, True)),
    *((told, (1, FRAME, w), "weight of client 1 is") for w in (np.nan, np.inf, "1", None)),
    *((told, (1, frame), None) for frame in (None, "frame", 7, b"", b"\xff", [1, 2])),
    *((length_is, (n,), "expected_length is") for n in (3.0, "3", None, True, -1)),
    *((finish, (size,), f"step_size is {size!r}") for size in (np.nan, np.inf, "0.1")),
    (finish, (0.1, 1.0), "dropout_rate is 1.0"),
    (finish, (0.1, 0.0, 0.0), "sampled is 0.0"),
    *((begin, (np.zeros(SIZE), count), "num_clients is") for count in (0, -1, 2.0, None)),
    *((begin, (p,), "parameters are") for p in (np.zeros((2, 2)), np.zeros(0), [0.0], None, 0.0)),
    *((client_of, (count,), "num_params is") for count in (0, -3, 2.5)),
    (client_of, (SIZE, "int64"), "dtype is int64; choose from float32, float64"),
    (begin, (np.zeros(SIZE, "float16"),), "dtype is float16; choose from float32, float64"),
    (lambda news: client_step(LEAN, CLIENT, np.ones(SIZE), news), (0.5,), "news is a float"),
    (lambda: uploaded(width=0), (), "width 0 is outside 1..16"),
    (lambda: uploaded(step=0.3), (), "step 0.3 is not a bfloat16"),
    (lambda: uploaded(step=float("nan")), (), "step nan"),
    (lambda: uploaded(**LEVELS[0]), (), r"levels are uint8 of shape \(2, 2\)"),
    (lambda: uploaded(**LEVELS[1]), (), r"levels are uint16 .*; they must be uint8"),
]


@pytest.mark.parametrize(("function", "arguments", "complaint"), REFUSED)
def test_what_is_refused(function, arguments, complaint):
    """In one line that names the value; the server's state stays as it was."""
    kind = {answer: GradientError, finish: ConfigError, begin: ConfigError, client_of: ConfigError}
    wrong = kind.get(
        function, WireError if complaint in (None, "expected_length is") else MessageError
    )
    with pytest.raises(wrong, match=complaint):
        function(*arguments)
    assert not SERVER.model.total.any()
    assert not any(SERVER.mirror(client).any() for client in range(3))


def test_the_same_upload_counts_once():
    server = told()
    total = server.model.total.copy()
    with pytest.raises(MessageError, match="client 1 has sent a message in round 1 already"):
        receive(LEAN, server, 1, FRAME)
    assert np.array_equal(server.model.total, total)
    receive(LEAN, finish_round(LEAN, server, 0.1), 1, aqg.encode(aqg.Skip()))


@pytest.mark.parametrize("name", ["lean", "auto", "stc", "ef21-m", "clag", "gd", "onebit"])
def test_inputs_are_never_changed(name):
    recipe, rng = make_recipe(name), np.random.default_rng(0)
    client, server = init_client(recipe, SIZE, "float64"), init_server(recipe, np.zeros(SIZE), 3)
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
