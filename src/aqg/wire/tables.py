"""Frequency tables: chosen for the fewest bits in all, written in few.

A table gives every symbol of an alphabet a frequency; they sum to ``2^scale_bits``. The most
frequent symbol (the peak) gets what the others leave. The others keep only ``precision`` bits after
their leading one, since the exact frequency of a rare symbol costs more to write than it saves.
``docs/reference/frame-format.md`` says how it is written.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqg.errors import WireError
from aqg.jit import njit, part

MIN_SCALE_BITS = 9
MAX_SCALE_BITS = 16
MAX_PRECISION = 7
_NOWHERE = np.empty(0, np.uint8)
"""What is written here is only counted."""


class Table(NamedTuple):
    """Frequencies that sum to ``2^scale_bits``, with ``precision`` bits after the leading one."""

    frequencies: NDArray[np.int64]
    peak: int
    scale_bits: int
    precision: int

    @property
    def is_constant(self) -> bool:
        return int(self.frequencies[self.peak]) == 1 << self.scale_bits


def choose_table(counts: NDArray[np.int64]) -> tuple[Table, float]:
    """Return the table for symbols with these ``counts``, and the bits of table and symbols."""
    frequencies = np.empty(len(counts), np.int64)
    peak = int(counts.argmax())
    scale_bits, precision, bits = _choose(counts, int(counts.sum()), peak, frequencies, _NOWHERE)
    table = Table(frequencies, peak, int(scale_bits), int(precision))
    return table, float(bits)


def least_bits(counts: NDArray[np.int64]) -> float:
    """Return bits that no table and symbols with these ``counts`` can do without.

    The symbols take at least their zero-order entropy, whatever the table says; and no table is
    shorter than the one in which every symbol but the peak has frequency one.
    """
    table_bits = _write(np.minimum(counts, 1), int(counts.argmax()), 0, _NOWHERE)
    found = counts[counts > 0]
    return float(table_bits + found @ np.log2(found.sum() / found))


def write_table(table: Table) -> bytes:
    """Write the frequencies; scale and precision are left to the caller."""
    num_bits = _write(table.frequencies, table.peak, table.precision, _NOWHERE)
    target = np.zeros((int(num_bits) + 7) // 8, np.uint8)
    _write(table.frequencies, table.peak, table.precision, target)
    return target.tobytes()


def read_table(
    data: NDArray[np.uint8], num_symbols: int, scale_bits: int, precision: int
) -> tuple[Table, int]:
    """Read a table for ``num_symbols`` symbols; return it and the bytes it took."""
    frequencies = np.zeros(num_symbols, np.int64)
    peak, bit = _read(data, scale_bits, precision, frequencies)
    if peak < 0:
        raise WireError(f"the frequency table for {num_symbols} symbols is damaged")
    num_bytes = (bit + 7) // 8
    if bit % 8 and int(data[num_bytes - 1]) >> bit % 8:
        raise WireError("the unused bits after the frequency table must be zero")
    return Table(frequencies, int(peak), scale_bits, precision), num_bytes


@part(forceinline=True)
def _bit_length(value: Any) -> Any:
    length = 0
    while value:
        value >>= 1
        length += 1
    return length


@part(forceinline=True)
def _zigzag(change: Any) -> Any:
    """Map 0, -1, 1, -2, 2, … to 0, 1, 2, 3, 4, … in this order."""
    return 2 * change if change >= 0 else -2 * change - 1


@part(forceinline=True)
def _unzigzag(value: Any) -> Any:
    return -(value + 1) // 2 if value & 1 else value // 2


@part(forceinline=True)
def _skip(index: Any, peak: Any) -> Any:
    return index + (1 if index >= peak else 0)


@part(forceinline=True)
def _round(share: Any, precision: Any) -> Any:
    """Round to the nearest integer of 1 + ``precision`` significant bits, at least 1."""
    value = max(1, int(share + 0.5))
    dropped = _bit_length(value) - 1 - precision
    if dropped > 0:
        unit = 1 << dropped
        value = int(share / unit + 0.5) * unit
    return value


@part(forceinline=True)
def _fill(
    counts: Any, total: Any, peak: Any, scale_bits: Any, precision: Any, frequencies: Any
) -> Any:
    """Give every counted symbol a frequency; return whether any is left for the peak."""
    scale = float(1 << scale_bits) / max(1, total)
    left = 1 << scale_bits
    for i in range(len(counts)):
        frequencies[i] = 0
        if counts[i] and i != peak:
            frequencies[i] = _round(counts[i] * scale, precision)
            left -= int(frequencies[i])
    frequencies[peak] = left
    return left > 0


@njit()
def _choose(counts: Any, total: Any, peak: Any, frequencies: Any, nowhere: Any) -> Any:
    """Try scales and precisions; leave the cheapest in ``frequencies``.

    Scale 16 with precision 7 is never refused: with at most 256 symbols the peak's share is at
    least 2^8. If it is below 2^9, so are all, and each of the others is rounded up by at most 1, by
    at most 255 together. Otherwise they are rounded up by at most 255 + 2^16/2^8 = 511 together.
    """
    best_bits = math.inf
    # Plain constants would be types of their own to numba, and compile all of this twice.
    best_scale = int(np.int64(MAX_SCALE_BITS))
    best_precision = int(np.int64(MAX_PRECISION))
    for scale_bits in (16, 14, 12, 9):
        for precision in (1, 2, 3, 4, 7):
            if not _fill(counts, total, peak, scale_bits, precision, frequencies):
                continue
            bits = float(_write(frequencies, peak, precision, nowhere))
            for i in range(len(counts)):
                if counts[i]:
                    bits += counts[i] * (scale_bits - math.log2(frequencies[i]))
            if bits < best_bits:
                best_bits, best_scale, best_precision = bits, scale_bits, precision
    _fill(counts, total, peak, best_scale, best_precision, frequencies)
    return best_scale, best_precision, best_bits


@part(forceinline=True)
def _write_bits(target: Any, bit: Any, value: Any, num_bits: Any) -> Any:
    """Write at position ``bit``; an empty ``target`` only counts. Return the position after."""
    if len(target):
        for k in range(num_bits):
            target[(bit + k) >> 3] |= (value >> k & 1) << ((bit + k) & 7)
    return bit + num_bits


@part(forceinline=True)
def _write_gamma(target: Any, bit: Any, value: Any) -> Any:
    extra = _bit_length(value) - 1
    bit = _write_bits(target, bit, 1 << extra, extra + 1)
    return _write_bits(target, bit, value, extra)


@njit()
def _write(frequencies: Any, peak: Any, precision: Any, target: Any) -> Any:
    """Write the table into zeroed bytes; return its number of bits."""
    num_others = len(frequencies) - 1
    bit = _write_bits(target, int(np.int64(0)), peak, _bit_length(num_others))
    done = 0
    while done < num_others:
        zeros = 0
        while done + zeros < num_others and not frequencies[_skip(done + zeros, peak)]:
            zeros += 1
        bit = _write_gamma(target, bit, zeros + 1)
        done += zeros
        size = 0
        while done < num_others:
            frequency = int(frequencies[_skip(done, peak)])
            change = _bit_length(frequency) - size
            bit = _write_gamma(target, bit, _zigzag(change) + 1 if size else change)
            size += change
            done += 1
            if size == 0:
                break
            kept = min(size - 1, precision)
            bit = _write_bits(target, bit, frequency >> (size - 1 - kept), kept)
    return bit


@part(forceinline=True)
def _read_bits(data: Any, bit: Any, num_bits: Any) -> Any:
    """Read at position ``bit``, or return -1 where the data ends before."""
    if bit + num_bits > 8 * len(data):
        return -1
    value = 0
    for k in range(num_bits):
        value |= (int(data[(bit + k) >> 3]) >> ((bit + k) & 7) & 1) << k
    return value


@part(forceinline=True)
def _read_gamma(data: Any, bit: Any) -> Any:
    """Read a value and the position after it; -1 where the data ends or the value is too large."""
    for extra in range(MAX_SCALE_BITS):
        one = _read_bits(data, bit + extra, 1)
        if one:
            low = _read_bits(data, bit + extra + 1, extra)
            return (low | 1 << extra if one > 0 and low >= 0 else -1), bit + 2 * extra + 1
    return -1, bit


@njit()
def _read(data: Any, scale_bits: Any, precision: Any, frequencies: Any) -> Any:
    """Fill the zeroed ``frequencies``; return the peak and the number of bits, or -1 if damaged."""
    num_others = len(frequencies) - 1
    bit = _bit_length(num_others)
    peak = _read_bits(data, 0, bit)
    if not 0 <= peak <= num_others:
        return -1, bit
    left = 1 << scale_bits
    done = 0
    while done < num_others:
        code, bit = _read_gamma(data, bit)
        if not 1 <= code <= num_others - done + 1:
            return -1, bit
        done += code - 1
        size = 0
        while done < num_others:
            code, bit = _read_gamma(data, bit)
            if code < 0:
                return -1, bit
            size += _unzigzag(code - 1) if size else code
            if not 0 <= size <= scale_bits:
                return -1, bit
            done += 1
            if size == 0:
                break
            kept = min(size - 1, precision)
            mantissa = _read_bits(data, bit, kept)
            if mantissa < 0:
                return -1, bit
            bit += kept
            frequency = (mantissa | 1 << kept) << (size - 1 - kept)
            frequencies[_skip(done - 1, peak)] = frequency
            left -= frequency
    frequencies[peak] = left
    return (peak if left > 0 else -1), bit
