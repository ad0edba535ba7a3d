"""Tensors of a model as vectors and back, and how they change, with few copies of them."""

import numpy as np
import pytest

from aqg.channel.server import largest_of, measure_change
from aqg.channel.tensors import PIECE, Schema, Update, flatten, is_same, shifted
from aqg.core.quantizers import largest


def test_the_last_value_counts():
    one = np.zeros(PIECE + 3, np.float32)
    other = one.copy()
    assert is_same(one, other)
    other[-1] = -0.0
    assert not is_same(one, other)


def test_a_change_is_measured_piece_by_piece():
    rng = np.random.default_rng(0)
    before = rng.standard_normal(PIECE + 1000).astype(np.float32)
    after = before.copy()
    after[::7] += 0.25
    after[1] *= 1 + 2e-7  # rounding
    (spec,) = Schema.of({"w": before}).specs
    square, count = measure_change({"w": after}, {"w": before}, [spec], "float32")
    assert count == len(before[::7])
    assert square == pytest.approx(float(np.square(after.astype(np.float64) - before).sum()))


def test_an_update_is_taken_off_in_the_tensors_own_precision():
    values = {"a": np.ones((2, 2), np.float16), "b": np.arange(3, dtype=np.float32)}
    specs = Schema.of(values).specs
    update = np.linspace(0, 0.1, 7).astype(np.float32)
    shown = dict(shifted(values, Update(update, "float32"), specs))
    assert [shown[s.name].dtype.name for s in specs] == ["float16", "float32"]
    difference = flatten(values, specs) - update
    assert np.array_equal(shown["b"], difference[4:])
    assert np.array_equal(shown["a"].reshape(-1), difference[:4].astype(np.float16))


@pytest.mark.parametrize("piece", [100, PIECE])
def test_the_largest_are_found_in_little_memory(piece, monkeypatch):
    monkeypatch.setattr("aqg.channel.tensors.PIECE", piece)
    rng = np.random.default_rng(0)
    for draw in range(60):
        vector = rng.standard_normal(int(rng.integers(2, 2000))).astype(np.float32)
        if draw % 2:  # many are equal, and many are zero
            vector = np.round(2 * vector).astype(np.float32) / 2
        count = int(rng.integers(0, len(vector) + 2))
        assert np.array_equal(largest_of(vector, count), largest(vector, count))
