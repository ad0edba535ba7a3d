"""The default's rounding, its noise budget and its step: formulas, bounds, and what is stored."""

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
from aqg.core.optimizers import SGD, Momentum
from aqg.core.quantizers import Request
from aqg.core.recipes import make_recipe
from aqg.core.round import init_client, init_clients, respond
from aqg.core.server import Model, Step, broadcast, init_server, publish_round, take_message
from aqg.core.space import NumpySpace
from aqg.core.step_sizes import DistanceOverGradients, Fixed, resolve_step
from aqg.core.types import from_arrays, to_arrays
from aqg.errors import ConfigError
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


EXTREME = {"zeros": np.zeros(10), "tiny": np.full(10, 1e-40), "huge": np.full(10, 2.0**100)}
EXTREME |= {"both": np.r_[2.0**100, np.full(9, 1e-40)], "one": np.r_[1.0, np.zeros(9999)]}
EXTREME |= {"peaked": np.r_[1e6, np.full(10**5, 1.0)]}


@pytest.mark.parametrize("vector", EXTREME.values(), ids=EXTREME)
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
    squares = np.sort(vector.astype(np.float64) ** 2)[::-1].cumsum()
    fewest = np.searchsorted(squares, 0.9 * squares[-1]) + 1
    found = np.count_nonzero(Share(0.9).quantize(vector, Request(2)).levels != 1)
    assert fewest <= found < 1.01 * fewest


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
    vectors = {"independent": own, "equal": np.tile(same, (8, 1)), "half": (own + same) / 2**0.5}
    vectors["cancelling"] = np.array([(-1.0) ** m * same for m in range(8)])
    budget = first_budget(nu)
    assert budget.noise == nu
    for number in range(8):
        budget = budget.after(nu, *sums_of(vectors[case], budget.noise, number), most=8)
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


def test_the_mean_is_that_of_the_last_ninth_of_the_models_and_other_states_are_refused():
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
