"""The simulator to hold beside the paper's Algorithms 1 and 2.

One server object, one object per client, and real frames between them. It is slow and plain on
purpose; the fast engine is tested against it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aqg.core import hearing as server_rules
from aqg.core.client import init_client, respond
from aqg.core.downlink import Downlink, Full
from aqg.core.dropouts import BernoulliDropout, Dropout
from aqg.core.hearing import Peer, ServerState
from aqg.core.messages import Broadcast
from aqg.core.per_client import PerClient
from aqg.core.public import Public
from aqg.core.round import Clients, join_clients, split_clients
from aqg.core.stages import level_factors
from aqg.sim.downloads import Downloads, initial_log
from aqg.sim.record import DROPPED, RoundRecord, full_download_bytes
from aqg.sim.state import SimulationState, check_fits, initial_state
from aqg.sim.statistics import RunStatistics
from aqg.sim.training import Training
from aqg.wire import Known, decode, encode, known
from aqg.wire.entry import encode_entry, follow_log
from aqg.wire.snapshot import decode_snapshot, encode_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aqg.core.messages import Message
    from aqg.core.optimizers import ServerOptimizer
    from aqg.core.recipe import Recipe
    from aqg.core.step_sizes import StepRule
    from aqg.core.types import Float64Array, FloatArray, IntArray
    from aqg.objectives.base import Objective
    from aqg.protocol.log import Delivery
    from aqg.sim.local import LocalTraining
    from aqg.sim.problem import Problem, Samples


class Client:
    """Client ``m``: holds its samples and its state, answers a broadcast with a frame."""

    def __init__(
        self,
        index: int,
        recipe: Recipe,
        objective: Objective,
        samples: Samples,
        dtype: np.dtype[Any],
        seed: int,
        local: LocalTraining,
    ) -> None:
        self.index = index
        self.recipe = recipe
        self.objective = objective
        self.samples = samples
        self.seed = seed
        self.local = local
        self.state: Clients = init_client(recipe, objective.num_params, dtype)
        self.public: Public | None = None
        self.level_factor = 1.0
        self.loss = np.nan
        self.fault: str | None = None

    def step(self, broadcast: Broadcast) -> bytes:
        """Compute ``g_m^k``, choose a width, and return the frame to send."""
        key = (self.seed, self.index, broadcast.round)
        loss, gradient = self.local.update(self.objective, broadcast.parameters, *self.samples, key)
        self.loss = float(loss)
        shared = known(self.state.link)
        self.state, message = respond(
            self.recipe,
            self.state,
            gradient,
            broadcast.movement,
            key,
            self.loss,
            self.level_factor,
            broadcast.noise,
        )
        self.fault = getattr(message, "fault", None)
        return encode(message, known=shared)

    def follow(
        self, parcel: Parcel, start: FloatArray, optimizer: ServerOptimizer, noise: float
    ) -> Broadcast:
        """Bring the own copy of the public model up to date, and read off the round's broadcast."""
        assert self.public is not None
        if parcel.snapshot is not None:
            self.public = decode_snapshot(parcel.snapshot, self.public, start)
        movement = self.recipe.movement
        self.public = follow_log(parcel.log, self.public, movement, optimizer)
        public = self.public
        return Broadcast(public.round, public.parameters, movement.of(public.history), noise)

    def evaluate(self, parameters: FloatArray) -> float:
        """Return ``f_m(θ)``."""
        return float(self.objective.losses(parameters, *self.samples))


class Parcel(NamedTuple):
    """What a client receives at the start of a round."""

    snapshot: bytes | None
    log: bytes
    num_bytes: int


class Server:
    """Holds the model and every ``ref_m``; hears frames, takes steps."""

    def __init__(
        self,
        recipe: Recipe,
        initial_params: FloatArray,
        weights: Float64Array,
        step_size: float,
        dropout_rate: float,
        sampled: float,
        optimizer: ServerOptimizer,
        downlink: Downlink,
        rule: StepRule,
    ) -> None:
        self.recipe = recipe
        self.weights = self.shares = weights
        self.step_size = step_size
        self.dropout_rate = dropout_rate
        self.sampled = sampled
        self.optimizer = optimizer
        self.downlink = downlink
        self.rule = rule
        self.state = server_rules.init_server(
            recipe, initial_params, len(weights), optimizer, downlink, rule
        )
        self.start = initial_params
        self.downloads: Downloads | None = None
        if not isinstance(downlink, Full):
            self.downloads = Downloads(initial_params, initial_log(len(weights)))

    def broadcast(self) -> Broadcast:
        """Return ``θ^k`` and the movement scalar."""
        return server_rules.broadcast(self.recipe, self.state)

    def begin_round(self, takes_part: IntArray) -> None:
        """Say how much each client counts in this round."""
        self.shares = self.recipe.round_weights(self.weights, takes_part, self.sampled)

    def receive(self, client: int, frame: bytes) -> Message:
        """Decode one client's frame and move its ``ref_m``."""
        shared = known(self.state.peers[client].link)
        message = decode(frame, len(self.state.parameters), known=shared)
        weight = float(self.shares[client])
        self.state = server_rules.hear(self.recipe, self.state, client, message, weight)
        return message

    @property
    def public(self) -> Public:
        """The public model as it is."""
        model = self.state.model
        assert model.downlink is not None
        return Public(
            model.round,
            model.parameters,
            model.downlink.total,
            model.downlink.direction,
            model.history,
            model.optimizer,
            model.downlink.rates,
        )

    def deliveries(self, clients: IntArray) -> dict[int, Delivery]:
        """Decide what brings each of these clients up to date; nothing where models are sent."""
        if self.downloads is None:
            return {}
        return self.downloads.plan(clients, lambda: encode_snapshot(self.public, self.start))

    def parcel(self, delivery: Delivery, held: int) -> Parcel:
        """Return the frames of a delivery, for a client that really holds round ``held``."""
        assert self.downloads is not None
        log = self.downloads.log
        snapshot = delivery.snapshot if isinstance(delivery.snapshot, bytes) else None
        first = delivery.first if snapshot is not None else max(held, delivery.first)
        return Parcel(snapshot, log.frame(first), delivery.num_bytes)

    def step(self) -> None:
        """Take ``θ^{k+1} = θ^k - α Σ_m ref_m``, with what is published of the sum."""
        before = self.state.model.downlink
        self.state, entry = server_rules.publish_round(
            self.recipe,
            self.state,
            self.step_size,
            self.dropout_rate,
            self.sampled,
            self.optimizer,
            self.downlink,
            self.rule,
        )
        if self.downloads is not None:
            assert before is not None
            known = Known(before.total, before.direction) if len(before.total) else None
            self.downloads.append(encode_entry(entry, known))


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
        self.dropout: Dropout = dropout if dropout is not None else BernoulliDropout()
        self.seed = seed
        self.training = training if training is not None else Training()
        num_clients = problem.num_clients
        sampled = self.training.num_sampled(num_clients) / num_clients
        recipe = recipe.for_updates(self.training.local.sees_all_samples)
        self.weights = self.training.client_weights(problem)
        self.statistics = RunStatistics(problem, recipe, self.training, self.weights)
        self.problem = problem = self.statistics.problem
        self.server = Server(
            recipe,
            problem.initial_params,
            self.weights,
            step_size,
            self.dropout.rate,
            sampled,
            self.training.optimizer,
            self.training.downlink,
            self.training.step,
        )
        self.clients = [
            Client(
                index, recipe, problem.objective, samples, problem.dtype, seed, self.training.local
            )
            for index, samples in enumerate(problem.clients)
        ]
        factors = level_factors(self.weights)
        if factors is not None:
            for client, factor in zip(self.clients, factors.tolist(), strict=True):
                client.level_factor = factor
        self._share_public()

    def _share_public(self) -> None:
        """Give every client a copy of the public model."""
        if self.server.downloads is not None:
            for client in self.clients:
                client.public = self.server.public

    @property
    def next_round(self) -> int:
        """The round that `run_round` would run."""
        return self.server.state.round

    @property
    def parameters(self) -> FloatArray:
        """The current model."""
        return self.server.state.parameters

    @property
    def averaged(self) -> FloatArray:
        """The mean of the models so far, where the step's rule keeps one; else the model."""
        return self.server.state.averaged

    def run_round(self, evaluate: bool = True) -> RoundRecord:
        """Run one round; with ``evaluate``, also report the loss at its start."""
        broadcast = self.server.broadcast()
        num_clients = len(self.clients)
        dropped = self.dropout.dropped(broadcast.round, num_clients)
        away = dropped | self.training.unsampled(broadcast.round, num_clients, self.seed)
        widths = []
        faults = []
        sent, received = [0] * num_clients, [0] * num_clients
        self.server.begin_round(np.flatnonzero(~away))
        deliveries = self.server.deliveries(np.flatnonzero(~away))
        for client in self.clients:
            if away[client.index]:
                widths.append(DROPPED)
                continue
            delivery = deliveries.get(client.index)
            news, received[client.index] = self._tell(client, broadcast, delivery)
            frame = client.step(news)
            message = self.server.receive(client.index, frame)
            widths.append(message.width)
            sent[client.index] = len(frame)
            if client.fault is not None:
                faults.append((client.index, client.fault))
        loss = None
        if evaluate:
            measured = ~away & self.training.local.sees_all_samples
            loss = self._weighted_mean(
                client.loss
                if measured[client.index]
                else self._evaluate(client, broadcast.parameters)
                for client in self.clients
            )
        self.server.step()
        traffic = self.statistics.finish_round(np.flatnonzero(~away))
        faults += traffic.faults
        for index, size in traffic.client_uploads:
            sent[index] += size
        for index in np.flatnonzero(~away).tolist():
            received[index] += traffic.client_download_bytes
        return RoundRecord(
            broadcast.round,
            loss,
            tuple(widths),
            sum(sent),
            tuple(faults),
            *traffic[:2],
            sum(received),
            tuple(sent),
            tuple(received),
        )

    def _tell(
        self, client: Client, broadcast: Broadcast, delivery: Delivery | None
    ) -> tuple[Broadcast, int]:
        """Return what the client knows at the start of a round, and the bytes that told it."""
        if delivery is None:
            return broadcast, full_download_bytes(broadcast.parameters)
        assert client.public is not None
        parcel = self.server.parcel(delivery, client.public.round)
        optimizer = self.training.optimizer
        start = self.problem.initial_params
        news = client.follow(parcel, start, optimizer, broadcast.noise)
        return news, parcel.num_bytes

    def loss(self) -> float:
        """Return the loss of the current model."""
        return self._weighted_mean(
            self._evaluate(client, self.parameters) for client in self.clients
        )

    def _evaluate(self, client: Client, parameters: FloatArray) -> float:
        with self.statistics.of_client(client.index):
            return client.evaluate(parameters)

    def _weighted_mean(self, losses: Iterable[float]) -> float:
        return float(np.mean(self.weights * np.fromiter(losses, np.float64)))

    def state(self) -> SimulationState:
        """Return everything needed to go on from here."""
        clients = join_clients([client.state for client in self.clients])
        downloads = self.server.downloads
        log = None if downloads is None else downloads.state()
        return SimulationState(self.server.state.model, clients, self.statistics.to_array(), log)

    def restore(self, state: SimulationState) -> None:
        """Go back to a state that `state` returned; both sides get the one copy of a mirror."""
        check_fits(state, initial_state(self.problem, self.server.recipe, self.training))
        for client, own in zip(self.clients, split_clients(state.clients), strict=True):
            client.state = own
        peers = PerClient(len(self.clients), Peer(self.clients[0].state.link))
        for client in self.clients:
            peers = peers.replaced(client.index, Peer(client.state.link))
        self.server.state = ServerState(state.model, peers)
        if self.server.downloads is not None:
            assert state.log is not None
            self.server.downloads.load(state.log)
            self._share_public()
        self.statistics.load(state.statistics)
