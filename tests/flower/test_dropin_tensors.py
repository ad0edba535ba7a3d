"""Tensors of the drop-in: read and written as Flower does, with fewer copies of them."""

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array

from aqg.errors import MessageError
from aqg.flower.envelope import array_of, tensor_of

TENSORS = [
    np.arange(12, dtype=np.float32).reshape(3, 4),
    np.asfortranarray(np.arange(12, dtype=np.float64).reshape(3, 4)),
    np.arange(24, dtype=np.int64).reshape(2, 3, 4)[:, ::2],
    np.array(3.5, np.float16),
    np.zeros((0, 3), np.float32),
    np.array([True, False]),
    np.arange(3, dtype=">f4"),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}{t.shape}")
def test_arrays_are_flowers(tensor):
    read = tensor_of(Array(tensor))
    assert read.dtype == tensor.dtype
    assert read.shape == tensor.shape
    assert np.array_equal(read, tensor)
    plain = np.array(tensor, order="C")
    assert array_of(tensor).data == Array(plain).data
    assert np.array_equal(array_of(tensor).numpy(), tensor)


def test_no_copy_is_made():
    array = Array(np.zeros(1000, np.float32))
    read = tensor_of(array)
    assert np.shares_memory(read, np.frombuffer(array.data, np.uint8))
    assert not read.flags.writeable


def test_damaged_arrays_are_refused():
    whole = Array(np.zeros(1000, np.float32))
    cut = Array("float32", (1000,), "numpy.ndarray", whole.data[:-8])
    with pytest.raises(ValueError, match="buffer is smaller"):
        tensor_of(cut)
    with pytest.raises(MessageError, match="an array is 'pickle'"):
        tensor_of(Array("float32", (1000,), "pickle", whole.data))
