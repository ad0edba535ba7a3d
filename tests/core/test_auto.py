"""The default's rounding and its noise budget: unbiased, as noisy as allowed, without memory."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqg.core.auto import Budget, Draws, Share, first_budget
from aqg.core.downlink import resolve_downlink
from aqg.core.grids import round_up_to_bfloat16
from aqg.core.messages import energy_of
from aqg.core.optimizers import SGD
from aqg.core.quantizers import Request
from aqg.core.recipes import make_recipe
from aqg.core.round import init_client, init_clients, respond
from aqg.core.server import Step, broadcast, init_server, publish_round, take_message
from aqg.core.step_sizes import resolve_step
from aqg.sim.engine import FastSimulation
from aqg.sim.training import LocalTraining, Training, make_late
from aqg.wire import encode

from tests.problems import crossed, tiny_problem

RNG = np.random.default_rng(7)
VECTORS = {
    "normal": RNG.standard_normal(5000),
    "sparse": np.where(RNG.random(5000) < 0.03, RNG.standard_normal(5000), 0.0),
    "two sizes": np.where(RNG.random(5000) < 0.01, 3.0, 0.1),
}


def draw(vector, noise=1.0, number=1):
    vector = np.asarray(vector)
    squared_norm = float(np.sum(vector.astype(np.float64) ** 2))
    request = Request(2, squared_norm=squared_norm, key=(3, 1, number), noise=noise)
    return Draws().quantize(vector, request)


@pytest.mark.parametrize(("shape", "noise"), crossed(list(VECTORS), [0.0, 1.0, 10.0]))
def test_the_mean_over_many_keys_is_the_vector(shape, noise):
    vector, count = VECTORS[shape][:300], 3000
    uploads = [draw(vector, noise, k) for k in range(count)]
    mean = sum(upload.values(np.float64) for upload in uploads) / count
    bound = 5.5 * uploads[0].step / 2 / math.sqrt(count)  # of standard errors, at most
    assert np.abs(mean - vector).max() < bound


@pytest.mark.parametrize("noise", [1.0, 4.0, 30.0])
@pytest.mark.parametrize("shape", VECTORS)
def test_the_noise_is_what_was_allowed(shape, noise):
    """In the update's energy, whatever its shape; more where coordinates are beyond a step."""
    vector = VECTORS[shape]
    energy, length = float(vector @ vector), np.abs(vector).sum()
    uploads = [draw(vector, noise, k) for k in range(200)]
    assert uploads[0].step == round_up_to_bfloat16((1 + noise) * energy / length)
    errors = [upload.values(np.float64) - vector for upload in uploads]
    found = np.mean([error @ error for error in errors]) / energy
    sent = np.mean([np.count_nonzero(error + vector) for error in errors])
    if np.abs(vector).max() <= uploads[0].step:
        assert found == pytest.approx(noise, rel=0.05)
        assert sent == pytest.approx(length**2 / energy / (1 + noise), rel=0.05)
    else:
        assert noise <= found < noise + 1.0


@pytest.mark.parametrize(
    "vector",
    [
        np.zeros(10),
        np.full(10, 1e-40),
        np.full(10, 2.0**100),
        np.r_[2.0**100, np.full(9, 1e-40)],
        np.r_[1.0, np.zeros(9999)],
        np.r_[1e6, np.full(10**5, 1.0)],
    ],
    ids=["zeros", "tiny", "huge", "both", "one", "peaked"],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_extreme_vectors_make_valid_uploads(vector, dtype):
    for noise in (0.0, 1.0, 1e6):
        upload = draw(vector.astype(dtype), noise)
        upload.validate()
        assert upload.width <= 8
        assert np.isfinite(upload.values(np.float32)).all()
        largest = np.abs(vector).max()
        if noise == 0 and largest > 1e-30:  # then the largest is at least some part of a step
            assert upload.values(np.float64).max() >= largest / 2 or upload.step > largest / 2


def test_precision_and_pieces_do_not_matter():
    """Vectors longer than what is rounded at a time, with float32 numbers in both precisions."""
    vector = np.random.default_rng(1).standard_normal(200_001).astype(np.float32)
    upload = draw(vector)
    assert upload == draw(vector.astype(np.float64))
    scaled = vector / upload.step + np.random.default_rng([3, 1, 1]).random(len(vector))
    middle = (1 << (upload.width - 1)) - 1
    assert np.array_equal(upload.levels - np.int16(middle), np.floor(scaled))


def test_clients_keep_nothing():
    """One that was replaced by a new one sends the same frames."""
    auto, state = make_recipe("auto"), init_clients(make_recipe("auto"), 50, np.dtype("f8"), 3)
    assert not state.stages
    assert not state.track.position.size
    client = init_client(auto, 50, "float64")
    for number in range(1, 6):
        update = np.random.default_rng(number).standard_normal(50)
        options, other = {"key": (0, 2, number), "noise": 2.0}, init_client(auto, 50, "float64")
        client, old = respond(auto, client, update, 1.0, **options)
        assert encode(respond(auto, other, update, 7.0, **options)[1]) == encode(old)


def sums_of(vectors, noise, number=1):
    uploads = [draw(v, noise, 1000 * number + m) for m, v in enumerate(vectors)]
    total = sum(upload.values(np.float64) for upload in uploads)
    return float(total @ total), sum(map(energy_of, uploads))


@pytest.mark.parametrize("nu", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("case", "agreement"),
    [("independent", 1.0), ("equal", 8.0), ("half", 4.5), ("cancelling", 0.1)],
)
def test_the_budget_is_as_large_as_updates_agree(case, agreement, nu):
    """Found from what was sent, as the server does."""
    own = np.random.default_rng(2).standard_normal((8, 20_000))
    same = np.random.default_rng(3).standard_normal(20_000)
    vectors = {
        "independent": own,
        "equal": np.tile(same, (8, 1)),
        "half": (own + same) / math.sqrt(2),
        "cancelling": np.array([(-1.0) ** m * same for m in range(8)]),
    }[case]
    budget = first_budget(nu)
    assert budget.noise == nu
    for number in range(8):
        budget = budget.after(nu, *sums_of(vectors, budget.noise, number), most=8)
    assert budget.noise == pytest.approx(nu * agreement, rel=0.1, abs=0.1 * nu)


def test_a_round_in_which_nothing_was_sent_says_nothing():
    budget = Budget(2.0)
    assert budget.after(1.0, 0.0, 0.0, most=3) == budget
    for bad in (math.inf, math.nan):
        assert budget.after(1.0, bad, 1.0, most=3) == budget
        assert budget.after(1.0, 1.0, bad, most=3) == budget
    assert Budget(1.0).after(1.0, 0.0, 5e-324, most=3) == Budget(1.0)
    assert Budget(1.0).after(1.0, 1e9, 1.0, most=3).noise == 3.0  # no more agree than there are


numbers = st.floats(0, 1e30)


@given(st.lists(st.tuples(numbers, numbers, st.floats(0, 1e6)), max_size=8), st.floats(0.01, 100))
def test_a_budget_is_always_a_number(rounds, nu):
    budget, bound = first_budget(nu), 1.0
    for of_sum, of_parts, most in rounds:
        budget = budget.after(nu, of_sum, of_parts, most)
        bound = max(bound, most)
        assert all(map(math.isfinite, budget))
        assert 0 <= budget.noise <= 1.01 * nu * bound


def test_the_server_finds_the_budget_of_the_true_updates():
    """In training, from rounded uploads, as close as a mean over a few rounds is."""
    problem, recipe = tiny_problem(num_clients=8, unequal=True), make_recipe("auto:share=0")
    local = LocalTraining(batch_size=8, steps=4, rate=0.05)
    simulation = FastSimulation(problem, recipe, 0.02, seed=1, training=Training(local=local))
    found, true, budget = [], [], Budget()
    for number in range(1, 61):
        start = problem.objective, simulation.parameters
        clients = enumerate(problem.clients)
        updates = np.array([local.update(*start, *c, (1, m, number))[1] for m, c in clients])
        exact = budget._replace(noise=0.0)  # nothing is added to these
        budget = exact.after(1.0, np.sum(updates.sum(axis=0) ** 2), np.sum(updates**2), most=8)
        simulation.run_round(evaluate=False)
        found.append(simulation.state().model.budget.noise)
        true.append(budget.noise)
    assert np.mean(found) == pytest.approx(np.mean(true), rel=0.2)
    assert np.ptp(true) > 2  # from updates that agree to such that do not
    assert np.corrcoef(found, true)[0, 1] > 0.8


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=60),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([np.float32, np.float64]),
)
def test_a_share_of_the_energy_is_sent_with_the_fewest_coordinates(numbers, share, dtype):
    """But for magnitudes that are equal in their first eight binary digits."""
    vector = np.array(numbers, dtype)
    upload = Share(share).quantize(vector, Request(2))
    squares = np.square(vector.astype(np.float64))
    kept = upload.values(np.float64) != 0
    if not kept.any():
        assert np.sqrt(squares).max() < 1e-20
        return
    assert (np.sign(vector[kept]) == np.sign(upload.values(np.float64)[kept])).all()
    assert squares[kept].sum() >= share * squares.sum() * (1 - 1e-12)
    without = squares > squares[kept].min() * (1 + 2**-7) ** 2
    assert squares[without].sum() < share * squares.sum() * (1 + 1e-12)
    assert upload.step == pytest.approx(np.abs(vector[kept]).mean(dtype=np.float64), rel=0.01)


def test_a_long_vector_is_counted_in_pieces():
    vector = np.random.default_rng(1).standard_normal(200_000)
    squares = np.sort(vector**2)[::-1].cumsum()
    fewest = np.searchsorted(squares, 0.9 * squares[-1]) + 1
    found = np.count_nonzero(Share(0.9).quantize(vector, Request(2)).levels != 1)
    assert fewest <= found < 1.01 * fewest


@pytest.mark.parametrize("downlink", ["auto", "exact"])
@pytest.mark.parametrize("swings", [False, True])
def test_clients_keep_what_they_do_not_send_while_the_model_gets_anywhere(swings, downlink):
    """Updates that agree, or turn round every time; the first round tells nothing."""
    recipe = make_recipe("auto").for_updates("steady")
    update = np.random.default_rng(2).standard_normal(50).astype(np.float32)
    rule = resolve_step("auto", recipe, are_exact=False, optimizer=SGD())
    step = Step(0.1, rule=rule, downlink=resolve_downlink(downlink, recipe))
    server, client = init_server(recipe, np.zeros(50, np.float32), 1, step), init_client(recipe, 50)
    noises, kept = [], []
    for number in range(6):
        news = broadcast(recipe, server)
        gradient = -update if swings and number % 2 else update
        client, message = respond(recipe, client, gradient, 0.0, (0, 0, number), noise=news.noise)
        noises.append(news.noise)
        kept.append(bool(client.stages["feedback"]["residual"].any()))
        server, _ = publish_round(recipe, take_message(recipe, server, 0, message), step)
    assert noises[:2] == [0.0, 0.0]
    assert [noise > 0 for noise in noises[2:]] == [swings] * 4
    assert not any(has for has, noise in zip(kept, noises, strict=True) if noise)
    assert all(kept) or swings


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("steady", {}),
        ("sampled", {"participation": 0.5}),
        ("sampled", {"memory": "none"}),
        ("sampled", {"late": make_late("equal", 2, None, 0.0)}),
        ("exact", {"local": LocalTraining()}),
    ],
)
def test_who_remembers_depends_on_who_is_asked(kind, options):
    training = Training(**{"local": LocalTraining(batch_size=8)} | options)
    assert training.updates == kind
    simulation = FastSimulation(tiny_problem(), make_recipe("auto"), 0.1, training=training)
    assert simulation.recipe.keeps_residual == (kind == "steady")
    assert simulation.recipe == make_recipe("auto").for_updates(kind)
    lean = make_recipe("lean:widest=3")
    assert (replace(simulation.recipe, downlink=lean.downlink) == lean) == (kind == "exact")
