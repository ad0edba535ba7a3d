"""A simulation between two rounds: the same for every engine, so runs can change engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqg.core.round import Clients
from aqg.core.server import (
    Model,
    clients_from_arrays,
    clients_to_arrays,
    model_from_arrays,
    model_to_arrays,
)
from aqg.core.types import Float64Array
from aqg.errors import RunError
from aqg.protocol.log import LogState

_VARYING = (
    *("is_moved", "history", "statistics"),
    *("log_lengths", "log_entries", "log_snapshot", "late_frames", "late_lengths"),
)
"""Arrays that are not of one length, or are checked elsewhere."""


class SimulationState(NamedTuple):
    """Server and clients together, in NumPy."""

    model: Model  # the model and what moves it
    clients: Clients  # what the clients remember; their links are the server's as well, being equal
    # of the model, as `RunStatistics.to_array` returns them; ``(0, 0)``: none
    statistics: Float64Array = np.zeros((0, 0))
    # of the model, and who has read how much of it; None where clients receive models
    log: LogState | None = None
    # replies on their way, as `aqg.sim.late.Replies.to_arrays` returns them; None where time is not
    # simulated
    late: Mapping[str, NDArray[Any]] | None = None

    @property
    def round(self) -> int:
        return self.model.round

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        return {
            **model_to_arrays(self.model),
            **clients_to_arrays(self.clients),
            "statistics": self.statistics,
            **({} if self.log is None else self.log.to_arrays()),
            **(self.late or {}),
        }

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> SimulationState:
        try:
            model, clients = model_from_arrays(arrays), clients_from_arrays(arrays)
            log = LogState.from_arrays(arrays) if "positions" in arrays else None
            late = {name: value for name, value in arrays.items() if name.startswith("late_")}
            return SimulationState(model, clients, arrays["statistics"], log, late or None)
        except KeyError as error:
            raise RunError(
                f"checkpoint has no {error.args[0]!r}; it is not one of a simulation"
            ) from None


def check_fits(state: SimulationState, expected: SimulationState) -> None:
    """Raise `RunError` unless a state has the arrays of another, with the same shapes."""
    shapes = {name: array.shape for name, array in state.to_arrays().items()}
    for name, array in expected.to_arrays().items():
        found = shapes.pop(name, None)
        if found != array.shape and (found is None or name not in _VARYING):
            raise RunError(
                f"checkpoint does not fit the run: {name!r} is not of shape {array.shape}"
            )
    extra = [name for name in shapes if name.startswith(("stage/", "step_", "log_", "late_"))]
    if extra:
        raise RunError(f"checkpoint does not fit the run: it has {extra[0]!r}")
