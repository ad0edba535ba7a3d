"""The frame of statistics that are not trained: some tensors of a list, lossless or halved.

====================== ===========================================================================
byte 0                 ``0x51``: a frame of statistics, version 1
byte 1                 0: lossless; 1: half precision
flags                  one bit per tensor of the list, lowest first: whether it is in the frame
floating-point tensors lossless: the values in the tensor's own precision, little-endian;
                       half: an exponent ``e`` (zigzag varint), then ``x / 2^(e - 15)`` in float16
integer tensors        the values as zigzag varints
last four bytes        CRC-32 of all before
====================== ===========================================================================

The exponent is that of the largest magnitude of the tensor, ``2^(e-1) <= max|x| < 2^e``, so that
nothing overflows and half precision is off by at most ``2^-11 |x| + 2^-39 max|x|``.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqg.errors import WireError
from aqg.wire.varint import read_varint, write_varint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.core.types import BoolArray, Float64Array, FloatArray, IntArray

PRECISIONS = ("exact", "half")

_MARK = 0x51
_CRC_BYTES = 4
_MANTISSA = 15
_KINDS = {"float16": "<f2", "bfloat16": "<f4", "float32": "<f4", "float64": "<f8"}
_EXPONENTS = range(-1100, 1101)


class Section(NamedTuple):
    """A tensor of the list: how many values, and ``"float32"``-like or ``"int"``."""

    size: int
    kind: str

    @property
    def is_integer(self) -> bool:
        """Whether its values are integers."""
        return self.kind not in _KINDS


class StatisticsMessage(NamedTuple):
    """What a frame holds: zero where a tensor is not in it.

    Attributes:
        values: of all floating-point tensors, one after the other.
        counts: of all integer tensors.
        sent: for each tensor, whether it is in the frame.

    """

    values: Float64Array
    counts: IntArray
    sent: BoolArray


def encode_statistics(
    message: StatisticsMessage, sections: Sequence[Section], precision: str
) -> bytes:
    """Return the frame; floating-point sections come before integer ones.

    >>> message = StatisticsMessage(np.array([1.0, -0.5]), np.array([3]), np.array([True, True]))
    >>> sections = Section(2, "float32"), Section(1, "int")
    >>> encode_statistics(message, sections, "half").hex(" ")
    '51 01 03 02 00 74 00 f0 06 d0 89 28 2a'
    """
    if precision not in PRECISIONS:
        raise WireError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}")
    parts = [bytes((_MARK, PRECISIONS.index(precision)))]
    parts.append(np.packbits(message.sent, bitorder="little").tobytes())
    floats = integers = 0
    for section, sent in zip(sections, message.sent.tolist(), strict=True):
        if section.is_integer:
            numbers = message.counts[integers : integers + section.size]
            integers += section.size
            if sent:
                parts += [write_varint(_zigzag(number)) for number in numbers.tolist()]
            continue
        values = message.values[floats : floats + section.size]
        floats += section.size
        if not sent:
            continue
        _require_finite(values)
        if precision == "half":
            exponent, halves = _to_half(values)
            parts += [write_varint(_zigzag(exponent)), halves.tobytes()]
        else:
            with np.errstate(over="ignore"):  # looked at in the line after
                stored = values.astype(_KINDS[section.kind])
            _require_finite(stored)
            parts.append(stored.tobytes())
    body = b"".join(parts)
    return body + zlib.crc32(body).to_bytes(_CRC_BYTES, "little")


def decode_statistics(data: bytes, sections: Sequence[Section]) -> StatisticsMessage:
    """Return what `encode_statistics` wrote; raise `WireError` on anything else."""
    num_flags = (len(sections) + 7) // 8
    if len(data) < 2 + num_flags + _CRC_BYTES:
        raise WireError(f"a frame of statistics has at least {2 + num_flags + _CRC_BYTES} bytes")
    body, crc = data[:-_CRC_BYTES], data[-_CRC_BYTES:]
    if zlib.crc32(body).to_bytes(_CRC_BYTES, "little") != crc:
        raise WireError("the checksum of the statistics is wrong")
    if body[0] != _MARK or body[1] >= len(PRECISIONS):
        raise WireError(f"bytes {body[:2].hex()} do not begin a frame of statistics")
    flags = np.frombuffer(body[2 : 2 + num_flags], np.uint8)
    bits = np.unpackbits(flags, bitorder="little").astype(np.bool_)
    sent = bits[: len(sections)]
    if bits[len(sections) :].any():
        raise WireError(f"flags beyond the {len(sections)} tensors are set")
    values = np.zeros(sum(s.size for s in sections if not s.is_integer))
    counts = np.zeros(sum(s.size for s in sections if s.is_integer), np.int64)
    position, floats, integers = 2 + num_flags, 0, 0
    for section, is_sent in zip(sections, sent.tolist(), strict=True):
        if section.is_integer:
            place = slice(integers, integers + section.size)
            integers += section.size
            if is_sent:
                counts[place], position = _read_integers(body, position, section.size)
            continue
        place = slice(floats, floats + section.size)
        floats += section.size
        if is_sent:
            half = body[1] == PRECISIONS.index("half")
            values[place], position = _read_floats(body, position, section, half=half)
    if position != len(body):
        raise WireError(f"{len(body) - position} bytes follow the last tensor")
    return StatisticsMessage(values, counts, sent)


def _require_finite(values: FloatArray) -> None:
    if not np.isfinite(values).all():
        raise WireError("statistics hold NaN or infinity")


def _to_half(values: Float64Array) -> tuple[int, np.ndarray[tuple[int], np.dtype[np.float16]]]:
    exponent = int(np.frexp(np.abs(values).max(initial=0.0))[1])
    return exponent, np.ldexp(values, _MANTISSA - exponent).astype("<f2")


def _read_floats(
    body: bytes, position: int, section: Section, *, half: bool
) -> tuple[Float64Array, int]:
    exponent = 0
    if half:
        code, position = read_varint(body, position)
        exponent = _from_zigzag(code)
        if exponent not in _EXPONENTS:
            raise WireError(f"exponent {exponent} of a tensor is outside -1100..1100")
    kind = np.dtype("<f2" if half else _KINDS[section.kind])
    end = position + section.size * kind.itemsize
    if end > len(body):
        raise WireError(f"the statistics end at byte {len(body)}, inside a tensor")
    with np.errstate(over="ignore", invalid="ignore"):  # looked at in the line after
        values = np.frombuffer(body[position:end], kind).astype(np.float64)
        if half:
            values = np.ldexp(values, exponent - _MANTISSA)
    _require_finite(values)
    return values, end


def _read_integers(body: bytes, position: int, size: int) -> tuple[list[int], int]:
    if size > len(body) - position:
        raise WireError(f"the statistics end at byte {len(body)}, inside a tensor")
    numbers = []
    for _ in range(size):
        code, position = read_varint(body, position)
        numbers.append(_from_zigzag(code))
    return numbers, position


def _zigzag(number: int) -> int:
    return 2 * number if number >= 0 else -2 * number - 1


def _from_zigzag(code: int) -> int:
    return code >> 1 if code % 2 == 0 else -(code >> 1) - 1
