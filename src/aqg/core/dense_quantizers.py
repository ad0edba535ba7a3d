"""Quantizers that say something about every coordinate, each in its own way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aqg.core.blockwise import BlockUpload, quantize_blocks
from aqg.core.halves import HalfUpload, to_halves
from aqg.core.quantizers import NormOnly, Request
from aqg.core.rotation import RotatedUpload, quantize_rotated

if TYPE_CHECKING:
    from aqg.core.types import FloatArray


@dataclass(frozen=True)
class Half(NormOnly):
    """IEEE 754 half precision, times one power of two that keeps the vector in its range."""

    def quantize(self, vector: FloatArray, _request: Request) -> HalfUpload:
        """Round to the nearest half."""
        return HalfUpload(*to_halves(vector))


@dataclass(frozen=True)
class Blockwise(NormOnly):
    """Eight bits and a step for every 256 coordinates: `aqg.core.blockwise`."""

    def quantize(self, vector: FloatArray, _request: Request) -> BlockUpload:
        """Round to the nearest level of the block."""
        return BlockUpload(*quantize_blocks(vector))


@dataclass(frozen=True)
class Rotated(NormOnly):
    """The signs after a random rotation: `aqg.core.rotation`."""

    unbiased: bool = True

    def quantize(self, vector: FloatArray, request: Request) -> RotatedUpload:
        """Rotate by a seed drawn from ``key``, which the message carries."""
        seed = int(np.random.default_rng(list(request.key)).integers(1 << 32))
        signs, scales = quantize_rotated(vector, seed, self.unbiased)
        return RotatedUpload(signs, scales, seed, len(vector))
