"""Quantizers that send the largest coordinates only.

With ``k`` of ``n`` coordinates kept, both are contractions, ``‖C(v) - v‖² ≤ (1 - δ)‖v‖²``: what
error feedback and EF21 ask of a compressor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aqg.core.grids import MIN_STEP, Grid, round_up_to_bfloat16
from aqg.core.halves import SparseUpload, to_halves
from aqg.core.messages import Upload
from aqg.core.quantizers import NormOnly, Request
from aqg.core.selection import largest, num_kept
from aqg.errors import ConfigError

if TYPE_CHECKING:
    from aqg.core.types import FloatArray, IntArray


TERNARY_WIDTH = 2
_FEWEST = 16.0
"""Coordinates below which the bytes of the frame outweigh them."""
_LEAST_SHARE = 0.2
"""The smallest part of noise that counts."""
_GROWTH = 0.7
"""How messages grow with the rounds between them, as a power: less than those, since residuals also
hold noise, which cancels."""
_LEAST_SWAPPED = 400.0
"""Coordinates with which small models keep up with whole updates."""
_LARGEST_PART = 0.1
"""Of all coordinates, beyond which sparse messages lose their advantage over dense ones."""


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

    Attributes:
        both_ways: whether a condensed downlink keeps the same share of the server's sum.

    """

    both_ways: bool = False

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        """Write the signs as the three levels of ``midtread`` at two bits."""
        kept = largest(vector, num_kept(self.keep, len(vector)))
        return ternary(vector, kept, request.width)


@dataclass(frozen=True)
class AdaptiveTernary(NormOnly):
    """Like `SparseTernary`, with ``k = √n/25`` of ``n`` coordinates, and at least 16.

    With error feedback, the fewer coordinates are sent, the more each byte of them buys: what is
    left out stays in the residual and is sent once it has grown. Below 16 the bytes of the frame
    outweigh them. Two things ask for more. Where only a part of an update's energy is noise, the
    rest comes again in every round and residuals grow faster: ``k`` is divided by that part. And a
    client sampled every ``r`` rounds holds residuals that are ``r`` rounds old: ``k`` is multiplied
    by ``√r``. The request's advice is ``(part of noise, r)``.

    Where the transport adds many bytes of its own to a message, few coordinates save nothing: ``k``
    is at least one for every four such bytes, but for that no more than ``n/10``.

    So few coordinates take many rounds. With ``keep`` above zero, ``k`` is at least ``r^0.7`` times
    the larger of ``keep·n`` and ``min(400, n/16)``, and for that no more than ``n/10``: training
    goes on as fast as with whole updates. Small models need a larger part of their coordinates, and
    it costs them little.

    Attributes:
        overhead: the transport's bytes.
        keep: the part of all coordinates that a client sends, if it is asked in every round.

    """

    overhead: float = 0.0
    keep: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.keep <= 1:
            raise ConfigError(f"keep is {self.keep}; it must be at least 0 and at most 1")

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        """Write the signs of the few largest coordinates, and their mean magnitude."""
        kept = largest(vector, self.num_kept(len(vector), *request.advice))
        return ternary(vector, kept, request.width)

    def num_kept(self, num_params: int, noise_share: float = 1.0, pause: float = 1.0) -> int:
        """Return ``k``; a noise share below a fifth counts as a fifth.

        >>> AdaptiveTernary().num_kept(7850), AdaptiveTernary().num_kept(10**8)
        (16, 400)
        >>> [AdaptiveTernary().num_kept(7850, *advice) for advice in [(0.5,), (0.0,), (0.5, 4)]]
        [32, 80, 64]
        >>> [AdaptiveTernary(overhead=12_000).num_kept(n) for n in (159010, 7850)]
        [3000, 785]
        >>> [AdaptiveTernary(keep=0.01).num_kept(159010, 1.0, pause) for pause in (1, 4, 100)]
        [1590, 4196, 15901]
        >>> [AdaptiveTernary(keep=0.01).num_kept(n) for n in (2410, 6871, 355_658)]
        [151, 400, 3557]
        """
        fewest = max(_FEWEST, math.sqrt(num_params) / 25.0) * math.sqrt(pause)
        wanted = fewest / min(1.0, max(_LEAST_SHARE, noise_share))
        swapped = 0.0
        if self.keep:
            growth = math.pow(pause, _GROWTH)
            least = min(_LEAST_SWAPPED, num_params / 16.0)
            swapped = growth * max(self.keep * num_params, least)
        fitting = min(max(self.overhead / 4.0, swapped), _LARGEST_PART * num_params)
        return min(num_params, round(max(wanted, fitting)))


def ternary(vector: FloatArray, indices: IntArray, width: int) -> Upload:
    """Return the signs of some coordinates times their mean magnitude, and zero elsewhere."""
    levels = np.ones(len(vector), np.uint8)
    mean = float(np.abs(vector[indices]).sum(dtype=np.float64)) / max(1, len(indices))
    if mean < MIN_STEP:  # as on the grid: rounding up would overshoot
        return Upload(levels, 0.0, width, Grid.MIDTREAD)
    levels[indices] = np.where(vector[indices] > 0, 2, 0)
    return Upload(levels, round_up_to_bfloat16(mean), width, Grid.MIDTREAD)
