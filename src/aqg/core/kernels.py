"""The client's hot loops, once for numba and once for plain NumPy.

Each public function takes rows ``(num_rows, n)`` so that a simulator can hand in many clients at
once. The compiled loops work in blocks that fit the first-level cache; sums run in the array's own
precision inside a block and in float64 across blocks.

Only sums may be reordered by the compiler (``reassoc``). `add_levels`, which moves the mirrors,
allows nothing: its products are exact and its additions round once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.core.grids import MAX_RADIUS, Grid, level_dtype
from aqg.jit import HAVE_NUMBA, njit

if TYPE_CHECKING:
    from aqg.core.types import BoolArray, Float64Array, FloatArray, Levels

_BLOCK = 1024
_SUMS = {"reassoc", "contract", "nsz"}
_SAFE_EXPONENT = 40


def inverses_below(steps: Float64Array | np.float64, dtype: np.dtype[Any]) -> FloatArray:
    """Return ``1/steps`` in ``dtype``, never above the true inverse; zero for a step of zero.

    With it, a coordinate below half a step never rounds up to a whole one, which is what makes
    ``midtread`` a contraction to the last bit.
    """
    with np.errstate(divide="ignore"):
        inverse = np.where(steps > 0, 1.0 / steps, 0.0).astype(dtype)
    below: FloatArray = np.nextafter(inverse, dtype.type(0.0))
    return below


def scan_rows(
    rows: FloatArray,
) -> tuple[Float64Array, Float64Array, BoolArray]:
    """Return radius ``‖Δ‖_∞``, mean of ``|Δ|``, and whether all values are in range, per row.

    A row with NaN, infinity or a value above `MAX_RADIUS` is not in range; its other results mean
    nothing.
    """
    if HAVE_NUMBA:
        bits = rows.view(f"u{rows.dtype.itemsize}")
        largest_bits, totals = _scan_rows(rows, bits)
        radius = largest_bits.astype(bits.dtype).view(rows.dtype).astype(np.float64)
    else:
        magnitude = np.abs(rows)
        radius = magnitude.max(axis=1, initial=0).astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            totals = magnitude.sum(axis=1, dtype=np.float64)
    return radius, totals / max(rows.shape[1], 1), radius <= MAX_RADIUS


def error_rows(
    rows: FloatArray, grid: Grid, steps: Float64Array, radius: Float64Array
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Return ``‖ε_b‖²`` for every width, ``‖Q_bmax(Δ)‖²`` and ``‖Δ‖²``, per row.

    ``steps`` is ``(num_rows, b_max)``: the step each width would use. Rows must be in range.
    """
    exponent = np.zeros(len(rows), np.int64)
    if rows.dtype == np.float32:
        # Squares of very small or very large float32 numbers leave its range: work on a copy
        # scaled by a power of two, which is exact.
        exponent = np.frexp(radius)[1].astype(np.int64)
        exponent[np.abs(exponent) < _SAFE_EXPONENT] = 0
        if exponent.any():
            rows = np.ldexp(rows, -exponent[:, None]).astype(rows.dtype)
            steps = np.ldexp(steps, -exponent[:, None])
    compute = _error_rows if HAVE_NUMBA else error_rows_numpy
    errors, quantized, squared = compute(
        rows, grid is Grid.MIDRISE, steps.astype(rows.dtype), inverses_below(steps, rows.dtype)
    )
    return (
        np.ldexp(errors, 2 * exponent[:, None]),
        np.ldexp(quantized, 2 * exponent),
        np.ldexp(squared, 2 * exponent),
    )


def quantize(vector: FloatArray, grid: Grid, width: int, step: float) -> Levels:
    """Return the level nearest to every coordinate, for coordinates within the grid's radius."""
    inverse = inverses_below(np.float64(step), vector.dtype)[()]
    if HAVE_NUMBA:
        levels: Levels = np.empty(len(vector), level_dtype(width))
        _quantize(vector, grid is Grid.MIDRISE, width, inverse, levels)
        return levels
    return _quantize_numpy(vector, grid, width, inverse)


def add_levels(base: FloatArray, levels: Levels, values: FloatArray) -> FloatArray:
    """Return ``base + values[levels]``: the step both mirrors take.

    ``values`` has an entry for everything the dtype of ``levels`` can hold (`grids.value_table`),
    so that no level, however wrong, reads outside it.
    """
    if HAVE_NUMBA:
        out = np.empty_like(base)
        _add_levels(base, levels, values, out)
        return out
    total: FloatArray = base + values[levels]
    return total


@njit(fastmath=_SUMS)
def _scan_rows(rows: Any, bits: Any) -> Any:
    # Without its sign bit, a float's bit pattern orders as its magnitude does, with infinity above
    # every number and NaN above infinity: one integer maximum finds the radius and any bad value.
    num_rows, n = rows.shape
    largest = np.zeros(num_rows, np.uint64)
    totals = np.zeros(num_rows)
    magnitude_mask = bits.dtype.type(~(1 << (8 * rows.itemsize - 1)))
    for r in range(num_rows):
        row_max = bits.dtype.type(0)
        for start in range(0, n, _BLOCK):
            block = rows[r, start : start + _BLOCK]
            block_bits = bits[r, start : start + _BLOCK]
            block_max = bits.dtype.type(0)
            for i in range(block_bits.size):
                block_max = max(block_max, bits.dtype.type(block_bits[i] & magnitude_mask))
            row_max = max(row_max, block_max)
            block_sum = rows.dtype.type(0)
            for i in range(block.size):
                block_sum += abs(block[i])
            totals[r] += block_sum
        largest[r] = row_max
    return largest, totals


@njit(fastmath=_SUMS)
def _error_rows(rows: Any, midrise: Any, steps: Any, inverses: Any) -> Any:
    num_rows, n = rows.shape
    max_width = steps.shape[1]
    errors = np.zeros((num_rows, max_width))
    quantized = np.zeros(num_rows)
    squared = np.zeros(num_rows)
    zero = rows.dtype.type(0)
    half = rows.dtype.type(0.5)
    for r in range(num_rows):
        for start in range(0, n, _BLOCK):
            block = rows[r, start : start + _BLOCK]
            square_sum = zero
            for i in range(block.size):
                square_sum += block[i] * block[i]
            squared[r] += square_sum
            for b in range(max_width):
                step = steps[r, b]
                inverse = inverses[r, b]
                error_sum = zero
                if midrise:
                    for i in range(block.size):
                        error = (np.floor(block[i] * inverse) + half) * step - block[i]
                        error_sum += error * error
                elif b == 0:
                    for i in range(block.size):
                        error = step - abs(block[i])
                        error_sum += error * error
                else:
                    for i in range(block.size):
                        error = np.rint(block[i] * inverse) * step - block[i]
                        error_sum += error * error
                errors[r, b] += error_sum
            if max_width == 0:
                continue
            step = steps[r, max_width - 1]
            inverse = inverses[r, max_width - 1]
            value_sum = zero
            if midrise:
                for i in range(block.size):
                    value = (np.floor(block[i] * inverse) + half) * step
                    value_sum += value * value
            elif max_width == 1:
                value_sum += step * step * rows.dtype.type(block.size)
            else:
                for i in range(block.size):
                    value = np.rint(block[i] * inverse) * step
                    value_sum += value * value
            quantized[r] += value_sum
    return errors, quantized, squared


@njit()
def _quantize(vector: Any, midrise: Any, width: Any, inverse: Any, levels: Any) -> Any:
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


def error_rows_numpy(
    rows: FloatArray,
    midrise: bool,
    steps: FloatArray,
    inverses: FloatArray,
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Compute the sums of `error_rows` by the plain formulas."""
    errors = np.empty(steps.shape)
    value = np.zeros_like(rows)
    for b in range(steps.shape[1]):
        step = steps[:, b, None]
        scaled = rows * inverses[:, b, None]
        if midrise:
            value = (np.floor(scaled) + rows.dtype.type(0.5)) * step
        elif b == 0:
            value = np.where(rows >= 0, step, -step)
        else:
            value = np.rint(scaled) * step
        errors[:, b] = np.square(value - rows).sum(axis=1, dtype=np.float64)
    quantized = np.square(value).sum(axis=1, dtype=np.float64)
    return errors, quantized, np.square(rows).sum(axis=1, dtype=np.float64)


def _quantize_numpy(vector: FloatArray, grid: Grid, width: int, inverse: FloatArray) -> Levels:
    half_count = 1 << (width - 1)
    if grid is Grid.MIDRISE:
        levels = np.floor(vector * inverse).astype(np.int32) + half_count
    elif width == 1:
        levels = (vector >= 0).astype(np.int32)
    else:
        levels = np.rint(vector * inverse).astype(np.int32) + (half_count - 1)
    result: Levels = levels.astype(level_dtype(width))
    return result
