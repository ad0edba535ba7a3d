"""A simulation between two rounds: the same for every engine, so runs can change engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray

from aqg.core.arrays import from_arrays, to_arrays
from aqg.core.round import Clients
from aqg.core.server import Model
from aqg.errors import RunError
from aqg.protocol.log import LogState
from aqg.sim.late import Pending

_VARYING = (
    *("model/history", "statistics/mean", "late/frames", "late/frames/lengths"),
    *("log/entries", "log/entries/lengths", "log/snapshot"),
)
"""Arrays that are not of one length."""
_OPTIONAL = ("clients/stages/", "model/step/", "statistics/", "log/", "late/")


class SimulationState(NamedTuple):
    """Server and clients together, in NumPy."""

    model: Model  # the model and what moves it
    clients: Clients  # what the clients remember; their links are the server's as well, being equal
    # of the model, as `RunStatistics.to_arrays` returns them; None: there are none to carry
    statistics: Mapping[str, NDArray[Any]] | None = None
    # of the model, and who has read how much of it; None where clients receive models
    log: LogState | None = None
    late: Pending | None = None  # replies on their way; None where time is not simulated

    @property
    def round(self) -> int:
        return self.model.round

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        return to_arrays(self)

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> SimulationState:
        try:
            return from_arrays(SimulationState, arrays)
        except KeyError as error:
            raise RunError(
                f"checkpoint has no {error.args[0]!r}; it is not one of a simulation"
            ) from None


def check_fits(state: SimulationState, expected: SimulationState) -> None:
    """Raise `RunError` unless a state has the arrays of another, with the same shapes."""
    shapes = {name: array.shape for name, array in state.to_arrays().items()}
    for name, array in expected.to_arrays().items():
        found = shapes.pop(name, None)
        if found != array.shape and name not in _VARYING:
            raise RunError(
                f"checkpoint does not fit the run: {name!r} is not of shape {array.shape}"
            )
    extra = [name for name in shapes if name.startswith(_OPTIONAL) and name not in _VARYING]
    if extra:
        raise RunError(f"checkpoint does not fit the run: it has {extra[0]!r}")
