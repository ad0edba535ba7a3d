"""Levels of ``width`` bits, packed without gaps, the first lowest.

Eight levels always take ``width`` whole bytes. The kernels take so many at a time inside 64-bit
words. The ``close`` functions squeeze the
unused high bits out of the lanes of a word, the ``open`` functions put them back. Loads and stores
are written byte by byte, which is right on every byte order, and the compiler merges them.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from aqg.core.grids import MAX_WIDTH, level_dtype
from aqg.core.types import Levels
from aqg.errors import MessageError, WireError
from aqg.jit import njit, part

Scalar = TypeVar("Scalar", bound=np.generic)


def packed_size(length: int, width: int) -> int:
    """Return the number of bytes ``length`` levels of ``width`` bits take.

    >>> packed_size(3, 4), packed_size(7850, 3)
    (2, 2944)
    """
    return (length * width + 7) // 8


def read_only(array: NDArray[Scalar]) -> NDArray[Scalar]:
    """Return a contiguous view that cannot be written to.

    Numba compiles a kernel for each kind of array; with this there is one kind of input.
    """
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def pack(levels: Levels, width: int) -> NDArray[np.uint8]:
    """Pack ``levels``, each below ``2^width``, into ``packed_size(len(levels), width)`` bytes.

    >>> pack(np.array([1, 2, 3], np.uint8), 4)
    array([33,  3], dtype=uint8)
    """
    _check_width(width)
    if len(levels) and int(levels.max()) >> width:
        raise MessageError(f"level {int(levels.max())} does not fit into {width} bits")
    if width in (8, 16):
        return levels.astype(f"<u{width // 8}").view(np.uint8)
    packed = np.empty(packed_size(len(levels), width), np.uint8)
    _pack(read_only(levels.astype(level_dtype(width), copy=False)), width, packed)
    return packed


def unpack(packed: NDArray[np.uint8], width: int, length: int) -> Levels:
    """Return the ``length`` levels that `pack` packed; refuse any other bytes.

    >>> unpack(np.array([33, 3], np.uint8), 4, 3)
    array([1, 2, 3], dtype=uint8)
    """
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
def _pack(levels: Levels, width: int, packed: NDArray[np.uint8]) -> None:
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
    elif width < 8:
        for i in range(groups):
            _store(packed, i * width, 8, _close_bytes(_load(levels, 8 * i, 8), width))
    else:
        half = np.uint64(4 * width)
        for i in range(groups):
            low = _close_shorts(_load(levels, 8 * i, 4), width)
            high = _close_shorts(_load(levels, 8 * i + 4, 4), width)
            _store(packed, i * width, 8, low | high << half)
            _store(packed, i * width + 8, 8, high >> (np.uint64(64) - half))
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
def _unpack(packed: NDArray[np.uint8], width: int, levels: Levels) -> None:
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
    elif width < 8:
        for i in range(groups):
            _store(levels, 8 * i, 8, _open_bytes(_load(packed, i * width, 8), width))
    else:
        half = np.uint64(4 * width)
        for i in range(groups):
            low = _load(packed, i * width, 8)
            high = low >> half | _load(packed, i * width + 8, 8) << (np.uint64(64) - half)
            _store(levels, 8 * i, 4, _open_shorts(low, width))
            _store(levels, 8 * i + 4, 4, _open_shorts(high, width))
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
def _load(source: Levels, start: int, lanes: int) -> np.uint64:
    """Read four or eight numbers, the first into the lowest lane of a word."""
    at = np.uint64(start)
    word = np.uint64(source[at])
    for lane in range(1, lanes):
        word |= np.uint64(source[at + np.uint64(lane)]) << np.uint64(64 // lanes * lane)
    return word


@part(forceinline=True)
def _store(target: Levels, start: int, lanes: int, word: np.uint64) -> None:
    """Write what is in the lanes, which are as wide as what ``target`` holds."""
    at = np.uint64(start)
    for lane in range(lanes):
        target[at + np.uint64(lane)] = word >> np.uint64(64 // lanes * lane)


@part(forceinline=True)
def _close_bytes(word: np.uint64, width: int) -> np.uint64:
    """Move eight integers of ``width`` bits, one per byte, into the low ``8·width`` bits."""
    even, odd = np.uint64(0x00FF00FF00FF00FF), np.uint64(0xFF00FF00FF00FF00)
    word = word & even | (word & odd) >> np.uint64(8 - width)
    return _close_shorts(word, 2 * width)


@part(forceinline=True)
def _close_shorts(word: np.uint64, width: int) -> np.uint64:
    """Move four integers of ``width`` bits, one per two bytes, into the low ``4·width`` bits."""
    even, odd = np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFF0000FFFF0000)
    word = word & even | (word & odd) >> np.uint64(16 - width)
    return word & np.uint64(0xFFFFFFFF) | word >> np.uint64(32) << np.uint64(2 * width)


@part(forceinline=True)
def _open_bytes(word: np.uint64, width: int) -> np.uint64:
    word = _open_shorts(word, 2 * width)
    lane = np.uint64((1 << width) - 1)
    keep = lane | lane << np.uint64(16) | lane << np.uint64(32) | lane << np.uint64(48)
    return word & keep | (word >> np.uint64(width) & keep) << np.uint64(8)


@part(forceinline=True)
def _open_shorts(word: np.uint64, width: int) -> np.uint64:
    half = np.uint64((1 << 2 * width) - 1)
    word = word & half | (word >> np.uint64(2 * width) & half) << np.uint64(32)
    lane = np.uint64((1 << width) - 1)
    keep = lane | lane << np.uint64(32)
    return word & keep | (word >> np.uint64(width) & keep) << np.uint64(16)
