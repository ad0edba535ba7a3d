"""More tolerance for clients that differ from the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from aqg.core.space import energies
from aqg.core.stage import Plain
from aqg.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aqg.core.recipe import Recipe
    from aqg.core.stage import Flow, Outcome, StageState
    from aqg.core.types import Float64Array


@dataclass(frozen=True)
class WiderTolerance(Plain):
    """Gives each client the movement ``min(max(t, ‖ref_m‖²), widest·t)`` to compare with.

    The movement ``t`` is the energy of the mean gradient. Where clients agree, each one's own
    gradient has about the same energy, and so have the errors of all if they point the same way.
    The more a client's gradient exceeds the mean, the less the clients agree: then their errors do
    not add up either, and more of them can be tolerated.

    Attributes:
        widest: the most that a client is given, in movements of the server.

    """

    widest: float
    name: ClassVar[str] = "wider_tolerance"
    vectors: ClassVar[str] = "unused"

    def __post_init__(self) -> None:
        if not 1 <= self.widest < math.inf:
            raise ConfigError(f"widest is {self.widest}; it must be at least 1 and finite")

    def init(self, _num_params: int, _dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        """Start from ``‖ref_m‖² = 0``."""
        return {"energy": np.zeros(())}

    def before(self, state: StageState, flow: Flow) -> tuple[StageState, Flow]:
        """Widen the movement."""
        return state, flow._replace(movement=self.widened(flow.movement, state["energy"]))

    def after(self, state: StageState, outcome: Outcome) -> StageState:
        """Note the energy of the mirrors that moved."""
        if not len(outcome.senders):
            return state
        energy = state["energy"].copy()
        energy[outcome.senders] = [energies(mirror) for mirror in outcome.mirrors()]
        return {"energy": energy}

    def widened(self, movement: float | Float64Array, energy: Float64Array) -> Float64Array:
        """Return what each client may be off by.

        >>> WiderTolerance(3.0).widened(2.0, np.array([1.0, 5.0, 100.0]))
        array([2., 5., 6.])
        """
        return np.minimum(np.maximum(energy, movement), self.widest * movement)


def widest_weights(recipe: Recipe) -> tuple[float, ...]:
    """Return ``ξ_1..ξ_D`` for a client that is tolerated most: what a guarantee has to cover."""
    factors = [stage.widest for stage in recipe.stages if isinstance(stage, WiderTolerance)]
    return tuple(max(factors, default=1.0) * weight for weight in recipe.movement.weights)
