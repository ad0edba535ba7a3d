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

`make_hints` adds what both ends know of an upload before it is sent. Where the gradient is small,
the innovation is ``Δ ≈ -ref_m``: the memory that both ends hold tells which way a coordinate will
go. And a coordinate often repeats, or takes back, what it did last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aqg.core.track import MAX_DIRECTION
from aqg.errors import WireError
from aqg.jit import njit, part
from aqg.wire.context_model import code_symbols, fresh_model
from aqg.wire.varint import read_varint, write_varint

Levels = NDArray[np.uint8] | NDArray[np.uint16]

MAX_SYMBOLS = 1 << 16
LONGEST = 1 << 20
"""No frame has more levels than this in context coding: it is thorough, and slow."""

MAX_NEAR = 4096
MAX_RATIO = 127
WINDOW = 1 << 16
NUM_CANDIDATES = 8
CLIP = 7
DIRECT_LENGTH = 256
"""Up to this length, sums of products are faster than a Fourier transform."""

NUM_DIRECTIONS = 2 * MAX_DIRECTION + 1
REFERENCE_EDGES = np.array([1, 3, 5, 7, 11, 17, 25, 39]) / 16
"""In steps: where one class of ``|ref_m|`` ends and the next begins."""


def require_short(count: int) -> None:
    """Refuse a frame that claims more levels in context coding than any encoder writes."""
    if count > LONGEST:
        raise WireError(f"{count} levels in context coding; {LONGEST} are the most")


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
    buffer = np.empty(len(symbols) * (num_symbols - 1).bit_length() // 4 + 64, np.uint8)
    size = _run(symbols, num_symbols, near, ratio, hints, buffer, decoding=False)
    if size > len(buffer):  # far from compressed; now the length is known
        buffer = np.empty(size, np.uint8)
        _run(symbols, num_symbols, near, ratio, hints, buffer, decoding=False)
    return write_varint(near) + write_varint(ratio) + buffer[:size].tobytes()


def decode(
    payload: bytes | bytearray | memoryview | NDArray[np.uint8],
    count: int,
    num_symbols: int,
    *,
    hints: NDArray[np.int8] | None = None,
) -> Levels:
    """Undo `encode`: return ``count`` levels below ``num_symbols``, or raise `WireError`.

    Time and memory are bounded by ``count`` and ``len(payload)``: it ends where the payload does,
    and a byte holds at most 91,000 decisions. For given lags there is one payload per message, and
    no other is accepted.

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
    return symbols, hints.astype(np.int8)


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
    far = near * ratio
    size = near + far + 4 + len(symbols)
    coded = (np.zeros(size, np.uint8), np.zeros(size, np.int8))
    return int(
        code_symbols(
            symbols, num_symbols, near, far, hints, fresh_model(), *coded, buffer, decoding
        )
    )


def make_hints(
    reference: NDArray[np.floating], step: float, direction: NDArray[np.int8] | None = None
) -> NDArray[np.int8]:
    """Return a class per coordinate: 17 of ``-ref_m/step``, times 7 of the last direction.

    Args:
        reference: ``ref_m`` before the upload, the same bits at both ends.
        step: the step of the upload's grid, which the frame carries.
        direction: `aqg.core.track.direction_of` the client's last upload; None if it is not kept.

    >>> make_hints(np.array([0.0, -1.0, 0.01]), step=0.5, direction=np.array([2, 0, -2], np.int8))
    array([ 2, 49, -2], dtype=int8)
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

    >>> rows = np.random.default_rng(0).integers(0, 3, size=(30, 10))
    >>> find_lags(np.repeat(rows, 20, axis=0).ravel().astype(np.uint8), num_symbols=3)[0]
    10
    """
    window = min(len(levels), WINDOW)
    start = (len(levels) - window) // 2
    limit = window // 2
    if limit < 3:
        return 1, 2
    signal = np.empty(window)
    is_candidate = np.zeros(min(limit // 3, MAX_NEAR) + 1, np.bool_)
    top = np.zeros(NUM_CANDIDATES, np.int64)
    if window <= DIRECT_LENGTH:
        correlation = np.empty(limit + 1)
        near, ratio = _best_pair_of(levels, num_symbols, signal, correlation, is_candidate, top)
    else:
        _center(levels[start : start + window], num_symbols, signal)
        near, ratio = _best_pair(_correlate_fourier(signal, limit), is_candidate, top)
    return int(near), int(ratio)


def _correlate_fourier(signal: NDArray[np.float64], limit: int) -> NDArray[np.float64]:
    """Return what `_correlate` returns; the sums are small integers, hence exact once rounded."""
    size = 1 << (len(signal) + limit).bit_length()
    if 3 * size // 4 >= len(signal) + limit:  # also a length that transforms fast
        size = 3 * size // 4
    spectrum = np.fft.rfft(signal, size)
    power = spectrum.real**2 + spectrum.imag**2
    return np.rint(np.fft.irfft(power, size)[: limit + 1])


@njit()
def _center(levels: Any, num_symbols: Any, signal: Any) -> None:
    """Write ``x``: which way a level goes, cut to ``±CLIP`` so that no outlier decides."""
    for i in range(len(levels)):
        signal[i] = min(max(2 * np.int64(levels[i]) - (num_symbols - 1), -CLIP), CLIP)


@part(forceinline=True)
def _correlate(signal: Any, correlation: Any) -> None:
    """Write ``Σ_i x[i]·x[i-lag]`` for every lag."""
    for lag in range(len(correlation)):
        total = 0.0
        for i in range(lag, len(signal)):
            total += signal[i] * signal[i - lag]
        correlation[lag] = total


@njit()
def _best_pair_of(
    levels: Any, num_symbols: Any, signal: Any, correlation: Any, is_candidate: Any, top: Any
) -> Any:
    """Do all that `find_lags` does with few levels, in one call."""
    _center(levels, num_symbols, signal)
    _correlate(signal, correlation)
    return _best_pair(correlation, is_candidate, top)


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
                spread = (
                    (10 + 8 * r[near] + 2 * r[2 * near])
                    + 8 * r[far - near]
                    + 4 * r[far]
                    + 4 * r[far - 2 * near]
                )
                if covariance > 0:
                    explained = covariance**2 / max(spread, 1.0)
            if explained > best:
                best = explained
                best_near, best_ratio = near, ratio
    return best_near, best_ratio


@part(forceinline=True)
def _mark_candidates(r: Any, is_candidate: Any, top: Any) -> None:
    """Mark the lags with the largest correlation, and the distances between them.

    ``top`` has the best lags so far, best first; its zeros are places that are free.
    """
    for lag in range(1, len(is_candidate)):  # of equal ones the first wins
        place = NUM_CANDIDATES
        while place > 0 and (top[place - 1] == 0 or r[lag] > r[top[place - 1]]):
            if place < NUM_CANDIDATES:
                top[place] = top[place - 1]
            place -= 1
        if place < NUM_CANDIDATES:
            top[place] = lag
    for i in range(NUM_CANDIDATES):
        for k in range(i + 1):
            if top[i] > 0 and top[k] > 0:
                is_candidate[top[i]] = True
                is_candidate[abs(top[i] - top[k])] = True
    is_candidate[0] = False
