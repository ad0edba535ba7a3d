"""Find at which distances a flat vector of symbols looks like itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_NEAR = 4096
MAX_RATIO = 127
WINDOW = 1 << 16
NUM_CANDIDATES = 8
CLIP = 7


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
    signal = 2 * levels[start : start + window].astype(np.float64) - (num_symbols - 1)
    limit = window // 2
    correlation = _autocorrelation(np.clip(signal, -CLIP, CLIP), limit)
    if limit < 3 or correlation[0] <= 0:
        return 1, 2
    r = correlation / correlation[0]
    near = _candidates(r[: min(limit // 3, MAX_NEAR) + 1])[:, np.newaxis]
    ratio = np.arange(2, MAX_RATIO + 1)[np.newaxis, :]
    fits = near * (ratio + 1) <= limit
    far = np.where(fits, near * ratio, 2 * near)
    covariance = 2 * r[near] + 2 * r[far] + r[far + near] + r[far - near]
    variance = (
        (10 + 8 * r[near] + 2 * r[2 * near])
        + 8 * r[far - near]
        + 4 * r[far]
        + 4 * r[np.abs(far - 2 * near)]
    )
    explained = np.where(fits & (covariance > 0), covariance**2 / np.maximum(variance, 1), 0)
    row, column = np.unravel_index(np.argmax(explained), explained.shape)
    return int(near[row, 0]), int(ratio[0, column])


def _autocorrelation(signal: NDArray[np.float64], limit: int) -> NDArray[np.float64]:
    """Return ``Σ_i x[i]·x[i-lag]`` for lags up to ``limit``: small integers, hence exact."""
    size = 1 << (len(signal) + limit).bit_length()
    spectrum = np.fft.rfft(signal, size)
    power = spectrum.real**2 + spectrum.imag**2
    return np.rint(np.fft.irfft(power, size)[: limit + 1])


def _candidates(r: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the lags with the largest correlation, and the distances between them."""
    top = np.argsort(-r[1:], kind="stable")[:NUM_CANDIDATES] + 1
    apart = np.abs(top[:, np.newaxis] - top[np.newaxis, :])
    lags = np.unique(np.concatenate([top, apart.ravel()]))
    return lags[lags > 0]
