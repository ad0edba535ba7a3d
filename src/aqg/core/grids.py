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

The client's hot loops are compiled. They take rows ``(num_rows, n)``, so that a simulator can hand
in many clients at once, and work in blocks that fit the first-level cache; sums run in the array's
own precision inside a block and in float64 across blocks. Only sums may be reordered by the
compiler (``reassoc``). `add_levels` and `move_mirror`, which move the mirrors, allow nothing: their
products are exact and their additions round once.
"""

from __future__ import annotations

import enum
import math
from typing import Any, NamedTuple

import numpy as np

from aqg.core.types import BoolArray, Float64Array, FloatArray, Levels
from aqg.jit import njit, part

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
    """Count the levels of ``grid`` at ``width`` bits."""
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


_BLOCK = 1024
_SUMS = {"reassoc", "contract", "nsz"}
_SAFE_EXPONENT = 40
_BIT_TYPES = {4: np.uint32, 8: np.uint64}


class Innovation(NamedTuple):
    """Statistics of ``Δ``; every array has the leading (client) axes of ``Δ``, possibly none."""

    in_range: BoolArray  # False where ``Δ`` has NaN, infinity or values beyond any grid
    squared_norm: Float64Array  # ``‖Δ‖²``
    steps: Float64Array  # the step each width ``b = 1..b_max`` would send, on the last axis
    errors: Float64Array  # ``‖ε_b‖² = ‖Q_b(Δ) - Δ‖²`` for ``b = 1..b_max``, on the last axis
    quantized_norm: Float64Array  # ``‖Q_bmax(Δ)‖²``


def measure(delta: FloatArray, grid: Grid, max_width: int) -> Innovation:
    """Measure ``Δ`` of shape ``(..., n)``: one scan for its size, one pass for all errors.

    Where a row has NaN, infinity or a value above `MAX_RADIUS`, steps are zero and sums NaN.
    """
    rows = np.ascontiguousarray(delta).reshape(-1, delta.shape[-1])
    sums = np.empty((len(rows), 3 + 2 * max_width))
    bits = rows.view(_BIT_TYPES[rows.itemsize])
    scratch = np.empty(_BLOCK + 2 * max_width + 1, rows.dtype)
    _measure_rows(
        rows, bits, grid is Grid.MIDRISE, max_width, sums, scratch, scratch[:1].view(bits.dtype)
    )
    found = Innovation(
        in_range=sums[:, 0] <= MAX_RADIUS,  # False for NaN and infinity too
        squared_norm=sums[:, 2],
        steps=sums[:, 3 : 3 + max_width],
        errors=sums[:, 3 + max_width :],
        quantized_norm=sums[:, 1],
    )
    if delta.ndim == 2:
        return found
    return Innovation(*(part.reshape((*delta.shape[:-1], *part.shape[1:])) for part in found))


def quantize(vector: FloatArray, grid: Grid, width: int, step: float) -> Levels:
    """Return the level nearest to every coordinate, for coordinates within the grid's radius."""
    levels: Levels = np.empty(len(vector), level_dtype(width))
    _quantize(vector, grid is Grid.MIDRISE, width, float(step), levels)
    return levels


def add_levels(
    base: FloatArray, levels: Levels, values: FloatArray, out: FloatArray | None = None
) -> FloatArray:
    """Return ``base + values[levels]``: the step both mirrors take; ``out`` may be ``base``.

    ``values`` has an entry for everything the dtype of ``levels`` can hold (`grids.value_table`),
    so that no level, however wrong, reads outside it.
    """
    out = np.empty_like(base) if out is None else out
    _add_levels(base, levels, values, out)
    return out


@njit(fastmath=_SUMS)
def _measure_rows(
    rows: Any, bits: Any, midrise: Any, max_width: Any, sums: Any, scratch: Any, first_bits: Any
) -> None:
    """Write radius, ``‖Q_bmax(Δ)‖²``, ``‖Δ‖²``, all steps and all ``‖ε_b‖²`` of every row.

    ``first_bits`` is the first number of ``scratch`` as an integer.
    """
    num_rows, n = rows.shape
    kind = rows.dtype.type
    scaled = scratch[1 : 1 + _BLOCK]
    inverses = scratch[1 + _BLOCK : 1 + _BLOCK + max_width]
    steps = scratch[1 + _BLOCK + max_width :]
    for r in range(num_rows):
        mean_abs = _scan_row(rows[r], bits[r], first_bits)
        radius = np.float64(scratch[0])
        for i in range(1, 3 + 2 * max_width):
            sums[r, i] = 0.0
        sums[r, 0] = radius
        if not radius <= MAX_RADIUS:
            sums[r, 1:3] = np.nan
            sums[r, 3 + max_width :] = np.nan
            continue
        # Squares of very small or very large float32 numbers leave its range: work on a copy
        # scaled by a power of two, which is exact.
        exponent = 0
        if rows.itemsize == 4:
            exponent = math.frexp(radius)[1]
            if abs(exponent) < _SAFE_EXPONENT:
                exponent = 0
        for b in range(max_width):
            step = _grid_step(midrise, b + 1, radius, mean_abs)
            sums[r, 3 + b] = step
            step = math.ldexp(step, -exponent)
            steps[b] = step
            inverses[b] = _inverse_below(step, kind(0))
        for start in range(0, n, _BLOCK):
            block = rows[r, start : start + _BLOCK]
            if exponent != 0:
                for i in range(block.size):
                    scaled[i] = math.ldexp(block[i], -exponent)
                block = scaled[: block.size]
            _add_block(block, midrise, steps, inverses, sums[r, 1:3], sums[r, 3 + max_width :])
        if exponent != 0:
            for i in range(1, 3):
                sums[r, i] = math.ldexp(sums[r, i], 2 * exponent)
            for i in range(3 + max_width, 3 + 2 * max_width):
                sums[r, i] = math.ldexp(sums[r, i], 2 * exponent)


@part(fastmath=_SUMS)
def _scan_row(row: Any, bits: Any, largest: Any) -> Any:
    """Write the bits of ``‖Δ‖_∞``; return the mean of ``|Δ|``."""
    # Without its sign bit, a float's bit pattern orders as its magnitude does, with infinity above
    # every number and NaN above infinity: one integer maximum finds the radius and any bad value.
    n = len(row)
    magnitude_mask = bits.dtype.type((1 << (8 * row.itemsize - 1)) - 1)
    largest[0] = 0
    total = 0.0
    for start in range(0, n, _BLOCK):
        block = row[start : start + _BLOCK]
        block_bits = bits[start : start + _BLOCK]
        block_max = largest[0]
        for i in range(block_bits.size):
            block_max = max(block_max, bits.dtype.type(block_bits[i] & magnitude_mask))
        largest[0] = block_max
        block_sum = row.dtype.type(0)
        for i in range(block.size):
            block_sum += abs(block[i])
        total += block_sum
    return total / max(n, 1)


_rounded_up = part()(round_up_to_bfloat16)


@part()
def _grid_step(midrise: Any, width: Any, radius: Any, mean_abs: Any) -> Any:
    """Return the step a client sends for a vector with this radius and mean absolute value."""
    if midrise:
        value = 2 * radius / ((1 << width) - 1)
    elif width == 1:
        # Below the smallest step, rounding up would overshoot: nothing is closer than ± that.
        value = mean_abs if mean_abs >= MIN_STEP else 0.0
    else:
        value = radius / ((1 << (width - 1)) - 1)
    return _rounded_up(value)


@part()
def _inverse_below(step: Any, zero: Any) -> Any:
    """Return ``1/step`` in the precision of ``zero``, never above it; zero for a step of zero.

    With it, a coordinate below half a step never rounds up to a whole one, which is what makes
    ``midtread`` a contraction to the last bit.
    """
    if step == 0.0:
        return zero
    return np.nextafter(type(zero)(1.0 / step), zero)


@part(fastmath=_SUMS)
def _add_block(
    block: Any, midrise: Any, steps: Any, inverses: Any, norms: Any, errors: Any
) -> None:
    """Add a block's share of ``‖Q_bmax(Δ)‖²`` and ``‖Δ‖²``, and of ``‖ε_b‖²`` for every width."""
    square_sum = block.dtype.type(0)
    for i in range(block.size):
        square_sum += block[i] * block[i]
    norms[1] += square_sum
    if len(steps) == 0:
        return
    for b in range(len(steps)):
        errors[b] += _error_sum(block, midrise, b + 1, steps[b], inverses[b])
    norms[0] += _value_sum(block, midrise, len(steps), steps[-1], inverses[-1])


@part(fastmath=_SUMS)
def _error_sum(block: Any, midrise: Any, width: Any, step: Any, inverse: Any) -> Any:
    half = block.dtype.type(0.5)
    error_sum = block.dtype.type(0)
    if midrise:
        for i in range(block.size):
            error = (np.floor(block[i] * inverse) + half) * step - block[i]
            error_sum += error * error
    elif width == 1:
        for i in range(block.size):
            error = step - abs(block[i])
            error_sum += error * error
    else:
        for i in range(block.size):
            error = np.rint(block[i] * inverse) * step - block[i]
            error_sum += error * error
    return error_sum


@part(fastmath=_SUMS)
def _value_sum(block: Any, midrise: Any, width: Any, step: Any, inverse: Any) -> Any:
    half = block.dtype.type(0.5)
    value_sum = block.dtype.type(0)
    if midrise:
        for i in range(block.size):
            value = (np.floor(block[i] * inverse) + half) * step
            value_sum += value * value
    elif width == 1:
        value_sum = step * step * block.dtype.type(block.size)
    else:
        for i in range(block.size):
            value = np.rint(block[i] * inverse) * step
            value_sum += value * value
    return value_sum


@njit()
def _quantize(vector: Any, midrise: Any, width: Any, step: Any, levels: Any) -> Any:
    inverse = _inverse_below(step, vector.dtype.type(0))
    half_count = np.int32(1 << (width - 1))
    if midrise:
        for i in range(len(vector)):
            levels[i] = np.int32(np.floor(vector[i] * inverse)) + half_count
    elif width == 1:
        for i in range(len(vector)):
            levels[i] = 1 if vector[i] >= 0 else 0
    else:
        for i in range(len(vector)):
            levels[i] = np.int32(np.rint(vector[i] * inverse)) + half_count - 1


@njit()
def _add_levels(base: Any, levels: Any, values: Any, out: Any) -> Any:
    for i in range(len(base)):
        out[i] = base[i] + values[levels[i]]


@njit()
def move_mirror(
    mirror: Any, levels: Any, scale: Any, offset: Any, unit: Any, total: Any, weight: Any
) -> None:
    """Do in one pass, in place: `add_levels` to ``mirror``, and its change to ``total``.

    ``total += weight · (new - old)`` in float64, one rounding at a time, as a server does it.
    Values come from the grid's formula (`aqg.core.grids.Affine`), where they are exact too.
    """
    factor, base = scale * unit, offset * unit  # like all that follows from them, exact
    for i in range(len(mirror)):
        old = mirror[i]
        new = old + mirror.dtype.type(np.float64(levels[i]) * factor - base)
        mirror[i] = new
        total[i] += weight * (np.float64(new) - np.float64(old))
