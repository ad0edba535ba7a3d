"""What leads a client to the public model: entries of its log, sums of entries, and snapshots.

An entry moves the public model (`aqg.core.public`) from one round to the next. Where nothing is
said it is one byte: the model moves by its velocity. A client that holds round ``k`` receives all
entries since, in one frame. Where the model lies on an exact grid entries can be added up, and are
sent as one where that is shorter. A snapshot is for clients that have missed too much: its reader
has the sender's model to the bit. ``docs/reference/frame-format.md`` describes each byte.
"""

import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aqg.core.grids import snap
from aqg.core.messages import Upload
from aqg.core.public import Entry, Merged, Public, advance, follow_merged
from aqg.core.recipe import Movement
from aqg.core.track import MAX_DIRECTION, Change, Part, Track
from aqg.core.types import FloatArray
from aqg.errors import MessageError, WireError
from aqg.wire.frame import Known, decode, decode_bare, encode, encode_levels, upload_head
from aqg.wire.sections import Alphabet, Plane, decode_planes, encode_planes
from aqg.wire.varint import (
    read_part,
    read_varint,
    read_zigzag,
    varint_size,
    write_varint,
    write_zigzag,
)
from aqg.wire.vectors import decode_vector, encode_vector

LOG_MARK, MERGED_MARK = 0x62, 0x63
VELOCITY, POSITION, MOVEMENT, DOUBLE, HOLD, QUANTUM = 1, 2, 4, 8, 16, 32
MIN_EXPONENT, MAX_EXPONENT = -126, 101
_EXACT_PART = b"\0"
_CRC_BYTES = 4


def encode_entry(entry: Entry, known: Known | None, threads: int | None = None) -> bytes:
    flags, head = _head(entry)
    parts = [bytes([flags]), head]
    for part, is_velocity in ((entry.velocity, True), (entry.position, False)):
        if part is not None:
            payload = _encode_part(part, is_velocity, known, threads)
            parts += [write_varint(len(payload)), payload]
    return b"".join(parts)


def known_velocity(public: Public) -> Known | None:
    """Return the velocity as context for the coder; None where there is none."""
    _, velocity, direction = public.vectors
    return Known(velocity, direction) if len(velocity) else None


def encode_log(first: int, entries: Sequence[bytes]) -> bytes:
    """Write entries of consecutive rounds, beginning with ``first``, as one frame.

    >>> encode_log(7, [bytes(1)] * 2).hex()
    '6207020000e73f83bb'
    """
    body = b"".join([bytes([LOG_MARK]), write_varint(first), write_varint(len(entries)), *entries])
    return body + struct.pack("<I", zlib.crc32(body))


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
        frame, number = np.frombuffer(data, np.uint8), self.first - 1
        entry, _ = _decode_entry(frame, 0, self._public, number, None)
        part, quantum = entry.position, entry.quantum
        is_rounded_later = self._quantum is not None and (part is not None or quantum is not None)
        if is_rounded_later or frame[0] & DOUBLE or isinstance(part, Change):
            return False
        if part is not None:
            self._total += part.values(np.float64)
        self._quantum = self._quantum if quantum is None else quantum
        self._steps += entry.is_step
        self.first = number
        return True

    def frame(self) -> bytes:
        public, quantum = self._public, self._quantum
        numbers = public.history[: self._steps]
        head = write_varint(self.first) + write_varint(public.round - self.first)
        head += b"\0" if quantum is None else b"\1" + write_quantum(quantum)
        head += write_varint(len(numbers)) + b"".join(struct.pack("<f", n)[2:] for n in numbers)
        total = encode_vector(self._total, np.zeros_like(self._total))
        body = bytes([MERGED_MARK]) + head + total
        return body + struct.pack("<I", zlib.crc32(body))


def log_overhead(first: int, count: int) -> int:
    """Return what a log's frame has beside its entries.

    >>> log_overhead(7, 2) + 2
    9
    """
    return 1 + varint_size(first) + varint_size(count) + _CRC_BYTES


def follow_log(
    data: bytes,
    public: Public,
    movement: Movement,
    threads: int | None = None,
    in_place: bool = False,
) -> Public:
    """Return the public model after the entries of a frame; the old one is left as it was.

    Raises `WireError` on a frame that is damaged, of another round, or not of this model. With
    ``in_place`` the old one is given away, as in `aqg.core.public.advance`, then, too.
    """
    frame, first, count, position = _open(data)
    if first != public.round:
        raise WireError(f"the log begins with round {first}; the model here is at {public.round}")
    if frame[0] == MERGED_MARK:
        merged = _read_merged(frame, position, count, public, threads)
        return follow_merged(public, merged, movement, in_place)
    for number in range(first, first + count):
        entry, position = _decode_entry(frame, position, public, number, threads)
        try:
            public = advance(public, entry, movement, in_place)
        except MessageError as error:
            raise WireError(f"entry {number} of the log cannot be followed: {error}") from error
    if position != len(frame):
        raise WireError(f"{len(frame) - position} bytes follow the last entry of the log")
    return public


def _read_merged(
    frame: NDArray[np.uint8], position: int, count: int, public: Public, threads: int | None
) -> Merged:
    if len(public.velocity):
        raise WireError("entries are merged that move a velocity")
    quantum, position = read_optional_quantum(frame, position)
    num_movements, position = read_varint(frame, position)
    if 2 * num_movements > len(frame) - position:
        raise WireError(f"{num_movements} movements in {len(frame) - position} bytes")
    movements = []
    for _ in range(num_movements):
        number, position = _bfloat16(frame, position)
        movements.append(_checked_movement(number, public.round))
    total = decode_vector(frame[position:], np.zeros(len(public.parameters)), threads)
    return Merged(count, total, tuple(movements), quantum)


def log_rounds(data: bytes) -> range:
    _, first, count, _ = _open(data)
    return range(first, first + count)


def log_since(data: bytes, position: int) -> bytes:
    """Return the frame without its entries before round ``position``, which the reader has.

    >>> log_since(encode_log(7, [bytes(1)] * 2), 8) == encode_log(8, [bytes(1)])
    True
    """
    frame, first, count, start = _open(data)
    if not first <= position <= first + count:
        raise WireError(f"the log has rounds {first} to {first + count - 1}, not {position}")
    if frame[0] == MERGED_MARK:
        if position == first:
            return data
        if position != first + count:
            raise WireError(f"entries {first} to {first + count - 1} are one; {position} is held")
        return encode_log(position, [])
    for number in range(first, position):
        start = _skip_entry(frame, start, number)
    rest = frame[start:].tobytes()
    body = bytes([LOG_MARK]) + write_varint(position) + write_varint(first + count - position)
    return body + rest + struct.pack("<I", zlib.crc32(rest, zlib.crc32(body)))


def _skip_entry(frame: NDArray[np.uint8], position: int, number: int) -> int:
    if position >= len(frame):
        raise WireError(f"the log ends before entry {number}")
    flags, position = int(frame[position]), position + 1
    if flags & MOVEMENT:
        position += 8 if flags & DOUBLE else 2
    if flags & QUANTUM:
        _, position = read_varint(frame, position)
    for part in (VELOCITY, POSITION):
        if flags & part:
            size, position = read_varint(frame, position)
            position += size
    if position > len(frame):
        raise WireError(f"the log ends inside entry {number}")
    return position


def _open(data: bytes) -> tuple[NDArray[np.uint8], int, int, int]:
    frame = np.frombuffer(data, np.uint8)
    if len(frame) < 3 + _CRC_BYTES:
        raise WireError(f"a log has at least {3 + _CRC_BYTES} bytes, not {len(frame)}")
    body = frame[:-_CRC_BYTES]
    if zlib.crc32(body.data) != int.from_bytes(frame[-_CRC_BYTES:].tobytes(), "little"):
        raise WireError("the checksum of the log is wrong: it is damaged")
    if int(body[0]) not in (LOG_MARK, MERGED_MARK):
        raise WireError(f"byte {int(body[0]):02x} does not begin a log of this version")
    first, position = read_varint(body, 1)
    count, position = read_varint(body, position)
    if int(body[0]) == LOG_MARK and count > len(body) - position:
        raise WireError(f"the log claims {count} entries in {len(body) - position} bytes")
    return body, first, count, position


def _head(entry: Entry) -> tuple[int, bytes]:
    flags = VELOCITY if entry.velocity is not None else 0
    flags |= POSITION if entry.position is not None else 0
    flags |= 0 if entry.is_step else HOLD
    head = b""
    if entry.movement is not None and entry.is_rounded:
        flags, head = flags | MOVEMENT, struct.pack("<f", entry.movement)[2:]
    elif entry.movement is not None:
        flags, head = flags | MOVEMENT | DOUBLE, struct.pack("<d", entry.movement)
    if entry.quantum is not None:
        flags, head = flags | QUANTUM, head + write_quantum(entry.quantum)
    return flags, head


def _encode_part(part: Part, is_velocity: bool, known: Known | None, threads: int | None) -> bytes:
    if isinstance(part, Change):
        return _EXACT_PART + encode_vector(part.new, part.old, threads)
    assert isinstance(part, Upload)
    if is_velocity:
        return encode(part, known=known, threads=threads)
    part.validate()
    mode, payload = encode_levels(part, None, threads)
    head = upload_head(mode, part)
    return bytes([mode]) + head[1:] + payload


def _decode_entry(
    frame: NDArray[np.uint8], position: int, public: Public, number: int, threads: int | None
) -> tuple[Entry, int]:
    if position >= len(frame):
        raise WireError(f"the log ends before entry {number}")
    flags, position = int(frame[position]), position + 1
    is_odd = flags >= 2 * QUANTUM or (flags & HOLD and flags != HOLD)
    if is_odd or (flags & DOUBLE and not flags & MOVEMENT):
        raise WireError(f"the flags of entry {number} are {flags:02x}, which mean nothing")
    movement = None
    if flags & MOVEMENT:
        if flags & DOUBLE:
            (movement,), position = _unpack("<d", frame, position)
        else:
            movement, position = _bfloat16(frame, position)
        movement = _checked_movement(movement, number)
    quantum = None
    if flags & QUANTUM:
        quantum, position = read_quantum(frame, position)
    of_velocity: Part | None = None
    of_position: Part | None = None
    if flags & VELOCITY:
        if not len(public.velocity):
            raise WireError(f"entry {number} changes a velocity; this model has none")
        of_velocity, position = _decode_part(
            frame, position, public.velocity, known_velocity(public), True, number, threads
        )
    if flags & POSITION:
        of_position, position = _decode_part(
            frame, position, public.parameters, None, False, number, threads
        )
    is_step = not flags & HOLD
    entry = Entry(number, of_velocity, of_position, movement, is_step, quantum=quantum)
    return entry, position


def _checked_movement(movement: float, number: int) -> float:
    if not movement >= 0 and not math.isnan(movement):
        raise WireError(f"the movement in entry {number} is {movement}; it is never negative")
    return movement


def write_quantum(quantum: float) -> bytes:
    return write_zigzag(math.frexp(quantum)[1] - 1)


def read_optional_quantum(frame: NDArray[np.uint8], position: int) -> tuple[float | None, int]:
    if position >= len(frame) or frame[position] > 1:
        raise WireError("the frame does not say whether it has a quantum")
    if not frame[position]:
        return None, position + 1
    return read_quantum(frame, position + 1)


def read_quantum(frame: NDArray[np.uint8], position: int) -> tuple[float, int]:
    exponent, position = read_zigzag(frame, position)
    if not MIN_EXPONENT <= exponent <= MAX_EXPONENT:
        raise WireError(
            f"a quantum of 2^{exponent}; exponents go from {MIN_EXPONENT} to {MAX_EXPONENT}"
        )
    return math.ldexp(1.0, exponent), position


def _decode_part(
    frame: NDArray[np.uint8],
    position: int,
    old: FloatArray,
    known: Known | None,
    is_velocity: bool,
    number: int,
    threads: int | None,
) -> tuple[Change | Upload, int]:
    size, position = read_varint(frame, position)
    if not 0 < size <= len(frame) - position:
        raise WireError(
            f"a part of entry {number} claims {size} bytes where {len(frame) - position} are left"
        )
    payload, position = frame[position : position + size], position + size
    if payload[0] == 0:
        return Change(old, decode_vector(payload[1:], old, threads)), position
    if not is_velocity:
        return decode_bare(payload, len(old), threads), position
    message = decode(payload.tobytes(), len(old), known=known, threads=threads)
    if not isinstance(message, Upload):
        raise WireError(f"entry {number} holds a {type(message).__name__}; it holds levels")
    return message, position


def _bfloat16(frame: NDArray[np.uint8], position: int) -> tuple[float, int]:
    (bits,), position = _unpack("<H", frame, position)
    (number,) = struct.unpack("<f", struct.pack("<HH", 0, int(bits)))
    return number, position


def _unpack(kind: str, frame: NDArray[np.uint8], position: int) -> tuple[tuple[float, ...], int]:
    end = position + struct.calcsize(kind)
    if end > len(frame):
        raise WireError(f"the log ends at byte {len(frame)}, inside a number")
    return struct.unpack(kind, frame[position:end].tobytes()), end


SNAPSHOT_MARK = 0x73
_CRC_BYTES = 4
_DIRECTIONS = Alphabet(3, 2 * MAX_DIRECTION + 1)


def encode_snapshot(public: Public, start: FloatArray | None, threads: int | None = None) -> bytes:
    """Write the public model; with ``start``, for a reader that has the starting model."""
    base = _base(public.parameters if start is None else start, start is not None, public.quantum)
    parts = [bytes([SNAPSHOT_MARK, start is not None]), write_varint(public.round)]
    parts += [
        write_varint(len(public.history)),
        struct.pack(f"<{len(public.history)}d", *public.history),
    ]
    parts.append(b"\1" + write_quantum(public.quantum) if public.quantum else b"\0")
    _, velocity, direction = public.vectors
    vectors = [encode_vector(public.parameters, base, threads)]
    vectors.append(encode_vector(velocity, np.zeros_like(velocity), threads))
    directions = (direction + MAX_DIRECTION).astype(np.uint8)
    vectors.append(
        encode_planes([Plane(directions, _DIRECTIONS)], threads) if len(directions) else b""
    )
    for payload in vectors:
        parts += [write_varint(len(payload)), payload]
    body = b"".join(parts)
    return body + struct.pack("<I", zlib.crc32(body))


def decode_snapshot(
    data: bytes, like: Public, start: FloatArray | None, threads: int | None = None
) -> Public:
    """Return the public model that was written.

    ``like`` is a public model of the same shape, ``start`` the starting model where the reader has
    it.
    """
    frame = np.frombuffer(data, np.uint8)
    if len(frame) < 4 + _CRC_BYTES:
        raise WireError(f"a snapshot has at least {4 + _CRC_BYTES} bytes, not {len(frame)}")
    body = frame[:-_CRC_BYTES]
    if zlib.crc32(body.data) != int.from_bytes(frame[-_CRC_BYTES:].tobytes(), "little"):
        raise WireError("the checksum of the snapshot is wrong: it is damaged")
    if int(body[0]) != SNAPSHOT_MARK or int(body[1]) > 1:
        raise WireError(f"bytes {body[:2].tobytes().hex()} do not begin a snapshot")
    is_relative = bool(body[1])
    if is_relative and start is None:
        raise WireError("the snapshot is relative to a starting model, which is not here")
    round_number, position = read_varint(body, 2)
    count, position = read_varint(body, position)
    if count > (len(body) - position) // 8:
        raise WireError(f"the snapshot claims {count} movements in {len(body) - position} bytes")
    end = position + 8 * count
    history = struct.unpack(f"<{count}d", body[position:end].tobytes())
    found, position = read_optional_quantum(body, end)
    quantum = found or 0.0
    base = _base(like.parameters if start is None else start, is_relative, quantum)
    rest, parts = body[position:], []
    for _ in range(3):
        part, rest = read_part(rest, 0, "a vector of the snapshot claims")
        parts.append(part)
    if len(rest):
        raise WireError(f"{len(rest)} bytes follow the snapshot")
    like_velocity, like_direction = like.vectors[1:]
    parameters = decode_vector(parts[0], base, threads)
    velocity = decode_vector(parts[1], np.zeros_like(like_velocity), threads)
    direction = _decode_direction(parts[2], len(like_direction), threads)
    track = Track(parameters[None], velocity[None], direction[None], np.ones(1, np.bool_))
    return Public(round_number, track, history, quantum).marked()


def _base(start: FloatArray, is_relative: bool, quantum: float) -> FloatArray:
    """Return what the parameters are written relative to: the starting model, or zeros like it."""
    if not is_relative:
        return np.zeros_like(start)
    return snap(start, quantum) if quantum else start


def _decode_direction(
    payload: NDArray[np.uint8], length: int, threads: int | None
) -> NDArray[np.int8]:
    if not length:
        if len(payload):
            raise WireError(f"{len(payload)} bytes of directions; this model has none")
        return np.zeros(0, np.int8)
    (symbols,) = decode_planes(payload, [_DIRECTIONS], length, threads)
    if int(symbols.max()) > 2 * MAX_DIRECTION:
        raise WireError(f"a direction is {int(symbols.max())}; {2 * MAX_DIRECTION} is the most")
    return symbols.astype(np.int8) - np.int8(MAX_DIRECTION)
