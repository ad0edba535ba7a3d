"""A model's statistics in a simulation: who holds which, and what sending them costs.

Where the training of a module changes buffers, clients start every round from the server's and send
theirs back under the policy ``average``; under ``local`` each keeps its own and nothing travels.
Other objectives have nothing to carry. Metrics are those of the mean over the models, where one is
kept, and come with that of their statistics; losses are those of the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqg.core.quantizers import Verbatim
from aqg.core.recipe import Recipe
from aqg.core.types import BoolArray, Float64Array, IntArray, from_arrays, to_arrays
from aqg.errors import GradientError
from aqg.objectives.layout import Buffers
from aqg.objectives.statistics import SharedStatistics, describe_change
from aqg.sim.problem import Problem
from aqg.sim.record import StatisticsTraffic
from aqg.sim.training import Training

if TYPE_CHECKING:
    from aqg.objectives.module import ModuleObjective
    from aqg.sim.engine import Backend


class RunStatistics:
    """Of a simulation whose clients have nothing to carry."""

    are_averaged = False
    _measured: int | None = None  # with whose statistics losses are measured; None: with the mean

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        """The same problem, with an objective that uses the statistics."""

    def losses(self, backend: Backend, params: Any, clients: IntArray) -> Float64Array:
        with self.of_client(0):
            return backend.losses(params, clients)

    @contextmanager
    def of_client(self, client: int) -> Iterator[None]:
        """Measure with a client's statistics, and the server's own, not their mean."""
        before, self._measured = self._measured, client
        try:
            yield
        finally:
            self._measured = before

    def finish_round(self) -> StatisticsTraffic:
        return StatisticsTraffic()

    def buffers(self, client: int = 0) -> Buffers | None:  # noqa: ARG002
        """Return the server's buffers, or a client's own; None where there are none to carry."""
        return None

    def averaged(self) -> Buffers | None:
        """Return what goes with the mean of the models; None where nothing is shared."""
        return None

    def to_arrays(self) -> Mapping[str, NDArray[Any]] | None:
        return None

    def load(self, arrays: Mapping[str, NDArray[Any]] | None) -> None:
        """Go on from what `to_arrays` returned."""


def make_statistics(
    problem: Problem, recipe: Recipe, training: Training, weights: Float64Array
) -> RunStatistics:
    """Return what a simulation carries; statistics are as fine as the recipe's updates.

    Where clients do not train on minibatches, exact gradients must be repeatable.
    """
    if training.local.sees_all_samples:
        problem.objective.require_repeatable()
        return RunStatistics(problem)
    layout = getattr(problem.objective, "model_layout", None)
    if layout is None or not layout.carries_buffers:
        return RunStatistics(problem)
    if layout.policy == "local":
        return _Local(problem)
    is_fine = isinstance(recipe.quantizer, Verbatim)
    return _Averaged(problem, weights, fine=is_fine, average=training.step.average)


class _Kept(NamedTuple):
    """The fields of `SharedStatistics` that rounds change."""

    buffers: Buffers
    travels: BoolArray
    moves: BoolArray
    residual: Float64Array
    mean: Float64Array | None
    num_rounds: int


class _Averaged(RunStatistics):
    """One set of buffers for all, which the server averages."""

    are_averaged = True

    def __init__(
        self, problem: Problem, weights: Float64Array, *, fine: bool, average: float
    ) -> None:
        objective: ModuleObjective = problem.objective  # type: ignore[assignment]
        super().__init__(replace(problem, objective=objective.carrying(self)))
        self._weights, self._layout = weights, objective.model_layout
        self._shared = SharedStatistics.first(
            self._layout, objective.initial_buffers(), fine=fine, average=average
        )
        self._begin_round()

    def _begin_round(self) -> None:
        self._start, self._known = self._shared.received
        self._frames: dict[int, bytes] = {}
        self._faults: dict[int, str] = {}

    def buffers(self, client: int = 0) -> Buffers:  # noqa: ARG002
        return self._shared.buffers

    def averaged(self) -> Buffers:
        return self.evaluation()

    def start(self, client: int) -> Buffers:  # noqa: ARG002
        return self._start

    def finish(self, client: int, buffers: Buffers) -> None:
        try:
            frame = describe_change(self._layout, self._start, buffers, self._known)
            self._frames[client] = frame
        except GradientError as error:
            self._faults[client] = str(error)

    def evaluation(self) -> Buffers:
        return self._shared.averaged if self._measured is None else self._start

    def views(self) -> Sequence[AbstractContextManager[None]]:
        return [nullcontext()]

    def finish_round(self) -> StatisticsTraffic:
        down, frames = len(self._shared.broadcast()), sorted(self._frames.items())
        messages = [(float(self._weights[m]), self._shared.read(frame)) for m, frame in frames]
        up = tuple((client, len(frame)) for client, frame in frames)
        faults = tuple(sorted(self._faults.items()))
        self._shared = self._shared.step(messages)
        self._begin_round()
        return StatisticsTraffic(up, down, faults)

    def to_arrays(self) -> Mapping[str, NDArray[Any]]:
        return to_arrays({name: getattr(self._shared, name) for name in _Kept._fields})

    def load(self, arrays: Mapping[str, NDArray[Any]] | None) -> None:
        kept = from_arrays(_Kept, to_arrays(arrays))
        self._shared = self._shared._replace(**kept._asdict())
        self._begin_round()


class _Local(RunStatistics):
    """A set of buffers for each client, which nobody else sees."""

    def __init__(self, problem: Problem) -> None:
        objective: ModuleObjective = problem.objective  # type: ignore[assignment]
        super().__init__(replace(problem, objective=objective.carrying(self)))
        self._num_values = objective.model_layout.num_statistics
        row = np.concatenate(objective.initial_buffers())
        self._rows: Float64Array = np.tile(row, (problem.num_clients, 1)).astype(np.float64)
        self._trained: dict[int, Float64Array] = {}

    def losses(self, backend: Backend, params: Any, clients: IntArray) -> Float64Array:
        result = np.empty(len(clients))
        for index, client in enumerate(clients.tolist()):
            with self.of_client(client):
                result[index] = backend.losses(params, clients[index : index + 1])[0]
        return result

    def buffers(self, client: int = 0) -> Buffers:
        row, count = self._rows[client], self._num_values
        return Buffers(row[:count].copy(), row[count:].astype(np.int64))

    start = buffers

    def finish(self, client: int, buffers: Buffers) -> None:
        """Keep a client's buffers for after the round, unless they are beyond numbers."""
        was_finite = np.isfinite(self._rows[client, : self._num_values])
        if np.isfinite(buffers.values[was_finite]).all():
            self._trained[client] = np.concatenate(buffers)

    def finish_round(self) -> StatisticsTraffic:
        for client, row in self._trained.items():
            self._rows[client] = row
        self._trained = {}
        return StatisticsTraffic()

    def evaluation(self) -> Buffers:
        return self.buffers(self._measured or 0)

    def views(self) -> Sequence[AbstractContextManager[None]]:
        return [self.of_client(client) for client in range(len(self._rows))]

    def to_arrays(self) -> Mapping[str, NDArray[Any]]:
        return {"rows": self._rows.copy()}

    def load(self, arrays: Mapping[str, NDArray[Any]] | None) -> None:
        assert arrays is not None
        self._rows, self._trained = arrays["rows"].copy(), {}
