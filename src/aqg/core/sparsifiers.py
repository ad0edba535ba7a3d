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
_LOCALLY_DENSE = 0.04
"""The share of all coordinates that is sent, over the square of an update's local density."""
_UNEVEN = 0.45
"""The fourth power of the local density over the density, from which on messages are longer: the
largest blocks would take nearly all of their coordinates."""
_LARGEST_UNEVEN, _LARGEST_UNEVEN_AFTER_PAUSE = 0.01, 0.03
"""The largest share that is sent because of that by a client that is sampled in every round. It
grows with the square of the rounds from one sampling to the next, up to the second number."""
_DENSE = 0.28
"""The density of an update from which on its few largest coordinates say too little of it."""
_DENSE_SLOPE = 0.7
"""By how much the share that is sent grows with the density from there on."""
_FEWEST_IN_TIME = 200.0
"""Coordinates with which small models train in as few rounds as with whole updates."""
_LARGEST_PART = 0.1
"""Of all coordinates, beyond which sparse messages lose their advantage over dense ones."""
_LARGEST_IN_TIME = 0.25
"""The largest share of coordinates that is sent to train in as few rounds as with whole updates."""
_MOST_FOR_PAUSE = 4.0 / 3.0
"""The most that the least share is multiplied by for clients not sampled in every round."""
_BLOCK = 64
"""Neighboring coordinates whose density is looked at together."""
_PIECE = 1 << 16
"""Coordinates that are widened at a time: some blocks."""


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

    So few coordinates take many rounds. With ``keep`` above zero, ``k`` is at least the larger of
    ``√r max(s n, min(200, n/32))`` and ``0.7 (ρ - 0.28) n``, and for that at most ``n/4``: training
    goes on as fast as with whole updates. The share ``s`` is the largest of

    - ``keep``, and up to a third more for a client that is not sampled in every round;
    - ``σ²/25``, where ``σ`` is the local density of the client's update: if neighbors are of
      similar size, the largest coordinates say little of the others;
    - ``σ⁴/ρ - 0.45``, at most ``min(0.01 r², 0.03)``, where ``ρ`` is its density: if it is far
      below ``σ``, some blocks are far larger than others and would take nearly all places in a
      message.

    See `densities`, which follow ``r`` in the advice. Small models need a larger part of their
    coordinates, which is what ``min(200, n/32)`` is for. Of a dense update the largest coordinates
    say little, hence the term with ``ρ`` alone; messages that hold much of an update leave little
    behind, so this one does not grow with the pause.

    Attributes:
        overhead: the transport's bytes.
        keep: the least part of all coordinates that a client sends, if it is asked in every round.

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

    def num_kept(
        self,
        num_params: int,
        noise_share: float = 1.0,
        pause: float = 1.0,
        density: float = 0.0,
        local_density: float = 0.0,
    ) -> int:
        """Return ``k``; a noise share below a fifth counts as a fifth.

        >>> AdaptiveTernary().num_kept(7850), AdaptiveTernary().num_kept(10**8)
        (16, 400)
        >>> [AdaptiveTernary().num_kept(7850, *advice) for advice in [(0.5,), (0.0,), (0.5, 4)]]
        [32, 80, 64]
        >>> [AdaptiveTernary(overhead=12_000).num_kept(n) for n in (159010, 7850)]
        [3000, 785]
        >>> [AdaptiveTernary(keep=0.01).num_kept(159010, 1.0, pause) for pause in (1, 4, 100)]
        [1590, 4240, 21201]
        >>> few = AdaptiveTernary(keep=0.003)
        >>> [few.num_kept(10**6, 1, 1, *found) for found in [(0.1, 0.2), (0.1, 0.4), (0.2, 0.5)]]
        [3000, 6400, 10000]
        >>> [few.num_kept(10**6, 1, pause, 0.1, 0.5) for pause in (1, 4)]
        [10000, 60000]
        >>> [few.num_kept(10**6, 1, pause, 0.4, 0.6) for pause in (1, 4)]
        [84000, 84000]
        >>> [AdaptiveTernary(keep=0.01).num_kept(n) for n in (2410, 6871, 355_658)]
        [75, 200, 3557]
        """
        growth = math.sqrt(pause)
        fewest = max(_FEWEST, math.sqrt(num_params) / 25.0) * growth
        wanted = fewest / min(1.0, max(_LEAST_SHARE, noise_share))
        in_time = 0.0
        if self.keep:
            share = self._share_in_time(pause, density, local_density)
            sparse = growth * max(share * num_params, min(_FEWEST_IN_TIME, num_params / 32.0))
            dense = _DENSE_SLOPE * (density - _DENSE) * num_params
            in_time = min(max(sparse, dense), _LARGEST_IN_TIME * num_params)
        fitting = min(self.overhead / 4.0, _LARGEST_PART * num_params)
        return min(num_params, round(max(wanted, fitting, in_time)))

    def _share_in_time(self, pause: float, density: float, local_density: float) -> float:
        """Return ``s``, the share of its coordinates that an update needs."""
        unevenness = local_density**4 / density if density else 0.0
        most = min(_LARGEST_UNEVEN_AFTER_PAUSE, _LARGEST_UNEVEN * pause**2)
        return max(
            self.keep * min(math.sqrt(pause), _MOST_FOR_PAUSE),
            _LOCALLY_DENSE * local_density**2,
            min(most, unevenness - _UNEVEN),
        )


def densities(vector: FloatArray) -> tuple[float, float]:
    """Return the density of a vector and its local density; zeros where they are no numbers.

    The density ``ρ = ‖v‖₁²/(n‖v‖₂²)`` is 1 if all coordinates have the same magnitude, ``1/n`` if
    only one is not zero, and ``2/π`` for normal noise. The local density is the mean of those of
    all blocks of 64 coordinates: it does not see how the blocks differ in size.

    >>> densities(np.array([1.0, -1.0])), densities(np.array([0.0, 2.0])), densities(np.zeros(2))
    ((1.0, 1.0), (0.5, 0.5), (0.0, 0.0))
    >>> densities(np.repeat([9.0, 0.0, -1.0], 64))
    (0.4065..., 0.6666...)
    """
    total = squared_norm = alike = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(vector), _PIECE):
            piece = np.abs(vector[start : start + _PIECE].astype(np.float64))
            firsts = np.arange(0, len(piece), _BLOCK)
            sums = np.add.reduceat(piece, firsts)
            squares = np.add.reduceat(piece * piece, firsts)
            total += float(sums.sum())
            squared_norm += float(squares.sum())
            alike += float((sums * sums / np.where(squares > 0, squares, 1.0)).sum())
    if not (squared_norm > 0 and all(map(math.isfinite, (total * total, squared_norm, alike)))):
        return 0.0, 0.0
    density = total * total / (len(vector) * squared_norm)
    return min(1.0, density), min(1.0, alike / len(vector))


def ternary(vector: FloatArray, indices: IntArray, width: int) -> Upload:
    """Return the signs of some coordinates times their mean magnitude, and zero elsewhere."""
    levels = np.ones(len(vector), np.uint8)
    mean = float(np.abs(vector[indices]).sum(dtype=np.float64)) / max(1, len(indices))
    if mean < MIN_STEP:  # as on the grid: rounding up would overshoot
        return Upload(levels, 0.0, width, Grid.MIDTREAD)
    levels[indices] = np.where(vector[indices] > 0, 2, 0)
    return Upload(levels, round_up_to_bfloat16(mean), width, Grid.MIDTREAD)
