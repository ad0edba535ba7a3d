"""The default recipe in both regimes, and across the change between them."""

from __future__ import annotations

import numpy as np
import pytest

from aqg.core.client import init_client, respond
from aqg.core.dropouts import BernoulliDropout
from aqg.core.hearing import hear, init_server
from aqg.core.persistence import clients_to_arrays
from aqg.core.recipes import make_recipe
from aqg.errors import ConfigError
from aqg.sim.engine import FastSimulation
from aqg.sim.local import LocalTraining
from aqg.sim.reference import ReferenceSimulation
from aqg.sim.training import Training

from tests.problems import tiny_problem

FEWEST = make_recipe("auto:keep=0")
"""Sends as little as makes each byte count most, at any number of rounds."""


def is_noisy(simulation) -> list[bool]:
    return [
        FEWEST.switch.meter.is_noisy(notes)
        for notes in simulation.state().clients.stages["noise"]["notes"]
    ]


@pytest.mark.parametrize("participation", [1.0, 0.5, 0.2])
@pytest.mark.parametrize("batch_size", [None, 2, 12])
def test_engines_agree_bit_for_bit(batch_size, participation):
    """With 12 of 20 to 55 samples some clients count as noisy, some do not, and some change."""
    training = Training(local=LocalTraining(batch_size=batch_size), participation=participation)
    arguments = (tiny_problem(num_clients=6, unequal=True), FEWEST, 0.1, BernoulliDropout(0.2), 4)
    reference = ReferenceSimulation(*arguments, training=training)
    fast = FastSimulation(*arguments, training=training)
    for _ in range(120):
        assert fast.run_round() == reference.run_round()
    expected = reference.state().to_arrays()
    for key, value in fast.state().to_arrays().items():
        assert np.array_equal(value, expected[key]), key


def test_minibatches_count_as_noise_and_exact_updates_are_not_measured():
    training = Training(local=LocalTraining(batch_size=2))
    simulation = FastSimulation(tiny_problem(), FEWEST, 0.05, training=training)
    for _ in range(30):
        simulation.run_round(evaluate=False)
    assert is_noisy(simulation) == [True] * 4

    for exact in (LocalTraining(), LocalTraining(steps=3)):
        state = FastSimulation(tiny_problem(), FEWEST, 0.05, training=Training(exact)).state()
        assert list(state.clients.stages) == ["wider_tolerance"]


def test_exact_updates_that_jump_about_are_not_taken_for_noise():
    """At a step size beyond all stability gradients look like noise, and a memory still holds."""
    problem = tiny_problem()
    simulation = FastSimulation(problem, FEWEST, step_size=20.0)
    meter, notes = FEWEST.switch.meter, FEWEST.switch.meter.init(len(problem.initial_params))
    for number in range(1, 31):
        gradient = simulation.backend.losses_and_gradients(simulation.parameters, np.arange(1))[1]
        notes = meter.observe(notes, gradient[0], number)
        simulation.run_round(evaluate=False)
    assert meter.is_noisy(notes)
    assert simulation.state().clients.link.mirror.any()


def test_who_is_asked_seldom_sends_more_at_a_time():
    rng = np.random.default_rng(5)
    sent = {}
    for every in (1, 2, 3):
        client = init_client(FEWEST, 3000, np.dtype(np.float64))
        for number in range(every, 40 * every, every):
            gradient = rng.standard_normal(3000)
            client, message = respond(FEWEST, client, gradient, 0.0, (0, 0, number))
        sent[every] = np.count_nonzero(message.levels != 1)
    assert sent == {1: 16, 2: 23, 3: 28}


def test_who_is_asked_very_seldom_draws_what_it_sends_and_keeps_no_residual():
    rng = np.random.default_rng(6)
    client = init_client(FEWEST, 3000, np.dtype(np.float64))
    for number in (1, 2, 3):  # it was asked often once, and has a residual since then
        client, _ = respond(FEWEST, client, rng.standard_normal(3000), 0.0, (0, 0, number))
    assert client.stages["feedback"]["residual"][0].any()
    for number in range(10, 200, 10):
        client, message = respond(FEWEST, client, rng.standard_normal(3000), 0.0, (0, 0, number))
    assert not client.stages["feedback"]["residual"][0].any()
    assert not message.lasting

    gradient = rng.standard_normal(3000)
    mean = np.zeros(3000)
    for seed in range(400):
        _, message = respond(FEWEST, client, gradient, 0.0, (seed, 0, 200))
        mean += message.values(np.float64) / 400
    length = np.linalg.norm(gradient)
    assert np.count_nonzero(message.levels != 1) < 80  # about ‖g‖₁/‖g‖₂, 44
    assert np.linalg.norm(mean - gradient) < 0.5 * length
    assert mean @ gradient == pytest.approx(length**2, rel=0.2)


def test_where_a_message_costs_much_more_is_put_into_it():
    update = np.random.default_rng(2).standard_normal(50_000)

    def num_sent(recipe):
        client = init_client(recipe, len(update), np.dtype(np.float64))
        _, upload = respond(recipe, client, update, 1.0, (0, 0, 1))
        return np.count_nonzero(upload.values(np.float64))

    assert num_sent(FEWEST) == 16
    assert num_sent(FEWEST.for_transport(12_000)) == 3000
    assert num_sent(FEWEST.for_transport(10**9)) == 5000
    told = make_recipe("auto:keep=0:overhead=400")
    assert num_sent(told) == 100
    assert told.for_transport(12_000) == told
    lean = make_recipe("lean")
    assert lean.for_transport(12_000) == lean
    with pytest.raises(ConfigError, match=r"overhead is -1\.0; it must be at least 0"):
        make_recipe("auto:overhead=-1")


def test_who_keeps_up_with_averaging_sends_more_after_a_pause():
    """The server's word counts; without it, the client's own count does."""
    auto, rng = make_recipe("auto:keep=0.01"), np.random.default_rng(5)
    sent = {}
    for every in (1, 5):
        for recipe in (auto, auto.for_participation(1 / 4)):
            client = init_client(recipe, 30_000, np.dtype(np.float64))
            for number in range(every, 12 * every, every):
                update = rng.standard_normal(30_000) ** 9  # few coordinates count
                client, message = respond(recipe, client, update, 0.0, (0, 0, number))
            sent[every, recipe.switch.pause] = np.count_nonzero(message.levels != 1)
    assert sent == {(1, 0.0): 300, (1, 4.0): 800, (5, 0.0): 894, (5, 4.0): 800}
    assert set(client.stages) == {"noise", "feedback", "wider_tolerance"}
    assert FEWEST.for_participation(0.25) == FEWEST
    with pytest.raises(ConfigError, match=r"keep is 2\.0; it must be at least 0 and at most 1"):
        init_client(make_recipe("auto:keep=2"), 10)


def _density(vector):
    return np.abs(vector).sum() ** 2 / (len(vector) * (vector**2).sum())


def _num_sent(update, asked=1.0):
    auto = make_recipe("auto").for_participation(asked)
    client = init_client(auto, len(update), np.dtype(np.float64))
    _, message = respond(auto, client, update, 0.0, (0, 0, 1))
    return np.count_nonzero(message.levels != 1)


def test_who_has_dense_updates_sends_more():
    rng, sent = np.random.default_rng(5), []
    for power in (9, 2, 1):
        update = rng.standard_normal(30_000) ** power
        density = _density(update)
        local = [_density(update[first : first + 64]) for first in range(0, 30_000, 64)]
        local = np.average(local, weights=[64] * 468 + [48])
        by_blocks = local**4 / density - 0.45
        share = max(0.04 * local**2, min(0.01, by_blocks), 0.7 * (density - 0.28))
        sent.append(_num_sent(update))
        assert sent[-1] == min(7500, max(200, round(share * 30_000)))
    assert sent[0] == 200 < sent[1] < sent[2]


def test_who_has_blocks_of_different_sizes_sends_more():
    """Their largest coordinates are all in a few blocks; more so after a pause."""
    normal = np.random.default_rng(6).standard_normal((512, 64))
    update = normal * np.abs(normal)
    sizes = np.exp(np.linspace(0, 40, 512))[:, None]
    uneven = (sizes * update).ravel()
    assert _density(uneven) < 0.28
    assert _num_sent(normal.ravel() ** 3) < _num_sent(uneven) == round(0.01 * 512 * 64)
    for asked, share in ((0.8, 0.015625), (0.5, 0.03), (0.25, 0.03)):
        assert _num_sent(uneven, asked) == round(share * asked**-0.5 * 512 * 64)


def test_the_smallest_models_are_sent_whole():
    """Rounded at random, so that the mean of many uploads is the update, and nothing is kept."""
    auto, rng = make_recipe("auto").for_participation(1.0), np.random.default_rng(6)
    for size, is_whole in ((1024, True), (1025, False)):
        update = rng.standard_normal(size)
        mean = np.zeros(size)
        for seed in range(400):
            client = init_client(auto, size, np.dtype(np.float64))
            client, message = respond(auto, client, update, 0.0, (seed, 0, 1))
            mean += message.values(np.float64) / 400
            assert not message.lasting
        assert client.stages["feedback"]["residual"].any() != is_whole
        assert (message.width == 4) is is_whole
        is_right = bool(np.linalg.norm(mean - update) < 0.2 * np.linalg.norm(update))
        assert is_right is is_whole


@pytest.mark.parametrize(("spec", "first"), [("auto", 16), ("auto:keep=0", 5)])
def test_who_keeps_up_with_averaging_does_not_trust_the_first_updates(spec: str, first: int):
    """They repeat themselves in any training; what repeats itself longer is remembered."""
    recipe, rng = make_recipe(spec), np.random.default_rng(8)
    signal = rng.standard_normal(3000)
    client = init_client(recipe, 3000, np.dtype(np.float64))
    lasting = []
    for number in range(1, 19):
        update = signal + 0.01 * rng.standard_normal(3000)
        client, message = respond(recipe, client, update, 0.0, (0, 0, number))
        lasting.append(message is not None and message.lasting)
    assert lasting.index(True) == first - 1


def test_what_keeps_changing_is_not_remembered():
    """A vector that turns holds no noise, but what it was does not help, either."""
    first, second = np.random.default_rng(7).standard_normal((2, 3000))
    for angle, noisy in ((0.1, False), (0.8, True)):
        meter, notes = FEWEST.switch.meter, FEWEST.switch.meter.init(3000)
        for number in range(1, 40):
            update = np.cos(angle * number) * first + np.sin(angle * number) * second
            notes = meter.observe(notes, update, number)
        assert meter.ratio(notes) < meter.low_noise_below
        assert meter.change(notes) == pytest.approx(2 * (1 - np.cos(angle)), rel=0.2)
        assert meter.is_noisy(notes) is noisy, angle


def test_a_client_unlike_the_others_is_given_more_tolerance():
    """Its gradient is three times what the model moves by, so that much error is tolerated."""
    gradient = np.array([3.0, 0.0, 0.0, 0.0])
    for name, speaks in (("lean", True), ("auto", False)):
        recipe = make_recipe(name).for_updates(are_exact=True)
        client = init_client(recipe, 4, np.dtype(np.float64))
        client, _ = respond(recipe, client, gradient, 0.0, (0, 0, 1))
        _, message = respond(recipe, client, gradient + 0.75, 1.0, (0, 0, 2))
        assert bool(message.width) is speaks, name  # the error is 2.25, the movement 1
    _, message = respond(recipe, client, gradient + 0.9, 1.0, (0, 0, 2))
    assert message.width  # 3.24: more than three times the movement


def test_noise_that_begins_and_ends_moves_the_client_between_both_rules():
    rng = np.random.default_rng(0)
    num_params = 5000
    slope = rng.standard_normal(num_params)
    client = init_client(FEWEST, num_params, np.dtype(np.float64))
    server = init_server(FEWEST, np.zeros(num_params), 1)
    seen = []
    for round_number in range(1, 111):
        gradient = slope * 0.99**round_number
        if 31 <= round_number <= 60:
            gradient = gradient + rng.standard_normal(num_params)
        client, message = respond(FEWEST, client, gradient, 1.0, (0, 0, round_number))
        server = hear(FEWEST, server, 0, message)
        model = server.model._replace(passing=None, round=server.round + 1)
        server = server._replace(model=model)
        assert np.array_equal(server.mirror(0), client.link.mirror[0])
        assert np.allclose(server.model.total, client.link.mirror[0], atol=1e-12)
        seen.append(FEWEST.switch.meter.is_noisy(client.stages["noise"]["notes"][0]))
    assert seen[:4] == [True] * 4
    assert not any(seen[5:31])
    assert all(seen[36:60])
    assert not any(seen[95:])


@pytest.mark.parametrize("num_params", [40, 20_000])
def test_the_ratio_is_twice_the_share_of_noise_and_none_for_drift_and_swings(num_params):
    meter = FEWEST.switch.meter
    rng = np.random.default_rng(2)
    signal, swing = rng.standard_normal((2, num_params))

    def ratio(update, rounds=200):
        notes = meter.init(num_params)
        ratios = []
        for number in range(rounds):
            notes = meter.observe(notes, update(number), number)
            ratios.append(meter.ratio(notes))
        return np.mean(ratios[5:])

    assert ratio(lambda k: signal + rng.standard_normal(num_params)) == pytest.approx(1.0, rel=0.3)
    assert ratio(lambda _: rng.standard_normal(num_params)) == pytest.approx(2.0, rel=0.3)
    assert ratio(lambda k: signal * (1 + 0.1 * k)) < 0.01
    assert ratio(lambda k: signal + swing * (-1) ** k) < 0.01


def test_the_residual_of_a_noisy_client_is_exactly_what_it_has_not_sent():
    rng = np.random.default_rng(1)
    client = init_client(FEWEST, 3000, np.dtype(np.float64))
    server = init_server(FEWEST, np.zeros(3000), 1)
    updates = np.zeros(3000)
    for round_number in range(1, 40):
        gradient = rng.standard_normal(3000)
        updates += gradient
        client, message = respond(FEWEST, client, gradient, 0.0, (0, 0, round_number))
        assert not message.lasting
        server = hear(FEWEST, server, 0, message)
        server = server._replace(model=server.model._replace(round=server.round + 1))
        assert np.allclose(server.model.passing + client.stages["feedback"]["residual"][0], updates)
    assert not server.model.total.any()
    assert not client.link.mirror[0].any()


def test_a_bad_gradient_leaves_no_trace():
    client = init_client(FEWEST, 10, np.dtype(np.float64))
    for round_number in range(1, 6):
        client, _ = respond(FEWEST, client, np.ones(10), 0.0, (0, 0, round_number))
    for bad in (np.nan, np.inf, 1e35):
        after, message = respond(FEWEST, client, np.full(10, bad), 0.0, (0, 0, 9))
        assert message.fault
        assert clients_to_arrays(after).keys() == clients_to_arrays(client).keys()
        for key, value in clients_to_arrays(after).items():
            assert np.array_equal(value, clients_to_arrays(client)[key]), key
