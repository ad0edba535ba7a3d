"""Payloads of mode GAPS and of modes 10 to 15: few levels, half precision, blocks, rotations.

The largest coordinates of a gradient cluster: with the context coder their places and signs take a
fifth less than the ``log2(n choose k) + k`` bits of random ones, and less than coded as gaps
(``benchmarks/sparse_frames.py``). Random places take ``log2(n choose k)`` bits in any code; GAPS, a
Rice code, needs about a tenth of a bit per place more, without a table to learn from a handful of
symbols. ``docs/reference/frame-format.md`` describes each byte.
"""

import enum
import struct

import numpy as np
from numpy.typing import NDArray

from aqg.core.grids import Grid
from aqg.core.messages import (
    BLOCK,
    LONGEST_BLOCK,
    TOP,
    WIDTHS,
    BlockUpload,
    HalfUpload,
    RotatedUpload,
    SparseUpload,
    Upload,
    block_lengths,
    num_blocks,
)
from aqg.core.types import IntArray
from aqg.errors import WireError
from aqg.jit import njit
from aqg.wire import context
from aqg.wire.bitpack import pack, unpack
from aqg.wire.sections import BLOCKED_LENGTH, BYTES, Alphabet, Plane, decode_planes, encode_planes
from aqg.wire.varint import read_part, read_varint, write_varint


class Mode(enum.IntEnum):
    """How the payload is written. Modes 6, 7 are kept for levels, 16..31 for other messages."""

    SKIP = 0
    RAW = 1
    CODED = 2
    CONTEXT = 3
    HINTED = 4
    GAPS = 5
    DENSE = 8
    DENSE_CODED = 9
    HALF = 10
    SPARSE = 11
    BLOCKS = 12
    ROTATED = 13
    BUCKETS = 14
    TURNED = 15


Other = HalfUpload | SparseUpload | BlockUpload | RotatedUpload
SIGNS = Alphabet(width=2, size=3)
MAGNITUDES = [BYTES, Alphabet(width=7, size=128)]
BLOCK_LEVELS = Alphabet(width=8, size=2 * TOP + 1)
SECTIONS, CONTEXT = 0, 1
EXPONENT_OFFSET = 128
SEED_BYTES = 4
SCALE_BYTES = 4


def encode_other(upload: Other, threads: int | None) -> tuple[Mode, bytes]:
    threads = _useful_threads(len(upload), threads)
    if isinstance(upload, HalfUpload):
        return Mode.HALF, _encode_half(upload, threads)
    if isinstance(upload, SparseUpload):
        return Mode.SPARSE, _encode_sparse(upload, threads)
    if isinstance(upload, RotatedUpload):
        return (Mode.ROTATED if upload.width == 1 else Mode.TURNED), _encode_rotated(upload)
    if upload.block == BLOCK:
        return Mode.BLOCKS, _encode_blocks(upload, threads)
    return Mode.BUCKETS, write_varint(upload.block) + _encode_blocks(upload, threads)


def decode_other(mode: int, payload: NDArray[np.uint8], length: int, threads: int | None) -> Other:
    """Undo `encode_other`; the parts of the message fit each other, its values may not.

    Memory is taken in proportion to ``length`` only.
    """
    threads = _useful_threads(length, threads)
    if mode == Mode.HALF:
        return _decode_half(payload, length, threads)
    if mode == Mode.SPARSE:
        return _decode_sparse(payload, length, threads)
    if mode == Mode.BLOCKS:
        return _decode_blocks(payload, length, threads, BLOCK)
    if mode == Mode.BUCKETS:
        block, start = read_varint(payload, 0)
        if not 1 <= block <= LONGEST_BLOCK or block == BLOCK:
            raise WireError(f"blocks of {block} coordinates are not what mode BUCKETS has")
        return _decode_blocks(payload[start:], length, threads, block)
    if mode == Mode.ROTATED:
        return _decode_rotated(payload, length, width=1)
    width = int(payload[0]) if len(payload) else 0
    if width not in WIDTHS or width == 1:
        raise WireError(f"codes of {width} bits are not what mode TURNED has")
    return _decode_rotated(payload[1:], length, width)


def _useful_threads(length: int, threads: int | None) -> int | None:
    """Return 1 for messages that are not cut into blocks: the work takes less than a thread."""
    return threads if length >= BLOCKED_LENGTH else 1


def _encode_half(upload: HalfUpload, threads: int | None) -> bytes:
    bits = np.ascontiguousarray(upload.halves).view(np.uint16)
    planes = _low_and_high(bits << np.uint16(1) | bits >> np.uint16(15), [BYTES] * 2)
    return bytes([upload.exponent + EXPONENT_OFFSET]) + encode_planes(planes, threads)


def _decode_half(payload: NDArray[np.uint8], length: int, threads: int | None) -> HalfUpload:
    exponent = _read_exponent(payload)
    low, high = decode_planes(payload[1:], [BYTES] * 2, length, threads)
    rotated = low | high.astype(np.uint16) << np.uint16(8)
    bits = rotated >> np.uint16(1) | rotated << np.uint16(15)
    return HalfUpload(bits.view(np.float16), exponent)


def _encode_sparse(upload: SparseUpload, threads: int | None) -> bytes:
    places = np.ones(upload.length, np.uint8)
    places[upload.indices] = np.where(np.signbit(upload.halves), 0, 2)
    coder, coded = SECTIONS, encode_planes([Plane(places, SIGNS)], threads)
    if len(upload) <= context.LONGEST:
        better = context.encode(places, SIGNS.size)
        if len(better) < len(coded):
            coder, coded = CONTEXT, better
    head = bytes([upload.exponent + EXPONENT_OFFSET, coder]) + write_varint(len(coded))
    if not len(upload.halves):
        return head + coded
    bits = np.ascontiguousarray(upload.halves).view(np.uint16) & np.uint16(0x7FFF)
    return head + coded + encode_planes(_low_and_high(bits, MAGNITUDES), threads)


def _decode_sparse(payload: NDArray[np.uint8], length: int, threads: int | None) -> SparseUpload:
    exponent = _read_exponent(payload)
    if len(payload) < 2:
        raise WireError("the frame ends where the coder of the places should be named")
    coder = int(payload[1])
    if coder not in (SECTIONS, CONTEXT):
        raise WireError(f"places are coded as {coder}; it must be {SECTIONS} or {CONTEXT}")
    coded, rest = read_part(payload, 2, "the places claim")
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


def _low_and_high(numbers: NDArray[np.uint16], alphabets: list[Alphabet]) -> list[Plane]:
    low, high = numbers.astype(np.uint8), (numbers >> np.uint16(8)).astype(np.uint8)
    return [Plane(low, alphabets[0]), Plane(high, alphabets[1])]


def _read_exponent(payload: NDArray[np.uint8]) -> int:
    if len(payload) == 0:
        raise WireError("the frame ends where the exponent should be")
    return int(payload[0]) - EXPONENT_OFFSET


def _encode_blocks(upload: BlockUpload, threads: int | None) -> bytes:
    bits = np.ascontiguousarray(upload.steps).view(np.uint32)
    planes = [Plane((bits >> np.uint32(shift)).astype(np.uint8), BYTES) for shift in (16, 24)]
    steps = encode_planes(planes, threads)
    levels = encode_planes([Plane(upload.levels, BLOCK_LEVELS)], threads)
    return write_varint(len(steps)) + steps + levels


def _decode_blocks(
    payload: NDArray[np.uint8], length: int, threads: int | None, block: int
) -> BlockUpload:
    coded, rest = read_part(payload, 0, "the steps claim")
    low, high = decode_planes(coded, [BYTES] * 2, num_blocks(length, block), threads)
    bits = low.astype(np.uint32) << np.uint32(16) | high.astype(np.uint32) << np.uint32(24)
    (levels,) = decode_planes(rest, [BLOCK_LEVELS], length, threads)
    return BlockUpload(levels, bits.view(np.float32), block)


def _encode_rotated(upload: RotatedUpload) -> bytes:
    scales = upload.scales.astype("<f4", copy=False).tobytes()
    head = b"" if upload.width == 1 else bytes([upload.width])
    codes = pack(upload.signs, upload.width).tobytes()
    return head + struct.pack("<I", upload.seed) + scales + codes


def _decode_rotated(payload: NDArray[np.uint8], length: int, width: int) -> RotatedUpload:
    lengths = block_lengths(length)
    start = SEED_BYTES + SCALE_BYTES * len(lengths)
    if len(payload) < start:
        raise WireError(f"seed and {len(lengths)} scales take {start} bytes, not {len(payload)}")
    seed = int.from_bytes(payload[:SEED_BYTES].tobytes(), "little")
    scales = np.frombuffer(payload[SEED_BYTES:start].tobytes(), "<f4").astype(np.float32)
    signs = unpack(payload[start:], width, sum(lengths)).astype(np.uint8, copy=False)
    return RotatedUpload(signs, scales, seed, length, width)


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
    count, length = len(places), len(upload)
    gaps, parameter = np.diff(places, prepend=-1) - 1, rice_parameter(length, count)
    num_bits = int((gaps >> parameter).sum()) + count * (parameter + 2)
    bits = np.zeros((num_bits + 7) // 8, np.uint8)
    _write(bits, gaps, upload.levels[places] == POSITIVE, parameter)
    return write_varint(count) + bits.tobytes()


def decode_gaps(payload: NDArray[np.uint8], length: int) -> NDArray[np.uint8]:
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
