"""Levels of ``width`` bits, packed without gaps, the first lowest.

Eight levels always take ``width`` whole bytes. The kernels take so many at a time inside 64-bit
words. Loads and stores are written byte by byte, which is right on every byte order, and the
compiler merges them.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from aqg.core.grids import MAX_WIDTH, level_dtype
from aqg.core.types import ByteArray, Levels
from aqg.errors import MessageError, WireError
from aqg.jit import njit, part

Scalar = TypeVar("Scalar", bound=np.generic)


def packed_size(length: int, width: int) -> int:
    return (length * width + 7) // 8


def read_only(array: NDArray[Scalar]) -> NDArray[Scalar]:
    """Return a contiguous view that cannot be written to.

    Numba compiles a kernel for each kind of array; with this there is one kind of input.
    """
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def pack(levels: Levels, width: int) -> ByteArray:
    """Pack ``levels``, each below ``2^width``, into ``packed_size(len(levels), width)`` bytes."""
    _check_width(width)
    if len(levels) and int(levels.max()) >> width:
        raise MessageError(f"level {int(levels.max())} does not fit into {width} bits")
    if width in (8, 16):
        return levels.astype(f"<u{width // 8}").view(np.uint8)
    packed = np.empty(packed_size(len(levels), width), np.uint8)
    _pack(read_only(levels.astype(level_dtype(width), copy=False)), width, packed)
    return packed


def unpack(packed: ByteArray, width: int, length: int) -> Levels:
    """Return the ``length`` levels that `pack` packed; refuse any other bytes."""
    _check_width(width)
    if len(packed) != packed_size(length, width):
        raise WireError(
            f"{length} levels of {width} bits take {packed_size(length, width)} bytes, "
            f"not {len(packed)}"
        )
    used_bits = length * width % 8
    if used_bits and int(packed[-1]) >> used_bits:
        raise WireError(f"the last packed byte is {int(packed[-1])}; its unused bits must be zero")
    if width in (8, 16):
        return packed.view(f"<u{width // 8}").astype(level_dtype(width))
    levels: Levels = np.empty(length, level_dtype(width))
    _unpack(read_only(packed), width, levels)
    return levels


def _check_width(width: int) -> None:
    if not 1 <= width <= MAX_WIDTH:
        raise MessageError(f"width {width} is outside 1..{MAX_WIDTH}")


@njit()
def _pack(levels: Levels, width: int, packed: ByteArray) -> None:
    """Fill ``packed``, which holds exactly ``ceil(len(levels)·width / 8)`` bytes."""
    groups = _num_groups(len(levels), width, len(packed))
    # Widths that divide a byte have loops of their own: simple enough to become SIMD code.
    if width == 4:
        for i in range(4 * groups):
            packed[i] = levels[2 * i] | levels[2 * i + 1] << 4
    elif width == 2:
        for i in range(2 * groups):
            packed[i] = (levels[4 * i] | levels[4 * i + 1] << 2) | (
                levels[4 * i + 2] << 4 | levels[4 * i + 3] << 6
            )
    else:
        half = np.uint64(4 * width)
        for i in range(groups):
            low, high = _join(levels, 8 * i, width), _join(levels, 8 * i + 4, width)
            _store(packed, i * width, low | high << half)
            if width > 8:
                _store(packed, i * width + 8, high >> (np.uint64(64) - half))
    pending = 0
    pending_bits = 0
    position = groups * width
    for i in range(8 * groups, len(levels)):
        pending |= int(levels[i]) << pending_bits
        pending_bits += width
        while pending_bits >= 8:
            packed[position] = pending & 255
            position += 1
            pending >>= 8
            pending_bits -= 8
    if pending_bits:
        packed[position] = pending & 255


@part(forceinline=True)
def _num_groups(num_levels: int, width: int, num_bytes: int) -> int:
    """Return how many groups of eight levels can be taken at once.

    A group's words are read and written whole, over what belongs to the next: those that would
    reach beyond the end are left out.
    """
    word_bytes = width if width in (2, 4) else 8 if width < 8 else 16
    return max(0, min(num_levels // 8, (num_bytes - word_bytes) // width + 1))


@njit()
def _unpack(packed: ByteArray, width: int, levels: Levels) -> None:
    groups = _num_groups(len(levels), width, len(packed))
    if width == 4:
        for i in range(4 * groups):
            levels[2 * i] = packed[i] & 15
            levels[2 * i + 1] = packed[i] >> 4
    elif width == 2:
        for i in range(2 * groups):
            levels[4 * i] = packed[i] & 3
            levels[4 * i + 1] = packed[i] >> 2 & 3
            levels[4 * i + 2] = packed[i] >> 4 & 3
            levels[4 * i + 3] = packed[i] >> 6
    else:
        half, last = np.uint64(4 * width), np.uint64((1 << width) - 1)
        for i in range(groups):
            low = _load(packed, i * width)
            high = low >> half
            if width > 8:
                high |= _load(packed, i * width + 8) << (np.uint64(64) - half)
            for k in range(4):
                levels[8 * i + k] = low >> np.uint64(k * width) & last
                levels[8 * i + 4 + k] = high >> np.uint64(k * width) & last
    pending = 0
    pending_bits = 0
    position = groups * width
    for i in range(8 * groups, len(levels)):
        while pending_bits < width:
            pending |= int(packed[position]) << pending_bits
            position += 1
            pending_bits += 8
        levels[i] = pending & ((1 << width) - 1)
        pending >>= width
        pending_bits -= width


@part(forceinline=True)
def _join(levels: Levels, start: int, width: int) -> np.uint64:
    """Put four levels into the low ``4·width`` bits of a word."""
    at = np.uint64(start)
    word = np.uint64(levels[at])
    for k in range(1, 4):
        word |= np.uint64(levels[at + np.uint64(k)]) << np.uint64(k * width)
    return word


@part(forceinline=True)
def _load(packed: ByteArray, start: int) -> np.uint64:
    at = np.uint64(start)
    word = np.uint64(packed[at])
    for k in range(1, 8):
        word |= np.uint64(packed[at + np.uint64(k)]) << np.uint64(8 * k)
    return word


@part(forceinline=True)
def _store(packed: ByteArray, start: int, word: np.uint64) -> None:
    at = np.uint64(start)
    for k in range(8):
        packed[at + np.uint64(k)] = word >> np.uint64(8 * k)
