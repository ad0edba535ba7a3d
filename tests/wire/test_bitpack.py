"""Bit packing: the kernels against plain NumPy, and refusal of other bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqg.core.grids import level_dtype
from aqg.errors import MessageError, WireError
from aqg.wire.bitpack import pack, packed_size, unpack


def random_levels(width, length, seed=0):
    levels = np.random.default_rng(seed).integers(0, 1 << width, length)
    return levels.astype(level_dtype(width))


@settings(deadline=None)
@given(
    st.integers(1, 16), st.integers(0, 400), st.integers(0, 2**32 - 1), st.sampled_from([1, -1, 3])
)
def test_kernels_agree_with_numpy(width, length, seed, stride):
    levels = random_levels(width, length, seed)[::stride]
    packed, length = pack(levels, width), len(levels)
    assert len(packed) == packed_size(length, width)
    bits = levels.astype(np.uint16)[:, None] >> np.arange(width, dtype=np.uint16) & np.uint16(1)
    by_numpy = np.packbits(bits.astype(np.uint8).ravel(), bitorder="little")
    np.testing.assert_array_equal(packed, by_numpy)
    unpacked = unpack(packed, width, length)
    assert unpacked.dtype == levels.dtype
    np.testing.assert_array_equal(unpacked, levels)


def test_other_bytes_are_refused():
    packed = pack(random_levels(3, 5), 3)
    with pytest.raises(WireError, match="take 2 bytes, not 3"):
        unpack(np.zeros(3, np.uint8), 3, 5)
    packed[-1] |= 0x80
    with pytest.raises(WireError, match="must be zero"):
        unpack(packed, 3, 5)


def test_levels_that_do_not_fit_are_refused():
    with pytest.raises(MessageError, match="level 8 does not fit into 3 bits"):
        pack(np.array([1, 8], np.uint8), 3)
    with pytest.raises(MessageError, match=r"width 17 is outside 1\.\.16"):
        pack(np.array([1], np.uint16), 17)
