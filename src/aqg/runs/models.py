"""The models of a run: where it starts from, and the files it leaves behind.

The best model is the one with the best value of the first test metric that says which way is
better; or, without one, with the lowest training loss. Up to some fifty models of a run are
measured, the last among them. Ties go to the earlier one.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aqg.errors import ConfigError
from aqg.runs.files import write_atomically
from aqg.weights import BEST, FINAL, check_names, fill_module, read_notes, to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from aqg.core.types import FloatArray
    from aqg.objectives.base import Objective
    from aqg.objectives.layout import Buffers
    from aqg.sim.engine import FastSimulation
    from aqg.sim.problem import Problem
    from aqg.sim.reference import ReferenceSimulation


def start_from(problem: Problem, tensors: Mapping[str, Any], source: str) -> Problem:
    """Return the problem with these tensors as its starting point, frozen ones included.

    Args:
        problem: whose model has the same names and shapes.
        tensors: by name.
        source: the file, for messages.

    """
    objective: Any = problem.objective
    if getattr(objective, "model_layout", None) is not None:
        module = copy.deepcopy(objective.module)
        fill_module(module, tensors, source)
        started = objective.with_module(module)
        params = started.init_params(0).astype(problem.dtype)
        return replace(problem, objective=started, initial_params=params)
    check_names(dict(objective.layout), tensors, source)
    flat = [np.asarray(tensors[name], problem.dtype).reshape(-1) for name, _ in objective.layout]
    for (name, _), values in zip(objective.layout, flat, strict=True):
        if not np.isfinite(values).all():
            raise ConfigError(f"tensor {name!r} of {source!r} holds NaN or infinity")
    return replace(problem, initial_params=np.concatenate(flat))


def name_tensors(objective: Objective, params: FloatArray, buffers: Buffers | None) -> Any:
    """Return all tensors of a model by name: a module's own state, or those of a closed form."""
    layout = getattr(objective, "model_layout", None)
    if layout is not None:
        module = copy.deepcopy(objective.module)  # type: ignore[attr-defined]
        layout.load(module, params)
        if buffers is not None:
            layout.write_buffers(module, buffers)
        return module.state_dict()
    tensors: dict[str, Any] = {}
    position = 0
    for name, shape in objective.layout:
        size = math.prod(shape)
        tensors[name] = params[position : position + size].reshape(shape)
        position += size
    return tensors


def shared_buffers(simulation: FastSimulation | ReferenceSimulation) -> Buffers | None:
    """Return the statistics that go with the model that is kept; None where none are shared.

    Files of a run whose clients keep statistics of their own hold those that the module came with.
    """
    layout = getattr(simulation.problem.objective, "model_layout", None)
    is_shared = layout is not None and layout.policy == "average"
    return simulation.statistics.averaged() if is_shared else None


class Measured(NamedTuple):
    """How good a model is.

    Attributes:
        rounds: after how many rounds.
        measure: what was measured, ``test_NAME`` or ``loss``.
        value: of it.

    """

    rounds: int
    measure: str
    value: float


class ModelFiles:
    """Keeps the best model of a run in mind, and writes it and the final one.

    Args:
        directory: of the run.
        directions: for each test metric, whether more of it is better; None where nobody said.
        next_round: the first round that is still to be run.

    Attributes:
        best: how good the best model is, None before the first.

    """

    def __init__(
        self, directory: Path, directions: Mapping[str, bool | None], next_round: int = 1
    ) -> None:
        self._directory = directory
        self._directions = directions
        self._pending: bytes | None = None
        self.best = self._read(next_round)

    def _read(self, next_round: int) -> Measured | None:
        """Return the best model so far; one of a round that is run again will be found again."""
        path = self._directory / BEST
        if not path.exists():
            return None
        notes = read_notes(path)
        try:
            found = Measured(int(notes["rounds"]), notes["measure"], float(notes["value"]))
        except (KeyError, ValueError, TypeError):
            return None
        return found if found.rounds < next_round else None

    def consider(
        self,
        rounds: int,
        metrics: Mapping[str, float],
        loss: float | None,
        tensors: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Remember a model if it is the best so far.

        Args:
            rounds: after how many rounds it is.
            metrics: what was measured of it on the test set.
            loss: its training loss, None where unknown.
            tensors: makes its tensors, by name.

        """
        name = next((name for name in metrics if self._directions.get(name) is not None), None)
        measure, value = ("loss", loss) if name is None else (f"test_{name}", metrics[name])
        if value is None or not math.isfinite(value):
            return
        best = self.best
        if best is not None and best.measure == measure:
            sign = -1.0 if name is not None and self._directions[name] else 1.0
            if not sign * value < sign * best.value:
                return
        elif best is not None and measure == "loss":
            return  # beyond numbers, or not measured this time
        self.best = Measured(rounds, measure, value)
        self._pending = to_bytes(tensors(), self.best._asdict())

    def save(self) -> None:
        """Write the best model if it is a new one."""
        if self._pending is not None:
            write_atomically(self._directory / BEST, self._pending)
            self._pending = None

    def finish(self, rounds: int, tensors: Callable[[], Mapping[str, Any]]) -> None:
        """Write both models."""
        self.save()
        write_atomically(self._directory / FINAL, to_bytes(tensors(), {"rounds": rounds}))
