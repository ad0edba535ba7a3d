"""Payloads of vectors with a scale per block: levels (`BLOCKS`) or rotated signs (`ROTATED`).

::

    BLOCKS      number of bytes of the next part, a varint
                sections of two planes: the low and the high bytes of the blocks' bfloat16 steps
                sections of one plane: the levels

    BUCKETS     coordinates in a block, a varint; then as BLOCKS

    ROTATED     seed of the rotation, 4 bytes
                a float32 scale for every block
                the signs of all blocks, a bit each

    TURNED      bits of a code, one byte; then as ROTATED, with codes in place of signs
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from aqg.core.blockwise import BLOCK, LONGEST_BLOCK, TOP, BlockUpload, num_blocks
from aqg.core.rotation import WIDTHS, RotatedUpload, block_lengths
from aqg.errors import WireError
from aqg.wire.bitpack import pack, packed_size, unpack
from aqg.wire.planes import BYTES, Plane, decode_planes, encode_planes, planes_size
from aqg.wire.sections import Alphabet
from aqg.wire.varint import read_varint, varint_size, write_varint

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEVELS = Alphabet(width=8, size=2 * TOP + 1)
SEED_BYTES = 4
SCALE_BYTES = 4


def encode_blocks(upload: BlockUpload, threads: int | None) -> bytes:
    """Return the payload of mode `BLOCKS`."""
    steps = encode_planes(_step_planes(upload), threads)
    levels = encode_planes([Plane(upload.levels, LEVELS)], threads)
    return write_varint(len(steps)) + steps + levels


def blocks_size(upload: BlockUpload) -> int:
    """Return ``len(encode_blocks(upload))``."""
    steps = planes_size(_step_planes(upload))
    return varint_size(steps) + steps + planes_size([Plane(upload.levels, LEVELS)])


def encode_buckets(upload: BlockUpload, threads: int | None) -> bytes:
    """Return the payload of mode `BUCKETS`."""
    return write_varint(upload.block) + encode_blocks(upload, threads)


def decode_buckets(payload: NDArray[np.uint8], length: int, threads: int | None) -> BlockUpload:
    """Undo `encode_buckets`."""
    block, start = read_varint(payload, 0)
    if not 1 <= block <= LONGEST_BLOCK or block == BLOCK:
        raise WireError(f"blocks of {block} coordinates are not what mode BUCKETS has")
    return decode_blocks(payload[start:], length, threads, block)


def decode_blocks(
    payload: NDArray[np.uint8], length: int, threads: int | None, block: int = BLOCK
) -> BlockUpload:
    """Undo `encode_blocks`."""
    size, start = read_varint(payload, 0)
    if size > len(payload) - start:
        raise WireError(f"the steps claim {size} bytes where {len(payload) - start} are left")
    coded, rest = payload[start : start + size], payload[start + size :]
    low, high = decode_planes(coded, [BYTES] * 2, num_blocks(length, block), threads)
    bits = low.astype(np.uint32) << np.uint32(16) | high.astype(np.uint32) << np.uint32(24)
    (levels,) = decode_planes(rest, [LEVELS], length, threads)
    return BlockUpload(levels, bits.view(np.float32), block)


def encode_rotated(upload: RotatedUpload) -> bytes:
    """Return the payload of mode `ROTATED`, or of `TURNED` for more than one bit."""
    scales = upload.scales.astype("<f4", copy=False).tobytes()
    head = b"" if upload.width == 1 else bytes([upload.width])
    codes = pack(upload.signs, upload.width).tobytes()
    return head + struct.pack("<I", upload.seed) + scales + codes


def rotated_size(upload: RotatedUpload) -> int:
    """Return ``len(encode_rotated(upload))``."""
    head = SEED_BYTES + (upload.width > 1)
    return head + SCALE_BYTES * len(upload.scales) + packed_size(len(upload.signs), upload.width)


def decode_turned(payload: NDArray[np.uint8], length: int) -> RotatedUpload:
    """Undo `encode_rotated` for more than one bit."""
    width = int(payload[0]) if len(payload) else 0
    if width not in WIDTHS or width == 1:
        raise WireError(f"codes of {width} bits are not what mode TURNED has")
    return decode_rotated(payload[1:], length, width)


def decode_rotated(payload: NDArray[np.uint8], length: int, width: int = 1) -> RotatedUpload:
    """Undo `encode_rotated`."""
    lengths = block_lengths(length)
    start = SEED_BYTES + SCALE_BYTES * len(lengths)
    if len(payload) < start:
        raise WireError(f"seed and {len(lengths)} scales take {start} bytes, not {len(payload)}")
    seed = int.from_bytes(payload[:SEED_BYTES].tobytes(), "little")
    scales = np.frombuffer(payload[SEED_BYTES:start].tobytes(), "<f4").astype(np.float32)
    signs = unpack(payload[start:], width, sum(lengths)).astype(np.uint8, copy=False)
    return RotatedUpload(signs, scales, seed, length, width)


def _step_planes(upload: BlockUpload) -> list[Plane]:
    bits = np.ascontiguousarray(upload.steps).view(np.uint32)
    return [Plane((bits >> np.uint32(shift)).astype(np.uint8), BYTES) for shift in (16, 24)]
