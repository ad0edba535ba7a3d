"""Wide numbers as planes of bytes, and planes as sections.

========== ======== ==============================================================================
message    planes   symbol ``i`` of each
========== ======== ==============================================================================
width ≤ 8  1        level ``i``
width > 8  2        the low 8 bits, and the rest, of ``(level - 2^(width-1) + 128) mod 2^width``
float32    4        the bytes, lowest first, of the bits rotated left by one
========== ======== ==============================================================================

The shift keeps the levels around zero, which are most of them, on one value of the upper plane. The
rotation gathers a float's exponent in one byte; that plane is compressible, the others seldom are.

A plane of `BLOCKED_LENGTH` symbols or more is cut into blocks of `BLOCK_LENGTH`; each is a section
of its own, so that several threads can work on one message. Where a message has more than one
section, each is preceded by its number of bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aqg.core.grids import num_levels
from aqg.errors import WireError
from aqg.jit import HAVE_NUMBA, njit
from aqg.parallel import map_threads
from aqg.wire.bitpack import read_only
from aqg.wire.sections import Alphabet, decode_section, encode_section, section_size
from aqg.wire.varint import read_varint, varint_size, write_varint

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aqg.core.grids import Grid
    from aqg.core.messages import Upload
    from aqg.core.types import Levels

BLOCKED_LENGTH = 1 << 21
BLOCK_LENGTH = 1 << 20
THREADED_LENGTH = 1 << 15
"""Messages with fewer symbols in all planes are coded before a thread has started."""
BYTES = Alphabet(width=8, size=256)


class Plane(NamedTuple):
    """One symbol per coordinate, all below ``alphabet.size``."""

    symbols: NDArray[np.uint8]
    alphabet: Alphabet


def level_alphabets(grid: Grid, width: int) -> list[Alphabet]:
    """Return the alphabets of the planes of levels on ``grid`` at ``width`` bits."""
    if width <= 8:
        return [Alphabet(width, num_levels(grid, width))]
    return [BYTES, Alphabet(width - 8, 1 << (width - 8))]


def dense_alphabets() -> list[Alphabet]:
    """Return the alphabets of the planes of float32 values."""
    return [BYTES] * 4


def split_levels(upload: Upload) -> list[Plane]:
    """Return the planes of an upload's levels."""
    alphabets = level_alphabets(upload.grid, upload.width)
    if len(alphabets) == 1:
        return [Plane(upload.levels.astype(np.uint8, copy=False), alphabets[0])]
    shifted = upload.levels - np.uint16((1 << (upload.width - 1)) - 128)
    shifted &= np.uint16((1 << upload.width) - 1)
    parts = (shifted.astype(np.uint8), (shifted >> np.uint16(8)).astype(np.uint8))
    return [Plane(*plane) for plane in zip(parts, alphabets, strict=True)]


def join_levels(planes: list[NDArray[np.uint8]], width: int) -> Levels:
    """Undo `split_levels`."""
    if len(planes) == 1:
        return planes[0]
    shifted = planes[0] | planes[1].astype(np.uint16) << np.uint16(8)
    shifted += np.uint16((1 << (width - 1)) - 128)
    shifted &= np.uint16((1 << width) - 1)
    return shifted


def split_dense(values: NDArray[np.float32]) -> list[Plane]:
    """Return the planes of float32 values."""
    bits = read_only(values).view(np.uint32)
    if HAVE_NUMBA:
        planes = np.empty((4, len(bits)), np.uint8)
        _split(bits, planes)
    else:
        rotated = bits << np.uint32(1) | bits >> np.uint32(31)
        planes = np.stack([rotated >> np.uint32(k) for k in (0, 8, 16, 24)]).astype(np.uint8)
    return [Plane(plane, BYTES) for plane in planes]


@njit()
def _split(bits: Any, planes: Any) -> None:
    for i in range(len(bits)):
        rotated = np.uint32(bits[i] << np.uint32(1)) | np.uint32(bits[i] >> np.uint32(31))
        planes[0, i] = rotated
        planes[1, i] = rotated >> np.uint32(8)
        planes[2, i] = rotated >> np.uint32(16)
        planes[3, i] = rotated >> np.uint32(24)


def join_dense(planes: list[NDArray[np.uint8]]) -> NDArray[np.float32]:
    """Undo `split_dense`."""
    rotated = planes[3].astype(np.uint32)
    for plane in planes[2::-1]:
        rotated <<= np.uint32(8)
        rotated |= plane
    return (rotated >> np.uint32(1) | rotated << np.uint32(31)).view(np.float32)


def encode_planes(planes: list[Plane], threads: int | None) -> bytes:
    """Write all planes, block by block.

    >>> encode_planes([Plane(np.zeros(100, np.uint8), BYTES)] * 2, threads=1).hex()
    '053d00000100053d00000100'
    """
    pieces = _pieces(planes)
    threads = _useful_threads(planes, threads)
    sections = map_threads(lambda piece: encode_section(*piece), pieces, threads)
    if len(sections) == 1:
        return sections[0]
    return b"".join(write_varint(len(section)) + section for section in sections)


def planes_size(planes: list[Plane]) -> int:
    """Return ``len(encode_planes(planes))`` without building the bytes."""
    pieces = _pieces(planes)
    if len(pieces) == 1:
        return section_size(*pieces[0])
    sizes = [section_size(*piece) for piece in pieces]
    return sum(varint_size(size) + size for size in sizes)


def decode_planes(
    payload: NDArray[np.uint8], alphabets: list[Alphabet], length: int, threads: int | None
) -> list[NDArray[np.uint8]]:
    """Return one plane of ``length`` symbols per alphabet; they may reach up to ``2^width - 1``."""
    planes = [Plane(np.empty(length, np.uint8), alphabet) for alphabet in alphabets]
    pieces = _pieces(planes)
    sections = _cut(payload, len(pieces))
    map_threads(
        lambda i: decode_section(sections[i], pieces[i].alphabet, pieces[i].symbols),
        range(len(pieces)),
        _useful_threads(planes, threads),
    )
    return [plane.symbols for plane in planes]


def _useful_threads(planes: list[Plane], threads: int | None) -> int | None:
    if len(planes) * len(planes[0].symbols) >= THREADED_LENGTH:
        return threads
    return 1 if threads is None else min(threads, 1)


def _pieces(planes: list[Plane]) -> list[Plane]:
    length = len(planes[0].symbols)
    if length < BLOCKED_LENGTH:
        return planes
    return [
        Plane(symbols[start : start + BLOCK_LENGTH], alphabet)
        for symbols, alphabet in planes
        for start in range(0, length, BLOCK_LENGTH)
    ]


def _cut(payload: NDArray[np.uint8], num_sections: int) -> list[NDArray[np.uint8]]:
    """Cut the payload into sections, by their number of bytes where there are several."""
    if num_sections == 1:
        return [payload]
    sections = []
    position = 0
    for index in range(num_sections):
        size, position = read_varint(payload, position)
        if size > len(payload) - position:
            raise WireError(
                f"section {index} claims {size} bytes where {len(payload) - position} are left"
            )
        sections.append(payload[position : position + size])
        position += size
    if position != len(payload):
        raise WireError(f"{len(payload) - position} bytes follow the last section")
    return sections
