"""Context coding: below the zero-order entropy, by what is known of the neighbors.

Gradients have structure that a table of symbol frequencies cannot see: a weight changes much like
the weight of the same output for the next input, and like the one a picture row above. Both are
*lags* in the flat vector, which the encoder finds by autocorrelation and writes in front:

::

    near        varint: one neighbor is ``near`` symbols back (10 for the weights of a 784→10 layer)
    ratio       varint: another is ``far = near·ratio`` symbols back (ratio 28: rows of 28 pixels)
    then        the bytes of the range coder

Drawn as a picture whose columns are ``near`` apart and whose rows are ``far`` apart, a symbol ``x``
is coded knowing these, and the four symbols before it in the flat vector:

::

                north-west   north   north-east
    west-west   west         x

A level ``q`` stands for ``v = 2q - (num_symbols - 1)``: it has the magnitude ``|v| >> 1``, coded
first, in unary, and a sign. Magnitudes of 8 and more share buckets, two to the octave, and the bits
within a bucket follow one by one. No table is sent: a short message pays only for what the model
learns from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.errors import WireError
from aqg.jit import njit
from aqg.wire.binary import (
    INITIAL_WEIGHT,
    LOGISTIC,
    ODDS_LIMIT,
    UNKNOWN,
    Model,
    code_mixed,
    code_plain,
    finish_coder,
    start_coder,
)
from aqg.wire.lags import MAX_NEAR, MAX_RATIO, find_lags
from aqg.wire.varint import read_varint, varint_size, write_varint

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Levels = NDArray[np.uint8] | NDArray[np.uint16]

MAX_SYMBOLS = 1 << 16
MAX_HINT = 63
PLAIN = 8
"""Magnitudes below this have a bucket each."""
NODES = 32
"""Unary decisions per context: the largest magnitude, 2^15 - 1, is in bucket 31."""
ACTIVITY_EDGES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 22, 27, 33, 40, 48, 57, 68, 80, 95, 112)
NUM_ACTIVITIES = len(ACTIVITY_EDGES) + 1
NUM_COLUMNS = 1024
PULL_LIMIT = 12
VALUE_LIMIT = 100

# All estimates live in one array, table after table. For magnitudes:
AROUND = 0
SHAPE = AROUND + NUM_ACTIVITIES * NODES
BEFORE = SHAPE + 64 * NODES
HINT = BEFORE + 3 * NUM_ACTIVITIES * NODES
OPEN = HINT + 5 * (MAX_HINT + 1) * NODES
QUIET = OPEN + 16 * NODES
# For signs:
COLUMN = QUIET + 1
PULL = COLUMN + 2 * NUM_COLUMNS
SIGNS = PULL + 4 * (2 * PULL_LIMIT + 1)
SIGN_HINT = SIGNS + 125
NUM_ESTIMATES = SIGN_HINT + 4 * (MAX_HINT + 1)
NUM_MIXERS = NODES + 4

ACTIVITY = np.searchsorted(ACTIVITY_EDGES, np.arange(6 * NODES), side="right").astype(np.uint8)
"""Class of a sum of buckets: exact when small, logarithmic above."""


def _initial_estimates() -> NDArray[np.int32]:
    """Return the estimates before the first symbol: neighbors are alike, the rest is unknown."""
    estimates = np.full(NUM_ESTIMATES, UNKNOWN, np.int32)
    sums = np.array([0, *ACTIVITY_EDGES])[:, np.newaxis]
    odds = 77 * sums - 461 * np.arange(PLAIN) - 254
    estimates[:SHAPE].reshape(NUM_ACTIVITIES, NODES)[:, :PLAIN] = _confident(odds)
    pull = np.arange(-PULL_LIMIT, PULL_LIMIT + 1)
    estimates[PULL:SIGNS].reshape(4, -1)[:] = _confident(64 * pull)
    return estimates


def _confident(odds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return estimates with these log-odds, as sure of them as after two decisions."""
    probabilities: NDArray[np.int64] = LOGISTIC.astype(np.int64)[
        odds.clip(-1000, 1000) + ODDS_LIMIT
    ]
    return (probabilities << 12) + 2


INITIAL_ESTIMATES = _initial_estimates()


def encode(levels: Levels, num_symbols: int, *, hints: NDArray[np.int8] | None = None) -> bytes:
    """Code ``levels``, each below ``num_symbols``; their number is not part of the payload.

    ``hints``, one per level, tell what both ends know beforehand: any classes from ``-MAX_HINT``
    to ``MAX_HINT``, such that ``-h`` means the mirror image of what ``h`` means.

    >>> levels = np.tile(np.array([3, 3, 3, 4, 2, 3], np.uint8), 100)
    >>> len(encode(levels, num_symbols=7)) < 40
    True
    """
    symbols, hints = _checked(levels, num_symbols, hints)
    if len(symbols) == 0 or num_symbols == 1:
        return b""
    near, ratio = find_lags(symbols, num_symbols)
    buffer = np.empty(len(symbols) * (num_symbols - 1).bit_length() // 8 + 16, np.uint8)
    size = _run(symbols, num_symbols, near, ratio, hints, buffer, decoding=False)
    if size > len(buffer):  # it did not compress; now the length is known
        buffer = np.empty(size, np.uint8)
        _run(symbols, num_symbols, near, ratio, hints, buffer, decoding=False)
    return write_varint(near) + write_varint(ratio) + buffer[:size].tobytes()


def encoded_size(levels: Levels, num_symbols: int, *, hints: NDArray[np.int8] | None = None) -> int:
    """Return ``len(encode(levels, num_symbols))`` without building the bytes.

    >>> encoded_size(np.ones(100_000, np.uint8), num_symbols=3) < 10
    True
    """
    symbols, hints = _checked(levels, num_symbols, hints)
    if len(symbols) == 0 or num_symbols == 1:
        return 0
    near, ratio = find_lags(symbols, num_symbols)
    nothing = np.empty(0, np.uint8)
    size = _run(symbols, num_symbols, near, ratio, hints, nothing, decoding=False)
    return varint_size(near) + varint_size(ratio) + size


def decode(
    payload: bytes | bytearray | memoryview | NDArray[np.uint8],
    count: int,
    num_symbols: int,
    *,
    hints: NDArray[np.int8] | None = None,
) -> Levels:
    """Undo `encode`: return ``count`` levels below ``num_symbols``, or raise `WireError`.

    Time and memory are bounded by ``count`` and ``len(payload)``. For given lags there is one
    payload per message, and no other is accepted.

    >>> levels = np.array([1, 0, 2, 1, 1, 1], np.uint8)
    >>> decode(encode(levels, 3), count=6, num_symbols=3)
    array([1, 0, 2, 1, 1, 1], dtype=uint8)
    """
    if count < 0:
        raise WireError(f"count is {count}; it must not be negative")
    symbols, hints = _checked(np.zeros(count, np.uint8), num_symbols, hints)
    data = np.array(np.frombuffer(payload, np.uint8))  # writable, as the kernel wants it
    if count == 0 or num_symbols == 1:
        if len(data):
            raise WireError(f"the context payload has {len(data)} bytes where 0 are needed")
        return symbols
    near, start = read_varint(data, 0)
    ratio, start = read_varint(data, start)
    if not (1 <= near <= MAX_NEAR and 2 <= ratio <= MAX_RATIO and near * ratio <= max(count, 2)):
        raise WireError(
            f"context lags {near} and {near}·{ratio} are outside 1..{MAX_NEAR} and "
            f"2..{MAX_RATIO} times that, up to {max(count, 2)}"
        )
    if _run(symbols, num_symbols, near, ratio, hints, data[start:], decoding=True) < 0:
        raise WireError(f"the {len(data)} bytes of the context payload are no coded message")
    return symbols


def _checked(
    levels: Levels, num_symbols: int, hints: NDArray[np.int8] | None
) -> tuple[Levels, NDArray[np.int8]]:
    """Return writable copies, which one compiled kernel serves in both directions."""
    if not 1 <= num_symbols <= MAX_SYMBOLS:
        raise WireError(f"num_symbols is {num_symbols}, outside 1..{MAX_SYMBOLS}")
    if len(levels) and int(levels.max()) >= num_symbols:
        raise WireError(f"level {int(levels.max())} is not below num_symbols {num_symbols}")
    symbols: Levels = levels.astype(np.uint8)
    if num_symbols > 256:
        symbols = levels.astype(np.uint16)
    if hints is None:
        return symbols, np.empty(0, np.int8)
    if len(hints) != len(levels):
        raise WireError(f"{len(hints)} hints do not fit {len(levels)} levels")
    return symbols, hints.clip(-MAX_HINT, MAX_HINT).astype(np.int8)


def _run(
    symbols: Levels,
    num_symbols: int,
    near: int,
    ratio: int,
    hints: NDArray[np.int8],
    buffer: NDArray[np.uint8],
    *,
    decoding: bool,
) -> int:
    weights = np.full((NUM_MIXERS, 3), INITIAL_WEIGHT, np.int64)
    model = Model(INITIAL_ESTIMATES.copy(), weights)
    return int(_code(symbols, num_symbols, near, near * ratio, hints, model, buffer, decoding))


@njit()
def _bucket_of(magnitude: Any) -> Any:
    """Return the bucket of a magnitude, and how many of its bits the bucket leaves open."""
    if magnitude < PLAIN:
        return magnitude, 0
    length = 4
    while magnitude >> length:
        length += 1
    return 2 * length + (magnitude >> (length - 2) & 1), length - 2


@njit()
def _clip(value: Any, limit: Any) -> Any:
    return min(max(value, -limit), limit)


@njit()
def _magnitude_contexts(buckets: Any, k: Any, near: Any, far: Any) -> Any:
    """Return the slots of the first unary decision at ``k``, and the sum of what is around it."""
    west = int(buckets[k - near])
    west_west = int(buckets[k - 2 * near])
    north_east = int(buckets[k - far + near])
    around = 2 * west + 2 * int(buckets[k - far]) + int(buckets[k - far - near]) + north_east
    before = int(buckets[k - 1]) + int(buckets[k - 2]) + int(buckets[k - 3]) + int(buckets[k - 4])
    a = AROUND + NODES * int(ACTIVITY[around])
    b = SHAPE + NODES * (16 * min(north_east, 3) + 4 * min(west_west, 3) + min(west, 3))
    c = BEFORE + NODES * (3 * int(ACTIVITY[before]) + min(west, 2))
    return a, b, c, around, around + west_west + before == 0


@njit()
def _sign_contexts(
    values: Any, k: Any, near: Any, far: Any, kind: Any, column: Any, flip: Any
) -> Any:
    """Return the slots of the sign at ``k``, seen upside down if ``flip`` is -1."""
    west = flip * int(values[k - near])
    west_west = flip * int(values[k - 2 * near])
    north_east = flip * int(values[k - far + near])
    pull = 2 * west + flip * (2 * int(values[k - far]) + int(values[k - far - near])) + north_east
    a = COLUMN + 2 * (column & (NUM_COLUMNS - 1)) + (1 if pull > 0 else 0)
    b = PULL + (2 * PULL_LIMIT + 1) * kind + _clip(pull, PULL_LIMIT) + PULL_LIMIT
    c = SIGNS + 25 * _clip(west_west, 2) + 5 * _clip(north_east, 2) + _clip(west, 2) + 62
    return a, b, c


@njit()
def _code(
    symbols: Any,
    num_symbols: Any,
    near: Any,
    far: Any,
    hints: Any,
    model: Any,
    buffer: Any,
    decoding: Any,
) -> Any:
    """Encode ``symbols`` into ``buffer``, or decode them from it; return the number of bytes.

    The decoder returns -1 if ``buffer`` is not what the encoder writes for any symbols.
    """
    # What lies before the first symbol is zero: every index below is at least 0.
    pad = near + far + 4
    buckets = np.zeros(pad + len(symbols), np.uint8)
    values = np.zeros(pad + len(symbols), np.int8)
    largest = (num_symbols - 1) >> 1
    last_bucket = _bucket_of(largest)[0]
    has_zero = num_symbols % 2
    coder = start_coder(buffer, decoding)
    column = 0
    for i in range(len(symbols)):
        k = pad + i
        v = 0 if decoding else 2 * int(symbols[i]) - (num_symbols - 1)
        magnitude = abs(v) >> 1
        bucket, open_bits = _bucket_of(magnitude)
        hint = int(hints[i]) if len(hints) else 0

        a, b, c, around, is_quiet = _magnitude_contexts(buckets, k, near, far)
        if len(hints):
            b = HINT + NODES * (5 * abs(hint) + min((around + 1) >> 2, 4))
        node = 0
        more = 1
        if is_quiet and hint == 0 and last_bucket > 0:
            more, coder = code_plain(coder, buffer, decoding, 1 if bucket else 0, model, QUIET)
            node = more
        while more and node < last_bucket:
            more, coder = code_mixed(
                coder,
                buffer,
                decoding,
                1 if bucket > node else 0,
                model,
                node,
                (a + node, b + node, c + node),
            )
            node += more
        if decoding:
            magnitude = node
            if node >= PLAIN:
                magnitude = 2 + (node & 1)
                open_bits = (node >> 1) - 2
        for shift in range(open_bits - 1, -1, -1):
            slot = OPEN + 16 * node + shift
            bit, coder = code_plain(coder, buffer, decoding, magnitude >> shift & 1, model, slot)
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
            positive, coder = code_mixed(
                coder,
                buffer,
                decoding,
                1 if v * flip > 0 else 0,
                model,
                NODES + kind,
                (a, b, c),
            )
            v = (2 * magnitude + 1 - has_zero) * (flip if positive else -flip)
        if decoding:
            symbols[i] = (v + num_symbols - 1) >> 1
        buckets[k] = node
        values[k] = _clip(v, VALUE_LIMIT)
        column = column + 1 if column + 1 < near else 0
    return finish_coder(coder, buffer, decoding)
