"""The largest coordinates of a vector."""

from __future__ import annotations

import numpy as np

from aqg.core.types import FloatArray, IntArray


def num_kept(fraction: float, num_params: int) -> int:
    """Return ``k = max(1, round(fraction·n))``, and never more than ``n``.

    >>> num_kept(0.01, 159010), num_kept(0.01, 18)
    (1590, 1)
    """
    return min(num_params, max(1, round(fraction * num_params)))


def largest(vector: FloatArray, count: int) -> IntArray:
    """Return the indices, increasing, of the ``count`` coordinates of largest magnitude.

    Of equal magnitudes those in front are taken. Zeros are never taken: they say nothing.

    >>> largest(np.array([0.5, -2.0, 0.5, 1.0, 0.0]), 3)
    array([0, 1, 3])
    """
    if count < 1:
        return np.arange(0)
    magnitude = np.abs(vector)
    if count >= len(vector):
        return np.flatnonzero(magnitude)
    threshold = np.partition(magnitude, len(vector) - count)[len(vector) - count]
    if threshold == 0:
        return np.flatnonzero(magnitude)
    taken = magnitude > threshold
    ties = np.flatnonzero(magnitude == threshold)
    taken[ties[: count - np.count_nonzero(taken)]] = True
    return np.flatnonzero(taken)
