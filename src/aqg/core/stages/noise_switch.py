"""The switch of `auto`: a mirror while updates repeat themselves, sparse ternary while they do not.

The mirror saves bytes while the next update is nearly the last one. While updates are mostly noise,
each client sends a few coordinates as sparse ternary, with error feedback. A client that is sampled
seldom would hold residuals that are long out of date; it sends an unbiased stochastic ternary
vector instead, and keeps no residual. With ``keep`` it sends more coordinates instead, the more the
longer it was not asked, and its residuals stay small; and the smallest models are sent whole in
every round, rounded at random to a few bits, as their frames are hardly longer for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from aqg.core.policies import Always
from aqg.core.quantizers import Stochastic
from aqg.core.recipe import Recipe
from aqg.core.sparsifiers import TERNARY_WIDTH, AdaptiveTernary, densities
from aqg.core.stage import Plain
from aqg.core.stages.feedback import ErrorFeedback
from aqg.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aqg.core.noise import NoiseMeter
    from aqg.core.stage import Flow, StageState
    from aqg.core.types import Float64Array

RARELY = 4.0
"""Mean rounds between two updates of a client from which residuals count as out of date."""
WHOLE_WIDTH = 4
"""Bits per coordinate for the smallest models."""
SETTLED = 16
"""With ``keep``, the update from which on a client may keep a mirror. The first ones repeat
themselves in any training, and a mirror that is given up soon costs more than it saves."""
MIRROR, SPARSE, STOCHASTIC = range(3)
"""The branches."""


@dataclass(frozen=True)
class NoiseSwitch(Plain):
    """Sends each client the way that suits the noise in its updates.

    Attributes:
        meter: tells noise from signal.
        overhead: bytes that the transport adds to every message; 0 if nothing is known of it.
        keep: the least part of all coordinates that a client sends, if it is asked in every round,
            and more otherwise or where its updates are dense (`AdaptiveTernary`); 0: as few as make
            each byte count most.
        pause: every how many rounds a client is asked, as the server says; 0 if it has not, which
            leaves it to the meter.

    """

    meter: NoiseMeter
    overhead: float = 0.0
    keep: float = 0.0
    pause: float = 0.0
    name: ClassVar[str] = "noise"
    vectors: ClassVar[str] = "read"

    def __post_init__(self) -> None:
        if not 0 <= self.overhead < math.inf:
            raise ConfigError(f"overhead is {self.overhead}; it must be at least 0 and finite")

    @cached_property
    def branches(self) -> tuple[Recipe, ...]:
        """Sparse ternary with error feedback, and stochastic rounding without."""
        always = Always(TERNARY_WIDTH)
        ternary = AdaptiveTernary(self.overhead, self.keep)
        sparse = Recipe(policy=always, quantizer=ternary, stages=(ErrorFeedback(),))
        rounded = Always(WHOLE_WIDTH) if self.keep else always
        return (sparse, Recipe(policy=rounded, quantizer=Stochastic()))

    def for_transport(self, overhead: float) -> NoiseSwitch:
        """Return the switch for another transport, unless it was told of one."""
        return self if self.overhead else replace(self, overhead=overhead)

    def for_participation(self, asked: float) -> NoiseSwitch:
        """Return the switch for clients that are asked in this part of all rounds."""
        return replace(self, pause=1.0 / asked) if self.keep else self

    def init(self, num_params: int, _dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        """Start where the meter does."""
        notes = self.meter.init(num_params)
        return {"notes": notes, "branch": np.array(self._branch(notes), np.int8)}

    def before(self, state: StageState, flow: Flow) -> tuple[StageState, Flow]:
        """Show every client's update to its meter, and choose."""
        updates = flow.space.rows(flow.vectors, np.arange(len(state["notes"])))
        pairs = zip(state["notes"], updates, strict=True)
        notes = np.array([self.meter.observe(row, update, flow.round) for row, update in pairs])
        branch = np.array([self._branch(row) for row in notes], np.int8)
        advice = np.array([(self.meter.noise_share(r), self._pause(r)) for r in notes])
        if self.keep:
            advice = np.column_stack([advice, [densities(update) for update in updates]])
        return {"notes": notes, "branch": branch}, flow._replace(advice=advice)

    def _branch(self, notes: Float64Array) -> int:
        if self.keep and self.meter.is_of_small_model(notes):
            return STOCHASTIC
        is_settled = not self.keep or self.meter.num_seen(notes) >= SETTLED
        if is_settled and not self.meter.is_noisy(notes):
            return MIRROR
        if self.keep or self.meter.mean_pause(notes) < RARELY:
            return SPARSE
        return STOCHASTIC

    def _pause(self, notes: Float64Array) -> float:
        return self.pause or self.meter.mean_pause(notes)
