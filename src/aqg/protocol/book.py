"""The server's side of the mirror protocol: the model, its log, and a mirror of every client.

A reply is checked as a whole before anything of it is used (`aqg.protocol.mirrors` has the rules).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from aqg.core.arrays import from_arrays, to_arrays
from aqg.core.downlink import Full
from aqg.core.messages import Message, Skip
from aqg.core.public import Entry, Public, lies_on_grid
from aqg.core.recipe import Recipe
from aqg.core.server import (
    Model,
    Peer,
    ServerState,
    Step,
    forget,
    init_server,
    join_server,
    publish_round,
    take_message,
)
from aqg.core.track import Track, init_mirrors
from aqg.core.types import Float64Array, FloatArray
from aqg.errors import MessageError, RunError, WireError
from aqg.protocol.digests import DIGEST_BYTES, public_digest
from aqg.protocol.log import LogState, Publisher, initial_state
from aqg.protocol.messages import Order, Reply, Stamp
from aqg.protocol.mirrors import Held, content_digest, first_peer, take_reply


@dataclass(eq=False)
class MirrorBook:
    """The server's side: the model and its log, every ``ref_m`` with its stamp, and their sum.

    A reply that is not taken changes nothing. Taking one costs the same however many there are.
    """

    recipe: Recipe
    state: ServerState  # the model, all mirrors, and what is `Held` beside each
    weights: Float64Array  # ``w_m``
    how: Step  # how the server steps, and how the model is published
    publisher: Publisher | None = None  # keeps its log; None where clients receive the whole model

    @classmethod
    def first(
        cls, recipe: Recipe, parameters: FloatArray, weights: Float64Array, how: Step
    ) -> Self:
        """Return the book before the first round, with every ``ref_m`` zero."""
        held = first_peer(recipe, len(parameters), str(parameters.dtype)).held
        state = init_server(recipe, parameters, len(weights), how, held)
        publisher = None
        if not isinstance(how.downlink, Full):
            log = initial_state(state.public, len(weights))
            publisher = Publisher(parameters, log, lies_on_grid(recipe, how.downlink))
        return cls(recipe, state, weights, how, publisher)

    @property
    def round(self) -> int:
        return self.state.round

    @property
    def parameters(self) -> FloatArray:
        return self.state.parameters

    @property
    def entries(self) -> list[Held]:
        return [peer.held for peer in self.state.peers]

    @property
    def public(self) -> Public:
        return self.state.public

    def order(self, client: int, **terms: Any) -> Order:
        """Return what a client is to be sent; ``terms`` are what the book does not know."""
        stamp = self.state.peers[client].held.stamp
        if self.publisher is not None:
            parcel = self.publisher.parcel(client, self.public)
            terms |= {"public": parcel.digest, "log": parcel.log, "snapshot": parcel.snapshot}
        return Order(
            num_params=len(self.parameters),
            dtype=str(self.parameters.dtype),
            round=self.round,
            client=client,
            movement=self.recipe.movement.of(self.state.model.history),
            noise=self.state.model.budget.noise,
            **stamp._asdict(),
            **terms,
        )

    def note_holding(self, client: int, reply: Reply) -> None:
        """Take note of the model that a client holds, by its reply to an order of this round."""
        if self.publisher is None or reply.round != self.round:
            return
        if reply.lost:
            self.publisher.lost(client, reply.holding)
        elif reply.held_round == self.round:
            self.publisher.followed(client)

    def accept(self, client: int, reply: Reply, incarnation: int) -> Message | str:
        """Take client ``m``'s reply to this round's order and return its message, or why not."""
        params = self.parameters
        try:
            if (reply.incarnation, reply.round) != (incarnation, self.round):
                raise MessageError(
                    f"the reply is to round {reply.round} of incarnation {reply.incarnation}, "
                    f"not to round {self.round} of {incarnation}"
                )
            before = self.state.peers[client]
            peer, message = take_reply(self.recipe, before, reply, len(params), str(params.dtype))
            self.take(client, peer, message, reply.restarted)
        except (MessageError, WireError) as error:
            return str(error)
        return message

    def take(self, client: int, peer: Peer, message: Message, restarted: bool) -> None:
        """Take in what `take_reply` returned for a client's reply."""
        state, weight = self.state, float(self.weights[client])
        if restarted:
            state = forget(self.recipe, state, client, weight)
        state = take_message(self.recipe, state, client, message, weight)
        taken = state.peers[client]
        last_upload = taken.held.last_upload if isinstance(message, Skip) else self.round
        taken = taken._replace(held=peer.held._replace(last_upload=last_upload))
        self.state = state._replace(peers=state.peers.replaced(client, taken))

    def reweigh(self, weights: Float64Array) -> None:
        """Go on with other weights ``w_m``, and the sum that belongs to them."""
        total = np.zeros(len(self.parameters))
        for weight, peer in zip(weights, self.state.peers, strict=True):
            if peer.track.is_held[0]:
                total += weight * peer.track.position[0].astype(np.float64)
        if self.recipe.memory.keeps_mirror:
            model = self.state.model._replace(total=total, is_moved=True)
            self.state = self.state._replace(model=model)
        self.weights = weights

    def step(self) -> Entry:
        """Take ``θ^{k+1} = θ^k - α Σ_m ref_m`` and go to the next round."""
        before = self.public
        self.state, entry = publish_round(self.recipe, self.state, self.how)
        self._publish(entry, before)
        return entry

    def skip_step(self) -> Entry:
        """Go to the next round with the model as it is, because too few clients answered.

        What was sent with error feedback waits for the next step: it is in no residual any more.
        """
        model = self.state.model._replace(round=self.round + 1)
        if not (self.recipe.memory.keeps_mirror or self.recipe.keeps_residual):
            total = np.zeros_like(model.total)
            model = model._replace(total=total, num_sent=0, upload_energy=0.0)
        entry, before = Entry(self.round, is_step=False), self.public
        self.state = self.state._replace(model=model)
        self._publish(entry, before)
        return entry

    def _publish(self, entry: Entry, before: Public) -> None:
        if self.publisher is not None:
            self.publisher.publish(entry, before, self.public)


_CLIENTS = {"mirrors": "held", "directions": "moved"}
"""Where it is written whose rows there are."""
_GROUP_BYTES = 64 << 20
"""Mirrors of many clients are written together, up to about this size."""


def book_to_arrays(book: MirrorBook) -> dict[str, NDArray[Any]]:
    """Return named arrays; mirrors that no upload has moved are left out."""
    state, entries = book.state, book.entries
    held = [client for client, peer in enumerate(state.peers) if peer.track.is_held[0]]
    arrays: dict[str, NDArray[Any]] = {
        "weights": book.weights,
        **to_arrays(state.model),
        "epochs": np.array([entry.stamp.epoch for entry in entries], np.int64),
        "uploads": np.array([entry.stamp.uploads for entry in entries], np.int64),
        "last_uploads": np.array([entry.last_upload for entry in entries], np.int64),
        "digests": np.stack([as_array(entry.stamp.digest) for entry in entries]),
        "lineages": np.stack([as_array(entry.lineage) for entry in entries]),
        **dict.fromkeys(_CLIENTS.values(), np.array(held, np.int64)),
    }
    arrays |= _groups("mirrors", [state.peers[client].track.position for client in held])
    arrays |= _groups("directions", [state.peers[client].track.direction for client in held])
    if book.publisher is not None:
        arrays |= to_arrays(book.publisher.state(), "log/")
    return arrays


def book_from_arrays(
    arrays: dict[str, NDArray[Any]], recipe: Recipe, how: Step, start: FloatArray | None
) -> MirrorBook:
    """Return the book that `book_to_arrays` wrote; ``start`` is the model that clients have."""
    model = from_arrays(Model, arrays)
    zero = init_mirrors(recipe.memory, len(model.parameters), model.parameters.dtype)
    mirrors, directions = _read_rows(arrays, "mirrors"), _read_rows(arrays, "directions")
    columns = ("epochs", "uploads", "digests", "lineages", "last_uploads")
    peers = []
    for client, row in enumerate(zip(*(arrays[name] for name in columns), strict=True)):
        epoch, uploads, digest, lineage, last_upload = row
        stamp = Stamp(int(epoch), int(uploads), digest.tobytes())
        mirror, direction = mirrors.get(client), directions.get(client)
        track = Track(
            zero.position if mirror is None else mirror[None],
            zero.velocity,
            zero.direction if direction is None else direction[None],
            np.array([client in mirrors or client in directions]),
        )
        peers.append(Peer(track, held=Held(stamp, lineage.tobytes(), int(last_upload))))
    publisher = None
    if not isinstance(how.downlink, Full) and "log/first" in arrays:
        merges = lies_on_grid(recipe, how.downlink)
        publisher = Publisher(start, from_arrays(LogState, arrays, "log/"), merges)
    return MirrorBook(recipe, join_server(model, peers), arrays["weights"], how, publisher)


def check_book(book: MirrorBook, file: Path) -> None:
    """Raise `RunError` unless every mirror and the model have the digests that are noted."""
    zeros: dict[bytes, bytes] = {}  # digests by lineage: many clients share one mirror of zeros
    for client, peer in enumerate(book.state.peers):
        lineage, is_held = peer.held.lineage, peer.track.is_held[0]
        digest = None if is_held else zeros.get(lineage)
        digest = digest or content_digest(lineage, peer.track)
        if not is_held:
            zeros[lineage] = digest
        if digest != peer.held.stamp.digest:
            raise RunError(f"checkpoint {str(file)!r} is damaged: mirror {client} has changed")
    publisher = book.publisher
    if publisher is not None and public_digest(book.public) != publisher.digest:
        raise RunError(f"checkpoint {str(file)!r} is damaged: the model has changed")


def _groups(name: str, rows: list[Any]) -> dict[str, NDArray[Any]]:
    size = max(1, _GROUP_BYTES // max(1, rows[0].nbytes)) if rows else 1
    groups = {f"{name}-{start}": rows[start : start + size] for start in range(0, len(rows), size)}
    return {n: g[0] if len(g) == 1 else np.concatenate(g) for n, g in groups.items()}


def _read_rows(arrays: dict[str, NDArray[Any]], name: str) -> dict[int, NDArray[Any]]:
    """Return the rows that `book_to_arrays` wrote, by client."""
    starts = sorted(int(key.rpartition("-")[2]) for key in arrays if key.startswith(f"{name}-"))
    rows = [row for start in starts for row in arrays[f"{name}-{start}"]]
    return dict(zip(arrays[_CLIENTS[name]].tolist(), rows, strict=True))


def as_array(digest: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(digest[:DIGEST_BYTES], np.uint8)
