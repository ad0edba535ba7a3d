"""States as named arrays, and back, without losing a bit."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aqg.core.budget import Budget
from aqg.core.optimizers import OptimizerState
from aqg.core.round import Clients
from aqg.core.server import Model
from aqg.core.step_sizes import StepState
from aqg.core.track import Track

Arrays = Mapping[str, NDArray[Any]]

_STAGE = "stage/"
"""What the names of stages' arrays begin with: ``stage/NAME/FIELD``."""


def clients_to_arrays(state: Clients) -> dict[str, NDArray[Any]]:
    """Return clients' state as arrays that any array format can hold."""
    return {
        "num_params": np.array(state.num_params, np.int64),
        "mirrors": state.track.position,
        "directions": state.track.direction,
        "skipped_rounds": state.skipped_rounds,
        **{
            f"{_STAGE}{name}/{field}": table
            for name, fields in state.stages.items()
            for field, table in fields.items()
        },
    }


def clients_from_arrays(arrays: Arrays) -> Clients:
    stages: dict[str, dict[str, NDArray[Any]]] = {}
    for key, table in arrays.items():
        if key.startswith(_STAGE):
            name, field = key.removeprefix(_STAGE).split("/")
            stages.setdefault(name, {})[field] = np.array(table)
    mirrors = np.array(arrays["mirrors"])
    directions = np.array(arrays["directions"])
    track = Track(mirrors, np.zeros((len(mirrors), 0)), directions, np.asarray(mirrors.any(axis=1)))
    skipped_rounds = np.array(arrays["skipped_rounds"])
    return Clients(int(arrays["num_params"]), track, skipped_rounds, stages)


def model_to_arrays(model: Model) -> dict[str, NDArray[Any]]:
    return {
        "round": np.array(model.round, np.int64),
        "parameters": model.parameters,
        "total": model.total,
        "history": np.array(model.history, np.float64),
        "momentum": model.optimizer.momentum,
        "variance": model.optimizer.variance,
        "velocity": model.velocity,
        "velocity_direction": model.direction,
        "rest": model.rest,
        "quantum": np.array(model.quantum),
        "gap": np.array(model.gap),
        "is_moved": np.array(model.is_moved),
        "num_sent": np.array(model.num_sent, np.int64),
        "budget": np.array([*model.budget, model.upload_energy]),
        **({} if model.step is None else _step_to_arrays(model.step)),
    }


def model_from_arrays(arrays: Arrays) -> Model:
    *budget, upload_energy = arrays["budget"].tolist()
    return Model(
        round=int(arrays["round"]),
        parameters=np.array(arrays["parameters"]),
        velocity=np.array(arrays["velocity"]),
        direction=np.array(arrays["velocity_direction"]),
        total=np.array(arrays["total"]),
        history=tuple(arrays["history"].tolist()),
        optimizer=OptimizerState(np.array(arrays["momentum"]), np.array(arrays["variance"])),
        rest=np.array(arrays["rest"]),
        quantum=float(arrays["quantum"]),
        gap=float(arrays["gap"]),
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
