"""What is to be learned, and by whom: the input of every simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aqg.core.types import FloatArray
    from aqg.objectives.base import Objective


class Samples(NamedTuple):
    """Features ``(n, f)`` and labels ``(n,)``."""

    features: FloatArray
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Problem:
    """An objective, each client's samples, the starting point and (if any) a test set.

    The loss that is reported is the mean over clients of their own loss, ``(1/M) Σ_m f_m(θ)``,
    weighted where clients are.
    """

    objective: Objective
    clients: tuple[Samples, ...]
    initial_params: FloatArray
    test: Samples | None = None

    @property
    def num_clients(self) -> int:
        """``M``."""
        return len(self.clients)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The precision everything is computed in."""
        return self.initial_params.dtype

    def test_accuracy(self, params: FloatArray) -> float | None:
        """Return the fraction of test samples that the model gets right."""
        if self.test is None or not np.isfinite(params).all():
            return None
        predicted = self.objective.predict(params, self.test.features)
        return float(np.mean(predicted == self.test.labels))
