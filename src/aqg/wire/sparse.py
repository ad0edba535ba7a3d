"""Payloads of vectors in half precision: all coordinates (`HALF`), or a few (`SPARSE`).

::

    HALF        exponent + 128, a byte
                sections of two planes: the low and the high bytes of the halves, each half's bits
                rotated left by one

    SPARSE      exponent + 128, a byte
                where the values are: 1 where a coordinate is zero, 0 and 2 for its sign elsewhere,
                    as the levels of a three-level grid; how they are coded (0 sections, 1 context),
                    a byte; their number of bytes, a varint; and those bytes
                sections of two planes: the low and the high bytes of the magnitudes, if any

The largest coordinates of a gradient cluster: with the context coder their places and signs take a
fifth less than the ``log2(n choose k) + k`` bits of random ones, and less than coded as gaps.
``benchmarks/sparse_frames.py`` measures it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aqg.core.halves import HalfUpload, SparseUpload
from aqg.errors import WireError
from aqg.wire import context
from aqg.wire.planes import BYTES, Plane, decode_planes, encode_planes, planes_size
from aqg.wire.sections import Alphabet
from aqg.wire.varint import read_varint, varint_size, write_varint

if TYPE_CHECKING:
    from numpy.typing import NDArray

EXPONENT_OFFSET = 128
SIGNS = Alphabet(width=2, size=3)
MAGNITUDES = [BYTES, Alphabet(width=7, size=128)]
SECTIONS, CONTEXT = 0, 1


def encode_half(upload: HalfUpload, threads: int | None) -> bytes:
    """Return the payload of mode `HALF`."""
    return _write_exponent(upload.exponent) + encode_planes(_half_planes(upload.halves), threads)


def half_size(upload: HalfUpload) -> int:
    """Return ``len(encode_half(upload))``."""
    return 1 + planes_size(_half_planes(upload.halves))


def decode_half(payload: NDArray[np.uint8], length: int, threads: int | None) -> HalfUpload:
    """Undo `encode_half`."""
    exponent = _read_exponent(payload)
    low, high = decode_planes(payload[1:], [BYTES] * 2, length, threads)
    rotated = low | high.astype(np.uint16) << np.uint16(8)
    bits = rotated >> np.uint16(1) | rotated << np.uint16(15)
    return HalfUpload(bits.view(np.float16), exponent)


def encode_sparse(upload: SparseUpload, try_context: bool, threads: int | None) -> bytes:
    """Return the payload of mode `SPARSE`; the context coder is tried where it is wanted."""
    places = _places(upload)
    coder, coded = SECTIONS, encode_planes([Plane(places, SIGNS)], threads)
    if try_context:
        better = context.encode(places, SIGNS.size)
        if len(better) < len(coded):
            coder, coded = CONTEXT, better
    head = _write_exponent(upload.exponent) + bytes([coder]) + write_varint(len(coded))
    if not len(upload.halves):
        return head + coded
    return head + coded + encode_planes(_magnitude_planes(upload.halves), threads)


def sparse_size(upload: SparseUpload, try_context: bool) -> int:
    """Return ``len(encode_sparse(upload, try_context))``."""
    places = _places(upload)
    size = planes_size([Plane(places, SIGNS)])
    if try_context:
        size = min(size, context.encoded_size(places, SIGNS.size))
    size += 2 + varint_size(size)
    return size + (planes_size(_magnitude_planes(upload.halves)) if len(upload.halves) else 0)


def decode_sparse(payload: NDArray[np.uint8], length: int, threads: int | None) -> SparseUpload:
    """Undo `encode_sparse`; memory is taken in proportion to ``length`` only."""
    exponent = _read_exponent(payload)
    if len(payload) < 2:
        raise WireError("the frame ends where the coder of the places should be named")
    coder = int(payload[1])
    if coder not in (SECTIONS, CONTEXT):
        raise WireError(f"places are coded as {coder}; it must be {SECTIONS} or {CONTEXT}")
    size, start = read_varint(payload, 2)
    if size > len(payload) - start:
        raise WireError(f"the places claim {size} bytes where {len(payload) - start} are left")
    coded, rest = payload[start : start + size], payload[start + size :]
    if coder == SECTIONS:
        (places,) = decode_planes(coded, [SIGNS], length, threads)
    else:
        context.require_short(length)
        places = context.decode(coded, length, SIGNS.size).astype(np.uint8, copy=False)
    if length and int(places.max()) >= SIGNS.size:
        raise WireError(f"a place holds {int(places.max())}; it must be below {SIGNS.size}")
    indices = np.flatnonzero(places != 1)
    if len(indices) == 0:
        if len(rest):
            raise WireError(f"{len(rest)} bytes follow the places of no values")
        return SparseUpload(indices, np.empty(0, np.float16), exponent, length)
    low, high = decode_planes(rest, MAGNITUDES, len(indices), threads)
    bits = low | high.astype(np.uint16) << np.uint16(8)
    bits |= (places[indices] == 0).astype(np.uint16) << np.uint16(15)
    return SparseUpload(indices, bits.view(np.float16), exponent, length)


def _places(upload: SparseUpload) -> NDArray[np.uint8]:
    places = np.ones(upload.length, np.uint8)
    places[upload.indices] = np.where(np.signbit(upload.halves), 0, 2)
    return places


def _half_planes(halves: NDArray[np.float16]) -> list[Plane]:
    bits = np.ascontiguousarray(halves).view(np.uint16)
    rotated = bits << np.uint16(1) | bits >> np.uint16(15)
    return [Plane(part, BYTES) for part in _low_and_high(rotated)]


def _magnitude_planes(halves: NDArray[np.float16]) -> list[Plane]:
    bits = np.ascontiguousarray(halves).view(np.uint16) & np.uint16(0x7FFF)
    return [Plane(*plane) for plane in zip(_low_and_high(bits), MAGNITUDES, strict=True)]


def _low_and_high(numbers: NDArray[np.uint16]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    return numbers.astype(np.uint8), (numbers >> np.uint16(8)).astype(np.uint8)


def _write_exponent(exponent: int) -> bytes:
    return bytes([exponent + EXPONENT_OFFSET])


def _read_exponent(payload: NDArray[np.uint8]) -> int:
    if len(payload) == 0:
        raise WireError("the frame ends where the exponent should be")
    return int(payload[0]) - EXPONENT_OFFSET
