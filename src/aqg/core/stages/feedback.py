"""Error feedback: what was not sent is kept, and added to the next vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from aqg.core.stage import Plain
from aqg.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aqg.core.stage import Flow, Outcome, StageState


@dataclass(frozen=True)
class ErrorFeedback(Plain):
    """Sends ``C(g + e)`` and keeps ``e ← g + e - C(g + e)``, the residual.

    Seide et al., 1-Bit Stochastic Gradient Descent; Stich et al., Sparsified SGD with Memory.
    """

    name: ClassVar[str] = "feedback"
    vectors: ClassVar[str] = "device"

    def init(self, num_params: int, dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        """Start without a residual."""
        return {"residual": np.zeros(num_params, dtype)}

    def before(self, state: StageState, flow: Flow) -> tuple[StageState, Flow]:
        """Add the residual."""
        return state, flow._replace(vectors=flow.space.add(flow.vectors, state["residual"]))

    def after(self, _state: StageState, outcome: Outcome) -> StageState:
        """Keep what the upload left out; all of it, where nothing was sent."""
        space, senders = outcome.space, outcome.senders
        if not len(senders):
            return {"residual": outcome.vectors}
        pairs = zip(space.rows(outcome.vectors, senders), outcome.uploads, strict=True)
        left = np.stack([vector - upload.values(vector.dtype.type) for vector, upload in pairs])
        return {"residual": space.store(outcome.vectors, senders, left)}


@dataclass(frozen=True)
class ErrorControl(ErrorFeedback):
    """Keeps ``η·e``, of the error ``e ← (1 - η)·e + v - C(v)`` with ``v`` what was to be sent.

    Gao et al., EControl: Fast Distributed Optimization with Compression and Error Control.
    """

    eta: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.eta <= 1:
            raise ConfigError(f"eta is {self.eta}; it must be above 0 and at most 1")

    def after(self, state: StageState, outcome: Outcome) -> StageState:
        """Keep a part of what the upload left out, and the rest of what was kept before."""
        space, senders = outcome.space, outcome.senders
        kept = space.rows(state["residual"], senders)
        new = super().after(state, outcome)["residual"]
        if not len(senders):
            return {"residual": new}
        pairs = zip(kept, space.rows(new, senders), strict=True)
        rows = np.stack([(1 - self.eta) * old + self.eta * left for old, left in pairs])
        return {"residual": space.store(new, senders, rows)}
