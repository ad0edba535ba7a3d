"""The public model: only sums leave the server, and everyone follows to the bit."""

from itertools import product

import numpy as np
import pytest

from aqg.core.arrays import from_arrays, to_arrays
from aqg.core.downlink import Condensed, Exact, Full, resolve_downlink
from aqg.core.grids import Grid
from aqg.core.messages import Upload, num_nonzero
from aqg.core.optimizers import SGD, Adam, Momentum
from aqg.core.recipes import make_recipe
from aqg.core.server import (
    Model,
    Step,
    init_model,
    init_server,
    publish_round,
    take_message,
    take_step,
)
from aqg.core.space import NumpySpace
from aqg.wire.entry import encode_entry, known_velocity

LENGTH = 300
DOWNLINKS = [Exact(), Condensed(), Condensed(tolerance=0.0, ratio=5)]


def upload(seed, sign=1):
    levels = np.random.default_rng(seed).integers(0, 3, LENGTH)
    levels = levels if sign > 0 else 2 - levels
    return Upload(levels.astype(np.uint8), 0.125, 2, Grid.MIDTREAD)


def publish(recipe_name, downlink, rounds):
    """Return the entries of rounds in which clients sent these uploads."""
    recipe = make_recipe(recipe_name)
    step = Step(0.1, downlink=downlink)
    state = init_server(recipe, np.ones(LENGTH), 3, step)
    written = []
    for uploads in rounds:
        for client, message in uploads.items():
            state = take_message(recipe, state, client, message)
        before = state.public
        state, entry = publish_round(recipe, state, step)
        written.append(encode_entry(entry, known_velocity(before)))
    return written, state


@pytest.mark.parametrize("downlink", DOWNLINKS)
@pytest.mark.parametrize("recipe", ["lean", "auto", "qsgd"])
def test_equal_sums_make_equal_entries(recipe, downlink):
    one, two, three, back = upload(1), upload(2), upload(3), upload(3, sign=-1)
    sent = [{0: one, 1: two}, {2: one}, {}, {0: two}, {}]
    swapped = [{0: two, 2: one}, {1: one}, {0: three, 1: back}, {2: two}, {}]
    if recipe == "lean":  # a mirror that moved there and back is where it was
        swapped[4] = {1: three, 2: back}
    expected, first = publish(recipe, downlink, sent)
    found, second = publish(recipe, downlink, swapped)
    assert found == expected
    assert first.parameters.tobytes() == second.parameters.tobytes()
    assert len(set(expected)) > 1


def test_a_silent_round_is_one_byte():
    for downlink in (Exact(), Condensed()):
        written, _ = publish("lean", downlink, [{0: upload(1)}, {}, {}])
        assert [len(entry) for entry in written[1:]] == [1, 1]


def test_the_state_given_is_left_as_it_was():
    for name, downlink in product(("lean", "auto"), DOWNLINKS):
        recipe = make_recipe(name)
        step = Step(0.1, optimizer=Adam(), downlink=downlink)
        state = init_server(recipe, np.ones(LENGTH), 2, step)
        state = take_message(recipe, state, 0, upload(1))
        state = take_message(recipe, state, 1, upload(2))
        first, again = (publish_round(recipe, state, step)[0].model for _ in range(2))
        for name in ("parameters", "velocity", "rest"):
            assert getattr(first, name).tobytes() == getattr(again, name).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", [SGD(), Momentum(0.7), Adam()])
@pytest.mark.parametrize("downlink", [Full(), Exact()])
@pytest.mark.parametrize("recipe", ["lean", "auto"])
def test_torch_takes_the_same_step_to_the_bit(recipe, downlink, optimizer, dtype):
    torch = pytest.importorskip("torch")
    from aqg.sim.simulation import model_in
    from aqg.sim.torch_backend import TorchBackend

    from tests.problems import tiny_problem

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rng, chosen = np.random.default_rng(5), make_recipe(recipe)
    for device in devices:
        space = TorchBackend(tiny_problem(), device)
        step = Step(0.01, optimizer=optimizer, downlink=downlink)
        model = init_model(chosen, rng.normal(size=LENGTH).astype(dtype), step)
        there = model_in(space.put, model)
        for _ in range(10):
            total = rng.normal(size=LENGTH)
            step = step._replace(size=rng.random(), sampled=rng.random())
            model = model._replace(total=total, is_moved=True)
            there = there._replace(total=space.put(total), is_moved=True)
            model, _ = take_step(NumpySpace(), chosen, model, step, 3)
            there, _ = take_step(space, chosen, there, step, 3)
            assert space.get(there.parameters).tobytes() == model.parameters.tobytes()


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("gd", Full()),
        ("auto", Condensed(ratio=0.5)),
        ("qsgd", Condensed()),
        ("stc:keep=0.02", Condensed()),
        ("stc-both:keep=0.2", Condensed(keep=0.2)),
        ("lean", Condensed()),
    ],
)
def test_the_default_is_the_recipes_own(recipe, expected):
    assert resolve_downlink("auto", make_recipe(recipe)) == expected
    for spec, named in (
        ("exact", Exact()),
        ("full", Full()),
        ("condensed:keep=1", Condensed(keep=1)),
    ):
        assert resolve_downlink(spec, make_recipe(recipe)) == named


@pytest.mark.parametrize("shared", [0, 100, 200])
@pytest.mark.parametrize(("num_sent", "expected"), [(200, 100), (40, 32)])
def test_entries_are_half_as_long_as_what_clients_send(num_sent, expected, shared):
    """However much two clients have in common; the state is written and read in between."""
    recipe, length, downlink = make_recipe("auto"), 2_000, Condensed(ratio=0.5)
    step = Step(0.1, downlink=downlink)
    state = init_server(recipe, np.ones(length), 2, step)
    for client, start in enumerate((0, max(0, num_sent - shared))):
        levels = np.ones(length, np.uint8)
        levels[start : start + num_sent] = 2
        state = take_message(recipe, state, client, Upload(levels, 0.125, 2, Grid.MIDTREAD))
    state = state._replace(model=from_arrays(Model, to_arrays(state.model)))
    assert state.model.num_sent == 2 * num_sent
    assert state.model.upload_energy == 2 * num_sent * 0.125**2
    state, entry = publish_round(recipe, state, step)
    assert isinstance(entry.position, Upload)
    assert num_nonzero(entry.position) == expected
    assert (state.model.num_sent, state.model.upload_energy) == (0, 0.0)


def test_an_entry_that_would_have_most_coordinates_has_four_bits_for_each():
    """One magnitude for all would say little of each; what is rounded off is sent later."""
    recipe, levels = make_recipe("auto"), np.array([0, 5, 14, 16, 23, 30], np.uint8)
    message = Upload(levels, 0.125, 5, Grid.MIDTREAD)
    width = 15 * 0.125 / 7
    step = Step(1.0, downlink=Condensed())
    state = init_server(recipe, np.zeros(6), 1, step)
    for number in range(1, 9):
        state = take_message(recipe, state, 0, message)
        state, entry = publish_round(recipe, state, step)
        assert isinstance(entry.position, Upload)
        assert entry.position.width == 4
        assert state.parameters == pytest.approx(-number * message.values(np.float64), abs=width)


def test_what_a_condensing_server_leaves_out_is_sent_later():
    recipe = make_recipe("qsgd")
    step = Step(1.0, downlink=Condensed(ratio=0.2))
    state = init_server(recipe, np.zeros(LENGTH), 1, step)
    vector = upload(1)
    total = np.zeros(LENGTH)
    for _ in range(30):
        state = take_message(recipe, state, 0, vector)
        total += vector.values(np.float64)
        state, _ = publish_round(recipe, state, step)
    np.testing.assert_allclose(state.model.rest - state.parameters, total, atol=1e-12)
    assert 0 < np.abs(state.model.rest).max() < np.abs(total).max()
