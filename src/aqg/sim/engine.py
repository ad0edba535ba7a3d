"""The fast simulator: many clients at once, on CPU or GPU.

The rules are the reference's own: the same statistics, policies, quantizers and mirror steps. What
differs is the order of work. Clients go through a round in blocks of consecutive clients, so that
gradients never take more memory than ``block_bytes``, whatever the number of clients; the model,
the mirrors and the samples live on one device; and frames are sized, not built.

On the CPU in float64 every upload, width, byte and parameter equals the reference's bit for bit.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from aqg.core.client import describe_fault, energies, is_usable
from aqg.core.dropouts import BernoulliDropout, Dropout
from aqg.core.messages import AnyUpload, for_one_round
from aqg.core.mirror import Memory, advance
from aqg.core.optimizers import OptimizerState
from aqg.core.quantizers import left_to_owe
from aqg.core.server import amplification
from aqg.sim.backends import Array, Backend, as_index, make_backend, num_threads
from aqg.sim.frame_sizes import SKIP_BYTES, FrameSize, FrameSizer, OpenRound
from aqg.sim.record import DROPPED, RoundRecord
from aqg.sim.speakers import who_speaks
from aqg.sim.start import initial_state
from aqg.sim.state import SimulationState
from aqg.sim.statistics import RunStatistics
from aqg.sim.training import Training
from aqg.wire.parallel import map_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqg.core.innovation import Innovation
    from aqg.core.quantizers import Quantizer
    from aqg.core.recipe import Noisy, Recipe
    from aqg.core.types import Float64Array, FloatArray, IntArray
    from aqg.sim.problem import Problem

_THREAD_LENGTH = 1 << 15
"""Uploads with fewer coordinates are sized before a thread has started."""
_ROUNDS_AHEAD = 64
"""How far `FastSimulation.run_rounds` may be ahead of the records it yields."""


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
        self.step_size = step_size
        self.dropout: Dropout = dropout if dropout is not None else BernoulliDropout()
        self.seed = seed
        self.training = training if training is not None else Training()
        self._losses_are_exact = self.training.local.sees_all_samples
        self.recipe = recipe = recipe.for_updates(self._losses_are_exact)
        self._weights = self.training.client_weights(problem)
        self.statistics = RunStatistics(problem, self.training, self._weights)
        self.problem = problem = self.statistics.problem
        self._sampled = self.training.num_sampled(problem.num_clients) / problem.num_clients
        never_away = isinstance(self.dropout, BernoulliDropout) and self.dropout.rate == 0
        self._all_take_part = never_away and self._sampled == 1
        self.backend: Backend = make_backend(problem, device)
        self._everyone = np.arange(problem.num_clients)
        self._keeps_mirror = recipe.memory.keeps_mirror
        self._fresh_share = self.training.optimizer.fresh_share
        self._amplification = amplification(recipe, self.dropout.rate, self._sampled)
        self._passing: Array | None = None
        self._pool: ThreadPoolExecutor | None = None
        if self.backend.is_asynchronous:
            self._pool = ThreadPoolExecutor(num_threads(), thread_name_prefix="aqg-frames")
        self._block_size = max(1, block_bytes // problem.initial_params.nbytes)
        self._load(initial_state(problem, recipe, self.training.optimizer))

    def _load(self, state: SimulationState) -> None:
        put = self.backend.put
        self.next_round = state.round
        self._params = put(state.parameters)
        self._total = put(state.total)
        self._history = state.history
        self._last_step: Array | None = None
        self._mirrors = put(state.mirrors)
        self._energies = energies(state.mirrors)
        self._frames = FrameSizer(state.directions.copy(), self._pool)
        self._residuals = put(state.residuals)
        self._averages = put(state.averages)
        self._notes = state.notes.copy()
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
        return self._run_round(evaluate).close()

    def run_rounds(self, count: int, evaluate: bool = True) -> Iterator[RoundRecord]:
        """Run ``count`` rounds and yield their records, in order.

        On a GPU this is faster than as many calls of `run_round`: frames of one round are sized
        while the next ones run, so that the simulation may be some rounds past the record that is
        yielded. It is not once all records have been taken.
        """
        ahead = _ROUNDS_AHEAD if self.backend.is_asynchronous else 0
        pending: deque[OpenRound] = deque()
        for _ in range(count):
            pending.append(self._run_round(evaluate))
            if len(pending) > ahead:
                yield pending.popleft().close()
        while pending:
            yield pending.popleft().close()

    def _run_round(self, evaluate: bool) -> OpenRound:
        number = self.next_round
        num_clients = self.problem.num_clients
        present = self._present()
        widths = np.zeros(num_clients, np.int64)
        if len(present) < num_clients:
            widths[:] = DROPPED
            widths[present] = 0
        losses = np.empty(num_clients)
        faults: list[tuple[int, str]] = []
        frame_sizes: list[FrameSize] = []
        movement = self._movement()
        for start in range(0, len(present), self._block_size):
            block = present
            if len(present) > self._block_size:
                block = present[start : start + self._block_size]
            block_losses, gradients = self._train(block)
            told = movement if self.recipe.schedule is None else self._note(block, block_losses)
            if self.recipe.noisy is None:
                frame_sizes += self._hear(self.recipe, block, gradients, told, widths, faults)
            else:
                for recipe, members, vectors in self._parts(self.recipe.noisy, block, gradients):
                    frame_sizes += self._hear(recipe, members, vectors, told, widths, faults)
            if evaluate:  # last: a GPU need not be waited for
                losses[block] = self.backend.get(block_losses)
        loss = self._mean_loss(present, losses) if evaluate else None
        self._step()
        traffic = self.statistics.finish_round(present.tolist())
        if self.backend.is_asynchronous and len(present) == num_clients <= self._block_size:
            self._foresee()
        self.next_round = number + 1
        spoken = tuple(widths.tolist())
        return OpenRound(number, loss, spoken, tuple(faults), frame_sizes, traffic)

    def _present(self) -> IntArray:
        """Return the clients that take part in the next round."""
        if self._all_take_part:
            return self._everyone
        num_clients = self.problem.num_clients
        away = self.dropout.dropped(self.next_round, num_clients)
        if self._sampled < 1:
            away = away | self.training.unsampled(self.next_round, num_clients, self.seed)
        return (~away).nonzero()[0] if np.count_nonzero(away) else self._everyone

    def _mean_loss(self, present: IntArray, losses: Float64Array) -> float:
        """Return the loss of all clients, of which those present may have measured their own."""
        if not self._losses_are_exact:
            losses = self.statistics.losses(self.backend, self._params, self._everyone)
        elif len(present) < len(losses):
            absent = np.setdiff1d(self._everyone, present)
            losses[absent] = self.statistics.losses(self.backend, self._params, absent)
        return float(np.add.reduce(self._weights * losses)) / len(losses)

    def _train(self, block: IntArray) -> tuple[Array, Array]:
        """Return each client's loss and the vector it would send: its (pseudo-)gradient."""
        local = self.training.local
        if local.is_one_gradient:
            return self.backend.losses_and_gradients(self._params, block)
        keys = [(self.seed, client, self.next_round) for client in block.tolist()]
        return self.backend.local_updates(local, self._params, block, keys)

    def _note(self, block: IntArray, losses: Array) -> Float64Array:
        """Show the clients' losses to their schedule; return what it says to each."""
        schedule = self.recipe.schedule
        assert schedule is not None
        for client, loss in zip(block.tolist(), self.backend.get(losses).tolist(), strict=True):
            self._notes[client] = schedule.observe(self._notes[client], loss)
        return np.array([schedule.signal(self._notes[client]) for client in block.tolist()])

    def _parts(
        self, noisy: Noisy, block: IntArray, gradients: Array
    ) -> Iterator[tuple[Recipe, IntArray, Array]]:
        """Split a block into runs of clients whose updates are all calm, or all noisy."""
        was_noisy = np.array([noisy.meter.is_noisy(notes) for notes in self._notes[block]])
        is_noisy = was_noisy.copy()
        for index, client in enumerate(block.tolist()):
            gradient = self.backend.get(gradients[index])
            if is_usable(gradient):
                notes = noisy.meter.observe(self._notes[client], gradient, self.next_round)
                self._notes[client] = notes
                is_noisy[index] = noisy.meter.is_noisy(notes)
        owes = np.array([noisy.owes(notes) for notes in self._notes[block]])
        clear = np.flatnonzero(is_noisy & ~(was_noisy & owes))  # old debts are history
        if len(clear):
            nothing = np.zeros((len(clear), self._residuals.shape[1]), self.problem.dtype)
            self.backend.store(self._residuals, block[clear], nothing)
        calm = replace(self.recipe, noisy=None)
        edges = [0, *(np.flatnonzero(np.diff(is_noisy)) + 1).tolist(), len(block)]
        for start, stop in pairwise(edges):
            recipe = noisy.recipe if is_noisy[start] else calm
            yield recipe, block[start:stop], gradients[start:stop]
            forgetting = block[start:stop][(is_noisy & ~was_noisy)[start:stop]]
            if len(forgetting):
                weights = self._weights[forgetting]
                self.backend.forget(self._mirrors, self._total, forgetting, weights)

    def _hear(
        self,
        recipe: Recipe,
        block: IntArray,
        gradients: FloatArray,
        movement: float | Float64Array,
        widths: IntArray,
        faults: list[tuple[int, str]],
    ) -> list[FrameSize]:
        """Let the clients of a block decide and speak; return the sizes of what they sent."""
        backend = self.backend
        members = as_index(block)
        held = self._held(recipe)
        vectors = gradients
        if recipe.keeps_average:
            averages = backend.blend(gradients, self._averages, block, recipe.averaging)
            if recipe.own_movement:
                movement = backend.own_movements(averages, self._averages, block)
            vectors = backend.stack(tuple(averages))
        deltas, innovation = backend.innovations(
            recipe.memory, recipe.quantizer, vectors, held, block
        )
        in_range = innovation.in_range
        if recipe.keeps_average:
            backend.store(self._averages, block[in_range], averages[np.flatnonzero(in_range)])
        if recipe.movement.widest > 1:
            movement = recipe.movement.widened(movement, self._energies[members])
        decision = recipe.policy.decide(innovation, movement, self._stored_errors[members])
        silent_rounds = self._silent_rounds[members]
        senders, silent, faulty = who_speaks(
            decision.send, in_range, silent_rounds, recipe.max_staleness
        )
        self._silent_rounds[members] = silent_rounds
        if recipe.memory is Memory.FEEDBACK and len(silent):
            backend.store(self._residuals, block[silent], deltas[silent])
        if len(faulty):
            faults.extend(
                (int(block[i]), describe_fault(backend.get(gradients[i]))) for i in faulty.tolist()
            )
        frame_sizes: list[FrameSize] = [SKIP_BYTES * (len(block) - len(senders))]
        if len(senders):
            widths[block[senders]] = decision.width[senders]
            frame_sizes += self._upload(recipe, block, senders, deltas, innovation, decision.width)
        return frame_sizes

    def _held(self, recipe: Recipe) -> Array:
        """Return what clients compare their vectors with: a row for each."""
        return self._residuals if recipe.memory is Memory.FEEDBACK else self._mirrors

    def _upload(
        self,
        recipe: Recipe,
        block: IntArray,
        senders: IntArray,
        vectors: Array,
        innovation: Innovation,
        widths: IntArray,
    ) -> list[FrameSize]:
        """Quantize the senders' vectors, move their mirrors, and return the sizes of all frames.

        ``senders`` are places in the block, as are the rows of the other arrays. Vectors are
        quantized and their frames sized on all cores; the sum moves in the clients' order.
        """
        backend = self.backend
        clients = block[senders]
        noisy = None if recipe.memory is self.recipe.memory else self.recipe.noisy
        deltas = backend.rows(vectors, senders)
        mirrors = backend.rows(self._mirrors, clients)

        quantizers: list[Quantizer] = [recipe.quantizer] * len(clients)
        if noisy is not None:
            quantizers = [noisy.quantizer(self._notes[client]) for client in clients.tolist()]

        def quantize(index: int) -> tuple[AnyUpload, FrameSize]:
            place, client = int(senders[index]), int(clients[index])
            key = (self.seed, client, self.next_round)
            upload = quantizers[index].quantize(
                deltas[index], innovation.of(place), int(widths[place]), key
            )
            if noisy is not None:
                upload = for_one_round(upload)
            elif recipe.movement.widest > 1:
                self._energies[client] = energies(advance(recipe.memory, mirrors[index], upload))
            return upload, self._frames.size(client, mirrors[index], upload)

        is_large = len(clients) * deltas[0].size >= _THREAD_LENGTH
        results = map_threads(quantize, range(len(clients)), num_threads() if is_large else 1)
        uploads = [upload for upload, _ in results]
        total = self._total
        if noisy is not None:
            total = self._passing = self._total * 0.0 if self._passing is None else self._passing
        backend.advance(
            recipe.memory, self._mirrors, total, clients, uploads, self._weights[clients]
        )
        if recipe.memory is Memory.FEEDBACK:
            triples = zip(quantizers, deltas, uploads, strict=True)
            residuals = [left_to_owe(*triple) for triple in triples]
            backend.store(self._residuals, clients, np.stack(residuals))
        self._stored_errors[clients] = innovation.errors[senders] if noisy is None else 0.0
        return [frame_size for _, frame_size in results]

    def _step(self) -> None:
        direction = self._total
        if self._amplification != 1:
            direction = direction * self._amplification
        if self.recipe.noisy is not None and self._passing is not None:
            factor = amplification(self.recipe.noisy.recipe, self.dropout.rate, self._sampled)
            direction = direction + self._passing * factor
            self._passing = None
        optimizer = self.training.optimizer
        self._optimizer_state, update = optimizer.step(self._optimizer_state, direction)
        self._params, self._last_step = self.backend.take_step(
            self._params, update, direction, self.step_size
        )
        if not self._keeps_mirror:
            self._total = self._total * 0.0

    def _movement(self) -> float:
        """Return the movement, with the last step, which a GPU may still be busy with."""
        if self._last_step is not None:
            step = self.backend.number(self._last_step) / len(self._everyone) ** 2
            step *= self._fresh_share
            self._history = self.recipe.movement.extend(self._history, step)
            self._last_step = None
        return self.recipe.movement.of(self._history)

    def _foresee(self) -> None:
        """Let a GPU begin the next round, in case that all clients take part in it again."""
        recipe = self.recipe
        is_foreseeable = not recipe.keeps_average and recipe.noisy is None
        if self.training.local.is_one_gradient and is_foreseeable:
            self.backend.foresee(self._params, recipe.memory, recipe.quantizer, self._held(recipe))

    def loss(self) -> float:
        """Return the loss of the current model."""
        clients = np.arange(self.problem.num_clients)
        losses = self.statistics.losses(self.backend, self._params, clients)
        return float(np.mean(self._weights * losses))

    def state(self) -> SimulationState:
        """Return everything needed to go on from here."""
        get = self.backend.get
        self._movement()
        return SimulationState(
            round=self.next_round,
            parameters=get(self._params).copy(),
            total=get(self._total).copy(),
            history=self._history,
            mirrors=get(self._mirrors).copy(),
            directions=self._frames.directions.copy(),
            residuals=get(self._residuals).copy(),
            averages=get(self._averages).copy(),
            notes=self._notes.copy(),
            stored_errors=self._stored_errors.copy(),
            silent_rounds=self._silent_rounds.copy(),
            momentum=get(self._optimizer_state.momentum).copy(),
            variance=get(self._optimizer_state.variance).copy(),
            statistics=self.statistics.to_array(),
        )

    def restore(self, state: SimulationState) -> None:
        """Go back to a state that `state` returned."""
        self._load(state)
        self.statistics.load(state.statistics)
