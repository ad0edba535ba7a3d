"""Levels of ``width`` bits, packed without gaps, the first lowest.

Eight levels always take ``width`` whole bytes, so blocks of a multiple of eight levels start on a
byte and can be packed independently.

The kernels take eight levels at a time inside 64-bit words. The ``close`` functions squeeze the
unused high bits out of the lanes of a word, the ``open`` functions put them back. Loads and stores
are written byte by byte, which is right on every byte order, and the compiler merges them.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from aqg.core.grids import MAX_WIDTH, level_dtype
from aqg.errors import MessageError, WireError
from aqg.jit import njit
from aqg.parallel import map_threads

Levels = NDArray[np.uint8] | NDArray[np.uint16]
Unsigned = NDArray[np.unsignedinteger]

Scalar = TypeVar("Scalar", bound=np.generic)

BLOCK_LENGTH = 1 << 21
"""Levels per thread's piece of work; a multiple of eight."""


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


def pack(levels: Unsigned, width: int, *, threads: int | None = None) -> NDArray[np.uint8]:
    """Pack ``levels``, each below ``2^width``, into ``packed_size(len(levels), width)`` bytes.

    >>> pack(np.array([1, 2, 3], np.uint8), 4)
    array([33,  3], dtype=uint8)
    """
    _check_width(width)
    if len(levels) and int(levels.max()) >> width:
        raise MessageError(f"level {int(levels.max())} does not fit into {width} bits")
    source = read_only(levels)
    packed = np.empty(packed_size(len(levels), width), np.uint8)

    def pack_from(start: int) -> None:
        stop = min(start + BLOCK_LENGTH, len(levels))
        _pack_block(
            source[start:stop], width, packed[start // 8 * width : packed_size(stop, width)]
        )

    map_threads(pack_from, range(0, len(levels), BLOCK_LENGTH), threads)
    return packed


def unpack(
    packed: NDArray[np.uint8], width: int, length: int, *, threads: int | None = None
) -> Levels:
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
    source = read_only(packed)
    levels: Levels = np.empty(length, level_dtype(width))  # type: ignore[assignment]

    def unpack_from(start: int) -> None:
        stop = min(start + BLOCK_LENGTH, length)
        bytes_of_block = source[start // 8 * width : packed_size(stop, width)]
        _unpack_block(bytes_of_block, width, levels[start:stop])

    map_threads(unpack_from, range(0, length, BLOCK_LENGTH), threads)
    return levels


def _check_width(width: int) -> None:
    if not 1 <= width <= MAX_WIDTH:
        raise MessageError(f"width {width} is outside 1..{MAX_WIDTH}")


@njit()
def _pack_block(levels: Unsigned, width: int, packed: NDArray[np.uint8]) -> None:
    """Pack one block; ``packed`` holds exactly ``ceil(len(levels)·width / 8)`` bytes."""
    length = len(levels)
    groups = 0
    # Widths that divide a byte have loops of their own: simple enough to become SIMD code.
    if width == 8:
        groups = length // 8
        for i in range(8 * groups):
            packed[i] = levels[i]
    elif width == 4:
        groups = length // 8
        for i in range(4 * groups):
            packed[i] = levels[2 * i] | levels[2 * i + 1] << 4
    elif width == 2:
        groups = length // 8
        for i in range(2 * groups):
            packed[i] = (
                levels[4 * i]
                | levels[4 * i + 1] << 2
                | levels[4 * i + 2] << 4
                | levels[4 * i + 3] << 6
            )
    elif width < 8:
        # A group's word is stored whole, over what the next group will write: stop where that
        # would pass the end.
        groups = max(0, min(length // 8, (len(packed) - 8) // width + 1))
        for i in range(groups):
            _store_bytes(packed, i * width, _close_bytes(_load_bytes(levels, 8 * i), width))
    elif width < 16:
        groups = max(0, min(length // 8, (len(packed) - 16) // width + 1))
        half = np.uint64(4 * width)
        for i in range(groups):
            low = _close_shorts(_load_shorts(levels, 8 * i), width)
            high = _close_shorts(_load_shorts(levels, 8 * i + 4), width)
            _store_bytes(packed, i * width, low | high << half)
            _store_bytes(packed, i * width + 8, high >> (np.uint64(64) - half))
    else:
        groups = length // 8
        for i in range(8 * groups):
            packed[2 * i] = levels[i] & 255
            packed[2 * i + 1] = levels[i] >> 8
    _pack_tail(levels, 8 * groups, width, packed)


@njit()
def _pack_tail(levels: Unsigned, done: int, width: int, packed: NDArray[np.uint8]) -> None:
    pending = 0
    pending_bits = 0
    position = done * width // 8
    for i in range(done, len(levels)):
        pending |= int(levels[i]) << pending_bits
        pending_bits += width
        while pending_bits >= 8:
            packed[position] = pending & 255
            position += 1
            pending >>= 8
            pending_bits -= 8
    if pending_bits:
        packed[position] = pending & 255


@njit()
def _unpack_block(packed: NDArray[np.uint8], width: int, levels: Unsigned) -> None:
    length = len(levels)
    groups = 0
    if width == 8:
        groups = length // 8
        for i in range(8 * groups):
            levels[i] = packed[i]
    elif width == 4:
        groups = length // 8
        for i in range(4 * groups):
            levels[2 * i] = packed[i] & 15
            levels[2 * i + 1] = packed[i] >> 4
    elif width == 2:
        groups = length // 8
        for i in range(2 * groups):
            levels[4 * i] = packed[i] & 3
            levels[4 * i + 1] = packed[i] >> 2 & 3
            levels[4 * i + 2] = packed[i] >> 4 & 3
            levels[4 * i + 3] = packed[i] >> 6
    elif width < 8:
        # A group's word is read whole, with bits of the next group: stop before the end.
        groups = max(0, min(length // 8, (len(packed) - 8) // width + 1))
        for i in range(groups):
            _store_bytes(levels, 8 * i, _open_bytes(_load_bytes(packed, i * width), width))
    elif width < 16:
        groups = max(0, min(length // 8, (len(packed) - 16) // width + 1))
        half = np.uint64(4 * width)
        for i in range(groups):
            low = _load_bytes(packed, i * width)
            high = low >> half | _load_bytes(packed, i * width + 8) << (np.uint64(64) - half)
            _store_shorts(levels, 8 * i, _open_shorts(low, width))
            _store_shorts(levels, 8 * i + 4, _open_shorts(high, width))
    else:
        groups = length // 8
        for i in range(8 * groups):
            levels[i] = packed[2 * i] | packed[2 * i + 1] << 8
    _unpack_tail(packed, 8 * groups, width, levels)


@njit()
def _unpack_tail(packed: NDArray[np.uint8], done: int, width: int, levels: Unsigned) -> None:
    mask = (1 << width) - 1
    pending = 0
    pending_bits = 0
    position = done * width // 8
    for i in range(done, len(levels)):
        while pending_bits < width:
            pending |= int(packed[position]) << pending_bits
            position += 1
            pending_bits += 8
        levels[i] = pending & mask
        pending >>= width
        pending_bits -= width


@njit()
def _load_bytes(source: Unsigned, start: int) -> np.uint64:
    """Read eight bytes, the first into the lowest lane."""
    at = np.uint64(start)
    word = np.uint64(source[at])
    for lane in range(1, 8):
        word |= np.uint64(source[at + np.uint64(lane)]) << np.uint64(8 * lane)
    return word


@njit()
def _store_bytes(target: Unsigned, start: int, word: np.uint64) -> None:
    """Write eight bytes, the lowest lane first."""
    at = np.uint64(start)
    for lane in range(8):
        target[at + np.uint64(lane)] = np.uint8(word >> np.uint64(8 * lane) & np.uint64(255))


@njit()
def _load_shorts(source: Unsigned, start: int) -> np.uint64:
    at = np.uint64(start)
    word = np.uint64(source[at])
    for lane in range(1, 4):
        word |= np.uint64(source[at + np.uint64(lane)]) << np.uint64(16 * lane)
    return word


@njit()
def _store_shorts(target: Unsigned, start: int, word: np.uint64) -> None:
    at = np.uint64(start)
    for lane in range(4):
        target[at + np.uint64(lane)] = np.uint16(word >> np.uint64(16 * lane) & np.uint64(65535))


@njit()
def _close_bytes(word: np.uint64, width: int) -> np.uint64:
    """Move eight integers of ``width`` bits, one per byte, into the low ``8·width`` bits."""
    even, odd = np.uint64(0x00FF00FF00FF00FF), np.uint64(0xFF00FF00FF00FF00)
    word = word & even | (word & odd) >> np.uint64(8 - width)
    return _close_shorts(word, 2 * width)


@njit()
def _close_shorts(word: np.uint64, width: int) -> np.uint64:
    """Move four integers of ``width`` bits, one per two bytes, into the low ``4·width`` bits."""
    even, odd = np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFF0000FFFF0000)
    word = word & even | (word & odd) >> np.uint64(16 - width)
    return word & np.uint64(0xFFFFFFFF) | word >> np.uint64(32) << np.uint64(2 * width)


@njit()
def _open_bytes(word: np.uint64, width: int) -> np.uint64:
    word = _open_shorts(word, 2 * width)
    lane = np.uint64((1 << width) - 1)
    keep = lane | lane << np.uint64(16) | lane << np.uint64(32) | lane << np.uint64(48)
    return word & keep | (word >> np.uint64(width) & keep) << np.uint64(8)


@njit()
def _open_shorts(word: np.uint64, width: int) -> np.uint64:
    half = np.uint64((1 << 2 * width) - 1)
    word = word & half | (word >> np.uint64(2 * width) & half) << np.uint64(32)
    lane = np.uint64((1 << width) - 1)
    keep = lane | lane << np.uint64(32)
    return word & keep | (word >> np.uint64(width) & keep) << np.uint64(16)
