"""A model's statistics in a simulation: who holds which, and what sending them costs.

`RunStatistics` stands between a simulation and a module whose training changes buffers. Under the
policy ``average`` clients start every round from the server's buffers and send theirs back; under
``local`` each keeps its own and nothing travels. Other objectives have nothing to carry, and then
all of this does nothing. Metrics are those of the mean over the models, where one is kept, and
come with that of their statistics; losses are those of the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.core.recipe import Recipe
from aqg.core.types import Float64Array, IntArray
from aqg.errors import GradientError, RunError
from aqg.objectives.layout import Buffers
from aqg.objectives.statistics import SharedStatistics, describe_change
from aqg.sim.backends import Backend
from aqg.sim.problem import Problem
from aqg.sim.record import StatisticsTraffic
from aqg.sim.training import Training

if TYPE_CHECKING:
    from aqg.objectives.module import ModuleObjective


_NO_TRAFFIC = StatisticsTraffic()


class RunStatistics:
    """Statistics of one simulation.

    They are as fine as the recipe's updates. `problem` is the same problem, with an objective that
    uses them. Where clients do not train on minibatches, exact gradients must be repeatable.
    """

    def __init__(
        self, problem: Problem, recipe: Recipe, training: Training, weights: Float64Array
    ) -> None:
        self.problem = problem
        self._carrier: Averaged | Local | None = None
        self._weights = weights
        if training.local.sees_all_samples:
            problem.objective.require_repeatable()
            return
        layout = getattr(problem.objective, "model_layout", None)
        if layout is None or not layout.carries_buffers:
            return
        objective: ModuleObjective = problem.objective  # type: ignore[assignment]
        if layout.policy == "local":
            self._carrier = Local(objective, problem.num_clients)
        else:
            average = training.step.average
            self._carrier = Averaged(objective, fine=recipe.is_verbatim, average=average)
        self.problem = replace(problem, objective=objective.carrying(self._carrier))

    def losses(self, backend: Backend, params: Any, clients: IntArray) -> Float64Array:
        if not isinstance(self._carrier, Local):
            with self.of_client(0):
                return backend.losses(params, clients)
        result = np.empty(len(clients))
        for index, client in enumerate(clients.tolist()):
            with self.of_client(client):
                result[index] = backend.losses(params, clients[index : index + 1])[0]
        return result

    @contextmanager
    def of_client(self, client: int) -> Iterator[None]:
        with nullcontext() if self._carrier is None else self._carrier.of_client(client):
            yield

    def finish_round(self, present: IntArray) -> StatisticsTraffic:
        if self._carrier is None:
            return _NO_TRAFFIC
        return self._carrier.finish_round(present.tolist(), self._weights)

    @property
    def are_averaged(self) -> bool:
        return isinstance(self._carrier, Averaged)

    def buffers(self, client: int = 0) -> Buffers | None:
        """Return the server's buffers, or a client's own; None where there are none to carry."""
        return None if self._carrier is None else self._carrier.held(client)

    def averaged(self) -> Buffers | None:
        """Return what goes with the mean of the models; None where nothing is shared."""
        return self._carrier.evaluation() if isinstance(self._carrier, Averaged) else None

    def to_array(self) -> Float64Array:
        return np.zeros((0, 0)) if self._carrier is None else self._carrier.to_array()

    def load(self, array: Float64Array) -> None:
        if self._carrier is not None:
            if array.shape != self._carrier.to_array().shape:
                raise RunError(
                    f"checkpoint has statistics of shape {array.shape}; the model needs "
                    f"{self._carrier.to_array().shape}"
                )
            self._carrier.load(array)


class Averaged:
    """One set of buffers for all, which the server averages."""

    def __init__(self, objective: ModuleObjective, *, fine: bool, average: float) -> None:
        self._layout = objective.model_layout
        self._shared = SharedStatistics.first(
            self._layout, objective.initial_buffers(), fine=fine, average=average
        )
        self._start, self._known = self._shared.received
        self._measures_mean = True
        self._frames: dict[int, bytes] = {}
        self._faults: dict[int, str] = {}

    def held(self, client: int) -> Buffers:  # noqa: ARG002
        return self._shared.buffers

    def start(self, client: int) -> Buffers:  # noqa: ARG002
        return self._start

    def finish(self, client: int, buffers: Buffers) -> None:
        try:
            frame = describe_change(self._layout, self._start, buffers, self._known)
        except GradientError as error:
            self._faults[client] = str(error)
            return
        self._frames[client] = frame

    def evaluation(self) -> Buffers:
        return self._shared.averaged if self._measures_mean else self._start

    @contextmanager
    def of_client(self, client: int) -> Iterator[None]:  # noqa: ARG002
        self._measures_mean = False
        try:
            yield
        finally:
            self._measures_mean = True

    def views(self) -> Sequence[AbstractContextManager[None]]:
        return [nullcontext()]

    def finish_round(self, present: Sequence[int], weights: Float64Array) -> StatisticsTraffic:
        down = len(self._shared.broadcast())
        messages = [
            (float(weights[client]), self._shared.read(frame))
            for client, frame in sorted(self._frames.items())
        ]
        up = tuple((client, len(frame)) for client, frame in sorted(self._frames.items()))
        faults = tuple(sorted(self._faults.items()))
        self._shared = self._shared.step(messages)
        self._start, self._known = self._shared.received
        self._frames, self._faults = {}, {}
        sent = sum(size for _, size in up)
        return StatisticsTraffic(sent, down * len(present), faults, up, down)

    def to_array(self) -> Float64Array:
        """Return values and counts, which of them travel, which move, and the residual, as rows.

        Where a mean is kept it is a fifth row, and of how many rounds, a sixth.
        """
        shared = self._shared
        specs = (*self._layout.statistics, *self._layout.counters)
        sizes = [spec.size for spec in specs]
        residual = np.append(shared.residual, np.zeros(self._layout.num_counters))
        rows = [
            np.concatenate(shared.buffers),
            np.repeat(shared.travels, sizes).astype(np.float64),
            np.repeat(shared.moves, sizes).astype(np.float64),
            residual,
        ]
        if shared.average:
            rows += [np.concatenate(shared.averaged), np.full(len(residual), shared.num_rounds)]
        return np.stack(rows)

    def load(self, array: Float64Array) -> None:
        specs = (*self._layout.statistics, *self._layout.counters)
        starts = np.cumsum([0, *(spec.size for spec in specs)])[:-1]
        travels, moves = ([bool(row[s : s + 1].any()) for s in starts] for row in array[1:3])
        num_values = self._layout.num_statistics
        self._shared = self._shared._replace(
            buffers=_split(array[0], num_values),
            travels=np.array(travels, np.bool_),
            moves=np.array(moves, np.bool_),
            residual=_split(array[3], num_values).values,
        )
        if self._shared.average:
            num_rounds = int(array[5, 0])
            mean = _split(array[4], num_values).values if num_rounds else None
            self._shared = self._shared._replace(mean=mean, num_rounds=num_rounds)
        self._start, self._known = self._shared.received
        self._frames, self._faults = {}, {}


class Local:
    """A set of buffers for each client, which nobody else sees."""

    def __init__(self, objective: ModuleObjective, num_clients: int) -> None:
        self._num_values = objective.model_layout.num_statistics
        row = np.concatenate(objective.initial_buffers())
        self._rows: Float64Array = np.tile(row, (num_clients, 1)).astype(np.float64)
        self._trained: dict[int, Float64Array] = {}
        self._measured = 0

    def held(self, client: int) -> Buffers:
        return _split(self._rows[client], self._num_values)

    def start(self, client: int) -> Buffers:
        return self.held(client)

    def finish(self, client: int, buffers: Buffers) -> None:
        """Keep a client's buffers for after the round, unless they are beyond numbers."""
        was_finite = np.isfinite(self._rows[client, : self._num_values])
        if np.isfinite(buffers.values[was_finite]).all():
            self._trained[client] = np.concatenate(buffers)

    def finish_round(self, present: Sequence[int], weights: Float64Array) -> StatisticsTraffic:  # noqa: ARG002
        for client, row in self._trained.items():
            self._rows[client] = row
        self._trained = {}
        return StatisticsTraffic()

    def evaluation(self) -> Buffers:
        return self.start(self._measured)

    def views(self) -> Sequence[AbstractContextManager[None]]:
        return [self.of_client(client) for client in range(len(self._rows))]

    @contextmanager
    def of_client(self, client: int) -> Iterator[None]:
        before, self._measured = self._measured, client
        try:
            yield
        finally:
            self._measured = before

    def to_array(self) -> Float64Array:
        return np.array(self._rows, np.float64)

    def load(self, array: Float64Array) -> None:
        self._rows, self._trained = array.copy(), {}


def _split(row: Float64Array, num_values: int) -> Buffers:
    return Buffers(row[:num_values].copy(), row[num_values:].astype(np.int64))
