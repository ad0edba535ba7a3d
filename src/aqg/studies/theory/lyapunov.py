"""The Lyapunov function along a run, and the linear rate that fits it.

``V^k = f(θ^k) - f* + Σ_{d=1..D} β_d ‖θ^{k+1-d} - θ^{k-d}‖²`` with ``β_d = (1/α) Σ_{j≥d} ξ_j`` and
``f = Σ_m w_m f_m``. Steps before the first round count as zero.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from aqg.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aqg.core.types import Float64Array, FloatArray
    from aqg.sim.record import RoundRecord

_ROUNDING = 1e-11
"""Below this part of its first value, ``V`` is a difference of rounded losses."""


class Simulation(Protocol):
    """What a simulator offers to be watched."""

    @property
    def parameters(self) -> FloatArray:
        """The current model."""

    def run_round(self, evaluate: bool = True) -> RoundRecord:
        """Run one round."""


@dataclass(frozen=True)
class LyapunovTrace:
    """``V^k`` and ``f(θ^k) - f*`` for ``k = 1, 2, …``, both of the sum over clients."""

    values: Float64Array
    residuals: Float64Array

    @property
    def above_rounding(self) -> int:
        """How many of the values are more than rounding."""
        small = np.flatnonzero(~(self.values > _ROUNDING * self.values[0]))
        return int(small[0]) if len(small) else len(self.values)

    @property
    def decrease_share(self) -> float:
        """The part of the rounds in which ``V`` did not rise."""
        steps = np.diff(self.values[: self.above_rounding])
        return float(np.mean(steps <= 0)) if len(steps) else float("nan")

    @property
    def fitted_rate(self) -> float:
        """``σ`` of the ``V^k ≈ C σ^k`` that fits the later half best."""
        return fit_rate(self.values[: self.above_rounding])


def step_weights(weights: Sequence[float], alpha: float) -> Float64Array:
    """Return ``β_1..β_D``.

    >>> step_weights((0.25, 0.25), alpha=0.5)
    array([1. , 0.5])
    """
    if not alpha > 0:
        raise ConfigError(f"alpha is {alpha}; it must be above 0")
    beta: Float64Array = np.cumsum(np.asarray(weights, np.float64)[::-1])[::-1] / alpha
    return beta


def watch_run(
    simulation: Simulation,
    num_rounds: int,
    num_clients: int,
    minimum: float,
    weights: Sequence[float],
    alpha: float,
    report: Callable[[int], None] | None = None,
) -> LyapunovTrace:
    """Run and measure ``V`` before every round.

    Args:
        simulation: at its first round.
        num_rounds: how many rounds to run.
        num_clients: ``M``; reported losses and ``minimum`` are means over the clients.
        minimum: ``f*/M``.
        weights: ``ξ_1..ξ_D``.
        alpha: the step size.
        report: is told the number of every finished round.

    """
    beta = step_weights(weights, alpha)
    steps: deque[float] = deque(maxlen=max(1, len(beta)))
    values, residuals = [], []
    before = simulation.parameters.astype(np.float64)
    for number in range(1, num_rounds + 1):
        moved = sum(b * step for b, step in zip(beta, steps, strict=False))
        record = simulation.run_round()
        if record.loss is None or not np.isfinite(record.loss):
            break
        residual = num_clients * (record.loss - minimum)
        residuals.append(residual)
        values.append(residual + moved)
        after = simulation.parameters.astype(np.float64)
        steps.appendleft(float(np.sum((after - before) ** 2)))
        before = after
        if report is not None:
            report(number)
    return LyapunovTrace(np.array(values), np.array(residuals))


def fit_rate(values: Float64Array) -> float:
    """Return the ``σ`` of the line through the logarithms of the later half; NaN if there is none.

    >>> round(fit_rate(5.0 * 0.9 ** np.arange(40)), 12)
    0.9
    """
    half = values[len(values) // 2 :]
    half = half[half > 0]
    if len(half) < 2:
        return float("nan")
    slope = np.polyfit(np.arange(len(half)), np.log(half), 1)[0]
    return float(np.exp(slope))
