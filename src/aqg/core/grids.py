"""The two quantization grids, and the step that makes mirrors exact.

A grid at width ``b`` maps integers ("levels") to multiples of a step:

========== =============== ================= =====================================
grid       levels          step for radius R value of level ``q``
========== =============== ================= =====================================
midrise    ``2^b``         ``2R/(2^b - 1)``  ``(2q - (2^b - 1)) · step/2``
midtread   ``2^b - 1``     ``R/(2^(b-1)-1)`` ``(q - (2^(b-1) - 1)) · step``
midtread,  2               mean of ``|Δ|``   ``(2q - 1) · step``
``b = 1``
========== =============== ================= =====================================

The step is always a bfloat16 number, rounded up from the formula. It has 8 significant bits and a
level has at most 16, so every value is an *exact* float32 product and ``reference + value`` rounds
once, the same way on every machine, with or without fused multiply-add.
"""

import enum
import math
from typing import Any, NamedTuple

import numpy as np

from aqg.core.types import FloatArray

MAX_WIDTH = 16
MIN_STEP = 2.0**-126
"""Smallest positive step: the smallest normal bfloat16, so that its inverse is finite too."""
MAX_RADIUS = 2.0**100
"""Largest coordinate a grid accepts: steps, their inverses and sums of a block stay in float32."""
_FIRST_STEPS = 1 << 6
"""A model that begins at zero has room for twice as many of its first steps."""


class Grid(enum.StrEnum):
    """How levels map to values."""

    MIDRISE = "midrise"
    MIDTREAD = "midtread"


class Affine(NamedTuple):
    """Level ``q`` has the value ``(scale·q - offset) · unit``, exactly."""

    scale: int
    offset: int
    unit: float


def num_levels(grid: Grid, width: int) -> int:
    """Count the levels of ``grid`` at ``width`` bits.

    >>> num_levels(Grid.MIDRISE, 4), num_levels(Grid.MIDTREAD, 4), num_levels(Grid.MIDTREAD, 1)
    (16, 15, 2)
    """
    if grid is Grid.MIDRISE or width == 1:
        return 1 << width
    return (1 << width) - 1


def affine(grid: Grid, width: int, step: float) -> Affine:
    """Return the map from levels to values, as in the table above."""
    if grid is Grid.MIDRISE:
        return Affine(2, (1 << width) - 1, step / 2)
    if width == 1:
        return Affine(2, 1, step)
    return Affine(1, (1 << (width - 1)) - 1, step)


def round_up_to_bfloat16(value: float) -> float:
    """Return the smallest bfloat16 number at or above ``value``; positive ones at least `MIN_STEP`.

    >>> round_up_to_bfloat16(1.001)
    1.0078125
    """
    if value == 0.0:
        return 0.0
    if value <= MIN_STEP:
        return MIN_STEP
    mantissa, exponent = math.frexp(value)  # value = mantissa · 2^exponent, mantissa in [1/2, 1)
    return math.ldexp(math.ceil(math.ldexp(mantissa, 8)), exponent - 8)


def nearest_power_of_two(value: float) -> float:
    """Return the power of two nearest to a positive number, within what a step can be.

    >>> [nearest_power_of_two(value) for value in (1.0, 1.4, 1.5, 1e-99)]
    [1.0, 1.0, 2.0, 1.1754943508222875e-38]
    """
    mantissa, exponent = math.frexp(value)
    power = math.ldexp(1.0, exponent - (mantissa < 0.75))
    return min(max(power, MIN_STEP), 2 * MAX_RADIUS)


def largest_multiple(dtype: np.dtype[Any]) -> float:
    """Return how many quanta a coordinate can be for every smaller multiple to be exact."""
    return math.ldexp(1.0, np.finfo(dtype).nmant + 1)


def choose_quantum(radius: float, step: float, dtype: np.dtype[Any]) -> float:
    """Return the finest quantum for vectors within ``radius``, with room to grow."""
    exponent = math.frexp(max(radius, _FIRST_STEPS * step))[1]
    quantum = 2 * math.ldexp(1.0, exponent) / largest_multiple(dtype)
    return min(max(quantum, MIN_STEP), 2 * MAX_RADIUS)


def snap(vector: Any, quantum: float, out: Any = None) -> Any:
    """Return the nearest multiples of a quantum, none of them a negative zero; also of torch.

    An array of NumPy can be written to ``out``, which may be the vector itself.
    """
    snapped = vector / quantum if out is None else np.divide(vector, quantum, out=out)
    snapped = np.rint(snapped, out=snapped) if isinstance(snapped, np.ndarray) else snapped.round()
    snapped *= quantum  # in place: a large model is copied once
    snapped += 0.0
    return snapped


def is_valid_step(step: float) -> bool:
    """Tell whether ``step`` is one a client can have sent: zero, or a bfloat16 in range."""
    return step == 0.0 or (
        MIN_STEP <= step <= 2 * MAX_RADIUS and round_up_to_bfloat16(step) == step
    )


def level_dtype(width: int) -> type[np.uint8] | type[np.uint16]:
    """Return the smallest dtype that holds the levels of ``width`` bits."""
    return np.uint8 if width <= 8 else np.uint16


def value_table(grid: Grid, width: int, step: float, dtype: type[np.floating]) -> FloatArray:
    """Return the value of every level, exact in ``dtype``; zero beyond the last level.

    The table is as long as the level dtype has numbers, so any level can be looked up safely.
    """
    scale, offset, unit = affine(grid, width, step)
    table = np.zeros(np.iinfo(level_dtype(width)).max + 1, dtype)
    count = num_levels(grid, width)
    table[:count] = (scale * np.arange(count) - offset) * np.float64(unit)
    return table
