"""Mode `GAPS`: three levels, nearly all of them zero; only the others are written.

::

    count       how many levels are not zero, a varint
    then bits   for each of them, in order: the gap since the last one as a Rice code, `q` ones
                and a zero, then `r` in `p` bits, lowest first, for a gap of ``q·2^p + r``; and its
                sign, one if it is positive
    last        zero bits up to a whole byte

The parameter ``p`` follows from the length ``n`` and the count ``k``, so it is not written. Random
places take ``log2(n choose k)`` bits in any code; this one needs about a tenth of a bit per place
more, without a table to learn from a handful of symbols.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aqg.core.grids import Grid
from aqg.core.messages import Upload
from aqg.core.types import IntArray
from aqg.errors import WireError
from aqg.jit import njit
from aqg.wire.varint import read_varint, write_varint

WIDTH = 2
NEGATIVE, ZERO, POSITIVE = 0, 1, 2
_MOST_OF_LENGTH = 32
"""Worth trying where at most one level in this many is not zero."""
_LEARNING_COUNT = 64
"""A coder that learns where levels are needs at least this many to learn from."""


def few_places(upload: Upload) -> IntArray | None:
    """Return where the levels are not zero, if they are three and these places are few."""
    if upload.width != WIDTH or upload.grid is not Grid.MIDTREAD:
        return None
    count = len(upload) - int(np.count_nonzero(upload.levels == ZERO))
    if count * _MOST_OF_LENGTH > len(upload):
        return None
    return np.flatnonzero(upload.levels != ZERO)


def is_best(places: IntArray) -> bool:
    """Whether no other mode needs to be tried."""
    return len(places) < _LEARNING_COUNT


def rice_parameter(length: int, count: int) -> int:
    """Return ``p``: half of random gaps are below ``2^p``, about.

    >>> rice_parameter(159010, 16), rice_parameter(7850, 16), rice_parameter(10, 10)
    (12, 8, 0)
    """
    half = 7 * length // (10 * max(1, count))  # the median of a geometric law: ln 2 times its mean
    return max(0, half.bit_length() - 1)


def encode_gaps(upload: Upload, places: IntArray) -> bytes:
    """Return the payload for an upload whose levels are not zero at ``places`` only."""
    count, length = len(places), len(upload)
    gaps, parameter = np.diff(places, prepend=-1) - 1, rice_parameter(length, count)
    num_bits = int((gaps >> parameter).sum()) + count * (parameter + 2)
    bits = np.zeros((num_bits + 7) // 8, np.uint8)
    _write(bits, gaps, upload.levels[places] == POSITIVE, parameter)
    return write_varint(count) + bits.tobytes()


def decode_gaps(payload: NDArray[np.uint8], length: int) -> NDArray[np.uint8]:
    """Return the levels; undo `encode_gaps`."""
    count, start = read_varint(payload, 0)
    if count > length:
        raise WireError(f"{count} levels of {length} are said not to be zero")
    levels = np.full(length, ZERO, np.uint8)
    bits = np.ascontiguousarray(payload[start:])
    used = _read(bits, levels, count, rice_parameter(length, count))
    if used < 0:
        raise WireError(f"the places of {count} levels end beyond the frame or the last parameter")
    padding = 8 * len(bits) - used
    if padding >= 8 or (padding and int(bits[-1]) >> (8 - padding)):
        raise WireError(f"{padding} bits follow the last level; below 8, all zero, may")
    return levels


@njit()
def _write(
    bits: NDArray[np.uint8], gaps: IntArray, is_positive: NDArray[np.bool_], parameter: int
) -> None:
    """Write the codes into ``bits``, which are zero and long enough."""
    position = 0
    for index in range(len(gaps)):
        gap = gaps[index]
        for _ in range(gap >> parameter):
            bits[position >> 3] |= np.uint8(1 << (position & 7))
            position += 1
        position += 1
        for shift in range(parameter):
            if (gap >> shift) & 1:
                bits[position >> 3] |= np.uint8(1 << (position & 7))
            position += 1
        if is_positive[index]:
            bits[position >> 3] |= np.uint8(1 << (position & 7))
        position += 1


@njit()
def _read(bits: NDArray[np.uint8], levels: NDArray[np.uint8], count: int, parameter: int) -> int:
    """Read ``count`` codes into ``levels``; return the bits used, or -1 if they do not fit."""
    num_bits = 8 * len(bits)
    position = 0
    place = -1
    for _ in range(count):
        gap = 0
        while position < num_bits and (bits[position >> 3] >> (position & 7)) & 1:
            gap += 1
            position += 1
        position += 1
        gap <<= parameter
        if position + parameter + 1 > num_bits or gap >= len(levels):
            return -1
        for shift in range(parameter):
            gap |= int((bits[position >> 3] >> (position & 7)) & 1) << shift
            position += 1
        place += gap + 1
        if place >= len(levels):
            return -1
        levels[place] = 2 * ((bits[position >> 3] >> (position & 7)) & 1)
        position += 1
    return position
