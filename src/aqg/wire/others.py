"""Which payload belongs to which message, for modes 10 to 15."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqg.core.blockwise import BLOCK, BlockUpload
from aqg.core.halves import HalfUpload, SparseUpload
from aqg.core.rotation import RotatedUpload
from aqg.jit import HAVE_NUMBA
from aqg.wire import context
from aqg.wire.planes import BLOCKED_LENGTH
from aqg.wire.scaled import (
    blocks_size,
    decode_blocks,
    decode_buckets,
    decode_rotated,
    decode_turned,
    encode_blocks,
    encode_buckets,
    encode_rotated,
    rotated_size,
)
from aqg.wire.sparse import (
    decode_half,
    decode_sparse,
    encode_half,
    encode_sparse,
    half_size,
    sparse_size,
)
from aqg.wire.varint import varint_size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Other = HalfUpload | SparseUpload | BlockUpload | RotatedUpload
HALF, SPARSE, BLOCKS, ROTATED, BUCKETS, TURNED = 10, 11, 12, 13, 14, 15


def tries_context(length: int) -> bool:
    """Tell whether the context coder is tried on so many symbols."""
    return HAVE_NUMBA and length <= context.LONGEST


def encode_other(upload: Other, threads: int | None) -> tuple[int, bytes]:
    """Return the mode and the payload of a message."""
    threads = _useful_threads(len(upload), threads)
    if isinstance(upload, SparseUpload):
        return SPARSE, encode_sparse(upload, tries_context(len(upload)), threads)
    if isinstance(upload, HalfUpload):
        return HALF, encode_half(upload, threads)
    if isinstance(upload, BlockUpload):
        if upload.block != BLOCK:
            return BUCKETS, encode_buckets(upload, threads)
        return BLOCKS, encode_blocks(upload, threads)
    return (ROTATED if upload.width == 1 else TURNED), encode_rotated(upload)


def other_size(upload: Other) -> int:
    """Return the length of the payload that `encode_other` makes."""
    if isinstance(upload, SparseUpload):
        return sparse_size(upload, tries_context(len(upload)))
    if isinstance(upload, HalfUpload):
        return half_size(upload)
    if isinstance(upload, BlockUpload):
        head = 0 if upload.block == BLOCK else varint_size(upload.block)
        return head + blocks_size(upload)
    return rotated_size(upload)


def decode_other(mode: int, payload: NDArray[np.uint8], length: int, threads: int | None) -> Other:
    """Undo `encode_other`; the parts of the message fit each other, its values may not."""
    threads = _useful_threads(length, threads)
    if mode == SPARSE:
        return decode_sparse(payload, length, threads)
    if mode == HALF:
        return decode_half(payload, length, threads)
    if mode == BLOCKS:
        return decode_blocks(payload, length, threads)
    if mode == BUCKETS:
        return decode_buckets(payload, length, threads)
    return decode_rotated(payload, length) if mode == ROTATED else decode_turned(payload, length)


def _useful_threads(length: int, threads: int | None) -> int | None:
    """Return 1 for messages that are not cut into blocks: the work takes less than a thread."""
    return threads if length >= BLOCKED_LENGTH else 1
