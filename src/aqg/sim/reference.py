"""The simulator to hold beside the paper's Algorithms 1 and 2.

One server, one object per client, and real frames between them, over the functions that every
deployment uses. It is slow and plain on purpose; the fast engine is tested against it.
"""

import numpy as np

from aqg.core import server
from aqg.core.messages import Broadcast
from aqg.core.public import init_public
from aqg.core.recipe import Recipe
from aqg.core.round import init_client, join_clients, respond, split_clients
from aqg.core.stages import level_factors
from aqg.core.types import Float64Array, FloatArray
from aqg.protocol.log import Delivery
from aqg.sim.downloads import make_downloads
from aqg.sim.late import Reply, make_replies
from aqg.sim.problem import Problem
from aqg.sim.record import RoundRecord, full_download_bytes, make_record
from aqg.sim.state import SimulationState, check_fits, initial_state
from aqg.sim.statistics import RunStatistics
from aqg.sim.training import BernoulliDropout, Dropout, Training
from aqg.wire import decode, encode, known
from aqg.wire.entry import encode_entry, known_velocity


class ReferenceSimulation:
    """Runs a recipe on a problem, round by round; can be saved and restored between any two."""

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
        self.dropout = dropout if dropout is not None else BernoulliDropout()
        self.recipe = recipe = recipe.for_updates(self.training.local.sees_all_samples)
        self.weights = self.training.client_weights(problem)
        self.statistics = RunStatistics(problem, recipe, self.training, self.weights)
        self.training.check_memory(recipe, self.statistics.are_averaged)
        self.problem = problem = self.statistics.problem
        self.num_clients, self.start = problem.num_clients, problem.initial_params
        factors = level_factors(self.weights)
        self.level_factors = np.ones(self.num_clients) if factors is None else factors
        self.step = self.training.make_step(step_size, self.dropout.rate, self.num_clients)
        self.server = server.init_server(recipe, self.start, self.num_clients, self.step)
        self.clients = [init_client(recipe, len(self.start), problem.dtype)] * self.num_clients
        self.models = [init_public(recipe, self.start)] * self.num_clients  # what each client holds
        self.replies = make_replies(self.training, recipe, problem, seed, self.statistics)
        forgets = self.training.memory == "none"
        self.downloads = make_downloads(problem, recipe, self.training.downlink, forgets)

    def run_round(self, evaluate: bool = True) -> RoundRecord:
        """Run one round; with ``evaluate``, also report the loss at its start."""
        number, count, theta = self.next_round, self.num_clients, self.parameters
        away = self.training.unsampled(number, count, self.seed, self.replies.at_work)
        away = away | self.dropout.dropped(number, count)
        present, before = np.flatnonzero(~away), self.server.public
        plan = {} if self.downloads is None else self.downloads.plan(present, before)
        losses, received, faults, replies = np.full(count, np.nan), np.zeros(count, int), [], {}
        for m in present.tolist():
            news, received[m] = self._tell(m, plan.get(m))
            frame, losses[m], fault = self._client(m, news)
            message = decode(frame, len(theta), known=known(self.server.peers[m].track))
            replies[m] = Reply(message, len(frame))
            faults += [] if fault is None else [(m, fault)]
        loss = self._mean_loss(theta, losses) if evaluate else None
        self.replies.send(number, replies, received)
        closed = self.replies.close(number)
        shares = self.recipe.round_weights(self.weights, closed.clients, self.step.sampled)
        for m, reply in zip(closed.clients.tolist(), closed.replies, strict=True):
            weight = float(shares[m] * closed.factors[m])
            self.server = server.take_message(self.recipe, self.server, m, reply.message, weight)
        self.server, entry = server.publish_round(self.recipe, self.server, self.step)
        if self.downloads is not None:
            self.downloads.append(encode_entry(entry, known_velocity(before)))
        widths, sent = closed.widths_and_sizes()
        traffic, seconds = self.statistics.finish_round(present), self.replies.clock
        return make_record(number, loss, widths, faults, sent, received, traffic, seconds)

    def _client(self, m: int, news: Broadcast) -> tuple[bytes, float, str | None]:
        """Compute ``g_m^k``, choose a width; return the frame to send, ``f_m(θ^k)``, any fault."""
        key, samples = (self.seed, m, news.round), self.problem.clients[m]
        problem, theta, state = self.problem, news.parameters, self.clients[m]
        loss, gradient = self.training.local.update(problem.objective, theta, *samples, key)
        terms = news.movement, key, float(loss), self.level_factors[m], news.noise
        self.clients[m], message = respond(self.recipe, state, gradient, *terms)
        frame = encode(message, known=known(state.track))
        return frame, float(loss), getattr(message, "fault", None)

    def _tell(self, m: int, delivery: Delivery | None) -> tuple[Broadcast, int]:
        """Bring a client's copy of the model up to date; return what it knows, and the bytes."""
        news = server.broadcast(self.recipe, self.server)
        if delivery is None or self.downloads is None:
            return news, full_download_bytes(news.parameters)
        held = self.downloads.follow(self.models[m], delivery, self.recipe)
        self.models[m] = self.models[m] if self.downloads.forgets else held
        movement = self.recipe.movement.of(held.history)
        return Broadcast(held.round, held.parameters, movement, news.noise), delivery.num_bytes

    @property
    def next_round(self) -> int:
        """The round that `run_round` would run."""
        return self.server.round

    @property
    def parameters(self) -> FloatArray:
        """The current model, as clients hold it."""
        return self.server.parameters

    @property
    def averaged(self) -> FloatArray:
        """The mean of the models so far, where the step's rule keeps one; else the model."""
        return self.server.averaged

    def loss(self) -> float:
        """Return the loss of the current model."""
        return self._mean_loss(self.parameters, np.full(self.num_clients, np.nan))

    def _mean_loss(self, params: FloatArray, losses: Float64Array) -> float:
        is_known = ~np.isnan(losses) & self.training.local.sees_all_samples
        for m in np.flatnonzero(~is_known).tolist():
            with self.statistics.of_client(m):
                losses[m] = self.problem.objective.losses(params, *self.problem.clients[m])
        return float(np.mean(self.weights * losses))

    def state(self) -> SimulationState:
        """Return everything needed to go on from here."""
        log = None if self.downloads is None else self.downloads.state()
        clients, others = join_clients(self.clients), (log, self.replies.to_arrays())
        return SimulationState(self.server.model, clients, self.statistics.to_array(), *others)

    def restore(self, state: SimulationState) -> None:
        """Go back to a state that `state` returned; both sides get the one copy of a mirror."""
        check_fits(state, initial_state(self.problem, self.recipe, self.training))
        self.clients = split_clients(state.clients)
        self.server = server.join_server(state.model, [client.track for client in self.clients])
        self.replies.load(state.late)
        if self.downloads is not None and state.log is not None:
            self.downloads.load(state.log)
            if not self.downloads.forgets:
                self.models = [self.server.public] * self.num_clients
        self.statistics.load(state.statistics)
