"""What leads a client to the public model: entries of its log, sums of entries, and snapshots.

An entry moves the public model (`aqg.core.downlink`) from one round to the next. Where nothing is
said it is one byte: the model moves by its velocity. A client that holds round ``k`` receives all
entries since, in one frame. Where the model lies on an exact grid entries can be added up, and are
sent as one where that is shorter. A snapshot is for clients that have missed too much: its reader
has the sender's model to the bit. ``docs/reference/frame-format.md`` describes each byte.

Vectors are written by their difference from one that the reader has, losslessly. Sums of quantized
vectors lie on a lattice: all are small multiples of one power of two, and often take few different
values. What does not fit is written by its bits.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aqg.core.downlink import Entry, Merged, Public, advance, follow_merged
from aqg.core.grids import Grid, snap
from aqg.core.messages import Upload
from aqg.core.recipe import Movement
from aqg.core.track import MAX_DIRECTION, Change, Part, Track
from aqg.core.types import ByteArray, Float64Array, FloatArray
from aqg.errors import MessageError, WireError
from aqg.wire import frame, sections
from aqg.wire.frame import Known, decode, decode_bare, encode, encode_bare
from aqg.wire.payloads import Mode
from aqg.wire.sections import BYTES, Alphabet, Plane, decode_planes, encode_planes
from aqg.wire.varint import Reader, seal, write_part, write_varint, write_zigzag

LOG_MARK, MERGED_MARK = 0x62, 0x63
VELOCITY, POSITION, MOVEMENT, DOUBLE, HOLD, QUANTUM = 1, 2, 4, 8, 16, 32
MIN_EXPONENT, MAX_EXPONENT = -126, 101


def encode_entry(entry: Entry, known: Known | None) -> bytes:
    flags, parts = 0 if entry.is_step else HOLD, []
    if entry.movement is not None and entry.is_rounded:
        flags |= MOVEMENT
        parts.append(_write_bfloat16([entry.movement]))
    elif entry.movement is not None:
        flags |= MOVEMENT | DOUBLE
        parts.append(np.array(entry.movement, "<f8").tobytes())
    if entry.quantum is not None:
        flags |= QUANTUM
        parts.append(_write_quantum(entry.quantum)[1:])
    if entry.velocity is not None:
        flags |= VELOCITY
        parts.append(write_part(_encode_part(entry.velocity, known, is_velocity=True)))
    if entry.position is not None:
        flags |= POSITION
        parts.append(write_part(_encode_part(entry.position, None, is_velocity=False)))
    return b"".join([bytes([flags]), *parts])


def known_velocity(public: Public) -> Known | None:
    """Return the velocity as context for the coder; None where there is none."""
    _, velocity, direction = public.vectors
    return Known(velocity, direction) if len(velocity) else None


def encode_log(first: int, entries: Sequence[bytes]) -> bytes:
    """Write entries of consecutive rounds, beginning with ``first``, as one frame."""
    return _write_log(LOG_MARK, first, len(entries), entries)


def _write_log(mark: int, first: int, count: int, parts: Iterable[bytes]) -> bytes:
    return seal(b"".join([bytes([mark]), write_varint(first), write_varint(count), *parts]))


class Merger:
    """Adds up entries, the latest first, for one frame in their place."""

    def __init__(self, public: Public) -> None:
        self._public = public
        self._total = np.zeros(len(public.parameters))
        self._steps = 0
        self._quantum: float | None = None
        self.first = public.round
        """The round of the first entry in the sum."""

    def add(self, data: bytes) -> bool:
        """Add the entry of the round before; False where no sum can stand for it."""
        number = self.first - 1
        entry = _read_entry(Reader(data), number, self._public)
        part, quantum = entry.position, entry.quantum
        is_rounded_later = self._quantum is not None and (part is not None or quantum is not None)
        if is_rounded_later or data[0] & DOUBLE or isinstance(part, Change):
            return False
        if part is not None:
            self._total += part.values(np.float64)
        self._quantum = self._quantum if quantum is None else quantum
        self._steps += entry.is_step
        self.first = number
        return True

    def frame(self) -> bytes:
        numbers = self._public.history[: self._steps]
        parts = [_write_quantum(self._quantum), write_varint(len(numbers))]
        parts += [_write_bfloat16(numbers), encode_vector(self._total, np.zeros_like(self._total))]
        return _write_log(MERGED_MARK, self.first, self._public.round - self.first, parts)


def log_overhead(first: int, count: int) -> int:
    """Return what a log's frame has beside its entries."""
    return len(_write_log(LOG_MARK, first, count, ()))


def follow_log(data: bytes, public: Public, movement: Movement, in_place: bool = False) -> Public:
    """Return the public model after the entries of a frame; the old one is left as it was.

    Raises `WireError` on a frame that is damaged, of another round, or not of this model. With
    ``in_place`` the old one is given away, as in `aqg.core.downlink.advance`, then, too.
    """
    is_merged, rounds, reader = _open(data)
    if rounds.start != public.round:
        raise WireError(
            f"the log begins with round {rounds.start}; the model here is at {public.round}"
        )
    if is_merged:
        merged = _read_merged(reader, len(rounds), public)
        return follow_merged(public, merged, movement, in_place)
    for number in rounds:
        entry = _read_entry(reader, number, public)
        try:
            public = advance(public, entry, movement, in_place)
        except MessageError as error:
            raise WireError(f"entry {number} of the log cannot be followed: {error}") from error
    reader.finish("the last entry of the log")
    return public


def _read_merged(reader: Reader, count: int, public: Public) -> Merged:
    if len(public.velocity):
        raise WireError("entries are merged that move a velocity")
    quantum = _read_quantum(reader)
    movements = _read_bfloat16(reader, reader.varint())
    movements = [_checked_movement(number, public.round) for number in movements]
    total = decode_vector(reader.rest(), np.zeros(len(public.parameters)))
    return Merged(count, total, tuple(movements), quantum)


def log_rounds(data: bytes) -> range:
    return _open(data)[1]


def log_since(data: bytes, position: int) -> bytes:
    """Return the frame without its entries before round ``position``, which the reader has."""
    is_merged, rounds, reader = _open(data)
    first, stop = rounds.start, rounds.stop
    if not first <= position <= stop:
        raise WireError(f"the log has rounds {first} to {stop - 1}, not {position}")
    if is_merged:
        if position == first:
            return data
        if position != stop:
            raise WireError(f"entries {first} to {stop - 1} are one; {position} is held")
        return encode_log(position, [])
    for number in range(first, position):
        _read_entry(reader, number, None)
    return _write_log(LOG_MARK, position, stop - position, [reader.rest().tobytes()])


def _open(data: bytes) -> tuple[bool, range, Reader]:
    """Return whether entries are merged, their rounds, and what comes next."""
    reader = Reader.of_sealed(data, "the log", 3)
    mark = reader.byte("its mark")
    if mark not in (LOG_MARK, MERGED_MARK):
        raise WireError(f"byte {mark:02x} does not begin a log of this version")
    first, count = reader.varint(), reader.varint()
    if mark == LOG_MARK and count > reader.left:
        raise WireError(f"the log claims {count} entries in {reader.left} bytes")
    return mark == MERGED_MARK, range(first, first + count), reader


def _encode_part(part: Part, known: Known | None, *, is_velocity: bool) -> bytes:
    if isinstance(part, Change):
        return b"\0" + encode_vector(part.new, part.old)
    assert isinstance(part, Upload)
    return encode(part, known=known) if is_velocity else encode_bare(part)


def _decode_part(
    number: int, payload: ByteArray, old: FloatArray, known: Known | None
) -> Change | Upload:
    if not len(payload):
        raise WireError(f"a part of entry {number} has 0 bytes")
    if payload[0] == 0:
        return Change(old, decode_vector(payload[1:], old))
    if known is None:
        return decode_bare(payload, len(old))
    message = decode(payload.tobytes(), len(old), known=known)
    if not isinstance(message, Upload):
        raise WireError(f"entry {number} holds a {type(message).__name__}; it holds levels")
    return message


def _read_entry(reader: Reader, number: int, public: Public | None) -> Entry:
    """Read the next entry of a model's log; without the model, its parts are passed over."""
    flags = reader.byte(f"entry {number}")
    is_odd = flags >= 2 * QUANTUM or (flags & HOLD and flags != HOLD)
    if is_odd or (flags & DOUBLE and not flags & MOVEMENT):
        raise WireError(f"the flags of entry {number} are {flags:02x}, which mean nothing")
    movement = quantum = velocity = position = None
    if flags & MOVEMENT:
        is_double = flags & DOUBLE
        (movement,) = reader.array(1, "<f8", "a number") if is_double else _read_bfloat16(reader, 1)
        movement = _checked_movement(float(movement), number)
    if flags & QUANTUM:
        quantum = _read_exponent(reader)
    if flags & VELOCITY:
        payload = reader.part(f"the velocity of entry {number}")
        if public is not None:
            if not len(public.velocity):
                raise WireError(f"entry {number} changes a velocity; this model has none")
            velocity = _decode_part(number, payload, public.velocity, known_velocity(public))
    if flags & POSITION:
        payload = reader.part(f"the position of entry {number}")
        if public is not None:
            position = _decode_part(number, payload, public.parameters, None)
    return Entry(number, velocity, position, movement, not flags & HOLD, quantum=quantum)


def _checked_movement(movement: float, number: int) -> float:
    if movement < 0:
        raise WireError(f"the movement in entry {number} is {movement}; it is never negative")
    return movement


def _write_bfloat16(numbers: Sequence[float]) -> bytes:
    return np.array(numbers, "<f4").view("<u2")[1::2].tobytes()


def _read_bfloat16(reader: Reader, count: int) -> list[float]:
    bits = reader.array(count, "<u2", "a number").astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32).tolist()


def _write_quantum(quantum: float | None) -> bytes:
    """Write the exponent after a byte that says that there is one."""
    return b"\0" if quantum is None else b"\1" + write_zigzag(math.frexp(quantum)[1] - 1)


def _read_quantum(reader: Reader) -> float | None:
    flag = reader.byte("the flag of the quantum")
    if flag > 1:
        raise WireError(f"byte {flag} does not say whether there is a quantum")
    return _read_exponent(reader) if flag else None


def _read_exponent(reader: Reader) -> float:
    exponent = reader.zigzag()
    if not MIN_EXPONENT <= exponent <= MAX_EXPONENT:
        raise WireError(
            f"a quantum of 2^{exponent}; exponents go from {MIN_EXPONENT} to {MAX_EXPONENT}"
        )
    return math.ldexp(1.0, exponent)


SNAPSHOT_MARK = 0x73
_DIRECTIONS = Alphabet(3, 2 * MAX_DIRECTION + 1)


def encode_snapshot(public: Public, start: FloatArray | None) -> bytes:
    """Write the public model; with ``start``, for a reader that has the starting model."""
    base = _base(public.parameters if start is None else start, start is not None, public.quantum)
    _, velocity, direction = public.vectors
    directions = Plane((direction + MAX_DIRECTION).astype(np.uint8), _DIRECTIONS)
    parts = [bytes([SNAPSHOT_MARK, start is not None]), write_varint(public.round)]
    parts += [write_varint(len(public.history)), np.array(public.history, "<f8").tobytes()]
    parts += [_write_quantum(public.quantum or None)]
    vectors = (public.parameters, base), (velocity, np.zeros_like(velocity))
    parts += [write_part(encode_vector(*pair)) for pair in vectors]
    parts.append(write_part(encode_planes([directions]) if len(direction) else b""))
    return seal(b"".join(parts))


def decode_snapshot(data: bytes, like: Public, start: FloatArray | None) -> Public:
    """Return the public model; ``like`` has its shape, and ``start`` is the starting model."""
    reader = Reader.of_sealed(data, "the snapshot", 4)
    head = reader.take(2, "its mark").tobytes()
    if head[0] != SNAPSHOT_MARK or head[1] > 1:
        raise WireError(f"bytes {head.hex()} do not begin a snapshot")
    is_relative = bool(head[1])
    if is_relative and start is None:
        raise WireError("the snapshot is relative to a starting model, which is not here")
    round_number = reader.varint()
    history = tuple(reader.array(reader.varint(), "<f8", "the movements").tolist())
    quantum = _read_quantum(reader) or 0.0
    base = _base(like.parameters if start is None else start, is_relative, quantum)
    _, like_velocity, like_direction = like.vectors
    parameters = decode_vector(reader.part("the parameters"), base)
    velocity = decode_vector(reader.part("the velocity"), np.zeros_like(like_velocity))
    payload, direction = reader.part("the directions"), like_direction
    if len(direction):
        (symbols,) = decode_planes(payload, [_DIRECTIONS], len(direction))
        if int(symbols.max()) > 2 * MAX_DIRECTION:
            raise WireError(f"a direction is {int(symbols.max())}; {2 * MAX_DIRECTION} is the most")
        direction = symbols.astype(np.int8) - np.int8(MAX_DIRECTION)
    elif len(payload):
        raise WireError(f"{len(payload)} bytes of directions; this model has none")
    reader.finish("the snapshot")
    track = Track(parameters[None], velocity[None], direction[None], np.ones(1, np.bool_))
    return Public(round_number, track, history, quantum).marked()


def _base(start: FloatArray, is_relative: bool, quantum: float) -> FloatArray:
    """Return what the parameters are written relative to: the starting model, or zeros like it."""
    if not is_relative:
        return np.zeros_like(start)
    return snap(start, quantum) if quantum else start


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
