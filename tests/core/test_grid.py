"""The exact grid of the model that clients hold: every sum of entries is exact."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqg.core.downlink import Condensed
from aqg.core.grids import (
    Grid,
    choose_quantum,
    largest_multiple,
    nearest_power_of_two,
    snap,
)
from aqg.core.messages import Upload
from aqg.core.public import advance, init_public
from aqg.core.recipes import make_recipe
from aqg.core.server import Step, init_server, publish_round, take_message

LENGTH = 64
RECIPE = make_recipe("qsgd")
STEP = Step(1.0, downlink=Condensed(keep=0.25))


def upload(rng: np.random.Generator, step: float) -> Upload:
    return Upload(rng.integers(0, 15, LENGTH).astype(np.uint8), step, 4, Grid.MIDTREAD)


def play(start: np.ndarray, steps: list[float], seed: int = 0):
    """Publish rounds in which uploads have these steps; return what clients held, and entries."""
    state = init_server(RECIPE, start, 1, STEP)
    public, rng = init_public(RECIPE, start), np.random.default_rng(seed)
    held, entries, total = [public], [], np.zeros(LENGTH)
    for size in steps:
        message = upload(rng, size)
        total += message.values(np.float64)
        state, entry = publish_round(RECIPE, take_message(RECIPE, state, 0, message), STEP)
        public = advance(public, entry, RECIPE.movement)
        assert public.parameters.tobytes() == state.parameters.tobytes()
        assert public.quantum == state.model.quantum
        held.append(public)
        entries.append(entry)
        waiting = state.model.rest.astype(np.float64)
        shown = start.astype(np.float64) - state.parameters.astype(np.float64)
        np.testing.assert_allclose(shown + waiting, total, rtol=1e-6, atol=1e-6 * size)
    return held, entries


powers = st.integers(-30, 8).map(lambda k: 2.0**k)


@given(st.lists(powers, min_size=1, max_size=12), st.sampled_from(["float32", "float64"]), powers)
def test_positions_are_multiples_of_a_quantum(steps, dtype: str, radius: float) -> None:
    """However long steps are, and however far they lead: a coarser quantum answers overflow."""
    start = (radius * np.random.default_rng(1).normal(size=LENGTH)).astype(dtype)
    held, entries = play(start, steps)
    for before, public, entry in zip(held[:-1], held[1:], entries, strict=True):
        if not public.quantum:
            continue
        multiples = public.parameters.astype(np.float64) / public.quantum
        assert np.array_equal(multiples, np.rint(multiples))
        assert np.abs(multiples).max() <= largest_multiple(np.dtype(dtype))
        if entry.position is not None:
            assert entry.position.step >= public.quantum
            assert nearest_power_of_two(entry.position.step) == entry.position.step
            base = snap(before.parameters, public.quantum)
            for old, new, value in zip(
                base.tolist(),
                public.parameters.tolist(),
                entry.position.values(np.float64).tolist(),
                strict=True,
            ):
                assert Fraction(old) + Fraction(value) == Fraction(new)


def test_overflow_makes_the_quantum_coarser() -> None:
    start = np.linspace(-1, 1, LENGTH, dtype=np.float32)
    held, entries = play(start, [2.0**-9] * 3 + [2.0**3] * 4)
    quanta = [entry.quantum for entry in entries]
    assert quanta[0] == 2.0**-22
    assert held[-1].quantum > quanta[0]
    assert held[-1].quantum == [q for q in quanta if q is not None][-1]
    assert quanta.count(None) >= 4


def test_steps_below_the_quantum_wait() -> None:
    """What is less than half a quantum is said when there is more of it."""
    start = np.full(LENGTH, 2.0**12, np.float32)
    _, entries = play(start, [2.0**-14] * 40)
    said = [entry for entry in entries if entry.position is not None]
    assert 0 < len(said) < len(entries)


def test_rounding_is_the_same_everywhere() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    for dtype in (np.float32, np.float64):
        vector = (rng.integers(-40, 40, 1000) / 8).astype(dtype)
        for quantum in (0.25, 1.0, 4.0):
            expected = snap(vector, quantum)
            assert snap(torch.from_numpy(vector), quantum).numpy().tobytes() == expected.tobytes()
            assert not np.signbit(expected[expected == 0]).any()


def test_the_first_steps_name_the_quantum_of_a_model_of_zeros() -> None:
    assert choose_quantum(0.0, 2.0**-6, np.dtype("float32")) == 2.0**-22
    assert choose_quantum(0.0, 2.0**-6, np.dtype("float64")) == 2.0**-51
