"""Quantizers that send the largest coordinates only.

With ``k`` of ``n`` coordinates kept, both are contractions, ``‖C(v) - v‖² ≤ (1 - δ)‖v‖²``: what
error feedback and EF21 ask of a compressor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aqg.core.grids import MIN_STEP, Grid, round_up_to_bfloat16
from aqg.core.halves import SparseUpload, to_halves
from aqg.core.messages import Upload
from aqg.core.quantizers import NormOnly, Request
from aqg.core.types import FloatArray, IntArray
from aqg.errors import ConfigError

TERNARY_WIDTH = 2


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


@dataclass(frozen=True)
class _KeepsFew(NormOnly):
    keep: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ConfigError(f"keep is {self.keep}; it must be above 0 and at most 1")


@dataclass(frozen=True)
class TopK(_KeepsFew):
    """``Top_k(v)``: the ``k`` coordinates of largest magnitude, each in half precision.

    Aji & Heafield, Sparse Communication for Distributed Gradient Descent; Stich et al., Sparsified
    SGD with Memory.
    """

    def quantize(self, vector: FloatArray, _request: Request) -> SparseUpload:
        """Keep ``k = max(1, round(keep·n))`` coordinates, fewer if they are zero as halves."""
        indices = largest(vector, num_kept(self.keep, len(vector)))
        halves, exponent = to_halves(vector[indices])
        is_left = halves != 0
        return SparseUpload(indices[is_left], halves[is_left], exponent, len(vector))


@dataclass(frozen=True)
class SparseTernary(_KeepsFew):
    """STC: ``μ·sign(v_i)`` where ``|v_i|`` is among the ``k`` largest, else zero.

    ``μ`` is the mean magnitude of the kept, rounded up to bfloat16. Sattler et al., Robust and
    Communication-Efficient Federated Learning from Non-IID Data (its Algorithm 1).
    """

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        """Write the signs as the three levels of ``midtread`` at two bits."""
        kept = largest(vector, num_kept(self.keep, len(vector)))
        return ternary(vector, kept, request.width)


def ternary(vector: FloatArray, indices: IntArray, width: int) -> Upload:
    """Return the signs of some coordinates times their mean magnitude, and zero elsewhere."""
    levels = np.ones(len(vector), np.uint8)
    mean = float(np.abs(vector[indices]).sum(dtype=np.float64)) / max(1, len(indices))
    if mean < MIN_STEP:  # as on the grid: rounding up would overshoot
        return Upload(levels, 0.0, width, Grid.MIDTREAD)
    levels[indices] = np.where(vector[indices] > 0, 2, 0)
    return Upload(levels, round_up_to_bfloat16(mean), width, Grid.MIDTREAD)
