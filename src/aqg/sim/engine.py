"""The fast simulator: many clients at once, on CPU or GPU.

Clients and server take the steps of `aqg.core.round` and `aqg.core.server`, as everywhere else.
What is done here is to hand clients over in blocks of consecutive ones, so that gradients never
take more memory than ``block_bytes``, whatever the number of clients; to keep the model, the
mirrors and the samples on one device; and to size frames in place of building them.

On the CPU in float64 every upload, width, byte and parameter equals the reference's bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from aqg.core.messages import AnyUpload
from aqg.core.recipe import Recipe
from aqg.core.round import Clients, compress, settle
from aqg.core.server import Model, add_uploads, take_step
from aqg.core.space import Array, with_rows
from aqg.core.track import Flow
from aqg.core.types import Float64Array, IntArray
from aqg.sim.backends import Backend, make_backend
from aqg.sim.late import Reply, replies_of
from aqg.sim.problem import Problem
from aqg.sim.record import DROPPED, SKIP_BYTES, RoundRecord, frame_sizes
from aqg.sim.simulation import Simulation


class FastSimulation(Simulation):
    """The same results as `ReferenceSimulation`, and the same arguments but for two.

    Args:
        device: ``"cpu"``, or a torch device such as ``"cuda"``.
        block_bytes: the most memory one block of gradients may take.
    """

    space: Backend
    _clients: Clients  # what the clients remember, in the space

    def __init__(
        self,
        problem: Problem,
        recipe: Recipe,
        *arguments: Any,
        device: str = "cpu",
        block_bytes: int = 1 << 25,
        **options: Any,
    ) -> None:
        super().__init__(problem, recipe, *arguments, **options)
        self.space = make_backend(self.problem, device)
        self._block_size = max(1, block_bytes // problem.initial_params.nbytes)
        self._load(self._initial_state())

    def run_round(self, evaluate: bool = True) -> RoundRecord:
        number, num_clients = self.next_round, len(self.everyone)
        present = self._present()
        widths = np.full(num_clients, DROPPED)
        widths[present] = 0
        losses = np.full(num_clients, np.nan)
        faults: list[tuple[int, str]] = []
        sent = np.zeros(num_clients, np.int64)
        sent[present] = SKIP_BYTES
        movement, noise = self.recipe.movement.of(self.model.history), self.model.budget.noise
        _, received = self._deliver(present)
        replies: dict[int, Reply] = {}
        shares = self._shares(present)
        for start in range(0, len(present), self._block_size):
            block = present
            if len(present) > self._block_size:
                block = present[start : start + self._block_size]
            block_losses, vectors = self._train(block)
            factors = None if self.level_factors is None else self.level_factors[block]
            terms = number, self.seed, 0, block_losses, factors, noise
            flow = Flow(vectors, movement, self.space, *terms)
            said = compress(self.recipe, self._clients, block, flow)
            faults += said.faults
            if len(said.senders):
                widths[said.senders] = [upload.width for upload in said.uploads]
                track, senders, uploads = self._clients.track, said.senders, said.uploads
                sent[senders] = frame_sizes(self.space, track, senders, uploads)
                if self.replies is None:
                    self._add(senders, uploads, shares)
            if self.replies is not None:
                replies |= replies_of(block, said.senders, said.uploads, sent)
            self._clients = settle(self.recipe, self._clients, said)
            if evaluate:  # last: a GPU need not be waited for
                losses = with_rows(losses, block, self.space.get(block_losses))
        loss = self._mean_loss(losses) if evaluate else None
        if self.replies is not None:
            closed = self._close(number, replies, received)
            widths, sent = closed.widths_and_sizes()
            senders, uploads = closed.uploads()
            if uploads:
                self._add(senders, uploads, self._shares(closed.clients) * closed.factors)
        before = self.model
        self.model, entry = take_step(self.space, self.recipe, before, self.step, num_clients)
        self._publish(entry, before)
        return self._record(number, loss, widths, faults, sent, received, present)

    def _add(self, senders: IntArray, uploads: Sequence[AnyUpload], shares: Float64Array) -> None:
        track, own = self._clients.track, shares[senders]
        self.model = add_uploads(self.space, self.recipe, self.model, track, senders, uploads, own)

    def _losses(self, clients: IntArray) -> Float64Array:
        return self.statistics.losses(self.space, self.model.parameters, clients)

    def _train(self, block: IntArray) -> tuple[Array, Array]:
        """Return each client's loss and the vector it would send: its (pseudo-)gradient."""
        local, params = self.training.local, self.model.parameters
        if local.is_one_gradient:
            return self.space.losses_and_gradients(params, block)
        keys = [(self.seed, client, self.next_round) for client in block.tolist()]
        return self.space.local_updates(local, params, block, keys)

    def _place(self, model: Model, clients: Clients) -> None:
        self.model, self._clients = model, clients

    def _clients_state(self) -> Clients:
        return self._clients
