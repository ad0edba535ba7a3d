"""The simulator to hold beside the paper's Algorithms 1 and 2.

One server, one object per client, and real frames between them, over the functions that every
deployment uses. It is slow and plain on purpose; the fast engine is tested against it.
"""

from operator import itemgetter
from typing import Any

import numpy as np

from aqg.core import server
from aqg.core.downlink import Public
from aqg.core.messages import Broadcast
from aqg.core.round import Clients, ClientState, respond
from aqg.core.server import Model, ServerState
from aqg.core.space import NumpySpace
from aqg.core.types import Float64Array, IntArray, map_arrays
from aqg.protocol.log import Delivery
from aqg.sim.record import RoundRecord
from aqg.sim.simulation import Simulation
from aqg.sim.training import Reply
from aqg.wire import decode, encode, known
from aqg.wire.entry import decode_snapshot, follow_log


class ReferenceSimulation(Simulation):
    """Runs a recipe on a problem, one client after the other."""

    server: ServerState  # the model, and every client's mirror
    clients: list[ClientState]  # what each client remembers
    models: list[Public]  # what each client holds

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.space = NumpySpace()
        self._load(self._initial_state())

    def run_round(self, evaluate: bool = True) -> RoundRecord:
        """Run the six steps of a round, as ``docs/explanation/algorithm.md`` counts them."""
        number, before, present = self.next_round, self.model, self._present()
        deliveries, received = self._deliver(present)
        plan = {m: delivery for clients, delivery in deliveries for m in clients.tolist()}
        losses, faults, replies = np.full(len(self.everyone), np.nan), [], {}
        for m in present.tolist():
            news = self._tell(m, plan[m])  # 1. ``θ^k``, and how far the model moved lately
            frame, losses[m], fault = self._client(m, news)  # 2. to 4. ``g_m^k``, and bits of ``Δ``
            message = decode(frame, len(before.parameters), known=known(self.server.peers[m].track))
            replies[m] = Reply(message, len(frame))
            faults += [] if fault is None else [(m, fault)]
        loss = self._mean_loss(losses) if evaluate else None
        closed = self._close(number, replies, received)
        shares = self._shares(closed.clients) * closed.factors
        for m, reply in zip(closed.clients.tolist(), closed.replies, strict=True):
            weight = float(shares[m])  # 5. ``ref_m ← ref_m + Q_b(Δ)``
            self.server = server.take_message(self.recipe, self.server, m, reply.message, weight)
        # 6. ``θ^{k+1} = θ^k - α Σ_m w_m ref_m``
        self.server, entry = server.publish_round(self.recipe, self.server, self.step)
        self._publish(entry, before)
        widths, sent = closed.widths_and_sizes()
        return self._record(number, loss, widths, faults, sent, received, present)

    def _client(self, m: int, news: Broadcast) -> tuple[bytes, float, str | None]:
        """Compute ``g_m^k``, choose a width; return the frame to send, ``f_m(θ^k)``, any fault."""
        key, samples = (self.seed, m, news.round), self.problem.clients[m]
        problem, theta, state = self.problem, news.parameters, self.clients[m]
        loss, gradient = self.training.local.update(problem.objective, theta, *samples, key)
        factor = 1.0 if self.level_factors is None else self.level_factors[m]
        terms = news.movement, key, float(loss), factor, news.noise
        self.clients[m], message = respond(self.recipe, state, gradient, *terms)
        frame = encode(message, known=known(state.track))
        return frame, float(loss), getattr(message, "fault", None)

    def _tell(self, m: int, delivery: Delivery) -> Broadcast:
        """Bring a client's copy of the model up to date, and return what it knows then."""
        news = server.broadcast(self.recipe, self.server)
        if self.log is None:
            return news
        held = self.models[m]
        if delivery.snapshot:
            held = decode_snapshot(delivery.snapshot, held, self.log.start)
        is_behind = held.round == delivery.first  # a restored one holds the model already
        frame = (is_behind and delivery.merged) or self.log.frame(held.round)
        held = follow_log(frame, held, self.recipe.movement)
        self.models[m] = self.models[m] if self._forgets else held
        movement = self.recipe.movement.of(held.history)
        return Broadcast(held.round, held.parameters, movement, news.noise)

    @property
    def model(self) -> Model:  # type: ignore[override]  # a part of the server
        """What the server holds besides the mirrors."""
        return self.server.model

    def _losses(self, clients: IntArray) -> Float64Array:
        losses = np.empty(len(clients))
        for place, m in enumerate(clients.tolist()):
            with self.statistics.of_client(m):
                samples = self.problem.clients[m]
                losses[place] = self.problem.objective.losses(self.parameters, *samples)
        return losses

    def _place(self, model: Model, clients: Clients) -> None:
        """Go on from a state; both sides get the one copy of a mirror."""
        rows = (slice(m, m + 1) for m in self.everyone.tolist())
        self.clients = [map_arrays(itemgetter(row), clients) for row in rows]
        peers = [server.Peer(client.track) for client in self.clients]
        self.server = server.join_server(model, peers)
        first = Public.first(self.recipe, self.problem.initial_params)
        held = first if self._forgets else self.server.public
        self.models = [held] * len(self.clients)

    def _clients_state(self) -> Clients:
        return map_arrays(lambda *rows: np.concatenate(rows), *self.clients)
