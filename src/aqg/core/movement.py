"""How far the model moved lately: the one number that replaces its history.

The paper's criteria compare an innovation with ``1/(α²M²) Σ_d ξ_d ‖θ^{k+1-d} - θ^{k-d}‖²``. With
``θ^{k+1} = θ^k - α·direction`` each term is ``ξ_d ‖direction^{k-d}‖²/M²``: the step size cancels,
and only the server needs the history. Server optimizers with momentum shrink the number by their
`fresh_share`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import mul
from typing import TYPE_CHECKING

import numpy as np

from aqg.errors import ConfigError

if TYPE_CHECKING:
    from aqg.core.types import Float64Array


@dataclass(frozen=True)
class Movement:
    """The weights ``ξ_1..ξ_D`` of the last ``D`` steps.

    Attributes:
        weights: ``ξ_d``, newest step first.
        fill: what the steps before the first round count as. ``"zero"``: nothing (the paper).
            ``"mean"``: the mean of those that exist, so the early rounds are not stricter.
        widest: up to so many times the movement is tolerated of a client that differs from the
            others; see `widened`.

    """

    weights: tuple[float, ...]
    fill: str = "zero"
    widest: float = 1.0

    def __post_init__(self) -> None:
        if self.fill not in ("zero", "mean"):
            raise ConfigError(f"fill is {self.fill!r}; choose 'zero' or 'mean'")
        if not self.weights or min(self.weights) < 0:
            raise ConfigError(f"movement weights {self.weights} must be non-empty and not negative")
        if not 1 <= self.widest < math.inf:
            raise ConfigError(f"widest is {self.widest}; it must be at least 1 and finite")

    @property
    def widest_weights(self) -> tuple[float, ...]:
        """``ξ_1..ξ_D`` for a client that is tolerated most: what a guarantee has to reckon with.

        >>> Movement((0.5, 0.25), widest=3.0).widest_weights
        (1.5, 0.75)
        """
        return tuple(self.widest * weight for weight in self.weights)

    def of(self, history: tuple[float, ...]) -> float:
        """Return the movement after steps with these ``‖direction‖²/M²``, newest first.

        >>> Movement((0.5, 0.5)).of((4.0,)), Movement((0.5, 0.5), fill="mean").of((4.0,))
        (2.0, 4.0)
        """
        if not history:
            return 0.0
        total: float = sum(map(mul, self.weights, history))
        if self.fill == "mean" and len(history) < len(self.weights):
            known = sum(self.weights[: len(history)])
            total *= sum(self.weights) / known if known > 0 else 1.0
        return total

    def extend(self, history: tuple[float, ...], step: float) -> tuple[float, ...]:
        """Return ``history`` with a new step in front, no longer than needed."""
        return (step, *history)[: len(self.weights)]

    def widened(self, movement: float | Float64Array, energies: Float64Array) -> Float64Array:
        """Return what each client may be off by: ``min(max(t, ‖ref_m‖²), widest·t)``.

        The movement ``t`` is the energy of the mean gradient. Where clients agree, each one's own
        gradient has about the same energy, and so have the errors of all if they point the same
        way. The more a client's gradient exceeds the mean, the less the clients agree: then their
        errors do not add up either, and more of them can be tolerated.

        >>> Movement((1.0,), widest=3.0).widened(2.0, np.array([1.0, 5.0, 100.0]))
        array([2., 5., 6.])
        """
        return np.minimum(np.maximum(energies, movement), self.widest * movement)
