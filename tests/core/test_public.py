"""The public model: only sums leave the server, and everyone follows to the bit."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from aqg.core.downlink import Condensed, Downlink, Exact, Full, resolve_downlink
from aqg.core.grids import Grid
from aqg.core.hearing import ServerState, hear, init_server, publish_round
from aqg.core.messages import Upload, num_nonzero
from aqg.core.optimizers import SGD, Adam, Momentum
from aqg.core.persistence import model_from_arrays, model_to_arrays
from aqg.core.public import Rates, take_step
from aqg.core.recipes import make_recipe
from aqg.core.space import NumpySpace
from aqg.wire import Known
from aqg.wire.entry import encode_entry

LENGTH = 300
DOWNLINKS: list[Downlink] = [Exact(), Condensed(), Condensed(tolerance=0.0, ratio=5)]


def upload(seed: int, sign: int = 1) -> Upload:
    levels = np.random.default_rng(seed).integers(0, 3, LENGTH)
    levels = levels if sign > 0 else 2 - levels
    return Upload(levels.astype(np.uint8), 0.125, 2, Grid.MIDTREAD)


def publish(
    recipe_name: str, downlink: Downlink, rounds: list[dict[int, Upload]]
) -> tuple[list[bytes], ServerState]:
    """Return the entries of rounds in which clients sent these uploads."""
    recipe = make_recipe(recipe_name)
    state = init_server(recipe, np.ones(LENGTH), 3, SGD(), downlink)
    written = []
    for uploads in rounds:
        for client, message in uploads.items():
            state = hear(recipe, state, client, message)
        before = state.model.downlink
        assert before is not None
        state, entry = publish_round(recipe, state, 0.1, downlink=downlink)
        known = Known(before.total, before.direction) if len(before.total) else None
        written.append(encode_entry(entry, known))
    return written, state


@pytest.mark.parametrize("downlink", DOWNLINKS)
@pytest.mark.parametrize("recipe", ["lean", "auto", "qsgd"])
def test_equal_sums_make_equal_entries(recipe: str, downlink: Downlink) -> None:
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


def test_a_silent_round_is_one_byte() -> None:
    for downlink in (Exact(), Condensed()):
        written, _ = publish("lean", downlink, [{0: upload(1)}, {}, {}])
        assert [len(entry) for entry in written[1:]] == [1, 1]


def test_the_state_given_is_left_as_it_was() -> None:
    for name, downlink in product(("lean", "auto"), DOWNLINKS):
        recipe = make_recipe(name)
        state = init_server(recipe, np.ones(LENGTH), 2, Adam(), downlink)
        state = hear(recipe, state, 0, upload(1))
        state = hear(recipe, state, 1, upload(2))
        first = publish_round(recipe, state, 0.1, optimizer=Adam(), downlink=downlink)
        again = publish_round(recipe, state, 0.1, optimizer=Adam(), downlink=downlink)
        assert first[0].parameters.tobytes() == again[0].parameters.tobytes()
        assert (
            first[0].model.downlink.residual.tobytes() == again[0].model.downlink.residual.tobytes()
        )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("optimizer", [SGD(), Momentum(0.7), Adam()])
def test_torch_takes_the_same_step_to_the_bit(optimizer, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from aqg.sim.torch_backend import TorchBackend

    from tests.problems import tiny_problem

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rng = np.random.default_rng(5)
    for device in devices:
        space = TorchBackend(tiny_problem(), device)
        params, state = rng.normal(size=LENGTH).astype(dtype), optimizer.init(LENGTH)
        there, there_state = space.put(params), type(state)(*map(space.put, state))
        for _ in range(20):
            total = rng.normal(size=LENGTH)
            rates = Rates(rng.random(), 1 / (1 - rng.random()))
            params, state, _ = take_step(NumpySpace(), params, state, total, None, rates, optimizer)
            there, there_state, _ = take_step(
                space, there, there_state, None, space.put(total), rates, optimizer
            )
            assert space.get(there).tobytes() == params.tobytes()


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("gd", Full()),
        ("auto", Condensed(ratio=0.5)),
        ("qsgd", Condensed()),
        ("stc-both:keep=0.2", Condensed(keep=0.2)),
        ("lean", Condensed()),
    ],
)
def test_the_default_is_the_recipes_own(recipe: str, expected: Downlink) -> None:
    assert resolve_downlink("auto", make_recipe(recipe)) == expected
    assert resolve_downlink("exact", make_recipe(recipe)) == Exact()


@pytest.mark.parametrize("shared", [0, 100, 200])
@pytest.mark.parametrize(("num_sent", "expected"), [(200, 100), (40, 32)])
def test_entries_are_half_as_long_as_what_clients_send(
    num_sent: int, expected: int, shared: int
) -> None:
    """However much two clients have in common; the state is written and read in between."""
    recipe, length, downlink = make_recipe("auto"), 2_000, Condensed(ratio=0.5)
    state = init_server(recipe, np.ones(length), 2, SGD(), downlink)
    for client, start in enumerate((0, max(0, num_sent - shared))):
        levels = np.ones(length, np.uint8)
        levels[start : start + num_sent] = 2
        state = hear(recipe, state, client, Upload(levels, 0.125, 2, Grid.MIDTREAD))
    state = state._replace(model=model_from_arrays(model_to_arrays(state.model)))
    assert state.model.num_sent == 2 * num_sent
    assert state.model.upload_energy == 2 * num_sent * 0.125**2
    state, entry = publish_round(recipe, state, 0.1, downlink=downlink)
    assert isinstance(entry.passing, Upload)
    assert num_nonzero(entry.passing) == expected
    assert (state.model.num_sent, state.model.upload_energy) == (0, 0.0)


def test_an_entry_that_would_have_most_coordinates_has_four_bits_for_each() -> None:
    """One magnitude for all would say little of each; what is rounded off is sent later."""
    recipe, levels = make_recipe("auto"), np.array([0, 5, 14, 16, 23, 30], np.uint8)
    message = Upload(levels, 0.125, 5, Grid.MIDTREAD)
    step = 15 * 0.125 / 7
    state = init_server(recipe, np.zeros(6), 1, SGD(), Condensed())
    for number in range(1, 9):
        state = hear(recipe, state, 0, message)
        state, entry = publish_round(recipe, state, 1.0, downlink=Condensed())
        assert isinstance(entry.passing, Upload)
        assert entry.passing.width == 4
        assert state.parameters == pytest.approx(-number * message.values(np.float64), abs=step)


def test_what_a_condensing_server_leaves_out_is_sent_later() -> None:
    recipe = make_recipe("qsgd")
    downlink = Condensed(ratio=0.2)
    state = init_server(recipe, np.zeros(LENGTH), 1, SGD(), downlink)
    vector = upload(1)
    total = np.zeros(LENGTH)
    for _ in range(30):
        state = hear(recipe, state, 0, vector)
        total += vector.values(np.float64)
        state, _ = publish_round(recipe, state, 1.0, downlink=downlink)
    residual = state.model.downlink.residual
    np.testing.assert_allclose(total + state.parameters, residual, atol=1e-12)
    assert np.abs(residual).max() < np.abs(total).max()
