"""The quantization errors of a client's last upload, which the paper's criterion asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from aqg.core.stage import Plain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aqg.core.stage import Flow, Outcome, StageState


@dataclass(frozen=True)
class StoredErrors(Plain):
    """Keeps ``‖ε̂_b‖²`` for ``b = 1..b_max`` as they were at the last upload; zeros before it."""

    max_width: int
    name: ClassVar[str] = "stored_errors"
    vectors: ClassVar[str] = "unused"

    def init(self, _num_params: int, _dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        """Start from zero errors."""
        return {"errors": np.zeros(self.max_width)}

    def before(self, state: StageState, flow: Flow) -> tuple[StageState, Flow]:
        """Give them to the policy."""
        return state, flow._replace(stored_errors=state["errors"])

    def after(self, state: StageState, outcome: Outcome) -> StageState:
        """Note those of the senders."""
        if not len(outcome.senders):
            return state
        errors = state["errors"].copy()
        errors[outcome.senders] = outcome.innovation.errors[outcome.senders]
        return {"errors": errors}
