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
from aqg.jit import HAVE_NUMBA
from aqg.parallel import map_threads
from aqg.wire.pack_kernels import pack_block, unpack_block

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

    def pack_from(start: int) -> None:
        stop = min(start + BLOCK_LENGTH, len(levels))
        pack_block(source[start:stop], width, packed[start // 8 * width : packed_size(stop, width)])

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
    if not HAVE_NUMBA:
        return unpack_numpy(packed, width, length)
    source = read_only(packed)
    levels: Levels = np.empty(length, level_dtype(width))  # type: ignore[assignment]

    def unpack_from(start: int) -> None:
        stop = min(start + BLOCK_LENGTH, length)
        bytes_of_block = source[start // 8 * width : packed_size(stop, width)]
        unpack_block(bytes_of_block, width, levels[start:stop])

    map_threads(unpack_from, range(0, length, BLOCK_LENGTH), threads)
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
