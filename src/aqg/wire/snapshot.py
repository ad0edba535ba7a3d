"""The public model as one frame, for clients that have missed too much of its log.

::

    byte 0      0x73: a snapshot, version 3
    byte 1      1 if the parameters are relative to the starting model, which the reader has; else 0
    then        the round, and the number of past movements, as varints; these, 8 bytes each
    quantum     a byte 0, or a byte 1 and its exponent, as in an entry (`aqg.wire.entry`); then the
                starting model is rounded to it before anything is relative to it
    vectors     position, velocity, its direction: each the number of bytes, a varint, and its bytes
                (`aqg.wire.vectors`; directions are a section of symbols)
    last 4      CRC-32 of all before

Nothing is lost: the reader has the sender's model to the bit.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from aqg.core.grids import snap
from aqg.core.public import Public
from aqg.core.track import MAX_DIRECTION, Track
from aqg.core.types import FloatArray
from aqg.errors import WireError
from aqg.wire.entry import read_optional_quantum, write_quantum
from aqg.wire.sections import Alphabet, Plane, decode_planes, encode_planes
from aqg.wire.varint import read_part, read_varint, write_varint
from aqg.wire.vectors import decode_vector, encode_vector

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

    Args:
        data: the frame.
        like: a public model of the same shape, such as that before the first round.
        start: the starting model, where the reader has it.
        threads: as many are used at most.
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
