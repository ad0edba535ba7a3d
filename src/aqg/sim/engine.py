"""The fast simulator: many clients at once, on CPU or GPU.

The rules are the reference's own: the same statistics, policies, quantizers and mirror steps. What
differs is the order of work. Clients go through a round in blocks of consecutive clients, so that
gradients never take more memory than ``block_bytes``, whatever the number of clients; the model,
the mirrors and the samples live on one device; and frames are sized, not built.

On the CPU in float64 every upload, width, byte and parameter equals the reference's bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aqg.core.client import describe_fault
from aqg.core.dropouts import BernoulliDropout, Dropout
from aqg.core.messages import DenseUpload, Skip, Upload
from aqg.core.mirror import Memory
from aqg.core.optimizers import OptimizerState
from aqg.core.server import amplification
from aqg.sim.backends import Backend, make_backend
from aqg.sim.record import DROPPED, RoundRecord
from aqg.sim.state import SimulationState
from aqg.sim.training import Training
from aqg.wire import encoded_size
from aqg.wire.memory import known, next_direction

if TYPE_CHECKING:
    from aqg.core.innovation import Innovation
    from aqg.core.recipe import Recipe
    from aqg.core.types import Float64Array, FloatArray, IntArray
    from aqg.sim.problem import Problem

_SKIP_BYTES = encoded_size(Skip())


class FastSimulation:
    """Runs a recipe on a problem; the same interface and results as `ReferenceSimulation`.

    Args:
        problem: what is learned, and by whom.
        recipe: the compressor.
        step_size: ``α``.
        dropout: who is away when.
        seed: makes stochastic recipes repeatable.
        device: ``"cpu"``, or a torch device such as ``"cuda"``.
        block_bytes: the most memory one block of gradients may take.
        training: what clients compute, who is asked, how they are weighted, and the server's
            optimizer; the paper's by default.

    """

    def __init__(
        self,
        problem: Problem,
        recipe: Recipe,
        step_size: float,
        dropout: Dropout | None = None,
        seed: int = 0,
        device: str = "cpu",
        block_bytes: int = 1 << 26,
        training: Training | None = None,
    ) -> None:
        self.problem = problem
        self.recipe = recipe
        self.step_size = step_size
        self.dropout: Dropout = dropout if dropout is not None else BernoulliDropout()
        self.seed = seed
        self.training = training if training is not None else Training()
        self._weights = self.training.client_weights(problem)
        num_params = len(problem.initial_params)
        self.backend: Backend = make_backend(problem, device)
        self._block_size = max(1, block_bytes // (num_params * problem.dtype.itemsize))
        num_mirrored = num_params if recipe.memory.keeps_mirror else 0
        num_residual = num_params if recipe.memory is Memory.FEEDBACK else 0
        num_clients = problem.num_clients
        optimizer_state = self.training.optimizer.init(num_params)
        self._load(
            SimulationState(
                round=1,
                parameters=problem.initial_params,
                total=np.zeros(num_params),
                history=(),
                mirrors=np.zeros((num_clients, num_mirrored), problem.dtype),
                directions=np.zeros((num_clients, num_mirrored), np.int8),
                residuals=np.zeros((num_clients, num_residual), problem.dtype),
                stored_errors=np.zeros((num_clients, recipe.quantizer.num_errors)),
                silent_rounds=np.zeros(num_clients, np.int64),
                momentum=optimizer_state.momentum,
                variance=optimizer_state.variance,
            )
        )

    def _load(self, state: SimulationState) -> None:
        put = self.backend.put
        self.next_round = state.round
        self._params = put(state.parameters)
        self._total = put(state.total)
        self._history = state.history
        self._mirrors = put(state.mirrors)
        self._directions = state.directions.copy()
        self._residuals = put(state.residuals)
        self._stored_errors = state.stored_errors.copy()
        self._silent_rounds = state.silent_rounds.copy()
        self._optimizer_state = OptimizerState(put(state.momentum), put(state.variance))

    @property
    def parameters(self) -> FloatArray:
        """The current model."""
        params: FloatArray = self.backend.get(self._params)
        return params

    def run_round(self, evaluate: bool = True) -> RoundRecord:
        """Run one round; with ``evaluate``, also report the loss at its start."""
        number = self.next_round
        num_clients = self.problem.num_clients
        movement = self.recipe.movement.of(self._history)
        away = self.dropout.dropped(number, num_clients)
        away |= self.training.unsampled(number, num_clients, self.seed)
        widths = np.where(away, DROPPED, 0)
        losses = np.empty(num_clients)
        faults: list[tuple[int, str]] = []
        upload_bytes = 0
        present = np.flatnonzero(~away)
        for start in range(0, len(present), self._block_size):
            block = present[start : start + self._block_size]
            losses[block], gradients = self._train(block)
            upload_bytes += self._hear(block, gradients, movement, widths, faults)
        loss = None
        if evaluate:
            known = ~away & self.training.local.sees_all_samples
            unknown = np.flatnonzero(~known)
            losses[unknown] = self.backend.losses(self._params, unknown)
            loss = float(np.mean(self._weights * losses))
        self._step()
        record = RoundRecord(number, loss, tuple(widths.tolist()), upload_bytes, tuple(faults))
        self.next_round = number + 1
        return record

    def _train(self, block: IntArray) -> tuple[Float64Array, FloatArray]:
        """Return each client's loss and the vector it would send: its (pseudo-)gradient."""
        local = self.training.local
        if local.is_one_gradient:
            return self.backend.losses_and_gradients(self._params, block)
        results = [
            local.update(
                self.problem.objective,
                self._params,
                *self.backend.samples(client),
                (self.seed, client, self.next_round),
            )
            for client in block.tolist()
        ]
        losses = np.array([float(loss) for loss, _ in results])
        return losses, self.backend.stack([update for _, update in results])

    def _hear(
        self,
        block: IntArray,
        gradients: FloatArray,
        movement: float,
        widths: IntArray,
        faults: list[tuple[int, str]],
    ) -> int:
        """Let the clients of a block decide and speak; return the bytes they sent."""
        recipe, backend = self.recipe, self.backend
        deltas = gradients
        if recipe.memory is Memory.INNOVATION:
            deltas = backend.subtract(gradients, self._mirrors, block)
        elif recipe.memory is Memory.FEEDBACK:
            deltas = backend.add(gradients, self._residuals, block)
        innovation = backend.measure(recipe.quantizer, deltas)
        decision = recipe.policy.decide(innovation, movement, self._stored_errors[block])
        stale = self._silent_rounds[block] >= recipe.max_staleness
        send = innovation.in_range & (decision.send | stale)

        silent = innovation.in_range & ~send
        self._silent_rounds[block[silent]] += 1
        if recipe.memory is Memory.FEEDBACK and silent.any():
            backend.store(self._residuals, block[silent], deltas[np.flatnonzero(silent)])
        faults.extend(
            (int(block[i]), describe_fault(backend.get(gradients[i])))
            for i in np.flatnonzero(~innovation.in_range)
        )
        num_bytes = _SKIP_BYTES * int(np.count_nonzero(~send))
        for i in np.flatnonzero(send).tolist():
            num_bytes += self._upload(
                int(block[i]), deltas[i], _row(innovation, i), int(decision.width[i])
            )
            widths[block[i]] = decision.width[i]
        return num_bytes

    def _upload(self, client: int, delta: FloatArray, innovation: Innovation, width: int) -> int:
        """Quantize one client's vector, move its mirror, and return the size of its frame."""
        recipe = self.recipe
        row = self.backend.get(delta)
        key = (self.seed, client, self.next_round)
        upload = recipe.quantizer.quantize(row, innovation, width, key)
        num_bytes = self._frame_size(client, upload)
        weight = float(self._weights[client])
        self.backend.advance(recipe.memory, self._mirrors, self._total, client, upload, weight)
        if recipe.memory is Memory.FEEDBACK:
            residual = row - upload.values(row.dtype.type)
            self.backend.store(self._residuals, np.array([client]), residual[None])
        self._stored_errors[client] = innovation.errors
        self._silent_rounds[client] = 0
        return num_bytes

    def _frame_size(self, client: int, upload: Upload | DenseUpload) -> int:
        """Return the length of the frame that client and server would exchange."""
        if isinstance(upload, DenseUpload):
            return encoded_size(upload)
        shared = known(self.backend.get(self._mirrors[client]), self._directions[client])
        num_bytes = encoded_size(upload, known=shared)
        self._directions[client] = next_direction(self._directions[client], upload)
        return num_bytes

    def _step(self) -> None:
        num_clients = self.problem.num_clients
        sampled = self.training.num_sampled(num_clients) / num_clients
        direction = self._total * amplification(self.recipe, self.dropout.rate, sampled)
        optimizer = self.training.optimizer
        self._optimizer_state, update = optimizer.step(self._optimizer_state, direction)
        self._params = self.backend.descend(self._params, update, self.step_size)
        step = self.backend.squared_norm(direction)
        if not self.recipe.memory.keeps_mirror:
            self._total = self._total * 0.0
        self._history = self.recipe.movement.extend(self._history, step / num_clients**2)

    def loss(self) -> float:
        """Return the loss of the current model."""
        clients = np.arange(self.problem.num_clients)
        losses: Float64Array = self.backend.losses(self._params, clients)
        return float(np.mean(self._weights * losses))

    def state(self) -> SimulationState:
        """Return everything needed to go on from here."""
        get = self.backend.get
        return SimulationState(
            round=self.next_round,
            parameters=get(self._params).copy(),
            total=get(self._total).copy(),
            history=self._history,
            mirrors=get(self._mirrors).copy(),
            directions=self._directions.copy(),
            residuals=get(self._residuals).copy(),
            stored_errors=self._stored_errors.copy(),
            silent_rounds=self._silent_rounds.copy(),
            momentum=get(self._optimizer_state.momentum).copy(),
            variance=get(self._optimizer_state.variance).copy(),
        )

    def restore(self, state: SimulationState) -> None:
        """Go back to a state that `state` returned."""
        self._load(state)


def _row(innovation: Innovation, index: int) -> Innovation:
    return type(innovation)(*(field[index] for field in innovation))
