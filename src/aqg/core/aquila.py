"""AQUILA's rule: the width from the shape of the innovation, and when to skip.

Zhao et al., AQUILA: Communication Efficient Federated Learning with Adaptive Quantization in Device
Selection Strategy. With ``R = ‖Δ‖_∞`` and ``d`` coordinates, the width is

    ``b = ⌈log2(R·√d/‖Δ‖₂ + 1)⌉``,

at least 1 since ``R·√d ≥ ‖Δ‖₂``; peaked innovations get more bits. On LAQ's grid the error is at
most ``√d·R/(2^b - 1)``, which this width keeps below ``‖Δ‖₂``: that is why it is rounded up. A
client skips while ``‖Q_b(Δ)‖² + ‖ε_b‖² ≤ β·‖θ^k - θ^{k-1}‖²/α²``, where the paper's server
takes ``α/M`` times the sum: that is ``β`` times the movement of one step here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from aqg.core.grids import MAX_WIDTH, Grid, grid_step, value_table
from aqg.core.kernels import Innovation, measure, quantize
from aqg.core.messages import Upload
from aqg.core.policies import Case, Decision
from aqg.core.quantizers import Request
from aqg.core.types import FloatArray


def choose_width(radius: float, norm: float, num_params: int) -> int:
    """Return ``b = ⌈log2(R·√d/‖Δ‖₂ + 1)⌉`` within ``1..MAX_WIDTH``.

    >>> choose_width(radius=1.0, norm=3.0, num_params=9), choose_width(1.0, 1.0, 7850)
    (1, 7)
    """
    if norm == 0:
        return 1
    width = math.ceil(math.log2(radius * num_params**0.5 / norm + 1))
    return min(max(width, 1), MAX_WIDTH)


@dataclass(frozen=True)
class AquilaQuantizer:
    """LAQ's grid, measured at the chosen width alone: the other widths' errors are infinite."""

    @property
    def num_errors(self) -> int:
        return MAX_WIDTH

    def measure(self, delta: FloatArray) -> Innovation:
        """Choose every row's width and measure what it would send."""
        rows = np.ascontiguousarray(delta).reshape(-1, delta.shape[-1])
        base = measure(rows, Grid.MIDTREAD, max_width=0)
        steps = np.zeros((len(rows), MAX_WIDTH))
        errors = np.full(steps.shape, np.inf)
        quantized = np.full(len(rows), np.nan)
        for r in np.flatnonzero(base.in_range):
            row = rows[r]
            radius = float(np.abs(row).max(initial=0))
            width = choose_width(radius, float(base.squared_norm[r]) ** 0.5, len(row))
            step = grid_step(Grid.MIDRISE, width, radius, mean_abs=0.0)
            levels = quantize(row, Grid.MIDRISE, width, step)
            values = value_table(Grid.MIDRISE, width, step, np.float64)[levels]
            steps[r, width - 1] = step
            errors[r, width - 1] = np.square(values - row).sum()
            quantized[r] = np.square(values).sum()
        leading = delta.shape[:-1]
        return Innovation(
            in_range=base.in_range.reshape(leading),
            squared_norm=base.squared_norm.reshape(leading),
            steps=steps.reshape(*leading, MAX_WIDTH),
            errors=errors.reshape(*leading, MAX_WIDTH),
            quantized_norm=quantized.reshape(leading),
        )

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        width, step = request.width, request.step
        return Upload(quantize(vector, Grid.MIDRISE, width, step), step, width, Grid.MIDRISE)


@dataclass(frozen=True)
class AquilaPolicy:
    """Send when ``‖Q_b(Δ)‖² + ‖ε_b‖² > movement``, with the one width that was measured."""

    def decide(self, case: Case) -> Decision:
        """Weigh what would be sent, and its error, against the model's last step."""
        innovation = case.innovation
        error = innovation.errors.min(axis=-1)
        send = np.asarray(innovation.quantized_norm + error > case.movement)
        return Decision(send, innovation.errors.argmin(axis=-1) + 1)
