"""A vector of floating-point numbers by its difference from one that the reader has, losslessly.

Sums of quantized vectors lie on a lattice: all are small multiples of one power of two, and often
take few different values. What does not fit is written by its bits.
``docs/reference/frame-format.md`` describes each byte.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aqg.core.grids import Grid
from aqg.core.messages import Upload
from aqg.core.types import ByteArray, Float64Array, FloatArray
from aqg.errors import WireError
from aqg.wire import frame, sections
from aqg.wire.payloads import Mode
from aqg.wire.sections import BYTES, Alphabet, Plane, decode_planes, encode_planes
from aqg.wire.varint import Reader, write_part, write_varint, write_zigzag

BITS, LATTICE, TABLE = range(3)
_MOST_BITS = 32
"""Multiples of more bits than this are not worth a lattice."""
_TABLE_SIZE = 256
_MANTISSA = 53
_EXPONENTS = range(-1200, 1201)
_BLOCK = 1 << 18
"""Values that are decoded together."""
_PLACES_MODES = (Mode.RAW, Mode.CODED, Mode.CONTEXT, Mode.GAPS)


_Difference: TypeAlias = tuple[int, ByteArray, bytes, list[Plane]]
"""What is written: the kind, the signs, and the head and planes of magnitudes other than zero."""


def encode_vector(new: FloatArray, old: FloatArray) -> bytes:
    """Write ``new`` for a reader that has ``old``."""
    kind, signs, head, planes = _measure(new, old)
    if not len(new):
        return b""
    mode, payload = frame.encode_levels(Upload(signs, 1.0, 2, Grid.MIDTREAD), None, None)
    written = bytes([kind, mode]) + write_part(payload) + head
    return written + encode_planes(planes) if planes else written


def decode_vector(data: ByteArray, old: FloatArray) -> Any:
    """Return the vector that `encode_vector` wrote; raise `WireError` on anything else.

    Memory is taken in proportion to the vector only.
    """
    if not len(old) and not len(data):
        return old.copy()
    reader = Reader(data, "the vector")
    kind, mode = reader.byte("its kind"), reader.byte("its mode")
    if kind not in (BITS, LATTICE, TABLE):
        raise WireError(f"a vector of kind {kind}; it must be at most {TABLE}")
    if mode not in _PLACES_MODES:
        raise WireError(f"the places of a vector are coded in mode {mode}, which holds none")
    payload = reader.part("the places of a vector")
    levels = frame.decode_levels(Mode(mode), payload, 2, Grid.MIDTREAD, len(old), None)
    if len(levels) and int(levels.max()) > 2:
        raise WireError(f"a place holds {int(levels.max())}; it must be below 3")
    count = int(np.count_nonzero(levels != 1))
    if not count:
        reader.finish("the places of a vector without changes")
        return old.copy()
    table, exponent, alphabets = None, 0, [BYTES] * old.dtype.itemsize
    if kind != BITS:
        table, exponent, alphabets = _read_head(reader, kind)
    planes = decode_planes(reader.rest(), alphabets, count)
    if table is not None and int(planes[0].max()) >= len(table):
        raise WireError(
            f"a magnitude has index {int(planes[0].max())}; {len(table) - 1} is the last"
        )
    new, done = old.copy(), 0
    for begin in range(0, len(old), _BLOCK):  # a block at a time: temporaries are several times it
        block = slice(begin, begin + _BLOCK)
        places = np.flatnonzero(levels[block] != 1)
        part = sections.join_bytes(
            [plane[done : done + len(places)] for plane in planes], np.uint64
        )
        part = part if table is None else table[part]
        done += len(places)
        is_negative = levels[block][places] == 0
        if kind == BITS:
            bits = new[block].view(f"u{old.dtype.itemsize}")
            bits[places] += np.where(is_negative, 0 - part, part).astype(bits.dtype)
            continue
        differences = np.ldexp(part.astype(np.float64), exponent)
        differences = np.where(is_negative, -differences, differences)
        with np.errstate(over="ignore", invalid="ignore"):
            new[block][places] = old[block][places].astype(np.float64) + differences
    return new


def _measure(new: FloatArray, old: FloatArray) -> _Difference:
    if new.dtype != old.dtype or new.shape != old.shape or new.ndim != 1:
        raise WireError(f"vectors differ in kind: {new.dtype}{new.shape}, {old.dtype}{old.shape}")
    kind = f"u{new.dtype.itemsize}"
    new, old = np.ascontiguousarray(new), np.ascontiguousarray(old)
    is_changed = new.view(kind) != old.view(kind)
    indices = np.flatnonzero(is_changed)
    levels = np.ones(len(new), np.uint8)
    if not len(indices):
        return BITS, levels, b"", []
    after, before = new[indices], old[indices]
    with np.errstate(over="ignore", invalid="ignore"):
        differences = after.astype(np.float64) - before
        is_exact = (before.astype(np.float64) + differences).astype(new.dtype)
    if np.array_equal(is_exact.view(kind), after.view(kind)) and differences.all():
        on_lattice = _on_lattice(np.abs(differences))
        if on_lattice is not None:
            multiples, exponent = on_lattice
            levels[indices] = np.where(differences < 0, 0, 2)
            return _multiples(levels, multiples, exponent)
    gaps = after.view(kind) - before.view(kind)
    top = np.array(1, gaps.dtype) << np.array(8 * gaps.itemsize - 1, gaps.dtype)
    is_negative = gaps >= top
    levels[indices] = np.where(is_negative, 0, 2)
    magnitudes = np.where(is_negative, 0 - gaps, gaps)
    return BITS, levels, b"", sections.split_bytes(magnitudes, [BYTES] * gaps.itemsize)


def _multiples(signs: ByteArray, multiples: NDArray[np.uint64], exponent: int) -> _Difference:
    """Write multiples by a table where they take few values, else by their bytes."""
    largest = int(multiples.max())
    if largest < max(1 << 16, 4 * len(multiples)):
        counts = np.bincount(multiples.astype(np.int64))
        table = np.flatnonzero(counts)
        lookup = np.cumsum(counts > 0) - 1
        indices = lookup[multiples.astype(np.int64)]
    else:
        table, indices = np.unique(multiples, return_inverse=True)
    if len(table) <= _TABLE_SIZE and 2 * len(table) <= 4 + len(multiples):
        plane = Plane(indices.astype(np.uint8), _index_alphabet(len(table)))
        steps = np.diff(table.astype(np.int64), prepend=0)
        head = bytes([len(table) - 1]) + b"".join(write_varint(int(step)) for step in steps)
        return TABLE, signs, write_zigzag(exponent) + head, [plane]
    planes = sections.split_bytes(multiples, [BYTES] * ((largest.bit_length() + 7) // 8))
    return LATTICE, signs, write_zigzag(exponent) + bytes([len(planes)]), planes


def _on_lattice(magnitudes: Float64Array) -> tuple[NDArray[np.uint64], int] | None:
    """Return numbers as multiples of the largest power of two that divides all of them."""
    if not np.isfinite(magnitudes).all():
        return None
    fractions, exponents = np.frexp(magnitudes)
    integers = np.ldexp(fractions, _MANTISSA).astype(np.int64)
    lowest = np.frexp((integers & -integers).astype(np.float64))[1] - 1 + exponents - _MANTISSA
    exponent = int(lowest.min())
    if int(exponents.max()) - exponent > _MOST_BITS or exponent not in _EXPONENTS:
        return None
    return np.ldexp(magnitudes, -exponent).astype(np.uint64), exponent


def _index_alphabet(size: int) -> Alphabet:
    return Alphabet(max(1, (size - 1).bit_length()), size)


def _read_head(reader: Reader, kind: int) -> tuple[NDArray[np.uint64] | None, int, list[Alphabet]]:
    """Return the table of a vector that has one, the exponent, and what its planes hold."""
    exponent = reader.zigzag()
    if exponent not in _EXPONENTS:
        raise WireError(f"exponent {exponent} of a vector is outside -1200..1200")
    number = reader.byte("its magnitudes")
    if kind == LATTICE:
        if not 1 <= number <= _MOST_BITS // 8:
            raise WireError(f"multiples of {number} bytes; they have 1 to {_MOST_BITS // 8}")
        return None, exponent, [BYTES] * number
    table = [0]
    for step in (reader.varint() for _ in range(number + 1)):
        table.append(table[-1] + step)
        if not step or table[-1] >> _MOST_BITS:
            raise WireError(f"the table of magnitudes holds {table[-1]} after a step of {step}")
    return np.array(table[1:], np.uint64), exponent, [_index_alphabet(number + 1)]
