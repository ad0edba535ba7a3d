"""Find at which distances a flat vector of symbols looks like itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.jit import njit, part

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_NEAR = 4096
MAX_RATIO = 127
WINDOW = 1 << 16
NUM_CANDIDATES = 8
CLIP = 7
DIRECT_LENGTH = 256
"""Up to this length, sums of products are faster than a Fourier transform."""


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
