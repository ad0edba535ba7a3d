"""How far the model moved lately: the one number that replaces its history.

The paper's criteria compare an innovation with ``1/(α²M²) Σ_d ξ_d ‖θ^{k+1-d} - θ^{k-d}‖²``. With
``θ^{k+1} = θ^k - α·direction`` each term is ``ξ_d ‖direction^{k-d}‖²/M²``: the step size cancels,
and only the server needs the history. Server optimizers with momentum shrink the number by their
`fresh_share`.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul

from aqg.errors import ConfigError


@dataclass(frozen=True)
class Movement:
    """The weights ``ξ_1..ξ_D`` of the last ``D`` steps.

    Attributes:
        weights: ``ξ_d``, newest step first.
        fill: what the steps before the first round count as. ``"zero"``: nothing (the paper).
            ``"mean"``: the mean of those that exist, so the early rounds are not stricter.

    """

    weights: tuple[float, ...]
    fill: str = "zero"

    def __post_init__(self) -> None:
        if self.fill not in ("zero", "mean"):
            raise ConfigError(f"fill is {self.fill!r}; choose 'zero' or 'mean'")
        if not self.weights or min(self.weights) < 0:
            raise ConfigError(f"movement weights {self.weights} must be non-empty and not negative")

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
