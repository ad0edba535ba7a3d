"""Context coding: an adaptive binary coder that goes below the zero-order entropy.

Gradients have structure that a table of symbol frequencies cannot see: a weight changes much like
the weight of the same output for the next input, and like the one a picture row above. Both are
*lags* in the flat vector, which the encoder finds by autocorrelation and writes in front:

::

    near        varint: a neighbor is ``near`` symbols back (10 for the weights of a 784→10 layer)
    ratio       varint: another is ``far = near·ratio`` symbols back (28 for rows of 28 pixels)
    then        the bits of the range coder

With ``v = 2·level - (num_symbols - 1)``, a symbol is its magnitude ``|v| >> 1`` and its sign. The
magnitude is coded in unary (in ever wider buckets from 8 on), the sign after it, where there is
one. Every binary decision gets a probability from three adaptive estimates, each under another
context of symbols already known, mixed in the logistic domain with weights that learn as well.
Nothing is sent ahead, so short messages pay for what they teach the model and for nothing else.

All arithmetic is on integers: encoder and decoder agree bit for bit on every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.errors import WireError
from aqg.jit import njit
from aqg.wire.lags import MAX_NEAR, MAX_RATIO, find_lags
from aqg.wire.varint import read_varint, varint_size, write_varint

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Levels = NDArray[np.uint8] | NDArray[np.uint16]

MAX_SYMBOLS = 1 << 16
PLAIN = 8
"""Magnitudes below this have a bucket each; above, two buckets to the octave."""
NODES = 32
"""Unary decisions per context; the largest magnitude, 2^15 - 1, is in bucket 31."""
ACTIVITIES = 24
COLUMNS = 1024
SIGN_CLIP = 12

# Estimates live in one array: three tables for magnitudes, three for signs.
AROUND = 0
SHAPE = AROUND + ACTIVITIES * NODES
BEFORE = SHAPE + 64 * NODES
COLUMN = BEFORE + 3 * ACTIVITIES * NODES
PULL = COLUMN + 2 * COLUMNS
SIGNS = PULL + 4 * (2 * SIGN_CLIP + 1)
NUM_ESTIMATES = SIGNS + 125
NUM_MIXERS = NODES + 4

PROBABILITY_BITS = 20
COUNT_BITS = 8
COUNT_LIMIT = 127
ODDS_LIMIT = 3071
"""Log-odds are in units of 1/256; ±12 covers probabilities down to 6e-6."""
STRETCH_BITS = 12
LEARNING_RATE = 14
INITIAL_WEIGHT = 25000


def _logistic_table() -> NDArray[np.int64]:
    """Return ``2^16 / (1 + e^(-x/256))`` for ``x = -ODDS_LIMIT..ODDS_LIMIT``, in integers alone."""
    one = 1 << 80
    decay = 1204212645616127843466583  # 2^80 · e^(-1/256), rounded
    upper = [1 << 15]
    power = one
    for _ in range(ODDS_LIMIT):
        power = power * decay >> 80
        upper.append(min((one << 16) // (one + power), (1 << 16) - 4))
    return np.array([(1 << 16) - p for p in upper[:0:-1]] + upper, np.int64)


def _stretch_table(logistic: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the log-odds of the middle of each of ``2^STRETCH_BITS`` probability intervals."""
    width = 1 << (16 - STRETCH_BITS)
    middles = np.arange(1 << STRETCH_BITS) * width + width // 2
    return np.searchsorted(logistic, middles).clip(0, 2 * ODDS_LIMIT) - ODDS_LIMIT


def _activity_table() -> NDArray[np.int64]:
    """Return the class of a sum of magnitude buckets: exact when small, logarithmic above."""
    edges = [*range(1, 9), 10, 12, 15, 18, 22, 27, 33, 40, 48, 57, 68, 80, 95, 112, 132]
    return np.searchsorted(np.array(edges), np.arange(6 * NODES), side="right")


LOGISTIC = _logistic_table()
STRETCH = _stretch_table(LOGISTIC)
ACTIVITY = _activity_table()
# After n observations an estimate moves 1/(n + 1.6) of the way, as a good counter would.
RATES = np.array([655360 // (10 * n + 16) for n in range(COUNT_LIMIT + 1)], np.int64)


def encode(levels: Levels, num_symbols: int) -> bytes:
    """Code ``levels``, each below ``num_symbols``; the length is not part of the payload.

    >>> levels = np.tile(np.array([3, 3, 3, 4, 2, 3], np.uint8), 100)
    >>> len(encode(levels, num_symbols=7)) < 40
    True
    """
    symbols = _checked(levels, num_symbols)
    if len(symbols) == 0 or num_symbols == 1:
        return b""
    near, ratio = find_lags(symbols, num_symbols)
    buffer = np.empty(len(symbols) * (num_symbols - 1).bit_length() // 8 + 16, np.uint8)
    size = _code(symbols, num_symbols, near, near * ratio, buffer, False)
    if size > len(buffer):
        buffer = np.empty(size, np.uint8)
        _code(symbols, num_symbols, near, near * ratio, buffer, False)
    return write_varint(near) + write_varint(ratio) + buffer[:size].tobytes()


def encoded_size(levels: Levels, num_symbols: int) -> int:
    """Return ``len(encode(levels, num_symbols))`` without building the bytes.

    >>> encoded_size(np.zeros(100_000, np.uint8), num_symbols=3) < 10
    True
    """
    symbols = _checked(levels, num_symbols)
    if len(symbols) == 0 or num_symbols == 1:
        return 0
    near, ratio = find_lags(symbols, num_symbols)
    size = _code(symbols, num_symbols, near, near * ratio, np.empty(0, np.uint8), False)
    return varint_size(near) + varint_size(ratio) + int(size)


def decode(
    payload: bytes | bytearray | memoryview | NDArray[np.uint8], count: int, num_symbols: int
) -> Levels:
    """Undo `encode`: return ``count`` levels below ``num_symbols``, or raise `WireError`.

    Time and memory are bounded by ``count`` and ``len(payload)``. The range coder's bytes are
    accepted only in the form in which `encode` writes them, up to the choice of lags.

    >>> levels = np.array([1, 0, 2, 1, 1, 1], np.uint8)
    >>> decode(encode(levels, 3), count=6, num_symbols=3)
    array([1, 0, 2, 1, 1, 1], dtype=uint8)
    """
    _check_alphabet(num_symbols)
    if count < 0:
        raise WireError(f"count is {count}; it must not be negative")
    data = np.array(np.frombuffer(payload, np.uint8))  # writable: one compiled kernel serves both ways
    symbols = np.zeros(count, np.uint8 if num_symbols <= 256 else np.uint16)
    if count == 0 or num_symbols == 1:
        if len(data):
            raise WireError(f"the context payload has {len(data)} bytes where 0 are needed")
        return symbols
    near, start = read_varint(data, 0)
    ratio, start = read_varint(data, start)
    if not (1 <= near <= MAX_NEAR and 2 <= ratio <= MAX_RATIO and near * ratio <= max(count, 2)):
        raise WireError(
            f"context lags {near} and {near}·{ratio} are outside 1..{MAX_NEAR} and "
            f"2..{MAX_RATIO} times it, up to {max(count, 2)}"
        )
    if _code(symbols, num_symbols, near, near * ratio, data[start:], True) < 0:
        raise WireError(f"the {len(data)} bytes of the context payload are no coded message")
    return symbols


def _check_alphabet(num_symbols: int) -> None:
    if not 1 <= num_symbols <= MAX_SYMBOLS:
        raise WireError(f"num_symbols is {num_symbols}, outside 1..{MAX_SYMBOLS}")


def _checked(levels: Levels, num_symbols: int) -> Levels:
    _check_alphabet(num_symbols)
    if len(levels) and int(levels.max()) >= num_symbols:
        raise WireError(f"level {int(levels.max())} is not below num_symbols {num_symbols}")
    return np.array(levels)  # writable: one compiled kernel serves both ways


@njit()
def _code_bit(
    bit: Any, p: Any, low: Any, high: Any, window: Any, at: Any, buffer: Any, decoding: Any
) -> Any:
    """Code one decision whose probability of being 1 is ``p / 2^16``.

    Invariants: ``0 ≤ low ≤ window ≤ high < 2^32`` (the middle one in the decoder), the top bytes of
    ``low`` and ``high`` differ, and so ``low ≤ middle < high`` for ``0 < p < 2^16``.
    """
    middle = low + ((high - low) * p >> 16)
    if decoding:
        bit = 1 if window <= middle else 0
    if bit:
        high = middle
    else:
        low = middle + 1
    while (low ^ high) >> 24 == 0:
        if decoding:
            ahead = at + 4
            window = (window & 0xFFFFFF) << 8 | (int(buffer[ahead]) if ahead < len(buffer) else 0)
        elif at < len(buffer):
            buffer[at] = high >> 24
        at += 1
        low = (low & 0xFFFFFF) << 8
        high = (high & 0xFFFFFF) << 8 | 255
    return bit, low, high, window, at


@njit()
def _learn(estimates: Any, slot: Any, bit: Any) -> None:
    state = int(estimates[slot])
    seen = state & 255
    p = state >> 8
    p += ((1048575 if bit else 0) - p) * int(RATES[seen]) >> 16
    estimates[slot] = p << 8 | (seen + 1 if seen < 127 else 127)


@njit()
def _code_mixed(
    bit: Any,
    a: Any,
    b: Any,
    c: Any,
    mixer: Any,
    estimates: Any,
    weights: Any,
    low: Any,
    high: Any,
    window: Any,
    at: Any,
    buffer: Any,
    decoding: Any,
) -> Any:
    """Code one decision under the estimates ``a``, ``b`` and ``c``, and learn from it."""
    odds_a = int(STRETCH[int(estimates[a]) >> 16])
    odds_b = int(STRETCH[int(estimates[b]) >> 16])
    odds_c = int(STRETCH[int(estimates[c]) >> 16])
    mixed = (
        odds_a * int(weights[mixer, 0])
        + odds_b * int(weights[mixer, 1])
        + odds_c * int(weights[mixer, 2])
    ) >> 16
    p = int(LOGISTIC[min(max(mixed, -3071), 3071) + 3071])
    bit, low, high, window, at = _code_bit(bit, p, low, high, window, at, buffer, decoding)
    step = ((65536 if bit else 0) - p) * 14
    weights[mixer, 0] += (odds_a * step + 131072) >> 18
    weights[mixer, 1] += (odds_b * step + 131072) >> 18
    weights[mixer, 2] += (odds_c * step + 131072) >> 18
    _learn(estimates, a, bit)
    _learn(estimates, b, bit)
    _learn(estimates, c, bit)
    return bit, low, high, window, at


@njit()
def _bucket_of(magnitude: Any) -> Any:
    """Return the bucket of a magnitude of 8 or more, and its bits below the bucket's start."""
    length = 4
    while magnitude >> length:
        length += 1
    return 2 * length + (magnitude >> (length - 2) & 1), length - 2


@njit()
def _code(symbols: Any, num_symbols: Any, near: Any, far: Any, buffer: Any, decoding: Any) -> Any:
    """Encode ``symbols`` into ``buffer`` or decode them from it; return the bytes used.

    The encoder counts on where the buffer ends. The decoder reads zeros there, and returns -1 if
    the buffer is not exactly what the encoder would write for what it decoded.
    """
    count = len(symbols)
    pad = near + far + 4
    buckets = np.zeros(pad + count, np.uint8)
    values = np.zeros(pad + count, np.int8)
    estimates = np.full(NUM_ESTIMATES, 1 << 27, np.int32)
    weights = np.full((NUM_MIXERS, 3), 25000, np.int32)
    largest = (num_symbols - 1) >> 1
    last_bucket = largest if largest < PLAIN else _bucket_of(largest)[0]
    signed_zero = num_symbols % 2 == 0
    low, high, window, at = 0, 0xFFFFFFFF, 0, 0
    if decoding:
        for i in range(4):
            window = window << 8 | (int(buffer[i]) if i < len(buffer) else 0)
    column = 0
    for i in range(count):
        k = i + pad
        west = int(buckets[k - near])
        north = int(buckets[k - far])
        north_west = int(buckets[k - far - near])
        north_east = int(buckets[k - far + near])
        west_west = int(buckets[k - 2 * near])
        before = (
            int(buckets[k - 1]) + int(buckets[k - 2]) + int(buckets[k - 3]) + int(buckets[k - 4])
        )
        a = AROUND + NODES * ACTIVITY[2 * west + 2 * north + north_west + north_east]
        b = SHAPE + NODES * (16 * min(north_east, 3) + 4 * min(west_west, 3) + min(west, 3))
        c = BEFORE + NODES * (3 * ACTIVITY[before] + min(west, 2))
        magnitude, extra_bits, bucket = 0, 0, 0
        is_positive = 0
        if not decoding:
            v = 2 * int(symbols[i]) - (num_symbols - 1)
            is_positive = 1 if v > 0 else 0
            magnitude = abs(v) >> 1
            bucket = magnitude
            if magnitude >= PLAIN:
                bucket, extra_bits = _bucket_of(magnitude)
        node = 0
        while node < last_bucket:
            more, low, high, window, at = _code_mixed(
                1 if bucket > node else 0,
                a + node,
                b + node,
                c + node,
                node,
                estimates,
                weights,
                low,
                high,
                window,
                at,
                buffer,
                decoding,
            )
            if not more:
                break
            node += 1
        if node >= PLAIN:
            if decoding:
                extra_bits = (node >> 1) - 2
                magnitude = 2 + (node & 1)
            for shift in range(extra_bits - 1, -1, -1):
                bit, low, high, window, at = _code_bit(
                    magnitude >> shift & 1, 32768, low, high, window, at, buffer, decoding
                )
                if decoding:
                    magnitude = magnitude << 1 | bit
            if magnitude > largest:
                return -1
        elif decoding:
            magnitude = node
        value = 0
        if signed_zero or magnitude > 0:
            v_west = int(values[k - near])
            v_north_east = int(values[k - far + near])
            v_west_west = int(values[k - 2 * near])
            pull = (
                2 * v_west + 2 * int(values[k - far]) + int(values[k - far - near]) + v_north_east
            )
            kind = min(magnitude, 3)
            is_positive, low, high, window, at = _code_mixed(
                is_positive,
                COLUMN + 2 * (column & (COLUMNS - 1)) + (1 if pull > 0 else 0),
                PULL + 25 * kind + min(max(pull, -12), 12) + 12,
                SIGNS
                + 25 * (min(max(v_west_west, -2), 2) + 2)
                + 5 * (min(max(v_north_east, -2), 2) + 2)
                + min(max(v_west, -2), 2)
                + 2,
                NODES + kind,
                estimates,
                weights,
                low,
                high,
                window,
                at,
                buffer,
                decoding,
            )
            value = 2 * magnitude + (1 if signed_zero else 0)
            if not is_positive:
                value = -value
        if decoding:
            symbols[i] = (value + num_symbols - 1) >> 1
        buckets[k] = node
        values[k] = min(max(value, -100), 100)
        column = column + 1 if column + 1 < near else 0
    # End with the fewest bytes that, followed by zeros, lie between low and high.
    num_tail = 0
    while (high >> (32 - 8 * num_tail)) << (32 - 8 * num_tail) < low:
        num_tail += 1
    if decoding and at + num_tail != len(buffer):
        return -1
    for i in range(num_tail):
        byte = high >> (24 - 8 * i) & 255
        if decoding:
            if buffer[at] != byte:
                return -1
        elif at < len(buffer):
            buffer[at] = byte
        at += 1
    return at
