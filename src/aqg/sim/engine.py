"""The fast simulator: many clients at once, on CPU or GPU.

Clients and server take the steps of `aqg.core.round` and `aqg.core.server`, as everywhere else.
What is done here is to hand clients over in blocks of consecutive ones, so that gradients never
take more memory than ``block_bytes``, whatever the number of clients; to keep the model, the
mirrors and the samples on one device; and to size frames in place of building them.

On the CPU in float64 every upload, width, byte and parameter equals the reference's bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from aqg.core.messages import AnyUpload, Skip
from aqg.core.optimizers import OptimizerState
from aqg.core.public import Public, lies_on_grid
from aqg.core.recipe import Recipe
from aqg.core.round import Clients, News, compress, settle
from aqg.core.server import Model, add_uploads, take_step
from aqg.core.space import Array, with_rows
from aqg.core.stages import level_factors
from aqg.core.track import Track
from aqg.core.types import Float64Array, FloatArray, IntArray
from aqg.protocol.log import Content
from aqg.sim.backends import Backend, make_backend
from aqg.sim.downloads import Downloads
from aqg.sim.late import Replies, Reply, check_late
from aqg.sim.problem import Problem
from aqg.sim.record import (
    DROPPED,
    SKIP_BYTES,
    RoundRecord,
    frame_sizes,
    full_download_bytes,
    make_record,
    received_bytes,
)
from aqg.sim.state import SimulationState, check_fits, initial_state
from aqg.sim.statistics import RunStatistics
from aqg.sim.training import BernoulliDropout, Dropout, Training
from aqg.wire import Known
from aqg.wire.entry import encode_entry


class FastSimulation:
    """Runs a recipe on a problem; the same interface and results as `ReferenceSimulation`.

    Args:
        problem: what is learned, and by whom.
        recipe: the compressor.
        step_size: ``α``, or the natural step of a rule that finds its own (``training.step``).
        dropout: who drops out when.
        seed: makes stochastic recipes repeatable.
        device: ``"cpu"``, or a torch device such as ``"cuda"``.
        block_bytes: the most memory one block of gradients may take.
        training: what clients compute, who is sampled, how they are weighted, and the server's
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
        count, late = problem.num_clients, self.training.late
        self._sampled = self.training.num_counted(count) / count
        recipe = recipe.for_updates(self._losses_are_exact)
        self.recipe = recipe
        self._weights = self.training.client_weights(problem)
        self._level_factors = level_factors(self._weights)
        self.statistics = RunStatistics(problem, recipe, self.training, self._weights)
        self.problem = problem = self.statistics.problem
        never_away = isinstance(self.dropout, BernoulliDropout) and self.dropout.rate == 0
        self._all_take_part = never_away and self._sampled == 1 and late is None
        num_at_work = self.training.num_sampled(count)
        self.training.check_memory(recipe, self.statistics.are_averaged)
        check_late(late, recipe, num_at_work, self.statistics.are_averaged)
        self._replies = None if late is None else Replies(late, problem, seed)
        self.backend: Backend = make_backend(problem, device)
        self._everyone = np.arange(problem.num_clients)
        self._block_size = max(1, block_bytes // problem.initial_params.nbytes)
        self._step = self.training.make_step(step_size, self.dropout.rate, problem.num_clients)
        self._downloads: Downloads | None = None
        self._load(initial_state(problem, recipe, self.training))

    def _load(self, state: SimulationState) -> None:
        self._model = _model_in(self.backend.put, state.model)
        if state.log is not None:
            merges = lies_on_grid(self.recipe, self._step.downlink)
            start, forgets = self.problem.initial_params, self.training.memory == "none"
            self._downloads = Downloads(start, state.log, merges, forgets)
        if self._replies is not None and state.late is not None:
            self._replies.load(state.late)
        self._clients = _clients_in(self.backend.put, np.array, self.recipe, state.clients)

    @property
    def next_round(self) -> int:
        """The round that `run_round` would run."""
        return self._model.round

    @property
    def parameters(self) -> FloatArray:
        """The current model."""
        return self.backend.get(self._model.parameters)

    @property
    def averaged(self) -> FloatArray:
        """The mean of the models so far, where the step's rule keeps one; else the model."""
        return self.backend.get(self._model.averaged)

    def run_round(self, evaluate: bool = True) -> RoundRecord:
        """Run one round; with ``evaluate``, also report the loss at its start."""
        number = self.next_round
        num_clients = self.problem.num_clients
        present = self._present()
        widths = np.zeros(num_clients, np.int64)
        if len(present) < num_clients:
            widths[:] = DROPPED
            widths[present] = 0
        losses = np.empty(num_clients)
        faults: list[tuple[int, str]] = []
        sent = np.zeros(num_clients, np.int64)
        sent[present] = SKIP_BYTES
        movement = self.recipe.movement.of(self._model.history)
        downloads = self._deliver(present)
        replies: dict[int, Reply] = {}
        shares = self.recipe.round_weights(self._weights, present, self._sampled)
        for start in range(0, len(present), self._block_size):
            block = present
            if len(present) > self._block_size:
                block = present[start : start + self._block_size]
            block_losses, vectors = self._train(block)
            factors = None if self._level_factors is None else self._level_factors[block]
            news = News(
                number,
                movement,
                block_losses,
                self.seed,
                level_factors=factors,
                noise=self._model.budget.noise,
            )
            said = compress(self.backend, self.recipe, self._clients, block, vectors, news)
            faults += said.faults
            if len(said.senders):
                widths[said.senders] = said.widths
                track, senders, uploads = self._clients.track, said.senders, said.uploads
                sent[senders] = frame_sizes(self.backend, track, senders, uploads)
                if self._replies is None:
                    self._add(senders, uploads, shares)
            if self._replies is not None:
                messages = dict(zip(said.senders.tolist(), said.uploads, strict=True))
                for client in block.tolist():
                    replies[client] = Reply(messages.get(client, Skip()), int(sent[client]))
            self._clients = settle(self.backend, self.recipe, self._clients, said)
            if evaluate:  # last: a GPU need not be waited for
                measured = self.backend.get(block_losses)
                losses = with_rows(losses, block, measured)
        loss = self._mean_loss(present, losses) if evaluate else None
        received, seconds = received_bytes(downloads, num_clients), None
        if self._replies is not None:
            self._replies.send(number, replies, received)
            closed, seconds = self._replies.close(number), self._replies.clock
            widths, sent = closed.widths_and_sizes()
            shares = self.recipe.round_weights(self._weights, closed.clients, self._sampled)
            senders, uploads = closed.uploads()
            if uploads:
                self._add(senders, uploads, shares * closed.factors)
        self._take_step()
        traffic = self.statistics.finish_round(present)
        return make_record(number, loss, widths, faults, sent, received, traffic, seconds)

    def _add(self, senders: IntArray, uploads: Sequence[AnyUpload], shares: Float64Array) -> None:
        self._model = add_uploads(
            self.backend,
            self.recipe,
            self._model,
            self._clients.track,
            senders,
            uploads,
            shares[senders],
        )

    def run_rounds(self, count: int, evaluate: bool = True) -> Iterator[RoundRecord]:
        """Run ``count`` rounds and yield their records."""
        for _ in range(count):
            yield self.run_round(evaluate)

    def _deliver(self, present: IntArray) -> Sequence[tuple[IntArray, Content]]:
        if self._downloads is None:
            return [(present, full_download_bytes(self.problem.initial_params))]
        return self._downloads.deliver(present, self._public)

    def _take_step(self) -> None:
        before, num_clients = self._model, self.problem.num_clients
        self._model, entry = take_step(self.backend, self.recipe, before, self._step, num_clients)
        if self._downloads is None:
            return
        known = None
        if entry.velocity is not None:
            known = Known(self.backend.get(before.velocity), before.direction)
        self._downloads.append(encode_entry(entry, known))

    def _public(self) -> Public:
        return self._model.public(self.backend)

    def _present(self) -> IntArray:
        if self._all_take_part:
            return self._everyone
        num_clients = self.problem.num_clients
        away = self.dropout.dropped(self.next_round, num_clients)
        at_work = None if self._replies is None else self._replies.at_work
        away = away | self.training.unsampled(self.next_round, num_clients, self.seed, at_work)
        return (~away).nonzero()[0] if np.count_nonzero(away) else self._everyone

    def _mean_loss(self, present: IntArray, losses: Float64Array) -> float:
        """Return the loss of all clients, of which those present may have measured their own."""
        params = self._model.parameters
        if not self._losses_are_exact:
            losses = self.statistics.losses(self.backend, params, self._everyone)
        elif len(present) < len(losses):
            absent = np.setdiff1d(self._everyone, present)
            losses[absent] = self.statistics.losses(self.backend, params, absent)
        return float(np.add.reduce(self._weights * losses)) / len(losses)

    def _train(self, block: IntArray) -> tuple[Array, Array]:
        """Return each client's loss and the vector it would send: its (pseudo-)gradient."""
        local, params = self.training.local, self._model.parameters
        if local.is_one_gradient:
            return self.backend.losses_and_gradients(params, block)
        keys = [(self.seed, client, self.next_round) for client in block.tolist()]
        return self.backend.local_updates(local, params, block, keys)

    def loss(self) -> float:
        """Return the loss of the current model."""
        losses = self.statistics.losses(self.backend, self._model.parameters, self._everyone)
        return float(np.mean(self._weights * losses))

    def state(self) -> SimulationState:
        """Return everything needed to go on from here."""

        def copy(array: Array) -> FloatArray:
            return np.array(self.backend.get(array))

        clients = _clients_in(copy, np.array, self.recipe, self._clients)
        model = _model_in(copy, self._model)
        log = None if self._downloads is None else self._downloads.state()
        late = None if self._replies is None else self._replies.to_arrays()
        return SimulationState(model, clients, self.statistics.to_array(), log, late)

    def restore(self, state: SimulationState) -> None:
        """Go back to a state that `state` returned."""
        check_fits(state, initial_state(self.problem, self.recipe, self.training))
        self._load(state)
        self.statistics.load(state.statistics)


def _model_in(move: Callable[[Array], Array], model: Model) -> Model:
    """Return the model with its vectors in another place."""
    step = model.step
    if step is not None:
        step = step._replace(start=move(step.start), mean=move(step.mean))
    return model._replace(
        parameters=move(model.parameters),
        velocity=move(model.velocity),
        total=move(model.total),
        optimizer=OptimizerState(*map(move, model.optimizer)),
        rest=move(model.rest),
        step=step,
    )


def _clients_in(
    move: Callable[[Array], Array], copy: Callable[[Array], Array], recipe: Recipe, clients: Clients
) -> Clients:
    """Return the clients' state with its vectors in another place, and all else copied."""
    position, velocity, direction, is_held = clients.track
    track = Track(move(position), move(velocity), copy(direction), copy(is_held))
    stages = {}
    for name, stage in recipe.all_stages.items():
        place = move if stage.vectors == "device" else copy
        stages[name] = {field: place(table) for field, table in clients.stages[name].items()}
    return Clients(clients.num_params, track, copy(clients.skipped_rounds), stages)
