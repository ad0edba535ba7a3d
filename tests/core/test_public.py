"""The public model: only sums leave the server, and everyone follows to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aqg.core.downlink import Condensed, Downlink, Exact, resolve_downlink
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


def upload(seed: int, lasting: bool, sign: int = 1) -> Upload:
    levels = np.random.default_rng(seed).integers(0, 3, LENGTH)
    levels = levels if sign > 0 else 2 - levels
    return Upload(levels.astype(np.uint8), 0.125, 2, Grid.MIDTREAD, lasting=lasting)


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
@pytest.mark.parametrize(
    ("recipe", "lasting"), [("lean", True), ("auto", True), ("auto", False), ("qsgd", True)]
)
def test_equal_sums_make_equal_entries(recipe: str, lasting: bool, downlink: Downlink) -> None:
    one, two = upload(1, lasting), upload(2, lasting)
    three, back = upload(3, lasting), upload(3, lasting, sign=-1)
    sent = [{0: one, 1: two}, {2: one}, {}, {0: two}, {}]
    swapped = [{0: two, 2: one}, {1: one}, {0: three, 1: back}, {2: two}, {}]
    if lasting and recipe != "qsgd":  # a mirror that moved there and back is where it was
        swapped[4] = {1: three, 2: back}
    expected, first = publish(recipe, downlink, sent)
    found, second = publish(recipe, downlink, swapped)
    assert found == expected
    assert first.parameters.tobytes() == second.parameters.tobytes()
    assert len(set(expected)) > 1


def test_a_silent_round_is_one_byte() -> None:
    for downlink in (Exact(), Condensed()):
        written, _ = publish("lean", downlink, [{0: upload(1, True)}, {}, {}])
        assert [len(entry) for entry in written[1:]] == [1, 1]


def test_the_state_given_is_left_as_it_was() -> None:
    recipe = make_recipe("auto")
    for downlink in DOWNLINKS:
        state = init_server(recipe, np.ones(LENGTH), 2, Adam(), downlink)
        state = hear(recipe, state, 0, upload(1, True))
        state = hear(recipe, state, 1, upload(2, False))
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
            total, passing = rng.normal(size=(2, LENGTH))
            rates = Rates(rng.random(), 1 / (1 - rng.random()), 1 / rng.random())
            params, state, _ = take_step(
                NumpySpace(), params, state, total, passing, rates, optimizer
            )
            there, there_state, _ = take_step(
                space, there, there_state, space.put(total), space.put(passing), rates, optimizer
            )
            assert space.get(there).tobytes() == params.tobytes()


def test_the_default_suits_the_recipe() -> None:
    assert resolve_downlink("auto", make_recipe("gd")).name == "full"
    assert resolve_downlink("auto", make_recipe("auto")) == Condensed(
        ratio=0.5, counted=True, most=0.8
    )
    assert resolve_downlink("auto", make_recipe("auto:keep=0"), 0.1) == Condensed()
    assert resolve_downlink("exact", make_recipe("gd")) == Exact()
    sampled = resolve_downlink("auto", make_recipe("auto"), 0.5)
    assert sampled == Condensed(ratio=0.5 * 0.5**0.4, counted=True, most=0.8 * 0.5**0.6)


@pytest.mark.parametrize(
    ("length", "shared", "counted", "expected"),
    [
        (10**6, 0, True, 100),
        (8_000, 0, True, 125),
        (2_000, 0, True, 160),
        (10**6, 100, True, 134),
        (10**6, 200, True, 160),
        (2_000, 200, False, 50),
    ],
)
def test_entries_are_as_long_as_what_clients_send(
    length: int, shared: int, counted: bool, expected: int
) -> None:
    """Two clients send 200 coordinates each; the state is written and read in between.

    An entry has half as many, and up to 0.8 times where they are a larger part of the model or have
    some in common.
    """
    recipe = make_recipe("auto")
    downlink = Condensed(ratio=0.5, counted=counted, most=0.8 * counted)
    state = init_server(recipe, np.ones(length), 2, SGD(), downlink)
    for client, start in enumerate((0, 200 - shared)):
        levels = np.ones(length, np.uint8)
        levels[start : start + 200] = 2
        message = Upload(levels, 0.125, 2, Grid.MIDTREAD, lasting=False)
        state = hear(recipe, state, client, message)
    state = state._replace(model=model_from_arrays(model_to_arrays(state.model)))
    assert state.model.num_sent == 400
    state, entry = publish_round(recipe, state, 0.1, downlink=downlink)
    assert isinstance(entry.passing, Upload)
    assert num_nonzero(entry.passing) == expected
    assert state.model.num_sent == 0


def test_an_entry_that_would_have_most_coordinates_has_four_bits_for_each() -> None:
    """One magnitude for all would say little of each; what is rounded off is sent later."""
    recipe, levels = make_recipe("auto"), np.array([0, 5, 14, 16, 23, 30], np.uint8)
    message = Upload(levels, 0.125, 5, Grid.MIDTREAD, lasting=False)
    step = 15 * 0.125 / 7
    state = init_server(recipe, np.zeros(6), 1, SGD(), Condensed())
    for number in range(1, 9):
        state = hear(recipe, state, 0, message)
        state, entry = publish_round(recipe, state, 1.0, downlink=Condensed())
        assert isinstance(entry.passing, Upload)
        assert entry.passing.width == 4
        assert state.parameters == pytest.approx(-number * message.values(np.float64), abs=step)


def test_what_a_condensing_server_leaves_out_is_sent_later() -> None:
    recipe = replace(make_recipe("qsgd"))
    downlink = Condensed(ratio=0.2)
    state = init_server(recipe, np.zeros(LENGTH), 1, SGD(), downlink)
    vector = upload(1, True)
    total = np.zeros(LENGTH)
    for _ in range(30):
        state = hear(recipe, state, 0, vector)
        total += vector.values(np.float64)
        state, _ = publish_round(recipe, state, 1.0, downlink=downlink)
    residual = state.model.downlink.residual
    np.testing.assert_allclose(total + state.parameters, residual, atol=1e-12)
    assert np.abs(residual).max() < np.abs(total).max()


def test_a_sum_that_no_one_is_part_of_any_more_leaves_the_public_one() -> None:
    """What passes is large against it, and would tolerate what is left of it for ever."""
    mirror, noise = upload(1, True), upload(2, False)
    loud = Upload(noise.levels, 16.0, 2, Grid.MIDTREAD, lasting=False)
    rounds: list[dict[int, Upload]] = [{0: mirror, 1: loud, 2: loud}]
    rounds += [dict.fromkeys(range(3), loud)] * 6
    _, state = publish("auto", Condensed(), rounds)
    assert not state.model.total.any()
    public = state.model.downlink
    assert public is not None
    assert np.linalg.norm(public.total) < 0.01 * np.linalg.norm(mirror.values(np.float64))
