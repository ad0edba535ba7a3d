"""A vector of floating-point numbers by its difference from one that the reader has, losslessly.

Sums of quantized vectors lie on a lattice: all are small multiples of one power of two, and often
take few different values. What does not fit is written by its bits.
``docs/reference/frame-format.md`` describes each byte.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqg.core.grids import Grid
from aqg.core.messages import Upload
from aqg.core.types import FloatArray
from aqg.errors import WireError
from aqg.wire import frame
from aqg.wire.payloads import Mode
from aqg.wire.sections import BYTES, Alphabet, Plane, decode_planes, encode_planes
from aqg.wire.varint import read_part, read_varint, read_zigzag, write_varint, write_zigzag

BITS, LATTICE, TABLE = range(3)
_MOST_BITS = 32
"""Multiples of more bits than this are not worth a lattice."""
_TABLE_SIZE = 256
_MANTISSA = 53
_EXPONENTS = range(-1200, 1201)
_BLOCK = 1 << 18
"""Values that are decoded together."""
_PLACES_MODES = (Mode.RAW, Mode.CODED, Mode.CONTEXT, Mode.GAPS)


class _Difference(NamedTuple):
    """What is written: the kind, the signs, and the magnitudes where they are not zero."""

    kind: int
    places: Upload
    exponent: int
    table: NDArray[np.uint64]
    planes: list[Plane]


def encode_vector(new: FloatArray, old: FloatArray, threads: int | None = None) -> bytes:
    """Write ``new`` for a reader that has ``old``.

    >>> old = np.zeros(8)
    >>> encode_vector(np.array([0, 0, 0.5, 0, 0, 0, -0.5, 0]), old).hex()
    '02010265450100013d'
    """
    difference = _measure(new, old)
    if not len(new):
        return b""
    mode, payload = frame.encode_levels(difference.places, None, threads)
    parts = [bytes([difference.kind, mode]), write_varint(len(payload)), payload]
    if difference.planes:
        parts += [_write_head(difference), encode_planes(difference.planes, threads)]
    return b"".join(parts)


def decode_vector(data: NDArray[np.uint8], old: FloatArray, threads: int | None = None) -> Any:
    """Return the vector that `encode_vector` wrote; raise `WireError` on anything else.

    Memory is taken in proportion to the vector only.
    """
    if not len(old) and not len(data):
        return old.copy()
    if len(data) < 2:
        raise WireError(f"a vector has at least 2 bytes, not {len(data)}")
    kind, mode = int(data[0]), int(data[1])
    if kind not in (BITS, LATTICE, TABLE):
        raise WireError(f"a vector of kind {kind}; it must be at most {TABLE}")
    if mode not in _PLACES_MODES:
        raise WireError(f"the places of a vector are coded in mode {mode}, which holds none")
    payload, rest = read_part(data, 2, "the places claim")
    levels = frame.decode_levels(Mode(mode), payload, 2, Grid.MIDTREAD, len(old), threads)
    if len(levels) and int(levels.max()) > 2:
        raise WireError(f"a place holds {int(levels.max())}; it must be below 3")
    count = int(np.count_nonzero(levels != 1))
    if not count:
        if len(rest):
            raise WireError(f"{len(rest)} bytes follow the places of a vector without changes")
        return old.copy()
    if kind == BITS:
        planes = decode_planes(rest, [BYTES] * old.dtype.itemsize, count, threads)
        table, exponent = None, 0
    else:
        planes, table, exponent = _read_magnitudes(kind, rest, count, threads)
    new, done = old.copy(), 0
    for begin in range(0, len(old), _BLOCK):  # a block at a time: temporaries are several times it
        block = slice(begin, begin + _BLOCK)
        places = np.flatnonzero(levels[block] != 1)
        part = _join([plane[done : done + len(places)] for plane in planes])
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
        return _Difference(BITS, _signs(levels), 0, np.zeros(0, np.uint64), [])
    after, before = new[indices], old[indices]
    with np.errstate(over="ignore", invalid="ignore"):
        differences = after.astype(np.float64) - before
        is_exact = (before.astype(np.float64) + differences).astype(new.dtype)
    if np.array_equal(is_exact.view(kind), after.view(kind)) and differences.all():
        on_lattice = _on_lattice(np.abs(differences))
        if on_lattice is not None:
            multiples, exponent = on_lattice
            levels[indices] = np.where(differences < 0, 0, 2)
            return _multiples(_signs(levels), multiples, exponent)
    gaps = after.view(kind) - before.view(kind)
    top = np.array(1, gaps.dtype) << np.array(8 * gaps.itemsize - 1, gaps.dtype)
    is_negative = gaps >= top
    levels[indices] = np.where(is_negative, 0, 2)
    magnitudes = np.where(is_negative, 0 - gaps, gaps)
    planes = _planes(magnitudes, gaps.itemsize)
    return _Difference(BITS, _signs(levels), 0, np.zeros(0, np.uint64), planes)


def _multiples(places: Upload, multiples: NDArray[np.uint64], exponent: int) -> _Difference:
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
        return _Difference(TABLE, places, exponent, table.astype(np.uint64), [plane])
    num_bytes = (largest.bit_length() + 7) // 8
    planes = _planes(multiples, num_bytes)
    return _Difference(LATTICE, places, exponent, np.zeros(0, np.uint64), planes)


def _on_lattice(magnitudes: NDArray[np.float64]) -> tuple[NDArray[np.uint64], int] | None:
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


def _signs(levels: NDArray[np.uint8]) -> Upload:
    return Upload(levels, 1.0, 2, Grid.MIDTREAD)


def _planes(numbers: NDArray[Any], count: int) -> list[Plane]:
    kind = numbers.dtype.type
    return [Plane((numbers >> kind(8 * k)).astype(np.uint8), BYTES) for k in range(count)]


def _join(planes: list[NDArray[np.uint8]]) -> NDArray[np.uint64]:
    numbers = np.zeros(len(planes[0]), np.uint64)
    for begin in range(0, len(numbers), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        for place, plane in enumerate(planes):
            numbers[block] |= plane[block].astype(np.uint64) << np.uint64(8 * place)
    return numbers


def _write_head(difference: _Difference) -> bytes:
    if difference.kind == BITS:
        return b""
    head = write_zigzag(difference.exponent)
    if difference.kind == LATTICE:
        return head + bytes([len(difference.planes)])
    table = difference.table.tolist()
    steps = [table[0], *(b - a for a, b in itertools.pairwise(table))]
    return head + bytes([len(table) - 1]) + b"".join(map(write_varint, steps))


def _read_magnitudes(
    kind: int, data: NDArray[np.uint8], count: int, threads: int | None
) -> tuple[list[NDArray[np.uint8]], NDArray[np.uint64] | None, int]:
    exponent, start = read_zigzag(data, 0)
    if exponent not in _EXPONENTS:
        raise WireError(f"exponent {exponent} of a vector is outside -1200..1200")
    if start >= len(data):
        raise WireError("the vector ends before its magnitudes")
    number, start = int(data[start]), start + 1
    if kind == LATTICE:
        if not 1 <= number <= (_MOST_BITS + 7) // 8:
            raise WireError(f"multiples of {number} bytes; they have 1 to {_MOST_BITS // 8}")
        planes = decode_planes(data[start:], [BYTES] * number, count, threads)
        return planes, None, exponent
    table = np.empty(number + 1, np.uint64)
    value = 0
    for index in range(number + 1):
        step, start = read_varint(data, start)
        value += step
        if not step > 0 or value >> _MOST_BITS:
            raise WireError(f"the table of magnitudes holds {value} after a step of {step}")
        table[index] = value
    (indices,) = decode_planes(data[start:], [_index_alphabet(number + 1)], count, threads)
    if int(indices.max()) > number:
        raise WireError(f"a magnitude has index {int(indices.max())}; {number} is the last")
    return [indices], table, exponent
