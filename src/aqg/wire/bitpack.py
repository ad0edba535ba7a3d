"""Levels of ``width`` bits, packed without gaps.

Level ``i`` takes the bits ``i·width`` to ``(i+1)·width - 1`` of the stream; bit ``k`` of the stream
is bit ``k mod 8`` of byte ``k div 8``. The last byte is filled up with zero bits.

Eight levels always take ``width`` whole bytes, so blocks of a multiple of eight levels start on a
byte and can be packed independently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from aqg.core.grids import MAX_WIDTH, level_dtype
from aqg.errors import MessageError, WireError
from aqg.jit import HAVE_NUMBA, njit
from aqg.wire.parallel import map_threads
from aqg.wire.words import (
    close_bytes,
    close_shorts,
    load_bytes,
    load_shorts,
    open_bytes,
    open_shorts,
    store_bytes,
    store_shorts,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    if not HAVE_NUMBA:
        return pack_numpy(levels, width)
    source = read_only(levels)
    packed = np.empty(packed_size(len(levels), width), np.uint8)

    def pack_block(start: int) -> None:
        stop = min(start + BLOCK_LENGTH, len(levels))
        _pack(source[start:stop], width, packed[start // 8 * width : packed_size(stop, width)])

    map_threads(pack_block, range(0, len(levels), BLOCK_LENGTH), threads)
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
    if not HAVE_NUMBA:
        return unpack_numpy(packed, width, length)
    source = read_only(packed)
    levels: Levels = np.empty(length, level_dtype(width))  # type: ignore[assignment]

    def unpack_block(start: int) -> None:
        stop = min(start + BLOCK_LENGTH, length)
        _unpack(source[start // 8 * width : packed_size(stop, width)], width, levels[start:stop])

    map_threads(unpack_block, range(0, length, BLOCK_LENGTH), threads)
    return levels


def pack_numpy(levels: Unsigned, width: int) -> NDArray[np.uint8]:
    """Do what `pack` does in plain NumPy: the specification, and the way without numba."""
    bits = levels.astype(np.uint16)[:, None] >> np.arange(width, dtype=np.uint16) & np.uint16(1)
    return np.packbits(bits.astype(np.uint8).ravel(), bitorder="little")


def unpack_numpy(packed: NDArray[np.uint8], width: int, length: int) -> Levels:
    """Do what `unpack` does in plain NumPy."""
    bits = np.unpackbits(packed, count=length * width, bitorder="little").reshape(length, width)
    sums: NDArray[np.int64] = bits @ (1 << np.arange(width))
    return sums.astype(level_dtype(width))  # type: ignore[return-value]


def _check_width(width: int) -> None:
    if not 1 <= width <= MAX_WIDTH:
        raise MessageError(f"width {width} is outside 1..{MAX_WIDTH}")


@njit()
def _pack(levels: Unsigned, width: int, packed: NDArray[np.uint8]) -> None:
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
            store_bytes(packed, i * width, close_bytes(load_bytes(levels, 8 * i), width))
    elif width < 16:
        groups = max(0, min(length // 8, (len(packed) - 16) // width + 1))
        half = np.uint64(4 * width)
        for i in range(groups):
            low = close_shorts(load_shorts(levels, 8 * i), width)
            high = close_shorts(load_shorts(levels, 8 * i + 4), width)
            store_bytes(packed, i * width, low | high << half)
            store_bytes(packed, i * width + 8, high >> (np.uint64(64) - half))
    else:
        groups = length // 8
        for i in range(8 * groups):
            packed[2 * i] = levels[i] & 255
            packed[2 * i + 1] = levels[i] >> 8
    _pack_tail(levels, 8 * groups, width, packed)


@njit()
def _pack_tail(levels: Unsigned, done: int, width: int, packed: NDArray[np.uint8]) -> None:
    """Pack the levels from ``done`` on, whose first bit starts a byte."""
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
def _unpack(packed: NDArray[np.uint8], width: int, levels: Unsigned) -> None:
    """Unpack one block; ``packed`` holds exactly ``ceil(len(levels)·width / 8)`` bytes."""
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
            store_bytes(levels, 8 * i, open_bytes(load_bytes(packed, i * width), width))
    elif width < 16:
        groups = max(0, min(length // 8, (len(packed) - 16) // width + 1))
        half = np.uint64(4 * width)
        for i in range(groups):
            low = load_bytes(packed, i * width)
            high = low >> half | load_bytes(packed, i * width + 8) << (np.uint64(64) - half)
            store_shorts(levels, 8 * i, open_shorts(low, width))
            store_shorts(levels, 8 * i + 4, open_shorts(high, width))
    else:
        groups = length // 8
        for i in range(8 * groups):
            levels[i] = packed[2 * i] | packed[2 * i + 1] << 8
    _unpack_tail(packed, 8 * groups, width, levels)


@njit()
def _unpack_tail(packed: NDArray[np.uint8], done: int, width: int, levels: Unsigned) -> None:
    """Unpack the levels from ``done`` on, whose first bit starts a byte."""
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
