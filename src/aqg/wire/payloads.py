"""Payloads of all modes but those for levels of any width: few levels, floats, blocks, rotations.

The largest coordinates of a gradient cluster: with the context coder their places and signs take a
fifth less than the ``log2(n choose k) + k`` bits of random ones, and less than coded as gaps
(``benchmarks/sparse_frames.py``). Random places take ``log2(n choose k)`` bits in any code; GAPS, a
Rice code, needs about a tenth of a bit per place more, without a table to learn from a handful of
symbols. ``docs/reference/frame-format.md`` describes each byte.
"""

import enum
import struct
from collections.abc import Callable

import numpy as np

from aqg.core import messages
from aqg.core.grids import Grid
from aqg.core.messages import BlockUpload, DenseUpload, HalfUpload, RotatedUpload, SparseUpload
from aqg.core.types import ByteArray, IntArray
from aqg.errors import WireError
from aqg.jit import njit
from aqg.wire import context, sections
from aqg.wire.bitpack import pack, unpack
from aqg.wire.sections import BYTES, Alphabet, Plane, decode_planes, encode_planes
from aqg.wire.varint import Reader, write_part, write_varint


class Mode(enum.IntEnum):
    """How the payload is written. Modes 6, 7 are kept for levels, 17..31 for other messages."""

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
    SAMPLED = 16


Values = DenseUpload | HalfUpload | SparseUpload | BlockUpload | RotatedUpload
SIGNS = Alphabet(width=2, size=3)
MAGNITUDES = [BYTES, Alphabet(width=7, size=128)]
BLOCK_LEVELS = Alphabet(width=8, size=2 * messages.TOP + 1)
SECTIONS, CONTEXT = 0, 1
EXPONENT_OFFSET = 128


def encode_values(upload: Values, threads: int | None) -> tuple[Mode, bytes]:
    match upload:
        case DenseUpload():
            coded = encode_planes(sections.split_floats(upload.dense), threads)
            if len(coded) < 4 * len(upload):
                return Mode.DENSE_CODED, coded
            return Mode.DENSE, upload.dense.astype("<f4", copy=False).tobytes()
        case HalfUpload():
            coded = encode_planes(sections.split_floats(upload.halves), threads)
            return Mode.HALF, bytes([upload.exponent + EXPONENT_OFFSET]) + coded
        case SparseUpload():
            return Mode.SPARSE, _encode_sparse(upload, threads)
        case RotatedUpload() if upload.taken:
            return Mode.SAMPLED, write_varint(upload.taken) + _encode_rotated(upload)
        case RotatedUpload(width=1):
            return Mode.ROTATED, _encode_rotated(upload)
        case RotatedUpload():
            return Mode.TURNED, bytes([upload.width]) + _encode_rotated(upload)
        case BlockUpload() if upload.block == messages.BLOCK:
            return Mode.BLOCKS, _encode_blocks(upload, threads)
    return Mode.BUCKETS, write_varint(upload.block) + _encode_blocks(upload, threads)


def decode_values(mode: Mode, payload: ByteArray, length: int, threads: int | None) -> Values:
    """Undo `encode_values`; the parts of the message fit each other, its values may not."""
    return _DECODERS[mode](Reader(payload), length, threads)


def _decode_dense(reader: Reader, length: int, _: int | None) -> DenseUpload:
    if reader.left != 4 * length:
        raise WireError(f"{length} float32 values take {4 * length} bytes, not {reader.left}")
    return DenseUpload(reader.array(length, "<f4", "the values").astype(np.float32))


def _decode_half(reader: Reader, length: int, threads: int | None) -> HalfUpload:
    exponent = reader.byte("the exponent") - EXPONENT_OFFSET
    return HalfUpload(sections.decode_floats(reader.rest(), np.float16, length, threads), exponent)


def _encode_sparse(upload: SparseUpload, threads: int | None) -> bytes:
    places = np.ones(upload.length, np.uint8)
    places[upload.indices] = np.where(np.signbit(upload.halves), 0, 2)
    coder, coded = SECTIONS, encode_planes([Plane(places, SIGNS)], threads)
    if len(upload) <= context.LONGEST:
        better = context.encode(places, SIGNS.size)
        if len(better) < len(coded):
            coder, coded = CONTEXT, better
    head = bytes([upload.exponent + EXPONENT_OFFSET, coder]) + write_part(coded)
    if not len(upload.halves):
        return head
    bits = np.ascontiguousarray(upload.halves).view(np.uint16) & np.uint16(0x7FFF)
    return head + encode_planes(sections.split_bytes(bits, MAGNITUDES), threads)


def _decode_sparse(reader: Reader, length: int, threads: int | None) -> SparseUpload:
    exponent = reader.byte("the exponent") - EXPONENT_OFFSET
    coder = reader.byte("the coder of the places")
    if coder not in (SECTIONS, CONTEXT):
        raise WireError(f"places are coded as {coder}; it must be {SECTIONS} or {CONTEXT}")
    coded = reader.part("a list of places")
    if coder == SECTIONS:
        (places,) = decode_planes(coded, [SIGNS], length, threads)
    else:
        places = context.decode(coded, length, SIGNS.size).astype(np.uint8, copy=False)
    if length and int(places.max()) >= SIGNS.size:
        raise WireError(f"a place holds {int(places.max())}; it must be below {SIGNS.size}")
    indices = np.flatnonzero(places != 1)
    if len(indices) == 0:
        reader.finish("the places of no values")
        return SparseUpload(indices, np.empty(0, np.float16), exponent, length)
    planes = decode_planes(reader.rest(), MAGNITUDES, len(indices), threads)
    bits = sections.join_bytes(planes, np.uint16)
    bits |= (places[indices] == 0).astype(np.uint16) << np.uint16(15)
    return SparseUpload(indices, bits.view(np.float16), exponent, length)


def _encode_blocks(upload: BlockUpload, threads: int | None) -> bytes:
    bits = np.ascontiguousarray(upload.steps).view(np.uint32)
    steps = encode_planes(sections.split_bytes(bits >> np.uint32(16), [BYTES] * 2), threads)
    return write_part(steps) + encode_planes([Plane(upload.levels, BLOCK_LEVELS)], threads)


def _decode_blocks(
    reader: Reader, length: int, threads: int | None, block: int = messages.BLOCK
) -> BlockUpload:
    coded = reader.part("a list of steps")
    planes = decode_planes(coded, [BYTES] * 2, messages.num_blocks(length, block), threads)
    steps = (sections.join_bytes(planes, np.uint32) << np.uint32(16)).view(np.float32)
    (levels,) = decode_planes(reader.rest(), [BLOCK_LEVELS], length, threads)
    return BlockUpload(levels, steps, block)


def _decode_buckets(reader: Reader, length: int, threads: int | None) -> BlockUpload:
    block = reader.varint()
    if not 1 <= block <= messages.LONGEST_BLOCK or block == messages.BLOCK:
        raise WireError(f"blocks of {block} coordinates are not what mode BUCKETS has")
    return _decode_blocks(reader, length, threads, block)


def _encode_rotated(upload: RotatedUpload) -> bytes:
    scales = upload.scales.astype("<f4", copy=False).tobytes()
    return struct.pack("<I", upload.seed) + scales + pack(upload.signs, upload.width).tobytes()


def _decode_rotated(
    reader: Reader, length: int, _: int | None, width: int = 1, taken: int = 0
) -> RotatedUpload:
    lengths = messages.block_lengths(taken or length)
    seed = int(reader.array(1, "<u4", "the seed")[0])
    scales = reader.array(len(lengths), "<f4", "the scales").astype(np.float32)
    signs = unpack(reader.rest(), width, sum(lengths)).astype(np.uint8, copy=False)
    return RotatedUpload(signs, scales, seed, length, width, taken)


def _decode_turned(reader: Reader, length: int, threads: int | None) -> RotatedUpload:
    width = reader.byte("the width of its codes")
    if width not in messages.WIDTHS or width == 1:
        raise WireError(f"codes of {width} bits are not what mode TURNED has")
    return _decode_rotated(reader, length, threads, width)


def _decode_sampled(reader: Reader, length: int, threads: int | None) -> RotatedUpload:
    taken = reader.varint()
    if not 0 < taken < length:
        raise WireError(f"{taken} of {length} coordinates are not what mode SAMPLED has")
    return _decode_rotated(reader, length, threads, taken=taken)


_DECODERS: dict[Mode, Callable[[Reader, int, int | None], Values]] = {
    Mode.DENSE: _decode_dense,
    Mode.DENSE_CODED: lambda reader, *more: DenseUpload(
        sections.decode_floats(reader.rest(), np.float32, *more)
    ),
    Mode.HALF: _decode_half,
    Mode.SPARSE: _decode_sparse,
    Mode.BLOCKS: _decode_blocks,
    Mode.ROTATED: _decode_rotated,
    Mode.BUCKETS: _decode_buckets,
    Mode.TURNED: _decode_turned,
    Mode.SAMPLED: _decode_sampled,
}


WIDTH = 2
NEGATIVE, ZERO, POSITIVE = 0, 1, 2
_MOST_OF_LENGTH = 32
"""Worth trying where at most one level in this many is not zero."""
LEARNING_COUNT = 64
"""A coder that learns where levels are needs at least this many to learn from."""


def few_places(upload: messages.Upload) -> IntArray | None:
    """Return where the levels are not zero, if they are three and these places are few."""
    if upload.width != WIDTH or upload.grid is not Grid.MIDTREAD:
        return None
    is_place = upload.levels != ZERO
    few = int(np.count_nonzero(is_place)) * _MOST_OF_LENGTH <= len(upload)
    return np.flatnonzero(is_place) if few else None


def rice_parameter(length: int, count: int) -> int:
    """Return ``p``: half of random gaps are below ``2^p``, about."""
    half = 7 * length // (10 * max(1, count))  # the median of a geometric law: ln 2 times its mean
    return max(0, half.bit_length() - 1)


def encode_gaps(upload: messages.Upload, places: IntArray) -> bytes:
    count = len(places)
    gaps, parameter = np.diff(places, prepend=-1) - 1, rice_parameter(len(upload), count)
    # Of each: the gap over 2^p in unary, which a zero ends, its last p bits, and the sign.
    signs = np.cumsum((gaps >> parameter) + parameter + 2) - 1
    bits = np.ones(signs[-1] + 1 if count else 0, np.bool_)
    bits[signs - parameter - 1] = False
    for shift in range(parameter):
        bits[signs - parameter + shift] = gaps >> shift & 1
    bits[signs] = upload.levels[places] == POSITIVE
    return write_varint(count) + np.packbits(bits, bitorder="little").tobytes()


def decode_gaps(payload: ByteArray, length: int) -> ByteArray:
    reader = Reader(payload)
    count = reader.varint()
    if count > length:
        raise WireError(f"{count} levels of {length} are said not to be zero")
    levels = np.full(length, ZERO, np.uint8)
    bits = np.ascontiguousarray(reader.rest())
    used = _read(bits, levels, count, rice_parameter(length, count))
    if used < 0:
        raise WireError(f"the places of {count} levels end beyond the frame or the last parameter")
    padding = 8 * len(bits) - used
    if padding >= 8 or (padding and int(bits[-1]) >> (8 - padding)):
        raise WireError(f"{padding} bits follow the last level; below 8, all zero, may")
    return levels


@njit()
def _read(bits: ByteArray, levels: ByteArray, count: int, parameter: int) -> int:
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
