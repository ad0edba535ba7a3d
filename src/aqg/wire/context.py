"""Context coding: below the zero-order entropy, by what is known of the neighbors.

``docs/explanation/entropy-coding.md`` says how it works, and what it saves. Drawn as a picture
whose columns are ``near`` apart and whose rows are ``far = near·ratio`` apart, a symbol ``x`` is
coded knowing these, and the four symbols before it in the flat vector:

::

                north-west   north   north-east
    west-west   west         x

A level ``q`` stands for ``v = 2q - (num_symbols - 1)``: it has the magnitude ``|v| >> 1``, coded
first, in unary, and a sign. Magnitudes of 8 and more share buckets, two to the octave, and the bits
within a bucket follow one by one. `make_hints` adds what both ends know of an upload before it is
sent: where the gradient is small, the innovation is ``Δ ≈ -ref_m``, and a coordinate often repeats,
or takes back, what it did last.

A decision is coded under three *estimates*, each the probability that it is 1 given another piece
of what is already known. Their log-odds are added up with weights, ``x = Σ w_i·ln(p_i/(1-p_i))``,
and the decision is coded with probability ``1/(1+e^-x)``. Then every estimate moves toward what
happened, and every weight against the gradient of the code length: ``w_i += rate·error·odds_i``.
None of this is floating point, so that both ends agree bit for bit on every machine.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqg.core.track import MAX_DIRECTION
from aqg.core.types import ByteArray, Float64Array, Int8Array, IntArray
from aqg.errors import WireError
from aqg.jit import njit, part
from aqg.wire.varint import Reader, write_varint

Levels = ByteArray | NDArray[np.uint16]

MAX_SYMBOLS = 1 << 16
LONGEST = 1 << 20
"""No frame has more levels than this in context coding: it is thorough, and slow."""

MAX_NEAR = 4096
MAX_RATIO = 127
DIRECT_LENGTH = 256
"""Up to this length, sums of products are faster than a Fourier transform."""
WINDOW = 1 << 16
NUM_CANDIDATES = 8
CLIP = 7

NUM_DIRECTIONS = 2 * MAX_DIRECTION + 1
REFERENCE_EDGES = np.array([1, 3, 5, 7, 11, 17, 25, 39]) / 16
"""In steps: where one class of ``|ref_m|`` ends and the next begins."""


def encode(levels: Levels, num_symbols: int, *, hints: Int8Array | None = None) -> bytes:
    """Code ``levels``, each below ``num_symbols``; their number is not part of the payload.

    ``hints``, one per level, tell what both ends know beforehand: any classes from ``-MAX_HINT``
    to ``MAX_HINT``, such that ``-h`` means the mirror image of what ``h`` means.
    """
    symbols, hints = _checked(levels, num_symbols, hints)
    if len(symbols) == 0 or num_symbols == 1:
        return b""
    near, ratio = find_lags(symbols, num_symbols)
    buffer = np.empty(len(symbols) * (num_symbols - 1).bit_length() // 4 + 64, np.uint8)
    size = _run(symbols, num_symbols, near, ratio, hints, buffer, decoding=False)
    if size > len(buffer):  # far from compressed; now the length is known
        buffer = np.empty(size, np.uint8)
        _run(symbols, num_symbols, near, ratio, hints, buffer, decoding=False)
    return write_varint(near) + write_varint(ratio) + buffer[:size].tobytes()


def decode(
    payload: bytes | bytearray | memoryview | ByteArray,
    count: int,
    num_symbols: int,
    *,
    hints: Int8Array | None = None,
) -> Levels:
    """Undo `encode`: return ``count`` levels below ``num_symbols``, or raise `WireError`.

    Time and memory are bounded by ``count`` and ``len(payload)``: it ends where the payload does,
    and a byte holds at most 91,000 decisions. For given lags there is one payload per message, and
    no other is accepted.
    """
    if count < 0:
        raise WireError(f"count is {count}; it must not be negative")
    if count > LONGEST:
        raise WireError(f"{count} levels in context coding; {LONGEST} are the most")
    symbols, hints = _checked(np.zeros(count, np.uint8), num_symbols, hints)
    data = np.array(np.frombuffer(payload, np.uint8))  # writable, as the kernel wants it
    if count == 0 or num_symbols == 1:
        if len(data):
            raise WireError(f"the context payload has {len(data)} bytes where 0 are needed")
        return symbols
    reader = Reader(data, "the context payload")
    near, ratio = reader.varint(), reader.varint()
    if not (1 <= near <= MAX_NEAR and 2 <= ratio <= MAX_RATIO and near * ratio <= max(count, 2)):
        raise WireError(
            f"context lags {near} and {near}·{ratio} are outside 1..{MAX_NEAR} and "
            f"2..{MAX_RATIO} times that, up to {max(count, 2)}"
        )
    if _run(symbols, num_symbols, near, ratio, hints, reader.rest(), decoding=True) < 0:
        raise WireError(f"the {len(data)} bytes of the context payload are no coded message")
    return symbols


def _checked(levels: Levels, num_symbols: int, hints: Int8Array | None) -> tuple[Levels, Int8Array]:
    """Return writable copies, which one compiled kernel serves in both directions."""
    if not 1 <= num_symbols <= MAX_SYMBOLS:
        raise WireError(f"num_symbols is {num_symbols}, outside 1..{MAX_SYMBOLS}")
    if len(levels) and int(levels.max()) >= num_symbols:
        raise WireError(f"level {int(levels.max())} is not below num_symbols {num_symbols}")
    symbols = levels.astype(np.uint8) if num_symbols <= 256 else levels.astype(np.uint16)
    if hints is None:
        return symbols, np.empty(0, np.int8)
    if len(hints) != len(levels):
        raise WireError(f"{len(hints)} hints do not fit {len(levels)} levels")
    return symbols, hints.astype(np.int8)


def _run(
    symbols: Levels,
    num_symbols: int,
    near: int,
    ratio: int,
    hints: Int8Array,
    buffer: ByteArray,
    *,
    decoding: bool,
) -> int:
    far = near * ratio
    size = near + far + 4 + len(symbols)
    coded = (np.zeros(size, np.uint8), np.zeros(size, np.int8), buffer, decoding)
    model = Model(INITIAL_ESTIMATES.copy(), INITIAL_WEIGHTS.copy())
    return int(code_symbols(symbols, num_symbols, near, far, hints, model, *coded))


def make_hints(
    reference: NDArray[np.floating], step: float, direction: Int8Array | None = None
) -> Int8Array:
    """Return a class per coordinate: 17 of ``-ref_m/step``, times 7 of the last direction.

    ``reference`` is ``ref_m`` before the upload, the same bits at both ends; the frame carries the
    step; ``direction`` is `aqg.core.track.direction_of` the client's last upload, where it is kept.
    """
    if direction is not None and len(direction) != len(reference):
        raise WireError(f"{len(direction)} directions do not fit {len(reference)} coordinates")
    hints = np.zeros(len(reference), np.int8) if direction is None else direction.copy()
    if step > 0:
        _add_classes(reference, float(step), hints)
    return hints


@njit(error_model="numpy")
def _add_classes(reference: Any, step: Any, hints: Any) -> None:
    """Add 7 times the class of ``-ref_m/step``."""
    for i in range(len(reference)):
        # One correctly rounded division: the same class on every machine.
        distance = abs(np.float64(reference[i])) / step
        place = 0
        for edge in REFERENCE_EDGES:
            # NaN belongs to the last class, as it does for a sorted search.
            place += 0 if distance < edge else 1
        hints[i] += NUM_DIRECTIONS * (-place if reference[i] > 0 else place)


def find_lags(levels: NDArray[np.unsignedinteger], num_symbols: int) -> tuple[int, int]:
    """Return ``near`` and ``ratio`` such that neighbors are ``near`` and ``near·ratio`` back.

    A pair is as good as the share of the variance of ``x[i]`` that is explained by
    ``y[i] = 2·x[i-near] + 2·x[i-far] + x[i-far-near] + x[i-far+near]``, that is
    ``cov(x, y)² / (var(x)·var(y))``; all of it follows from the autocorrelation of ``x``.
    """
    window = min(len(levels), WINDOW)
    start = (len(levels) - window) // 2
    limit = window // 2
    if limit < 3:
        return 1, 2
    # Which way a level goes, cut so that no outlier decides.
    centered = 2 * levels[start : start + window].astype(np.int64) - (num_symbols - 1)
    signal = centered.clip(-CLIP, CLIP).astype(np.float64)
    is_candidate = np.zeros(min(limit // 3, MAX_NEAR) + 1, np.bool_)
    top = np.zeros(NUM_CANDIDATES, np.int64)
    near, ratio = _best_pair(_correlate(signal, limit), is_candidate, top)
    return int(near), int(ratio)


def _correlate(signal: Float64Array, limit: int) -> Float64Array:
    """Return the autocorrelation; its sums are small integers, hence exact once rounded."""
    if len(signal) <= DIRECT_LENGTH:
        return np.correlate(signal, signal, "full")[len(signal) - 1 :][: limit + 1]
    size = 1 << (len(signal) + limit).bit_length()
    if 3 * size // 4 >= len(signal) + limit:  # also a length that transforms fast
        size = 3 * size // 4
    spectrum = np.fft.rfft(signal, size)
    power = spectrum.real**2 + spectrum.imag**2
    return np.rint(np.fft.irfft(power, size)[: limit + 1])


@njit()
def _best_pair(r: Any, is_candidate: Any, top: Any) -> Any:
    """Return the pair that explains most; ``(1, 2)`` where none explains anything.

    ``r`` is the autocorrelation, which is divided by the variance in place; ``is_candidate`` and
    ``top`` are zeros.
    """
    limit = len(r) - 1
    variance = r[0]
    if variance <= 0:
        return 1, 2
    for i in range(len(r)):
        r[i] /= variance
    _mark_candidates(r, is_candidate, top)
    best = -1.0
    best_near, best_ratio = 1, 2
    for near in range(1, len(is_candidate)):
        if not is_candidate[near]:
            continue
        for ratio in range(2, MAX_RATIO + 1):
            far = near * ratio
            explained = 0.0
            if far + near <= limit:
                covariance = 2 * r[near] + 2 * r[far] + r[far + near] + r[far - near]
                spread = 10 + 8 * r[near] + 2 * r[2 * near]
                spread = spread + 8 * r[far - near] + 4 * r[far] + 4 * r[far - 2 * near]
                if covariance > 0:
                    explained = covariance**2 / max(spread, 1.0)
            if explained > best:
                best = explained
                best_near, best_ratio = near, ratio
    return best_near, best_ratio


@part(forceinline=True)
def _mark_candidates(r: Any, is_candidate: Any, top: Any) -> None:
    """Mark the lags with the largest correlation, and the distances between them.

    ``top``, of zeros, is filled with these lags; zeros stay where there are too few.
    """
    for place in range(NUM_CANDIDATES):
        for lag in range(1, len(is_candidate)):  # of equal ones the first wins
            if not is_candidate[lag] and (top[place] == 0 or r[lag] > r[top[place]]):
                top[place] = lag
        is_candidate[top[place]] = True
    for i in range(NUM_CANDIDATES):
        for k in range(i):
            is_candidate[abs(top[i] - top[k])] = True
    is_candidate[0] = False


MAX_HINT = 63
"""Hints are classes from -63 to 63; the opposite number is the mirror image."""
PLAIN = 8
"""Magnitudes below this have a bucket each."""
NODES = 32
"""Unary decisions per context: the largest magnitude, 2^15 - 1, is in bucket 31."""
ACTIVITY_EDGES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 22, 27, 33, 40, 48, 57, 68, 80, 95, 112)
NUM_ACTIVITIES = len(ACTIVITY_EDGES) + 1
NUM_COLUMNS = 1024
PULL_LIMIT = 12
VALUE_LIMIT = 100

# All estimates live in one array, table after table. Those for magnitudes have a row of NODES
# unary decisions for each context:
AROUND = 0
SHAPE = AROUND + NUM_ACTIVITIES * NODES
BEFORE = SHAPE + 64 * NODES
HINT = BEFORE + 3 * NUM_ACTIVITIES * NODES
OPEN = HINT + 5 * (MAX_HINT + 1) * NODES
QUIET = OPEN + 16 * NODES
# Those for signs:
COLUMN = QUIET + 1
PULL = COLUMN + 2 * NUM_COLUMNS
SIGNS = PULL + 4 * (2 * PULL_LIMIT + 1)
SIGN_HINT = SIGNS + 125
NUM_ESTIMATES = SIGN_HINT + 4 * (MAX_HINT + 1)
NUM_MIXERS = NODES + 4

ACTIVITY = np.searchsorted(ACTIVITY_EDGES, np.arange(6 * NODES), side="right").astype(np.uint8)
"""Class of a sum of buckets: exact when small, logarithmic above."""

ODDS_LIMIT = 3071
"""Log-odds are in units of 1/256; the limit, 12, is a probability of 6e-6."""
LEAST_PROBABILITY = 4
"""Of 2^16: no decision costs more than 14 bits, and none less than 8.8e-5."""
UNKNOWN = 1 << 27
"""An estimate of one half that has seen nothing: 20 bits of probability, 8 bits of count."""
FAST_LIMIT = 127
SLOW_LIMIT = 255
"""How many decisions an estimate remembers: after more, the older ones fade."""
INITIAL_WEIGHT = 25000
"""Of 2^16: three estimates that say the same are believed a little more than each alone."""
LEARNING_RATE = 20
"""Of 2^18: how far a weight moves per unit of error (2^-16) and log-odds (1/256)."""


class Model(NamedTuple):
    """All that is learned: estimates, and the weights ``(mixers, 3)`` that they are mixed with.

    A weight changes by less than 2^14 at a time: for 2^33 symbols and more, whatever they are, the
    sum of three products with log-odds stays within 64 bits.
    """

    estimates: NDArray[np.int32]
    weights: IntArray


class Coder(NamedTuple):
    """The range coder between two decisions.

    The message so far is every 32-bit number from ``low`` to ``high``, after ``position`` bytes
    that are settled. ``window`` is the decoder's view of the 32 bits after those.

    Invariants: ``0 ≤ low ≤ window ≤ high < 2^32``, the middle in the decoder only; the top bytes
    of ``low`` and ``high`` differ, hence ``low < high``.
    """

    low: int
    high: int
    window: int
    position: int


def _logistic_table() -> NDArray[np.uint16]:
    one = 1 << 80
    decay = 1204212645616127843466583  # 2^80 · e^(-1/256)
    power, upper = one, [1 << 15]
    for _ in range(ODDS_LIMIT):
        power = power * decay >> 80
        upper.append(min((one << 16) // (one + power), (1 << 16) - LEAST_PROBABILITY))
    return np.array([(1 << 16) - p for p in upper[:0:-1]] + upper, np.uint16)


LOGISTIC = _logistic_table()
_PLACES = np.searchsorted(LOGISTIC, np.arange(8, 1 << 16, 16)) - ODDS_LIMIT
LOG_ODDS = _PLACES.clip(max=ODDS_LIMIT).astype(np.int16)
"""The log-odds in the middle of each of 4096 equal intervals of probability."""
# After n decisions an estimate moves 1/(n + 1.6) of the way: nearly a plain average.
RATES = np.array([655360 // (10 * n + 16) for n in range(SLOW_LIMIT + 1)], np.uint16)


def _initial_estimates() -> NDArray[np.int32]:
    """Return the estimates before the first symbol: neighbors are alike, the rest is unknown."""
    estimates = np.full(NUM_ESTIMATES, UNKNOWN, np.int32)
    sums = np.array([0, *ACTIVITY_EDGES])[:, np.newaxis]
    odds = 77 * sums - 461 * np.arange(PLAIN) - 254
    estimates[:SHAPE].reshape(NUM_ACTIVITIES, NODES)[:, :PLAIN] = _confident(odds)
    pull = np.arange(-PULL_LIMIT, PULL_LIMIT + 1)
    estimates[PULL:SIGNS].reshape(4, -1)[:] = _confident(64 * pull)
    return estimates


def _confident(odds: IntArray) -> IntArray:
    """Return estimates with these log-odds, as sure of them as after two decisions."""
    p = np.take(LOGISTIC.astype(np.int64), odds.clip(-1000, 1000) + ODDS_LIMIT)
    return p << 12 | 2


INITIAL_ESTIMATES = _initial_estimates()
INITIAL_WEIGHTS = np.full((NUM_MIXERS, 3), INITIAL_WEIGHT, np.int64)


@part(forceinline=True)
def _start_coder(buffer: Any, decoding: Any) -> Any:
    window = 0
    if decoding:
        for i in range(4):
            window = window << 8 | (int(buffer[i]) if i < len(buffer) else 0)
    return Coder(0, 0xFFFFFFFF, window, 0)


@part(forceinline=True)
def _code_bit(coder: Any, buffer: Any, decoding: Any, bit: Any, p: Any) -> Any:
    """Code a decision that is 1 with probability ``p / 2^16``, where ``0 < p < 2^16``.

    Return the decision (``bit`` itself when encoding) and the coder after it. Beyond the end of
    ``buffer`` the decoder reads zeros and the encoder only counts.
    """
    low, high, window, position = coder
    middle = low + (_product(high - low, p) >> 16)
    if decoding:
        bit = 1 if window <= middle else 0
    if bit:
        high = middle
    else:
        low = middle + 1
    while (low ^ high) >> 24 == 0:
        if decoding:
            ahead = position + 4
            window = (window & 0xFFFFFF) << 8 | (int(buffer[ahead]) if ahead < len(buffer) else 0)
        elif position < len(buffer):
            buffer[position] = low >> 24
        position += 1
        low = (low & 0xFFFFFF) << 8
        high = (high & 0xFFFFFF) << 8 | 0xFF
    return bit, Coder(low, high, window, position)


@part(forceinline=True)
def _finish_coder(coder: Any, buffer: Any, decoding: Any) -> Any:
    """End the message with the fewest bytes that, followed by zeros, lie in the range.

    Return the number of bytes of the message. The decoder returns -1 instead if ``buffer`` is not
    exactly those bytes: together with the invariant ``low ≤ window ≤ high`` this makes every
    accepted buffer the very one that the encoder writes.
    """
    low, high, _, position = coder
    num_last = 0
    while (high >> (32 - 8 * num_last)) << (32 - 8 * num_last) < low:
        num_last += 1
    if decoding and position + num_last != len(buffer):
        return -1
    for i in range(num_last):
        byte = high >> (24 - 8 * i) & 0xFF
        if decoding:
            if buffer[position + i] != byte:
                return -1
        elif position + i < len(buffer):
            buffer[position + i] = byte
    return position + num_last


@part(forceinline=True)
def _product(left: Any, right: Any) -> Any:
    """Multiply two numbers of 32 bits without sign: on some processors twice as fast as of 64."""
    return int(np.uint64(np.uint32(left)) * np.uint64(np.uint32(right)))


@part(forceinline=True)
def _signed_product(left: Any, right: Any) -> Any:
    return np.int64(np.int32(left)) * np.int64(np.int32(right))


@part(forceinline=True)
def _learn(estimates: Any, slot: Any, bit: Any, limit: Any) -> None:
    at = np.uint64(slot)
    state = int(estimates[at])
    seen = state & 0xFF
    p = state >> 8
    p += _signed_product((0xFFFFF if bit else 0) - p, np.int64(RATES[np.uint64(seen)])) >> 16
    estimates[at] = p << 8 | min(seen + 1, limit)


@part(forceinline=True)
def _code_plain(coder: Any, buffer: Any, decoding: Any, bit: Any, model: Any, slot: Any) -> Any:
    """Code a decision under one estimate alone; return it and the coder after it."""
    p: Any = np.int64(model.estimates[np.uint64(slot)]) >> 12
    p = min(max(p, LEAST_PROBABILITY), (1 << 16) - LEAST_PROBABILITY)
    bit, coder = _code_bit(coder, buffer, decoding, bit, p)
    _learn(model.estimates, slot, bit, np.int64(SLOW_LIMIT))
    return bit, coder


@part(forceinline=True)
def _code_mixed(
    coder: Any, buffer: Any, decoding: Any, bit: Any, model: Any, mixer: Any, slots: Any
) -> Any:
    """Code a decision under three estimates; return it and the coder after it."""
    estimates, weights = model
    a, b, c = slots
    odds_a = int(LOG_ODDS[np.uint64(estimates[np.uint64(a)] >> 16 & 0xFFF)])
    odds_b = int(LOG_ODDS[np.uint64(estimates[np.uint64(b)] >> 16 & 0xFFF)])
    odds_c = int(LOG_ODDS[np.uint64(estimates[np.uint64(c)] >> 16 & 0xFFF)])
    row = np.uint64(mixer)
    mixed = (
        odds_a * int(weights[row, 0])
        + odds_b * int(weights[row, 1])
        + odds_c * int(weights[row, 2])
    ) >> 16
    p = np.int64(LOGISTIC[np.uint64(min(max(mixed, -ODDS_LIMIT), ODDS_LIMIT) + ODDS_LIMIT)])
    bit, coder = _code_bit(coder, buffer, decoding, bit, p)
    step = LEARNING_RATE * ((1 << 16 if bit else 0) - p)
    weights[row, 0] += (_signed_product(odds_a, step) + (1 << 17)) >> 18
    weights[row, 1] += (_signed_product(odds_b, step) + (1 << 17)) >> 18
    weights[row, 2] += (_signed_product(odds_c, step) + (1 << 17)) >> 18
    _learn(estimates, a, bit, np.int64(FAST_LIMIT))
    _learn(estimates, b, bit, np.int64(FAST_LIMIT))
    _learn(estimates, c, bit, np.int64(FAST_LIMIT))
    return bit, coder


@part(forceinline=True)
def _bucket_of(magnitude: Any) -> Any:
    """Return the bucket of a magnitude, and how many of its bits the bucket leaves open."""
    if magnitude < PLAIN:
        return magnitude, 0
    length = 4
    while magnitude >> length:
        length += 1
    return 2 * length + (magnitude >> (length - 2) & 1), length - 2


@part(forceinline=True)
def _clip(value: Any, limit: Any) -> Any:
    return min(max(value, -limit), limit)


@part(forceinline=True)
def _magnitude_contexts(buckets: Any, k: Any, near: Any, far: Any) -> Any:
    """Return the slots of the first unary decision at ``k``, and the sum of what is around it."""
    west = int(buckets[np.uint64(k - near)])
    west_west = int(buckets[np.uint64(k - 2 * near)])
    north_east = int(buckets[np.uint64(k - far + near)])
    north = int(buckets[np.uint64(k - far)])
    around = 2 * west + 2 * north + int(buckets[np.uint64(k - far - near)]) + north_east
    before = int(buckets[np.uint64(k - 1)]) + int(buckets[np.uint64(k - 2)])
    before = before + int(buckets[np.uint64(k - 3)]) + int(buckets[np.uint64(k - 4)])
    a = AROUND + NODES * int(ACTIVITY[np.uint64(around)])
    b = SHAPE + NODES * (16 * min(north_east, 3) + 4 * min(west_west, 3) + min(west, 3))
    c = BEFORE + NODES * (3 * int(ACTIVITY[np.uint64(before)]) + min(west, 2))
    return a, b, c, around, around + west_west + before == 0


@part(forceinline=True)
def _sign_contexts(
    values: Any, k: Any, near: Any, far: Any, kind: Any, column: Any, flip: Any
) -> Any:
    """Return the slots of the sign at ``k``, seen upside down if ``flip`` is -1."""
    west = flip * int(values[np.uint64(k - near)])
    west_west = flip * int(values[np.uint64(k - 2 * near)])
    north_east = flip * int(values[np.uint64(k - far + near)])
    north = 2 * int(values[np.uint64(k - far)]) + int(values[np.uint64(k - far - near)])
    pull = 2 * west + flip * north + north_east
    a = COLUMN + 2 * (column & (NUM_COLUMNS - 1)) + (1 if pull > 0 else 0)
    b = PULL + (2 * PULL_LIMIT + 1) * kind + _clip(pull, np.int64(PULL_LIMIT)) + PULL_LIMIT
    two = np.int64(2)
    c = SIGNS + 25 * _clip(west_west, two) + 5 * _clip(north_east, two) + _clip(west, two) + 62
    return a, b, c


@njit()
def code_symbols(
    symbols: Any,
    num_symbols: Any,
    near: Any,
    far: Any,
    hints: Any,
    model: Any,
    buckets: Any,
    values: Any,
    buffer: Any,
    decoding: Any,
) -> Any:
    """Encode ``symbols`` into ``buffer``, or decode them from it; return the number of bytes.

    ``buckets`` and ``values``, of ``near + far + 4`` zeros and one for every symbol, are filled
    with what has been coded. The decoder returns -1 if ``buffer`` is not what the encoder writes
    for any symbols.
    """
    # What lies before the first symbol is zero: every index below is at least 0.
    pad = near + far + 4
    largest = (num_symbols - 1) >> 1
    last_bucket = _bucket_of(largest)[0]
    has_zero = num_symbols % 2
    coder = _start_coder(buffer, decoding)
    column: Any = np.int64(0)
    for i in range(len(symbols)):
        k = pad + i
        v = 0 if decoding else 2 * int(symbols[i]) - (num_symbols - 1)
        magnitude = abs(v) >> 1
        bucket, open_bits = _bucket_of(magnitude)
        hint = _clip(np.int64(hints[i]), np.int64(MAX_HINT)) if len(hints) else 0

        a, b, c, around, is_quiet = _magnitude_contexts(buckets, k, near, far)
        if len(hints):
            b = HINT + NODES * (5 * abs(hint) + min((around + 1) >> 2, 4))
        node = 0
        more = 1
        if is_quiet and hint == 0 and last_bucket > 0:
            more, coder = _code_plain(
                coder, buffer, decoding, 1 if bucket else 0, model, np.int64(QUIET)
            )
            node = more
        while more and node < last_bucket:
            goes_on, slots = 1 if bucket > node else 0, (a + node, b + node, c + node)
            more, coder = _code_mixed(coder, buffer, decoding, goes_on, model, node, slots)
            node += more
        if decoding:
            magnitude = node
            if node >= PLAIN:
                magnitude = 2 + (node & 1)
                open_bits = (node >> 1) - 2
        for shift in range(open_bits - 1, -1, -1):
            slot = OPEN + 16 * node + shift
            bit, coder = _code_plain(coder, buffer, decoding, magnitude >> shift & 1, model, slot)
            if decoding:
                magnitude = magnitude << 1 | bit
        if magnitude > largest:
            return -1

        if magnitude > 0 or not has_zero:
            flip = -1 if hint < 0 else 1
            kind = min(magnitude, 3)
            a, b, c = _sign_contexts(values, k, near, far, kind, column, flip)
            if len(hints):
                a = SIGN_HINT + 4 * abs(hint) + kind
            positive, coder = _code_mixed(
                coder, buffer, decoding, 1 if v * flip > 0 else 0, model, NODES + kind, (a, b, c)
            )
            v = (2 * magnitude + 1 - has_zero) * (flip if positive else -flip)
        if decoding:
            symbols[i] = (v + num_symbols - 1) >> 1
        buckets[np.uint64(k)] = node
        values[np.uint64(k)] = _clip(v, np.int64(VALUE_LIMIT))
        column = column + 1 if column + 1 < near else 0
        if decoding and coder.position > len(buffer):
            return -1  # what comes now is read from nothing
    return _finish_coder(coder, buffer, decoding)
