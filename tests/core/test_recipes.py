"""The two state machines, one contract for every recipe, ties by hand, and a stage of one's own."""

import tracemalloc
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import aqg
from aqg.cli.app import run_app
from aqg.core.grids import Grid, Innovation
from aqg.core.messages import DenseUpload, Skip, Upload
from aqg.core.policies import (
    Always,
    Case,
    Decision,
    Lazy,
    LazyExact,
    Multilevel,
    Tolerance,
    TwoLevel,
)
from aqg.core.recipe import Recipe
from aqg.core.recipes import RECIPES, make_recipe, register
from aqg.core.round import respond
from aqg.core.server import take_message
from aqg.core.types import to_arrays
from aqg.errors import ConfigError, GradientError, MessageError, WireError
from aqg.exchange import broadcast, client_step, finish_round, init_client, init_server, receive
from aqg.runs import loop
from aqg.sim.engine import FastSimulation
from aqg.sim.reference import ReferenceSimulation
from aqg.sim.training import Dropout, LocalTraining, Training

from tests.commands import shown_on
from tests.problems import SOME_RECIPES, check_engines, check_torch, tiny_problem

# Sign steps have a fixed length, so their step size sets how close they can come; momentum makes
# ten steps of one.
STEP_SIZES = {"signsgd": 0.002, "onebit": 0.02, "qsgd": 0.02, "dgc": 0.01}
# Clients that disagree make the sum of signs a biased direction: SignSGD only comes near.
GAPS = {"signsgd": 0.1}


def simulate(name):
    recipe, step_size = make_recipe(name), STEP_SIZES.get(name, 0.1)
    return ReferenceSimulation(tiny_problem(), recipe, step_size, seed=5)


@cache
def losses_of(name):
    simulation = simulate(name)
    first, *_ = simulation.run_rounds(120)
    return first.loss, simulation.loss()


@pytest.mark.parametrize("name", SOME_RECIPES)
def test_converges(name):
    (start, end), (_, best) = losses_of(name), losses_of("gd")
    assert end - best < GAPS.get(name, 0.05) * (start - best)


def test_users_add_their_own():
    class EveryOther:
        """Sends two bits whenever the innovation is larger than the movement."""

        def decide(self, case):
            send = case.innovation.squared_norm > case.movement
            return Decision(send, np.full(np.shape(send), 2))

    @register("every-other", "a rule of my own")
    def make(bits):
        lean = make_recipe("lean", bits)
        return Recipe(memory=lean.memory, policy=EveryOther(), quantizer=lean.quantizer)

    records = list(simulate("every-other").run_rounds(30))
    assert {w for record in records for w in record.widths} <= {0, 2}
    with pytest.raises(ConfigError, match="must be non-empty, without"):
        register("a,b", "bad name")
    with pytest.raises(ConfigError, match="'lean' exists already"):
        register("lean", "taken")(make)


def innovation(quantized_norm, errors, squared_norm=1.0):
    squared_norm, errors, quantized_norm = map(np.float64, (squared_norm, errors, quantized_norm))
    return Innovation(np.bool_(True), squared_norm, np.zeros_like(errors), errors, quantized_norm)


ERRORS = [4.0, 1.0, 0.25, 0.0625]  # widths 1..4
STORED = np.array([0.4, 0.1, 0.02, 0.01])


def test_ties_send_and_two_level_rounds_half_up():
    stats = innovation(0.5, np.zeros(4))
    for policy in (Lazy(), TwoLevel(), Multilevel()):
        assert policy.decide(Case(stats, 0.5, np.zeros(4))).send
    assert LazyExact().decide(Case(innovation(0, [], squared_norm=2.0), 2.0, np.zeros(0))).send
    for bits, low in ((1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (8, 4)):
        case = Case(innovation(1.0, np.full(bits, 9.0)), 0.0, np.zeros(bits))
        assert TwoLevel().decide(case).width == low


@pytest.mark.parametrize(
    ("squared_norm", "movement", "expected"),
    [
        (1.0, 1.0, (False, 3)),  # at the tolerance: good enough already
        (1.1, 1.0, (True, 3)),  # 0.25 <= 0.5
        (9.0, 2.0, (True, 2)),  # 1 <= 1
        (9.0, 8.0, (True, 1)),
        (9.0, 0.1, (True, 4)),  # 0.0625 > 0.05: no width reaches it
        (9.0, 0.0, (True, 4)),
        (0.0, 0.0, (False, 4)),
    ],
)
def test_tolerance_sends_the_fewest_bits_that_do(squared_norm, movement, expected):
    decision = Tolerance(0.5).decide(Case(innovation(9.0, ERRORS, squared_norm), movement, STORED))
    assert (bool(decision.send), int(decision.width)) == expected


def some(*shape):
    return arrays(np.float64, shape, elements=st.floats(0, 1e6))


@given(some(5, 4), some(5, 4), some(5), some(5), some(5))
def test_many_clients_decide_as_one_would(errors, stored, norms, squared, movements):
    together = Innovation(np.ones(5, bool), squared, np.zeros((5, 4)), errors, norms)
    for policy in (Always(4), Lazy(), TwoLevel(), Multilevel(), Tolerance(), LazyExact()):
        batch = policy.decide(Case(together, movements, stored))
        for i in range(5):
            alone = Innovation(*(field[i] for field in together))
            single = policy.decide(Case(alone, movements[i], stored[i]))
            assert (batch.send[i], batch.width[i]) == (single.send, single.width)


@pytest.fixture
def code():
    found = shown_on("how-to/own-recipe.md", "clipped.py")
    assert len(found.splitlines()) <= 35
    return found


@pytest.fixture
def recipe(code):
    exec(compile(code, "clipped.py", "exec", dont_inherit=True), {"__name__": "clipped"})
    return make_recipe("clipped:factor=0.9")


ARGUMENTS = {"dropout": Dropout(0.3, seed=2), "seed": 3}
TRAINING = Training(LocalTraining(batch_size=8, steps=3, rate=0.05), participation=0.7)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_reference_engine_and_resume(recipe, dtype):
    problem = tiny_problem(dtype, num_clients=5, unequal=True)
    options = {"training": TRAINING, **ARGUMENTS}
    reference, fast = check_engines(problem, recipe, 0.05, **options, rounds=30)
    assert reference.state().to_arrays()["clients/stages/clip/usual"].all()
    plain = FastSimulation(problem, make_recipe("lean"), 0.05, training=TRAINING, **ARGUMENTS)
    list(plain.run_rounds(30))
    assert not np.array_equal(plain.parameters, fast.parameters)  # it does clip


def test_torch(recipe):
    problem = tiny_problem(num_clients=5, unequal=True)
    check_torch(problem, recipe, 0.05, training=TRAINING, **ARGUMENTS, rounds=20)


def test_command_line_and_resume(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "_SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    monkeypatch.setattr(loop, "_LARGEST_SHARE_OF_CHECKPOINTS", 1e9)
    Path("clipped.py").write_text(code)
    arguments = ["--recipe", "clipped:factor=0.9", "--set", 'plugins=["clipped.py"]']
    assert run_app(["run", *arguments, "--rounds", "9", "--out", "whole"]) == 0

    def run_until_crash(simulation, evaluate=True, run_round=FastSimulation.run_round):
        if simulation.next_round == 6:
            raise Crash
        return run_round(simulation, evaluate)

    with monkeypatch.context() as broken:
        broken.setattr(FastSimulation, "run_round", run_until_crash)
        with pytest.raises(Crash):
            run_app(["run", *arguments, "--rounds", "9", "--out", "cut"])
    assert run_app(["run", "--resume", "cut", "--allow-code"]) == 0
    (whole,), (cut,) = (list(Path(name).rglob("rounds.jsonl")) for name in ("whole", "cut"))
    assert len(whole.read_text().splitlines()) == 9
    assert cut.read_text() == whole.read_text()


class Crash(BaseException):
    """Stands for a process that dies."""


def test_flower(recipe, tmp_path):
    from aqg.flower import make_client_app

    from tests.flower.federation import ALPHA, PROBLEM, Federation, task_of

    federation = Federation(tmp_path, rounds=8)
    federation.grid.client_app = make_client_app(task_of, recipe=recipe)
    final = federation.run(recipe=recipe)
    reference = ReferenceSimulation(PROBLEM, recipe, ALPHA)
    list(reference.run_rounds(8))
    assert np.array_equal(final, reference.parameters)
    assert federation.agree()


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
    usual = WireError if complaint in (None, "expected_length is") else MessageError
    wrong = kind.get(function, usual)
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
        for found, copies in zip(held, saved, strict=True):
            assert all(np.array_equal(found[name], copies[name]) for name in copies)
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


def test_messages_cost_the_same_for_any_number_of_clients_who_take_no_memory_without_a_mirror():
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

    recipe = make_recipe("stc")
    tracemalloc.start()
    server = init_server(recipe, np.zeros(1000, np.float32), 1_000_000)
    frame = aqg.encode(aqg.Skip())
    for client in range(0, 1_000_000, 100_000):
        server = receive(recipe, server, client, frame)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used < 500_000
