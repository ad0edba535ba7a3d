"""How to turn a vector into an upload of a given width.

A quantizer measures and encodes; it never decides. Randomness is an argument: a key of integers
(seed, client, round) from which the stochastic quantizer draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from aqg.core.blockwise import LONGEST_BLOCK, BlockUpload, quantize_blocks, quantize_buckets
from aqg.core.grids import Grid, level_dtype, round_up_to_bfloat16
from aqg.core.halves import HalfUpload, to_halves
from aqg.core.kernels import Innovation, measure, quantize
from aqg.core.messages import AnyUpload, DenseUpload, Upload
from aqg.core.rotation import RotatedUpload, quantize_rotated
from aqg.core.types import FloatArray
from aqg.errors import ConfigError

MAX_BUCKET_BITS = 8
"""Levels of buckets are bytes."""


class Request(NamedTuple):
    """How one vector is to be encoded."""

    width: int  # the bits per coordinate that the policy chose
    step: float = 0.0  # the step that was measured for this width; 0 where steps are not measured
    squared_norm: float = math.nan  # ``‖v‖²``
    key: tuple[int, ...] = ()  # integers (seed, client, round) that make the message's randomness
    # what a stage of the recipe has to say to the quantizer; nothing, mostly
    advice: tuple[float, ...] = ()
    noise: float = 1.0  # ``b``, the noise that the upload may carry, in the vector's own energy


class Quantizer(Protocol):
    """Measures a vector and encodes it at a width the policy chose."""

    @property
    def num_errors(self) -> int:
        """How many widths ``1..num_errors`` it reports errors for."""

    def measure(self, delta: FloatArray) -> Innovation:
        """Return the statistics of ``delta``, shape ``(..., n)``."""

    def quantize(self, vector: FloatArray, request: Request, /) -> AnyUpload:
        """Encode one vector of shape ``(n,)``."""


@dataclass(frozen=True)
class GridQuantizer:
    """Nearest level on a grid: the paper's quantizer (`Grid.MIDRISE`) and ours (`MIDTREAD`)."""

    grid: Grid
    max_width: int

    @property
    def num_errors(self) -> int:
        return self.max_width

    def measure(self, delta: FloatArray) -> Innovation:
        return measure(delta, self.grid, self.max_width)

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        width, step = request.width, request.step
        return Upload(quantize(vector, self.grid, width, step), step, width, self.grid)


class NormOnly:
    """Part of the quantizers whose errors no policy asks for."""

    @property
    def num_errors(self) -> int:
        return 0

    def measure(self, delta: FloatArray) -> Innovation:
        return measure(delta, Grid.MIDTREAD, max_width=0)


@dataclass(frozen=True)
class Verbatim(NormOnly):
    """The vector itself, in float32 (GD, LAG)."""

    def quantize(self, vector: FloatArray, _request: Request) -> DenseUpload:
        return DenseUpload(vector.astype(np.float32))


@dataclass(frozen=True)
class Stochastic(NormOnly):
    """QSGD: unbiased rounding to ``s`` multiples of ``‖v‖₂/s``.

    ``Q(v)_i = step·⌊v_i/step + u_i⌋`` with ``u_i`` uniform on [0, 1), so ``E[Q(v)] = v`` for any
    step; rounding the step up to bfloat16 keeps the expectation and every level on the grid.
    Without ``num_levels``, ``s = 2^(b-1) - 1``: all that the width can tell apart.
    """

    num_levels: int | None = None

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        """Round every coordinate up or down at random, by its distance."""
        width = request.width
        top = (1 << (width - 1)) - 1
        num_levels = top if self.num_levels is None else self.num_levels
        step = round_up_to_bfloat16(math.sqrt(request.squared_norm) / num_levels)
        scaled = vector.astype(np.float64) / step if step else np.zeros(len(vector))
        uniform = np.random.default_rng(list(request.key)).random(len(vector))
        integers = np.clip(np.floor(scaled + uniform), -top, top).astype(np.int32) + top
        return Upload(integers.astype(level_dtype(width)), step, width, Grid.MIDTREAD)


@dataclass(frozen=True)
class Sign(NormOnly):
    """SignSGD: one bit per coordinate, with magnitude one."""

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        """Keep the signs; zero counts as positive."""
        return Upload((vector >= 0).astype(np.uint8), 1.0, request.width, Grid.MIDTREAD)


@dataclass(frozen=True)
class QsgdAtWidth(NormOnly):
    """QSGD with ``q = 2^(b-2)`` levels at ``b`` bits, or with as many as the advice says."""

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        """Round every coordinate up or down at random, by its distance."""
        num_levels = int(request.advice[0]) if request.advice else 1 << (request.width - 2)
        return Stochastic(num_levels).quantize(vector, request)


@dataclass(frozen=True)
class Half(NormOnly):
    """IEEE 754 half precision, times one power of two that keeps the vector in its range."""

    def quantize(self, vector: FloatArray, _request: Request) -> HalfUpload:
        return HalfUpload(*to_halves(vector))


@dataclass(frozen=True)
class Blockwise(NormOnly):
    """Eight bits and a step for every 256 coordinates: `aqg.core.blockwise`."""

    def quantize(self, vector: FloatArray, _request: Request) -> BlockUpload:
        return BlockUpload(*quantize_blocks(vector))


@dataclass(frozen=True)
class Buckets(NormOnly):
    """QSGD with a norm for every bucket of coordinates, and ``s = 2^(b-1) - 1`` levels."""

    bucket: int

    def __post_init__(self) -> None:
        if not 1 <= self.bucket <= LONGEST_BLOCK:
            raise ConfigError(f"bucket is {self.bucket}; it must be in 1..{LONGEST_BLOCK}")

    def quantize(self, vector: FloatArray, request: Request) -> BlockUpload:
        """Round every coordinate up or down at random, by its distance."""
        uniform = np.random.default_rng(list(request.key)).random(len(vector))
        num_levels = (1 << (request.width - 1)) - 1
        found = quantize_buckets(vector, self.bucket, num_levels, uniform)
        return BlockUpload(*found, self.bucket)


@dataclass(frozen=True)
class Rotated(NormOnly):
    """A few bits per coordinate after a random rotation: `aqg.core.rotation`."""

    unbiased: bool = True

    def quantize(self, vector: FloatArray, request: Request) -> RotatedUpload:
        """Rotate by a seed drawn from ``key``, which the message carries."""
        seed = int(np.random.default_rng(list(request.key)).integers(1 << 32))
        codes, scales = quantize_rotated(vector, seed, self.unbiased, request.width)
        return RotatedUpload(codes, scales, seed, len(vector), request.width)
