"""Rules that follow a client's own losses from round to round.

A schedule keeps a few numbers per client, its notes, and turns them into the one number that the
policy is given in place of the movement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from aqg.core.grids import MAX_WIDTH
from aqg.core.policies import Decision
from aqg.core.quantizers import NormOnly, Stochastic
from aqg.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.core.innovation import Innovation
    from aqg.core.messages import Upload
    from aqg.core.types import Float64Array, FloatArray


class Schedule(Protocol):
    """See the module's text."""

    def init(self) -> Float64Array:
        """Return the notes before the first round."""

    def observe(self, notes: Float64Array, loss: float) -> Float64Array:
        """Return the notes after a round's loss; one that is not finite changes nothing."""

    def signal(self, notes: Float64Array) -> float:
        """Return the number for the policy."""


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
        """Average the loss, and double ``q`` on a plateau."""
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

    def signal(self, notes: Float64Array) -> float:
        """Return the width."""
        return float(notes[0])


@dataclass(frozen=True)
class Told:
    """Send every round, with the width that a schedule gives."""

    def decide(
        self,
        innovation: Innovation,
        movement: float | Float64Array,
        stored_errors: Float64Array,  # noqa: ARG002
    ) -> Decision:
        """Send."""
        shape = innovation.squared_norm.shape
        return Decision(np.ones(shape, np.bool_), np.full(shape, movement, np.int64))


@dataclass(frozen=True)
class PowersOfTwo(NormOnly):
    """QSGD with ``q = 2^(b-2)`` levels at ``b`` bits."""

    def quantize(
        self, delta: FloatArray, innovation: Innovation, width: int, key: Sequence[int]
    ) -> Upload:
        """Round every coordinate up or down at random, by its distance."""
        return Stochastic(1 << (width - 2)).quantize(delta, innovation, width, key)
