"""How to turn a vector into an upload of a given width.

A quantizer measures and encodes; it never decides. Randomness is an argument: a key of integers
(seed, client, round) from which the stochastic quantizer draws.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from aqg.core.grids import (
    MAX_WIDTH,
    MIN_STEP,
    Grid,
    Innovation,
    level_dtype,
    measure,
    quantize,
    round_up_to_bfloat16,
    value_table,
)
from aqg.core.messages import (
    LONGEST_BLOCK,
    AnyUpload,
    BlockUpload,
    DenseUpload,
    HalfUpload,
    RotatedUpload,
    SparseUpload,
    Upload,
    quantize_blocks,
    quantize_rotated,
    random_places,
    to_halves,
)
from aqg.core.types import FloatArray, IntArray
from aqg.errors import require

MAX_BUCKET_BITS = 8
"""Levels of buckets are bytes."""


class Request(NamedTuple):
    """How one vector is to be encoded."""

    width: int  # the bits per coordinate that the policy chose
    step: float = 0.0  # the step that was measured for this width; 0 where steps are not measured
    squared_norm: float = math.nan  # ``‖v‖²``
    key: tuple[int, ...] = ()  # integers (seed, client, round) that make the message's randomness
    movement: float = math.nan  # what the policy compared with
    noise: float = 1.0  # ``b``, the noise that the upload may carry, in the vector's own energy


class Quantizer:
    """Measures a vector, here its norm alone, and encodes it at a width the policy chose."""

    def measure(self, delta: FloatArray) -> Innovation:
        """Return the statistics of ``delta``, shape ``(m, n)``."""
        return measure(delta, Grid.MIDTREAD, max_width=0)

    def quantize(self, vector: FloatArray, _request: Request) -> AnyUpload:
        """Encode one vector of shape ``(n,)``."""
        raise NotImplementedError


@dataclass(frozen=True)
class GridQuantizer(Quantizer):
    """Nearest level on a grid: the paper's quantizer (`Grid.MIDRISE`) and ours (`MIDTREAD`)."""

    grid: Grid
    max_width: int

    def measure(self, delta: FloatArray) -> Innovation:
        return measure(delta, self.grid, self.max_width)

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        width, step = request.width, request.step
        return Upload(quantize(vector, self.grid, width, step), step, width, self.grid)


@dataclass(frozen=True)
class Verbatim(Quantizer):
    """The vector itself, in float32 (GD, LAG)."""

    def quantize(self, vector: FloatArray, _request: Request) -> DenseUpload:
        return DenseUpload(vector.astype(np.float32))


@dataclass(frozen=True)
class Stochastic(Quantizer):
    """QSGD: unbiased rounding to ``s`` multiples of ``‖v‖₂/s``.

    ``Q(v)_i = step·⌊v_i/step + u_i⌋`` with ``u_i`` uniform on [0, 1), so ``E[Q(v)] = v`` for any
    step; rounding the step up to bfloat16 keeps the expectation and every level on the grid.
    Without ``num_levels``, ``s = 2^(b-1) - 1``: all that the width can tell apart.
    """

    num_levels: int | None = None
    is_scheduled: bool = False  # as many levels as a `aqg.core.stages.LossSchedule` gives

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        width = request.width
        top = (1 << (width - 1)) - 1
        num_levels = int(request.movement) if self.is_scheduled else self.num_levels or top
        step = round_up_to_bfloat16(math.sqrt(request.squared_norm) / num_levels)
        scaled = vector.astype(np.float64) / step if step else np.zeros(len(vector))
        uniform = np.random.default_rng(list(request.key)).random(len(vector))
        integers = np.clip(np.floor(scaled + uniform), -top, top).astype(np.int32) + top
        return Upload(integers.astype(level_dtype(width)), step, width, Grid.MIDTREAD)


@dataclass(frozen=True)
class Sign(Quantizer):
    """SignSGD: one bit per coordinate, with magnitude one."""

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        return Upload((vector >= 0).astype(np.uint8), 1.0, request.width, Grid.MIDTREAD)


@dataclass(frozen=True)
class Half(Quantizer):
    """IEEE 754 half precision, times one power of two that keeps the vector in its range."""

    def quantize(self, vector: FloatArray, _request: Request) -> HalfUpload:
        return HalfUpload(*to_halves(vector))


@dataclass(frozen=True)
class Blockwise(Quantizer):
    """A step for every block: eight bits by the largest, or QSGD with the norm of each bucket."""

    bucket: int = 0  # coordinates in a bucket, of ``s = 2^(b-1) - 1`` levels; 0: 8 bits for 256

    def __post_init__(self) -> None:
        require(0 <= self.bucket <= LONGEST_BLOCK, "bucket", self.bucket, f"in 1..{LONGEST_BLOCK}")

    def quantize(self, vector: FloatArray, request: Request) -> BlockUpload:
        if not self.bucket:
            return BlockUpload(*quantize_blocks(vector))
        uniform = np.random.default_rng(list(request.key)).random(len(vector))
        num_levels = (1 << (request.width - 1)) - 1
        found = quantize_blocks(vector, self.bucket, num_levels, uniform)
        return BlockUpload(*found, self.bucket)


@dataclass(frozen=True)
class Rotated(Quantizer):
    """A few bits per coordinate after a random rotation: `aqg.core.messages`."""

    unbiased: bool = True
    share: float = 1.0  # of the coordinates, drawn at random; nothing of the others is sent

    def quantize(self, vector: FloatArray, request: Request) -> RotatedUpload:
        seed = int(np.random.default_rng(list(request.key)).integers(1 << 32))
        length, count = len(vector), num_kept(self.share, len(vector))
        taken = count if count < length else 0
        if taken:
            vector = vector[random_places(seed, length, taken)]
        codes, scales = quantize_rotated(vector, seed, self.unbiased, request.width)
        if taken and self.unbiased:
            scales *= np.float32(length / taken)
        return RotatedUpload(codes, scales, seed, length, request.width, taken)


TERNARY_WIDTH = 2


def num_kept(fraction: float, num_params: int) -> int:
    """Return ``k = max(1, round(fraction·n))``, and never more than ``n``."""
    return min(num_params, max(1, round(fraction * num_params)))


def largest(vector: FloatArray, count: int) -> IntArray:
    """Return the indices, increasing, of the ``count`` coordinates of largest magnitude.

    Of equal magnitudes those in front are taken. Zeros are never taken: they say nothing.
    """
    if count < 1:
        return np.arange(0)
    magnitude, place = np.abs(vector), len(vector) - count
    threshold = np.partition(magnitude, place)[place] if place > 0 else 0
    if threshold == 0:
        return np.flatnonzero(magnitude)
    taken = magnitude > threshold
    ties = np.flatnonzero(magnitude == threshold)
    taken[ties[: count - np.count_nonzero(taken)]] = True
    return np.flatnonzero(taken)


@dataclass(frozen=True)
class _KeepsFew(Quantizer):
    keep: float = 0.01

    def __post_init__(self) -> None:
        require(0 < self.keep <= 1, "keep", self.keep, "above 0 and at most 1")


@dataclass(frozen=True)
class TopK(_KeepsFew):
    """``Top_k(v)``: the ``k`` coordinates of largest magnitude, each in half precision.

    Aji & Heafield, Sparse Communication for Distributed Gradient Descent; Stich et al., Sparsified
    SGD with Memory.
    """

    def quantize(self, vector: FloatArray, _request: Request) -> SparseUpload:
        indices = largest(vector, num_kept(self.keep, len(vector)))
        halves, exponent = to_halves(vector[indices])
        is_left = halves != 0
        return SparseUpload(indices[is_left], halves[is_left], exponent, len(vector))


@dataclass(frozen=True)
class LargestTernary(Quantizer):
    """The ``count`` largest coordinates as ternary."""

    count: int

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        return ternary(vector, largest(vector, self.count), request.width)


@dataclass(frozen=True)
class SparseTernary(_KeepsFew):
    """STC: ``μ·sign(v_i)`` where ``|v_i|`` is among the ``k`` largest, else zero.

    ``μ`` is the mean magnitude of the kept, rounded up to bfloat16. Sattler et al., Robust and
    Communication-Efficient Federated Learning from Non-IID Data (its Algorithm 1).
    """

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        return LargestTernary(num_kept(self.keep, len(vector))).quantize(vector, request)


def ternary(vector: FloatArray, indices: IntArray, width: int) -> Upload:
    levels = np.ones(len(vector), np.uint8)
    mean = float(np.abs(vector[indices]).sum(dtype=np.float64)) / max(1, len(indices))
    if mean < MIN_STEP:  # as on the grid: rounding up would overshoot
        return Upload(levels, 0.0, width, Grid.MIDTREAD)
    levels[indices] = np.where(vector[indices] > 0, 2, 0)
    return Upload(levels, round_up_to_bfloat16(mean), width, Grid.MIDTREAD)


def choose_width(radius: float, norm: float, num_params: int) -> int:
    """Return ``b = ⌈log2(R·√d/‖Δ‖₂ + 1)⌉`` within ``1..MAX_WIDTH``."""
    if norm == 0:
        return 1
    width = math.ceil(math.log2(radius * num_params**0.5 / norm + 1))
    return min(max(width, 1), MAX_WIDTH)


@dataclass(frozen=True)
class AquilaQuantizer(Quantizer):
    """AQUILA's width, ``b = ⌈log2(R·√d/‖Δ‖₂ + 1)⌉``; the other widths' errors are infinite.

    Zhao et al., AQUILA: Communication Efficient Federated Learning with Adaptive Quantization in
    Device Selection Strategy. Peaked innovations get more bits. On LAQ's grid the error is at most
    ``√d·R/(2^b - 1)``, which this width keeps below ``‖Δ‖₂``: that is why it is rounded up.
    """

    def measure(self, delta: FloatArray) -> Innovation:
        """Choose every row's width and measure what it would send."""
        base = super().measure(delta)
        steps = np.zeros((len(delta), MAX_WIDTH))
        errors = np.full(steps.shape, np.inf)
        quantized = np.full(len(delta), np.nan)
        for r in np.flatnonzero(base.in_range):
            row = delta[r]
            radius = float(np.abs(row).max(initial=0))
            width = choose_width(radius, float(base.squared_norm[r]) ** 0.5, len(row))
            step = round_up_to_bfloat16(2 * radius / ((1 << width) - 1))
            levels = quantize(row, Grid.MIDRISE, width, step)
            values = value_table(Grid.MIDRISE, width, step, np.float64)[levels]
            steps[r, width - 1] = step
            errors[r, width - 1] = np.square(values - row).sum()
            quantized[r] = np.square(values).sum()
        return base._replace(steps=steps, errors=errors, quantized_norm=quantized)

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        width, step = request.width, request.step
        return Upload(quantize(vector, Grid.MIDRISE, width, step), step, width, Grid.MIDRISE)
