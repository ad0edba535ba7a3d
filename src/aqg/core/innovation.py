"""What a client learns about its innovation ``Δ`` before it decides anything."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from aqg.core.grids import MAX_RADIUS, Grid
from aqg.core.kernels import measure_rows
from aqg.core.types import BoolArray, Float64Array, FloatArray, IntArray


class Innovation(NamedTuple):
    """Statistics of ``Δ``; every array has the leading (client) axes of ``Δ``, possibly none.

    Attributes:
        in_range: False where ``Δ`` has NaN, infinity or values beyond any grid.
        squared_norm: ``‖Δ‖²``.
        steps: the step each width ``b = 1..b_max`` would send, on the last axis.
        errors: ``‖ε_b‖² = ‖Q_b(Δ) - Δ‖²`` for ``b = 1..b_max``, on the last axis.
        quantized_norm: ``‖Q_bmax(Δ)‖²``.

    """

    in_range: BoolArray
    squared_norm: Float64Array
    steps: Float64Array
    errors: Float64Array
    quantized_norm: Float64Array

    def of(self, clients: IntArray | int) -> Innovation:
        """Return the statistics of some clients on the leading axis, or of one."""
        return Innovation(
            np.asarray(self.in_range[clients]),
            np.asarray(self.squared_norm[clients]),
            self.steps[clients],
            self.errors[clients],
            np.asarray(self.quantized_norm[clients]),
        )


def measure(delta: FloatArray, grid: Grid, max_width: int) -> Innovation:
    """Measure ``Δ`` of shape ``(..., n)``: one scan for its size, one pass for all errors.

    >>> stats = measure(np.array([1.0, -0.5, 0.25]), Grid.MIDTREAD, max_width=3)
    >>> stats.squared_norm.item(), stats.steps.tolist()
    (1.3125, [0.5859375, 1.0, 0.333984375])
    >>> stats.errors.round(4).tolist()
    [0.2917, 0.3125, 0.0346]
    """
    rows = np.ascontiguousarray(delta)
    if delta.ndim == 2:  # a block of clients, as the simulator has it
        radius, steps, errors, quantized, squared = measure_rows(rows, grid, max_width)
        return Innovation(radius <= MAX_RADIUS, squared, steps, errors, quantized)
    leading = delta.shape[:-1]
    rows = rows.reshape(-1, delta.shape[-1])
    radius, steps, errors, quantized, squared = measure_rows(rows, grid, max_width)
    return Innovation(
        in_range=(radius <= MAX_RADIUS).reshape(leading),
        squared_norm=squared.reshape(leading),
        steps=steps.reshape(*leading, max_width),
        errors=errors.reshape(*leading, max_width),
        quantized_norm=quantized.reshape(leading),
    )
