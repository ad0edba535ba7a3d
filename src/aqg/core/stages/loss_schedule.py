"""Rules that follow a client's own losses from round to round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from aqg.core.grids import MAX_WIDTH
from aqg.core.stage import Plain
from aqg.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aqg.core.stage import Flow, StageState
    from aqg.core.types import Float64Array


@dataclass(frozen=True)
class LossSchedule(Plain):
    """Shows a client's losses to a rule and gives the policy its signal, in place of the movement.

    The loss of a round counts although its gradient cannot be used.
    """

    rule: DoublingLevels
    name: ClassVar[str] = "loss_schedule"
    vectors: ClassVar[str] = "unused"
    notes_faults: ClassVar[bool] = True

    def init(self, _num_params: int, _dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        """Start where the rule does."""
        return {"notes": self.rule.init()}

    def before(self, state: StageState, flow: Flow) -> tuple[StageState, Flow]:
        """Note the losses."""
        losses = flow.space.get(flow.losses).tolist()
        pairs = zip(state["notes"], losses, strict=True)
        notes = np.array([self.rule.observe(row, loss) for row, loss in pairs])
        signals = np.array([self.rule.signal(row) for row in notes])
        if flow.level_factors is None:
            return {"notes": notes}, flow._replace(movement=signals)
        num_levels = [
            self.rule.num_levels(row, factor)
            for row, factor in zip(notes, flow.level_factors.tolist(), strict=True)
        ]
        signals = np.array([count.bit_length() + 1.0 for count in num_levels])
        advice = np.array(num_levels, np.float64)[:, None]
        return {"notes": notes}, flow._replace(movement=signals, advice=advice)


def level_factors(weights: Float64Array) -> Float64Array | None:
    """Return DAdaQuant's ``q_m/q`` for clients of these weights; None where all are equal.

    ``q_m = q·w_m^(2/3)·√(Σ w^(2/3) / Σ w²)``: of all with the same variance of the weighted sum,
    ``Σ w²/q_m²``, these have the fewest levels.

    >>> level_factors(np.array([0.5, 1.5])).round(3)
    array([0.555, 1.154])
    >>> level_factors(np.ones(3)) is None
    True
    """
    if not len(weights) or (weights == weights[0]).all() or not (weights > 0).all():
        return None
    powers = weights ** (2 / 3)
    factors: Float64Array = powers * math.sqrt(powers.sum() / np.square(weights).sum())
    return factors


@dataclass(frozen=True)
class DoublingLevels:
    """DAdaQuant in time: the number of levels ``q`` doubles when the loss stops falling.

    With the running average ``Ĝ_t = ψ·Ĝ_{t-1} + (1 - ψ)·G_t`` of the losses, ``q`` doubles where
    ``Ĝ`` is not below what it was ``φ - 1`` rounds before, and then stays for ``φ`` rounds. A width
    of ``b`` bits stands for ``q = 2^(b-2)``, and is the signal.

    Attributes:
        start: ``q`` at the start, a power of two.
        patience: ``φ``.
        smoothing: ``ψ``.

    """

    start: int = 1
    patience: int = 50
    smoothing: float = 0.9

    def __post_init__(self) -> None:
        largest = 1 << (MAX_WIDTH - 2)
        if not 1 <= self.start <= largest or self.start & (self.start - 1):
            raise ConfigError(f"q is {self.start}; it must be a power of two in 1..{largest}")
        if not 2 <= self.patience <= 10_000:
            raise ConfigError(f"phi is {self.patience}; it must be in 2..10000")
        if not 0 <= self.smoothing < 1:
            raise ConfigError(f"psi is {self.smoothing}; it must be at least 0 and below 1")

    def init(self) -> Float64Array:
        """Return width, rounds since it changed, and the last ``φ`` averages, newest first."""
        width = self.start.bit_length() + 1
        return np.array([width, 0.0] + [math.inf] * self.patience)

    def observe(self, notes: Float64Array, loss: float) -> Float64Array:
        """Average the loss, and double ``q`` on a plateau; one that is not finite is ignored."""
        if not math.isfinite(loss):
            return notes
        newest = float(notes[2])
        if math.isfinite(newest):
            loss = self.smoothing * newest + (1.0 - self.smoothing) * loss
        after = np.concatenate([notes[:2], [loss], notes[2:-1]])
        after[1] += 1
        is_flat = after[1] >= self.patience and after[2] >= after[-1]
        if is_flat and after[0] < MAX_WIDTH:
            after[:2] = after[0] + 1, 0
        return after

    def num_levels(self, notes: Float64Array, factor: float) -> int:
        """Return ``q`` of a client that uses ``factor`` times as many levels as the average."""
        most = (1 << (MAX_WIDTH - 1)) - 1
        return min(most, max(1, round(factor * (1 << (int(notes[0]) - 2)))))

    def signal(self, notes: Float64Array) -> float:
        """Return the width."""
        return float(notes[0])
