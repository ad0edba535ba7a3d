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
    correlation = _autocorrelation(np.clip(signal, -CLIP, CLIP))
    limit = window // 3  # far + near stays inside the correlation
    if limit < 3 or correlation[0] == 0:
        return 1, 2
    r = correlation / correlation[0]
    best, lags = 0.0, (1, 2)
    for near in _candidates(r[: min(limit // 2, MAX_NEAR) + 1]):
        far = near * np.arange(2, min(MAX_RATIO, limit // near) + 1)
        covariance = 2 * r[near] + 2 * r[far] + r[far + near] + r[far - near]
        variance = (
            10
            + 8 * r[far - near]
            + 4 * r[far]
            + 4 * r[np.abs(far - 2 * near)]
            + 8 * r[near]
            + 2 * r[2 * near]
        )
        explained = np.sign(covariance) * covariance**2 / np.maximum(variance, 1)
        k = int(np.argmax(explained))
        if explained[k] > best:
            best, lags = float(explained[k]), (near, k + 2)
    return lags


def _autocorrelation(signal: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``Σ_i x[i]·x[i-lag]`` for every lag; exact, since the sums are small integers."""
    size = 1 << (2 * len(signal)).bit_length()
    spectrum = np.fft.rfft(signal, size)
    power = spectrum.real**2 + spectrum.imag**2
    return np.rint(np.fft.irfft(power, size)[: len(signal)])


def _candidates(r: NDArray[np.float64]) -> list[int]:
    """Return the lags with the largest correlation, and the distances between them."""
    top = (np.argsort(-r[1:], kind="stable")[:NUM_CANDIDATES] + 1).tolist()
    apart = {abs(a - b) for a in top for b in top} - {0}
    return sorted({*top, *apart})
