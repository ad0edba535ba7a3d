"""States as named arrays, and back, without losing a bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.core.client import ClientState
from aqg.core.optimizers import OptimizerState
from aqg.core.server import ServerState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[Any]]


def client_to_arrays(state: ClientState) -> dict[str, NDArray[Any]]:
    """Return a client's state as arrays that any array format can hold."""
    return {
        "mirror": state.mirror,
        "residual": state.residual,
        "average": state.average,
        "notes": state.notes,
        "stored_errors": state.stored_errors,
        "silent_rounds": np.array(state.silent_rounds, np.int64),
    }


def client_from_arrays(arrays: Arrays) -> ClientState:
    """Return the state that `client_to_arrays` wrote."""
    return ClientState(
        mirror=np.array(arrays["mirror"]),
        residual=np.array(arrays["residual"]),
        average=np.array(arrays["average"]),
        notes=np.array(arrays["notes"]),
        stored_errors=np.array(arrays["stored_errors"]),
        silent_rounds=int(arrays["silent_rounds"]),
    )


def server_to_arrays(state: ServerState) -> dict[str, NDArray[Any]]:
    """Return the server's state as arrays that any array format can hold."""
    return {
        "round": np.array(state.round, np.int64),
        "parameters": state.parameters,
        "mirrors": np.stack(state.mirrors),
        "total": state.total,
        "history": np.array(state.history, np.float64),
        "momentum": state.optimizer.momentum,
        "variance": state.optimizer.variance,
        "passing": state.passing,
    }


def server_from_arrays(arrays: Arrays) -> ServerState:
    """Return the state that `server_to_arrays` wrote."""
    return ServerState(
        round=int(arrays["round"]),
        parameters=np.array(arrays["parameters"]),
        mirrors=tuple(np.array(mirror) for mirror in arrays["mirrors"]),
        total=np.array(arrays["total"]),
        history=tuple(arrays["history"].tolist()),
        optimizer=OptimizerState(np.array(arrays["momentum"]), np.array(arrays["variance"])),
        passing=np.array(arrays["passing"]),
    )
