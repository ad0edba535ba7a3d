"""States as named arrays, and back, without losing a bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.core.budget import Budget
from aqg.core.downlink import DownlinkState
from aqg.core.links import Link
from aqg.core.optimizers import OptimizerState
from aqg.core.public import Rates
from aqg.core.round import Clients
from aqg.core.server import Model
from aqg.core.step_sizes import StepState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[Any]]

_STAGE = "stage/"
"""What the names of stages' arrays begin with: ``stage/NAME/FIELD``."""


def clients_to_arrays(state: Clients) -> dict[str, NDArray[Any]]:
    """Return clients' state as arrays that any array format can hold."""
    return {
        "num_params": np.array(state.num_params, np.int64),
        "mirrors": state.link.mirror,
        "directions": state.link.direction,
        "silent_rounds": state.silent_rounds,
        **{
            f"{_STAGE}{name}/{field}": table
            for name, fields in state.stages.items()
            for field, table in fields.items()
        },
    }


def clients_from_arrays(arrays: Arrays) -> Clients:
    """Return the state that `clients_to_arrays` wrote."""
    stages: dict[str, dict[str, NDArray[Any]]] = {}
    for key, table in arrays.items():
        if key.startswith(_STAGE):
            name, field = key.removeprefix(_STAGE).split("/")
            stages.setdefault(name, {})[field] = np.array(table)
    mirrors = np.array(arrays["mirrors"])
    link = Link(mirrors, np.array(arrays["directions"]), np.asarray(mirrors.any(axis=1)))
    silent_rounds = np.array(arrays["silent_rounds"])
    return Clients(int(arrays["num_params"]), link, silent_rounds, stages)


def model_to_arrays(model: Model) -> dict[str, NDArray[Any]]:
    """Return the model and what moves it as arrays."""
    return {
        "round": np.array(model.round, np.int64),
        "parameters": model.parameters,
        "total": model.total,
        "history": np.array(model.history, np.float64),
        "momentum": model.optimizer.momentum,
        "variance": model.optimizer.variance,
        "is_moved": np.array(model.is_moved),
        "num_sent": np.array(model.num_sent, np.int64),
        "budget": np.array([*model.budget, model.upload_energy]),
        **({} if model.downlink is None else _downlink_to_arrays(model.downlink)),
        **({} if model.step is None else _step_to_arrays(model.step)),
    }


def model_from_arrays(arrays: Arrays) -> Model:
    """Return the model that `model_to_arrays` wrote."""
    *budget, upload_energy = arrays["budget"].tolist()
    return Model(
        round=int(arrays["round"]),
        parameters=np.array(arrays["parameters"]),
        total=np.array(arrays["total"]),
        history=tuple(arrays["history"].tolist()),
        optimizer=OptimizerState(np.array(arrays["momentum"]), np.array(arrays["variance"])),
        downlink=_downlink_from_arrays(arrays) if "public_total" in arrays else None,
        is_moved=bool(arrays["is_moved"]),
        step=_step_from_arrays(arrays) if "step_start" in arrays else None,
        num_sent=int(arrays["num_sent"]),
        budget=Budget(*budget),
        upload_energy=upload_energy,
    )


_STEP_VECTORS = ("start", "mean")


def _step_to_arrays(state: StepState) -> dict[str, NDArray[Any]]:
    numbers = [number for name, number in state._asdict().items() if name not in _STEP_VECTORS]
    vectors = {f"step_{name}": getattr(state, name) for name in _STEP_VECTORS}
    return {**vectors, "step_numbers": np.array(numbers, np.float64)}


def _step_from_arrays(arrays: Arrays) -> StepState:
    vectors: dict[str, Any] = {n: np.array(arrays[f"step_{n}"]) for n in _STEP_VECTORS}
    names = [name for name in StepState._fields if name not in _STEP_VECTORS]
    numbers = arrays["step_numbers"].tolist()
    return StepState(**vectors, **dict(zip(names, numbers, strict=True)))


def _downlink_to_arrays(state: DownlinkState) -> dict[str, NDArray[Any]]:
    return {
        "public_total": state.total,
        "public_direction": state.direction,
        "public_residual": state.residual,
        "public_gap": np.array(state.gap),
        "public_passed": np.array(state.passed),
        "public_rates": np.array(state.rates or (), np.float64),
    }


def _downlink_from_arrays(arrays: Arrays) -> DownlinkState:
    rates = arrays["public_rates"].tolist()
    return DownlinkState(
        total=np.array(arrays["public_total"]),
        direction=np.array(arrays["public_direction"]),
        residual=np.array(arrays["public_residual"]),
        gap=float(arrays["public_gap"]),
        passed=bool(arrays["public_passed"]),
        rates=Rates(*rates) if rates else None,
    )
