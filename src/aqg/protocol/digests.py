"""Digests: short numbers that tell states apart."""

import hashlib
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aqg.core.public import Public
from aqg.core.types import FloatArray

DIGEST_BYTES = 16
STATE_DIGEST_BYTES = 4
"""Of the states that both ends hold, which go with every message. Two that differ in their content
but not in round or number of uploads are mistaken for each other once in four billion times."""


def public_digest(public: Public) -> bytes:
    """Return a digest of every bit of the public model: all that later entries build on.

    Of a position on an exact grid the mark is taken, which costs the length of the last entry.
    """
    digest = hashlib.blake2b(digest_size=STATE_DIGEST_BYTES)
    digest.update(struct.pack("<2qd", public.round, len(public.history), public.quantum))
    digest.update(struct.pack(f"<{len(public.history)}d", *public.history))
    if public.quantum:
        mark = public.mark if public.mark is not None else public.marked().mark
        digest.update(struct.pack("<Q", mark))
        return digest.digest()
    for vector in public.vectors:
        _add(digest, vector)
    return digest.digest()


def start_digest(parameters: FloatArray) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    _add(digest, parameters)
    return digest.digest()


def xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def is_zero(vector: NDArray[Any]) -> bool:
    """Tell whether all bits of a vector are zero: of ``-0.0`` one is not."""
    bits = np.ascontiguousarray(vector).reshape(-1).view(np.uint8)
    wide = len(bits) - len(bits) % 8
    return not (bits[:wide].view(np.uint64).any() or bits[wide:].any())


def _add(digest: Any, vector: NDArray[Any]) -> None:
    """Add kind, length and content; zeros are not read twice, as a sum that is not used yet."""
    zero = is_zero(vector)
    digest.update(f"{vector.dtype.newbyteorder('<').str} {len(vector)} {zero}|".encode())
    if not zero:
        digest.update(np.ascontiguousarray(vector, vector.dtype.newbyteorder("<")).data)
