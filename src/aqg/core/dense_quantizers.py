"""Quantizers that say something about every coordinate, each in its own way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aqg.core.blockwise import LONGEST_BLOCK, BlockUpload, quantize_blocks, quantize_buckets
from aqg.core.halves import HalfUpload, to_halves
from aqg.core.quantizers import NormOnly, Request
from aqg.core.rotation import RotatedUpload, quantize_rotated
from aqg.core.types import FloatArray
from aqg.errors import ConfigError

MAX_BUCKET_BITS = 8
"""Levels of buckets are bytes."""


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
