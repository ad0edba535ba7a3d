"""The frame of statistics that are not trained: some tensors of a list, shortened.

``docs/reference/frame-format.md`` describes each byte, and how far off values are.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from aqg.core.types import BoolArray, Float64Array, IntArray
from aqg.errors import WireError
from aqg.wire.varint import Reader, seal, write_zigzag

PRECISIONS = ("half", "byte", "change")
"""Byte 1 of a frame counts them from 1."""

_MARK = 0x51
_MANTISSA = 15
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_EXPONENTS = range(-1100, 1101)
_SMALL = np.arange(8) / 2.0**17
_BYTES = np.concatenate([_SMALL, *((1 + np.arange(8) / 8) * 2.0 ** (e - 16) for e in range(1, 16))])
_NIBBLES = np.array([0.0, *(2.0**e for e in range(-6, 1))])
_SHORT = {"byte": _BYTES, "change": _NIBBLES}
"""The magnitudes of a code, for ``e = 0``."""
_MAX_EXPONENT = 1023
_MIDDLE = 0.75
"""Half way from one half to one."""


class Section(NamedTuple):
    """A tensor of the list: how many values, and ``"float32"``-like or ``"int"``."""

    size: int
    kind: str

    @property
    def is_integer(self) -> bool:
        return self.kind not in _FLOATS


class StatisticsMessage(NamedTuple):
    """What a frame holds: zero where a tensor is not in it."""

    values: Float64Array  # of all floating-point tensors, one after the other
    counts: IntArray  # of all integer tensors
    sent: BoolArray  # for each tensor, whether it is in the frame
    # for each tensor, whether it is there in the short form; None: no such form
    short: BoolArray | None = None
    is_change: bool = False  # whether values in the short form are changes


def encode_statistics(
    message: StatisticsMessage, sections: Sequence[Section], precision: str
) -> bytes:
    """Return the frame; floating-point sections come before integer ones."""
    if precision not in PRECISIONS:
        raise WireError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}")
    parts = [bytes((_MARK, 1 + PRECISIONS.index(precision))), _pack_flags(message.sent)]
    short = np.zeros(len(message.sent), np.bool_)
    if precision in _SHORT:
        if message.short is not None:
            is_float = np.array([not section.is_integer for section in sections], np.bool_)
            short = message.short & message.sent & is_float
        parts.append(_pack_flags(short))
    for index, place in enumerate(_places(sections)):
        if not message.sent[index]:
            continue
        if sections[index].is_integer:
            parts += [write_zigzag(number) for number in message.counts[place].tolist()]
            continue
        values = _finite(message.values[place])
        if short[index]:
            parts.append(_to_short(values, precision))
        else:
            exponent = _exponent(values)
            halves = np.ldexp(values, _MANTISSA - exponent).astype("<f2")
            parts += [write_zigzag(exponent), halves.tobytes()]
    return seal(b"".join(parts))


def decode_statistics(data: bytes, sections: Sequence[Section]) -> StatisticsMessage:
    """Return what `encode_statistics` wrote; raise `WireError` on anything else."""
    reader = Reader.of_sealed(data, "the frame of statistics", 2 + (len(sections) + 7) // 8)
    mark, number = reader.byte("its mark"), reader.byte("its precision")
    if mark != _MARK or not 1 <= number <= len(PRECISIONS):
        raise WireError(f"bytes {data[:2].hex()} do not begin a frame of statistics")
    precision = PRECISIONS[number - 1]
    sent, short = _read_flags(reader, len(sections)), None
    if precision in _SHORT:
        short = _read_flags(reader, len(sections))
        wrong = [s.is_integer or not is_sent for s, is_sent in zip(sections, sent, strict=True)]
        if (short & wrong).any():
            raise WireError(f"tensor {int((short & wrong).argmax())} cannot be in the short form")
    values = np.zeros(sum(s.size for s in sections if not s.is_integer))
    counts = np.zeros(sum(s.size for s in sections if s.is_integer), np.int64)
    for index, place in enumerate(_places(sections)):
        size = sections[index].size
        if not sent[index]:
            continue
        if sections[index].is_integer:
            counts[place] = [reader.zigzag() for _ in range(size)]
        elif short is not None and short[index]:
            values[place] = _read_short(reader, size, precision)
        else:
            exponent = _read_exponent(reader) - _MANTISSA
            halves = reader.array(size, "<f2", "a tensor")
            values[place] = _scaled(halves.astype(np.float64), exponent)
    reader.finish("the last tensor")
    return StatisticsMessage(values, counts, sent, short, precision == "change")


def _places(sections: Sequence[Section]) -> Iterator[slice]:
    ends = {True: 0, False: 0}
    for section in sections:
        start = ends[section.is_integer]
        ends[section.is_integer] = start + section.size
        yield slice(start, start + section.size)


def _pack_flags(flags: BoolArray) -> bytes:
    return np.packbits(flags, bitorder="little").tobytes()


def _read_flags(reader: Reader, number: int) -> BoolArray:
    packed = reader.take((number + 7) // 8, "the flags")
    bits = np.unpackbits(packed, bitorder="little").astype(np.bool_)
    if bits[number:].any():
        raise WireError(f"flags beyond the {number} tensors are set")
    return bits[:number]


def _finite(values: Float64Array) -> Float64Array:
    if not np.isfinite(values).all():
        raise WireError("statistics hold NaN or infinity")
    return values


def _exponent(values: Float64Array) -> int:
    return int(np.frexp(np.abs(values).max(initial=0.0))[1])


def _to_short(values: Float64Array, precision: str) -> bytes:
    """Return the exponent and the codes: signs, and the nearest of the magnitudes."""
    exponent = _exponent(values)
    if precision == "change" and np.ldexp(np.abs(values).max(initial=0.0), -exponent) < _MIDDLE:
        exponent -= 1
    exponent = min(exponent, _MAX_EXPONENT)
    magnitudes = _SHORT[precision]
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    codes = np.searchsorted(middles, np.abs(np.ldexp(values, -exponent)), side="right")
    codes += len(magnitudes) * ((values < 0) & (codes > 0))
    if precision == "change":
        codes = np.append(codes, np.zeros(len(codes) % 2, np.int64))
        codes = codes[::2] + 16 * codes[1::2]
    return write_zigzag(exponent) + codes.astype(np.uint8).tobytes()


def _read_short(reader: Reader, size: int, precision: str) -> Float64Array:
    exponent = _read_exponent(reader)
    magnitudes = _SHORT[precision]
    codes = reader.take(size if precision == "byte" else (size + 1) // 2, "a tensor")
    if precision == "change":
        codes = np.stack([codes & 15, codes >> 4], axis=1).ravel()
        if codes[size:].any():
            raise WireError("half a byte behind the changes of a tensor is not zero")
        codes = codes[:size]
    if (codes == len(magnitudes)).any():
        raise WireError("a zero among the statistics has a sign")
    signs = np.where(codes > len(magnitudes), -1.0, 1.0)
    return _scaled(signs * magnitudes[codes % len(magnitudes)], exponent)


def _scaled(values: Float64Array, exponent: int) -> Float64Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return _finite(np.ldexp(values, exponent))


def _read_exponent(reader: Reader) -> int:
    exponent = reader.zigzag()
    if exponent not in _EXPONENTS:
        raise WireError(f"exponent {exponent} of a tensor is outside -1100..1100")
    return exponent
