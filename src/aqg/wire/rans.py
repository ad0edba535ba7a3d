"""Range asymmetric numeral systems (rANS): symbols as one big number per lane; frequency tables.

A lane's state ``x`` absorbs a symbol of frequency ``f`` out of ``M = 2^scale_bits`` by
``x ← (x div f)·M + start + (x mod f)``, where ``start`` is the sum of the frequencies before it.
That grows ``x`` by ``log2(M/f)`` bits, the information in the symbol. Decoding undoes it:
``x mod M`` falls into the range of exactly one symbol. Symbol ``i`` belongs to lane
``i mod lanes``; the lanes share one stream of 16-bit words and let a processor work on several
symbols at once.

Invariants, which bound every shift and product below, on hostile input too:

* between symbols ``LOW ≤ x < LOW·2^16 = 2^40``, so ``x`` is exact in int64 and in float64;
* ``1 ≤ f ≤ M ≤ 2^16 ≤ LOW``, so one word in or out always restores the first;
* the encoder starts every lane at ``LOW`` and walks backwards; the decoder walks forwards and must
  end with every lane at ``LOW`` and every word read.

A table gives every symbol of an alphabet a frequency; they sum to ``2^scale_bits``. It is chosen
for the fewest bits in all. The most frequent symbol (the peak) gets what the others leave. The
others keep only ``precision`` bits after their leading one, since the exact frequency of a rare
symbol costs more to write than it saves. ``docs/reference/frame-format.md`` says how it is written.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from aqg.core.types import ByteArray, IntArray
from aqg.errors import WireError
from aqg.jit import njit, part

MANY_LANES = 8
WORD_BITS = 16
LOW_BITS = 24
STATE_BITS = LOW_BITS + WORD_BITS
STATE_BYTES = STATE_BITS // 8
LOW = 1 << LOW_BITS

MIN_SCALE_BITS = 9
MAX_SCALE_BITS = 16
MAX_PRECISION = 7
_NOWHERE = np.empty(0, np.uint8)
"""What is written here is only counted."""


class Table(NamedTuple):
    """Frequencies that sum to ``2^scale_bits``, with ``precision`` bits after the leading one."""

    frequencies: IntArray
    peak: int
    scale_bits: int
    precision: int

    @property
    def is_constant(self) -> bool:
        return int(self.frequencies[self.peak]) == 1 << self.scale_bits


def choose_table(counts: IntArray) -> tuple[Table, float]:
    """Return the table for symbols with these ``counts``, and the bits of table and symbols."""
    frequencies = np.empty(len(counts), np.int64)
    peak = int(counts.argmax())
    scale_bits, precision, bits = _choose(counts, int(counts.sum()), peak, frequencies, _NOWHERE)
    table = Table(frequencies, peak, int(scale_bits), int(precision))
    return table, float(bits)


def least_bits(counts: IntArray) -> float:
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
    data: ByteArray, num_symbols: int, scale_bits: int, precision: int
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


def encode_symbols(symbols: ByteArray, table: Table, lanes: int) -> bytes:
    """Code ``symbols``: the lanes' final states of five bytes each, then the words."""
    size = len(table.frequencies)
    steps = (np.empty(size, np.int64), np.empty(size), np.empty(size, np.uint64))
    _fill_steps(table.scale_bits, table.frequencies, *steps)
    words = np.empty(len(symbols), np.uint16)  # a symbol gives at most one word
    states = np.empty(lanes, np.int64)
    num_words = _encode(symbols, *steps, states, words)
    used = words[len(words) - num_words :].astype("<u2", copy=False)
    return states.astype("<i8").view(np.uint8).reshape(lanes, 8)[:, :STATE_BYTES].tobytes() + (
        used.tobytes()
    )


def decode_symbols(data: ByteArray, table: Table, lanes: int, symbols: ByteArray) -> None:
    """Fill ``symbols`` with what `encode_symbols` coded into ``data``; refuse any other bytes."""
    num_state_bytes = lanes * STATE_BYTES
    if len(data) < num_state_bytes:
        raise WireError(f"{lanes} coder states take {num_state_bytes} bytes, not {len(data)}")
    padded = np.zeros((lanes, 8), np.uint8)
    padded[:, :STATE_BYTES] = data[:num_state_bytes].reshape(lanes, STATE_BYTES)
    states = padded.view("<i8").ravel().astype(np.int64)
    if int(states.min()) < LOW:
        raise WireError(f"a coder state is {int(states.min())}, below {LOW}")
    frequencies, words = table.frequencies, data[num_state_bytes:]
    slots = np.repeat(np.arange(len(frequencies), dtype=np.uint8), frequencies)
    starts = np.cumsum(frequencies) - frequencies
    num_read = _decode(words, table.scale_bits, frequencies, starts, slots, states, symbols)
    if num_read < 0:
        raise WireError(f"the coded symbols need more than the {len(words)} bytes of the payload")
    if num_read != len(words):
        raise WireError(f"the coded symbols end after {num_read} of {len(words)} bytes")
    if (states != LOW).any():
        raise WireError("the coder does not end in the state it began with")


@njit()
def _fill_steps(scale_bits: Any, frequencies: Any, limits: Any, inverses: Any, gains: Any) -> None:
    """Write what the encoder looks up for a symbol of frequency ``f``.

    ``limits`` are ``f·2^(40 - scale_bits)``: a state below it stays under ``2^40``. ``inverses``
    are ``1/f`` rounded up. For ``x < 2^40`` the float64 product ``x·inverse`` exceeds ``x/f`` by
    less than ``2^-11/f``, and ``x/f`` is at least ``1/f`` below the next integer, so the integer
    part of the product is ``x div f`` exactly: a division without dividing. It is less than
    ``2^31``, and so are ``M - f`` and ``start``, which ``gains`` hold in its lower and upper half:
    one load serves both, and the product with ``M - f`` is one of 32 bits, the fastest there is.
    """
    start = 0
    for i in range(len(frequencies)):
        limits[i] = frequencies[i] << (STATE_BITS - scale_bits)
        inverses[i] = np.nextafter(1.0 / max(frequencies[i], 1), 2.0)
        gains[i] = start << 32 | (1 << scale_bits) - frequencies[i]
        start += frequencies[i]


@part(forceinline=True)
def _put(
    symbol: Any, x: Any, position: Any, limits: Any, inverses: Any, gains: Any, words: Any
) -> Any:
    """Absorb one symbol; return the new state and the position of the next word.

    The word is always stored and kept only if the state was too full: no branch to mispredict.
    """
    words[np.uint64(position)] = x & 0xFFFF
    is_full = x >= limits[symbol]
    position -= int(is_full)
    x = x >> WORD_BITS if is_full else x
    quotient = np.uint64(np.uint32(int(x * inverses[symbol])))
    gain = gains[symbol]
    x += int(gain >> np.uint64(32))
    return x + int(quotient * (gain & np.uint64(0xFFFFFFFF))), position


@njit()
def _encode(symbols: Any, limits: Any, inverses: Any, gains: Any, states: Any, words: Any) -> Any:
    """Code backwards, filling ``words`` from its end; return how many."""
    last = len(symbols) - 1
    position = last
    t = (limits, inverses, gains, words)
    if len(states) == 1:
        x = LOW
        for i in range(last, -1, -1):
            x, position = _put(symbols[i], x, position, *t)
        states[0] = x
        return last - position
    states[:] = LOW
    whole = len(symbols) // 8 * 8
    for i in range(last, whole - 1, -1):
        states[i % 8], position = _put(symbols[i], int(states[i % 8]), position, *t)
    a, b, c, d = int(states[0]), int(states[1]), int(states[2]), int(states[3])
    e, f, g, h = int(states[4]), int(states[5]), int(states[6]), int(states[7])
    for i in range(whole - 8, -1, -8):
        at = np.uint64(i)  # unsigned: no index is checked for being negative
        h, position = _put(symbols[at + np.uint64(7)], h, position, *t)
        g, position = _put(symbols[at + np.uint64(6)], g, position, *t)
        f, position = _put(symbols[at + np.uint64(5)], f, position, *t)
        e, position = _put(symbols[at + np.uint64(4)], e, position, *t)
        d, position = _put(symbols[at + np.uint64(3)], d, position, *t)
        c, position = _put(symbols[at + np.uint64(2)], c, position, *t)
        b, position = _put(symbols[at + np.uint64(1)], b, position, *t)
        a, position = _put(symbols[at], a, position, *t)
    states[0], states[1], states[2], states[3] = a, b, c, d
    states[4], states[5], states[6], states[7] = e, f, g, h
    return last - position


@part(forceinline=True)
def _get(
    x: Any, position: Any, words: Any, scale_bits: Any, frequencies: Any, starts: Any, slots: Any
) -> Any:
    """Release one symbol; return it, the new state and the new position.

    The caller makes sure that two bytes can be read at ``position``, whether they are used or not.
    """
    slot = x & ((1 << scale_bits) - 1)
    symbol = slots[np.uint64(slot)]
    # f ≥ 1 and x ≥ 2^24 give x ≥ 2^8 here, and x ≥ 2^24 again once a word has come in.
    x = int(frequencies[symbol]) * (x >> scale_bits) + slot - int(starts[symbol])
    at = np.uint64(position)
    refilled = x << WORD_BITS | int(words[at]) | int(words[at + np.uint64(1)]) << 8
    is_low = x < LOW
    return symbol, refilled if is_low else x, position + 2 * int(is_low)


@njit()
def _decode(
    words: Any, scale: Any, frequencies: Any, starts: Any, slots: Any, states: Any, symbols: Any
) -> Any:
    """Fill ``symbols``; return the number of bytes read, or -1 where there are too few."""
    position = 0
    done = 0
    t = (words, scale, frequencies, starts, slots)
    if len(states) == 1:
        x = int(states[0])
        while done < len(symbols) and position + 2 <= len(words):
            symbols[done], x, position = _get(x, position, *t)
            done += 1
        states[0] = x
    while len(states) == 8 and done + 8 <= len(symbols) and position + 16 <= len(words):
        for lane in range(8):
            at = np.uint64(lane)
            symbols[done + lane], states[at], position = _get(int(states[at]), position, *t)
        done += 8
    # The last symbols, for which the words may run out: `end` stands in for what is not there.
    end = np.zeros(2, np.uint8)
    for i in range(done, len(symbols)):
        lane = i % len(states)
        x = int(states[lane])
        if position + 2 <= len(words):
            symbols[i], x, position = _get(x, position, *t)
        else:
            symbols[i], x, taken = _get(x, 0, end, scale, frequencies, starts, slots)
            if taken:
                return -1
        states[lane] = x
    return position
