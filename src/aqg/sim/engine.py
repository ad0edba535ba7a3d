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
from aqg.sim.backends import Array, Backend, as_index, make_backend, num_threads
from aqg.sim.record import DROPPED, RoundRecord
from aqg.sim.state import SimulationState
from aqg.sim.training import Training
from aqg.wire import encoded_size
from aqg.wire.memory import known, next_direction
from aqg.wire.parallel import map_threads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.core.innovation import Innovation
    from aqg.core.recipe import Recipe
    from aqg.core.types import Float64Array, FloatArray, IntArray
    from aqg.sim.problem import Problem

_SKIP_BYTES = encoded_size(Skip())
_THREAD_LENGTH = 1 << 15
"""Uploads with fewer coordinates are sized before a thread has started."""


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
        block_bytes: int = 1 << 25,
        training: Training | None = None,
    ) -> None:
        self.problem = problem
        self.recipe = recipe
        self.step_size = step_size
        self.dropout: Dropout = dropout if dropout is not None else BernoulliDropout()
        self.seed = seed
        self.training = training if training is not None else Training()
        self._weights = self.training.client_weights(problem)
        self._sampled = self.training.num_sampled(problem.num_clients) / problem.num_clients
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
        if self._sampled < 1:
            away = away | self.training.unsampled(number, num_clients, self.seed)
        widths = np.where(away, DROPPED, 0)
        losses = np.empty(num_clients)
        faults: list[tuple[int, str]] = []
        upload_bytes = 0
        present = (~away).nonzero()[0]
        for start in range(0, len(present), self._block_size):
            block = present[start : start + self._block_size]
            block_losses, gradients = self._train(block)
            upload_bytes += self._hear(block, gradients, movement, widths, faults)
            losses[block] = self.backend.get(block_losses)  # last: a GPU need not be waited for
        loss = None
        if evaluate:
            measured = ~away & self.training.local.sees_all_samples
            unknown = np.flatnonzero(~measured)
            losses[unknown] = self.backend.losses(self._params, unknown)
            loss = float(np.mean(self._weights * losses))
        self._step()
        record = RoundRecord(number, loss, tuple(widths.tolist()), upload_bytes, tuple(faults))
        self.next_round = number + 1
        return record

    def _train(self, block: IntArray) -> tuple[Array, Array]:
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
        losses, updates = zip(*results, strict=True)
        return self.backend.stack(losses), self.backend.stack(updates)

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
        members = as_index(block)
        held = self._residuals if recipe.memory is Memory.FEEDBACK else self._mirrors
        deltas, innovation = backend.innovations(
            recipe.memory, recipe.quantizer, gradients, held, block
        )
        in_range = innovation.in_range
        decision = recipe.policy.decide(innovation, movement, self._stored_errors[members])
        stale = self._silent_rounds[members] >= recipe.max_staleness
        send = (decision.send | stale) & in_range
        silent = send ^ in_range
        self._silent_rounds[members] += silent
        if recipe.memory is Memory.FEEDBACK and silent.any():
            backend.store(self._residuals, block[silent], deltas[np.flatnonzero(silent)])
        if not in_range.all():
            faults.extend(
                (int(block[i]), describe_fault(backend.get(gradients[i])))
                for i in np.flatnonzero(~in_range)
            )
        senders = send.nonzero()[0]
        num_bytes = _SKIP_BYTES * (len(block) - len(senders))
        if len(senders):
            widths[block[senders]] = decision.width[senders]
            num_bytes += self._upload(
                block[senders],
                backend.rows(deltas, senders),
                innovation.of(senders),
                decision.width[senders],
            )
        return num_bytes

    def _upload(
        self,
        clients: IntArray,
        deltas: Sequence[FloatArray],
        innovation: Innovation,
        widths: IntArray,
    ) -> int:
        """Quantize these clients' vectors, move their mirrors, and return the size of all frames.

        Clients are quantized and their frames sized on all cores; the sum moves in their order.
        """
        recipe, backend = self.recipe, self.backend
        mirrors = backend.rows(self._mirrors, clients)

        def quantize(index: int) -> tuple[Upload | DenseUpload, int]:
            client = int(clients[index])
            key = (self.seed, client, self.next_round)
            upload = recipe.quantizer.quantize(
                deltas[index], innovation.of(index), int(widths[index]), key
            )
            return upload, self._frame_size(client, mirrors[index], upload)

        is_large = len(clients) * deltas[0].size >= _THREAD_LENGTH
        results = map_threads(quantize, range(len(clients)), num_threads() if is_large else 1)
        uploads = [upload for upload, _ in results]
        backend.advance(
            recipe.memory, self._mirrors, self._total, clients, uploads, self._weights[clients]
        )
        if recipe.memory is Memory.FEEDBACK:
            pairs = zip(deltas, uploads, strict=True)
            residuals = [delta - upload.values(delta.dtype.type) for delta, upload in pairs]
            backend.store(self._residuals, clients, np.stack(residuals))
        self._stored_errors[clients] = innovation.errors
        self._silent_rounds[clients] = 0
        return sum(num_bytes for _, num_bytes in results)

    def _frame_size(self, client: int, mirror: FloatArray, upload: Upload | DenseUpload) -> int:
        """Return the length of the frame that client and server would exchange."""
        if isinstance(upload, DenseUpload):
            return encoded_size(upload)
        num_bytes = encoded_size(upload, known=known(mirror, self._directions[client]))
        self._directions[client] = next_direction(self._directions[client], upload)
        return num_bytes

    def _step(self) -> None:
        direction = self._total * amplification(self.recipe, self.dropout.rate, self._sampled)
        optimizer = self.training.optimizer
        self._optimizer_state, update = optimizer.step(self._optimizer_state, direction)
        self._params = self.backend.descend(self._params, update, self.step_size)
        step = self.backend.squared_norm(direction) / self.problem.num_clients**2
        if not self.recipe.memory.keeps_mirror:
            self._total = self._total * 0.0
        self._history = self.recipe.movement.extend(self._history, step * optimizer.fresh_share)

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
