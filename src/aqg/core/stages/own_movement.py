"""How far the client's own vector moved, in place of how far the model did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from aqg.core.stage import Plain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aqg.core.stage import Flow, StageState


@dataclass(frozen=True)
class OwnMovement(Plain):
    """Gives the policy ``‖v^k - v^{k-1}‖²``; zero at the first vector."""

    name: ClassVar[str] = "own_movement"
    vectors: ClassVar[str] = "device"

    def init(self, num_params: int, dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        """Start from zero, which stands for no vector yet."""
        return {"last": np.zeros(num_params, dtype)}

    def before(self, state: StageState, flow: Flow) -> tuple[StageState, Flow]:
        """Compare with the last vector, and keep this one."""
        movement = flow.space.distances(flow.vectors, state["last"])
        return {"last": flow.vectors}, flow._replace(movement=movement)
