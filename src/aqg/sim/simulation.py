"""What both simulators have in common: the terms of a run, its state, who takes part, the log.

Where the training of a module changes buffers, `RunStatistics` says who holds which, and what
sending them costs: clients start every round from the server's and send theirs back under the
policy ``average``; under ``local`` each keeps its own and nothing travels. Other objectives have
nothing to carry. Metrics are those of the mean over the models, where one is kept, and come with
that of their statistics; losses are those of the model itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqg.core.downlink import Entry, Full, lies_on_grid
from aqg.core.quantizers import Verbatim
from aqg.core.recipe import Recipe
from aqg.core.round import Clients, init_clients
from aqg.core.server import Model, init_model
from aqg.core.space import Array, NumpySpace
from aqg.core.stages import level_factors
from aqg.core.track import Track
from aqg.core.types import (
    BoolArray,
    Float64Array,
    FloatArray,
    IntArray,
    from_arrays,
    map_arrays,
    to_arrays,
)
from aqg.errors import GradientError, RunError
from aqg.objectives.layout import Buffers
from aqg.objectives.statistics import SharedStatistics, describe_change
from aqg.protocol.log import Delivery, LogState, ReadLog
from aqg.sim.problem import Problem
from aqg.sim.record import RoundRecord, StatisticsTraffic
from aqg.sim.training import Closed, Dropout, Pending, Replies, Reply, Training, check_late
from aqg.wire import Known
from aqg.wire.entry import encode_entry

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


_MOVEMENT_BYTES = 8
"""Of the movement, which goes with a whole model."""
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


class Simulation(ABC):
    """Runs a recipe on a problem, round by round; can be saved and restored between any two.

    Args:
        problem: what is learned, and by whom.
        recipe: the compressor.
        step_size: ``α``, or the natural step of a rule that finds its own (``training.step``).
        dropout: who drops out when.
        seed: makes stochastic recipes repeatable.
        training: what clients compute, who is sampled, how they are weighted, and the server's
            optimizer; the paper's by default.
    """

    space: NumpySpace  # where vectors live
    model: Model  # the server's, and the model of the round
    log: ReadLog | None = None  # None where clients receive models

    def __init__(
        self,
        problem: Problem,
        recipe: Recipe,
        step_size: float,
        dropout: Dropout | None = None,
        seed: int = 0,
        training: Training | None = None,
    ) -> None:
        self.training, self.seed = training or Training(), seed
        self.dropout = dropout or Dropout()
        self.recipe = recipe = recipe.for_updates(self.training.updates)
        self.weights = self.training.client_weights(problem)
        self.level_factors = level_factors(self.weights)
        self.statistics = make_statistics(problem, recipe, self.training, self.weights)
        self.problem = problem = self.statistics.problem
        count, late = problem.num_clients, self.training.late
        self.training.check_memory(recipe, self.statistics.are_averaged)
        check_late(late, recipe, self.training.num_sampled(count), self.statistics.are_averaged)
        self.replies = None if late is None else Replies(late, problem, seed)
        self.step = self.training.make_step(step_size, self.dropout.rate, count)
        self.everyone = np.arange(count)

    @abstractmethod
    def run_round(self, evaluate: bool = True) -> RoundRecord:
        """Run one round; with ``evaluate``, also report the loss at its start."""

    @abstractmethod
    def _losses(self, clients: IntArray) -> Float64Array:
        """Return the losses of the current model at some clients."""

    @abstractmethod
    def _place(self, model: Model, clients: Clients) -> None:
        """Go on from what server and clients hold, in the space."""

    @abstractmethod
    def _clients_state(self) -> Clients:
        """Return what the clients hold, in the space."""

    def run_rounds(self, count: int, evaluate: bool = True) -> Iterator[RoundRecord]:
        """Run ``count`` rounds and yield their records."""
        for _ in range(count):
            yield self.run_round(evaluate)

    @property
    def next_round(self) -> int:
        """The round that `run_round` would run."""
        return self.model.round

    @property
    def parameters(self) -> FloatArray:
        """The current model, as clients hold it."""
        return self.space.get(self.model.parameters)

    @property
    def averaged(self) -> FloatArray:
        """The mean of the models so far, where the step's rule keeps one; else the model."""
        return self.space.get(self.model.averaged)

    def loss(self) -> float:
        """Return the loss of the current model."""
        return self._mean_loss(np.full(len(self.everyone), np.nan))

    def _mean_loss(self, losses: Float64Array) -> float:
        """Return the loss of all clients; some may have measured their own on all samples."""
        is_exact = self.training.local.sees_all_samples
        unknown = np.flatnonzero(np.isnan(losses)) if is_exact else self.everyone
        if len(unknown):
            losses[unknown] = self._losses(unknown)
        return float(np.mean(self.weights * losses))

    def _present(self) -> IntArray:
        number, count = self.next_round, len(self.everyone)
        at_work = None if self.replies is None else self.replies.at_work
        away = self.training.unsampled(number, count, self.seed, at_work)
        away = away | self.dropout.dropped(number, count)
        return np.flatnonzero(~away) if away.any() else self.everyone

    def _deliver(self, present: IntArray) -> tuple[list[tuple[IntArray, Delivery]], IntArray]:
        """Bring clients up to date; return what each receives, and how many bytes that is."""
        if self.log is None:
            size = self.problem.initial_params.nbytes + _MOVEMENT_BYTES
            found = [(present, Delivery(self.next_round, size))]
        else:
            found = self.log.deliver_to(present, lambda: self.model.public(self.space))
            if not self._forgets:
                self.log.positions[present] = self.log.round
        received = np.zeros(len(self.everyone), np.int64)
        for clients, delivery in found:
            received[clients] = delivery.num_bytes
        return found, received

    @property
    def _forgets(self) -> bool:
        """Whether clients hold nothing but the first model, each time anew."""
        return self.training.memory == "none"

    def _publish(self, entry: Entry, before: Model) -> None:
        if self.log is None:
            return
        known = None
        if entry.velocity is not None:
            known = Known(self.space.get(before.velocity), before.direction)
        self.log.append(encode_entry(entry, known))
        self.log.cut(int(self.log.positions.min()))

    def _close(self, number: int, replies: Mapping[int, Reply], received: IntArray) -> Closed:
        if self.replies is None:  # a round waits for all of them
            clients, count = np.array(list(replies), np.int64), len(self.everyone)
            return Closed(
                clients, list(replies.values()), np.ones(count), np.zeros(count, np.bool_)
            )
        self.replies.send(number, replies, received)
        return self.replies.close(number)

    def _shares(self, clients: IntArray) -> Float64Array:
        """Return what each client's upload counts for, if these send in the round."""
        return self.recipe.round_weights(self.weights, clients, self.step.sampled)

    def _record(
        self,
        number: int,  # of the round
        loss: float | None,
        widths: IntArray,
        faults: Sequence[tuple[int, str]],
        sent: IntArray,  # the length of each client's frame, like what it received, without
        received: IntArray,  # statistics
        present: IntArray,
    ) -> RoundRecord:
        traffic, replies = self.statistics.finish_round(), self.replies
        for client, size in traffic.uploads:
            sent[client] += size
        received[present] += traffic.download_bytes
        up, down = tuple(sent.tolist()), tuple(received.tolist())
        of_statistics = (
            sum(size for _, size in traffic.uploads),
            traffic.download_bytes * len(present),
        )
        sums = sum(up), (*faults, *traffic.faults), *of_statistics, sum(down)
        clock = None if replies is None else replies.clock
        return RoundRecord(number, loss, tuple(widths.tolist()), *sums, up, down, clock)

    def state(self) -> SimulationState:
        """Return everything needed to go on from here."""

        def copy(array: Array) -> FloatArray:
            return np.array(self.space.get(array))

        clients = _clients_in(copy, self.recipe, self._clients_state())
        return SimulationState(
            model_in(copy, self.model),
            clients,
            self.statistics.to_arrays(),
            None if self.log is None else self.log.state(),
            None if self.replies is None else self.replies.pending(),
        )

    def restore(self, state: SimulationState) -> None:
        """Go back to a state that `state` returned."""
        check_fits(state, self._initial_state())
        self._load(state)
        self.statistics.load(state.statistics)

    def _initial_state(self) -> SimulationState:
        problem, params = self.problem, self.problem.initial_params
        count, late = problem.num_clients, self.training.late
        receives_models = isinstance(self.step.downlink, Full)
        return SimulationState(
            init_model(self.recipe, params, self.step),
            init_clients(self.recipe, len(params), problem.dtype, count),
            self.statistics.to_arrays(),
            log=None if receives_models else LogState(np.ones(count, np.int64)),
            late=None if late is None else Replies(late, problem, self.seed).pending(),
        )

    def _load(self, state: SimulationState) -> None:
        if state.log is not None:
            merges = lies_on_grid(self.recipe, self.step.downlink)
            self.log = ReadLog(self.problem.initial_params, state.log, merges)
        if self.replies is not None and state.late is not None:
            self.replies.load(state.late)
        clients = _clients_in(self.space.put, self.recipe, state.clients)
        self._place(model_in(self.space.put, state.model), clients)


def model_in(move: Callable[[Array], Array], model: Model) -> Model:
    """Return the model with its vectors in another place; directions stay in NumPy."""
    moved: Model = map_arrays(move, model)
    return moved._replace(direction=model.direction)


def _clients_in(move: Callable[[Array], Array], recipe: Recipe, clients: Clients) -> Clients:
    """Return the clients' state with its vectors in another place, and all else copied."""
    position, velocity, direction, is_held = clients.track
    stages = {
        name: map_arrays(move if stage.vectors == "device" else np.array, clients.stages[name])
        for name, stage in recipe.all_stages.items()
    }
    track = Track(move(position), move(velocity), direction.copy(), is_held.copy())
    return Clients(clients.num_params, track, clients.skipped_rounds.copy(), stages)


def check_fits(state: SimulationState, expected: SimulationState) -> None:
    """Raise `RunError` unless a state has the arrays of another, with the same shapes."""
    found, wanted = (
        {name: a.shape for name, a in one.to_arrays().items() if name not in _VARYING}
        for one in (state, expected)
    )
    for name, shape in wanted.items():
        if found.get(name) != shape:
            raise RunError(f"checkpoint does not fit the run: {name!r} is not of shape {shape}")
    for name in sorted(found.keys() - wanted.keys()):
        if name.startswith(_OPTIONAL):
            raise RunError(f"checkpoint does not fit the run: it has {name!r}")
