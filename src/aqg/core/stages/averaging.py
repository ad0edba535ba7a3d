"""A running average of the client's gradients, which is compressed in their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from aqg.core.stage import Plain
from aqg.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aqg.core.stage import Flow, StageState


@dataclass(frozen=True)
class RunningAverage(Plain):
    """``v ← (1 - η)·v + η·g``; the first gradient starts it.

    >>> from aqg.core.space import NumpySpace
    >>> NumpySpace().blend(np.array([[2.0, 0.0]]), np.array([[4.0, 4.0]]), weight=0.25)
    array([[2.5, 1. ]])
    """

    eta: float
    name: ClassVar[str] = "average"
    vectors: ClassVar[str] = "device"

    def __post_init__(self) -> None:
        if not 0 < self.eta <= 1:
            raise ConfigError(f"eta is {self.eta}; it must be above 0 and at most 1")

    def init(self, num_params: int, dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        """Start from zero, which stands for no gradient yet."""
        return {"average": np.zeros(num_params, dtype)}

    def before(self, state: StageState, flow: Flow) -> tuple[StageState, Flow]:
        """Pass the average on."""
        average = flow.space.blend(state["average"], flow.vectors, self.eta)
        return {"average": average}, flow._replace(vectors=average)
