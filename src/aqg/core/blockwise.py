"""Levels with a step of their own for every block of coordinates.

Dettmers et al., 8-bit Optimizers via Block-wise Quantization: a block is divided by its largest
magnitude, so that an outlier spoils the resolution of its own block only. The map is the linear
one: ``v_i ≈ level_i · step`` with ``step = max|v|/127``, rounded up to bfloat16 as on our grids, so
that every value is an exact float32 product.

QSGD's buckets (Alistarh et al.) are the same with other blocks, and rounded at random to multiples
of ``‖v‖₂/s`` of the block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aqg.core.grids import MAX_RADIUS, MIN_STEP
from aqg.core.types import ByValue, Float64Array, FloatArray
from aqg.errors import MessageError

BLOCK = 256
"""Coordinates in a block, unless a message says otherwise."""
LONGEST_BLOCK = 1 << 20
TOP = 127
"""Levels are ``0..2·TOP``, with zero in the middle."""
_BFLOAT16_REST = 45
"""So many of the last bits of a float64 are zero in a bfloat16 number."""


def num_blocks(length: int, block: int = BLOCK) -> int:
    """Return how many blocks ``length`` coordinates make."""
    return -(-length // block)


def quantize_blocks(vector: FloatArray) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return the levels and the step of every block.

    >>> levels, steps = quantize_blocks(np.array([1.0, -0.5, 0.0]))
    >>> levels, steps
    (array([253,  64, 127], dtype=uint8), array([0.00793457], dtype=float32))
    """
    rows = _in_blocks(vector, BLOCK)
    steps = _rounded_up(np.abs(rows).max(axis=1) / TOP)
    inverses = np.divide(1.0, steps, out=np.zeros_like(steps), where=steps > 0)
    levels = np.rint(rows * inverses[:, None]) + TOP
    return levels.astype(np.uint8).ravel()[: len(vector)], steps.astype(np.float32)


def quantize_buckets(
    vector: FloatArray, block: int, num_levels: int, uniform: NDArray[np.float64]
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Round every block at random to multiples of ``‖v‖₂/s``: QSGD with buckets.

    Args:
        vector: ``(n,)``.
        block: coordinates in a bucket.
        num_levels: ``s``, at most `TOP`.
        uniform: random numbers in [0, 1), ``(n,)``.
    """
    rows = _in_blocks(vector, block)
    steps = _rounded_up(np.sqrt(np.square(rows).sum(axis=1)) / num_levels)
    inverses = np.divide(1.0, steps, out=np.zeros_like(steps), where=steps > 0)
    scaled = (rows * inverses[:, None]).ravel()[: len(vector)]
    levels = np.clip(np.floor(scaled + uniform), -num_levels, num_levels) + TOP
    return levels.astype(np.uint8), steps.astype(np.float32)


def _in_blocks(vector: FloatArray, block: int) -> Float64Array:
    """Return the vector as rows of blocks, the last one filled up with zeros."""
    padded = np.zeros(num_blocks(len(vector), block) * block)
    padded[: len(vector)] = vector
    return padded.reshape(-1, block)


def _rounded_up(raw: Float64Array) -> Float64Array:
    """Return the smallest bfloat16 numbers at or above these; positive ones at least `MIN_STEP`."""
    rest = np.int64((1 << _BFLOAT16_REST) - 1)
    rounded = ((raw.view(np.int64) + rest) & ~rest).view(np.float64)
    return np.where(raw > 0, np.maximum(rounded, MIN_STEP), 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class BlockUpload(ByValue):
    """A vector as a level per coordinate, of one byte, and a step per block of coordinates."""

    levels: NDArray[np.uint8]
    steps: NDArray[np.float32]
    block: int = BLOCK

    def __post_init__(self) -> None:
        if not 1 <= self.block <= LONGEST_BLOCK:
            raise MessageError(f"blocks have {self.block} coordinates, not 1..{LONGEST_BLOCK}")
        if self.levels.ndim != 1 or self.levels.dtype != np.uint8:
            raise MessageError(
                f"levels are {self.levels.ndim}-d {self.levels.dtype}, not 1-d uint8"
            )
        expected = num_blocks(len(self.levels), self.block)
        if self.steps.shape != (expected,) or self.steps.dtype != np.float32:
            raise MessageError(
                f"steps are {self.steps.dtype} of shape {self.steps.shape}; "
                f"{len(self.levels)} levels need {expected} float32"
            )

    @property
    def width(self) -> int:
        return 8

    def __len__(self) -> int:
        return len(self.levels)

    def validate(self) -> None:
        """Raise `MessageError` if a level or a step is none that a client sends."""
        if len(self.levels) and int(self.levels.max()) > 2 * TOP:
            raise MessageError(f"level {int(self.levels.max())} is above {2 * TOP}")
        bits = self.steps.view(np.uint32)
        in_range = (self.steps >= MIN_STEP) & (self.steps <= 2 * MAX_RADIUS)
        is_valid = (bits == 0) | (in_range & (bits & 0xFFFF == 0))
        if not is_valid.all():
            step = float(self.steps[np.argmin(is_valid)])
            raise MessageError(f"step {step!r} of a block is not a bfloat16 number in range")

    def values(self, dtype: type[np.floating]) -> FloatArray:
        """Return the vector the levels stand for; exact in float32 and float64 alike."""
        integers = self.levels.astype(dtype) - dtype(TOP)
        steps = np.repeat(self.steps.astype(dtype), self.block)[: len(integers)]
        values: FloatArray = integers * steps
        return values
