"""The server's side of the mirror protocol: the model, its log, and a mirror of every client.

A reply is checked as a whole before anything of it is used (`aqg.protocol.mirrors` has the rules).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.core.downlink import Downlink, Full
from aqg.core.hearing import ServerState, forget, hear, init_server, publish_round
from aqg.core.messages import Skip
from aqg.core.public import Entry as LogEntry
from aqg.core.step_sizes import Fixed
from aqg.errors import MessageError, WireError
from aqg.protocol.messages import Order, Reply, Stamp
from aqg.protocol.mirrors import (
    EPOCH_DRAWS,
    Entry,
    Snapshot,
    content_digest,
    first_lineage,
    max_frame_bytes,
    next_lineage,
)
from aqg.protocol.publisher import Publisher, initial_state, public_of
from aqg.wire import decode, known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.core.downlink import DownlinkState
    from aqg.core.links import Link
    from aqg.core.messages import Message
    from aqg.core.optimizers import ServerOptimizer
    from aqg.core.recipe import Recipe
    from aqg.core.step_sizes import StepRule
    from aqg.core.types import Float64Array, FloatArray
    from aqg.protocol.follower import Parcel

_FULL = Full()
_FIXED = Fixed()


@dataclass(frozen=True)
class Verdict:
    """What became of a reply.

    Attributes:
        message: the message taken; None where the reply changed nothing.
        problem: why it was not taken; empty where it was.

    """

    message: Message | None
    problem: str = ""


class MirrorBook:
    """The server's side: the model and its log, every ``ref_m`` with its stamp, and their sum.

    A reply is checked as a whole and the new state computed beside the old one, which it replaces
    only then; a reply that is not taken changes nothing. Taking one costs the same however many
    clients there are.

    Args:
        recipe: the compressor.
        state: the model and all mirrors.
        entries: what is held of each client beside its mirror.
        weights: ``w_m``.
        downlink: how the model is published.
        publisher: keeps its log; None where clients receive the whole model.
        rule: for the length of steps.

    """

    def __init__(
        self,
        recipe: Recipe,
        state: ServerState,
        entries: Sequence[Entry],
        weights: Float64Array,
        downlink: Downlink = _FULL,
        publisher: Publisher | None = None,
        rule: StepRule = _FIXED,
    ) -> None:
        self.recipe = recipe
        self.rule = rule
        self.weights = weights
        self.state = state
        self.downlink = downlink
        self.publisher = publisher
        self._entries = list(entries)

    @staticmethod
    def first(
        recipe: Recipe,
        parameters: FloatArray,
        weights: Float64Array,
        optimizer: ServerOptimizer,
        downlink: Downlink = _FULL,
        rule: StepRule = _FIXED,
    ) -> MirrorBook:
        """Return the book before the first round, with every ``ref_m`` zero."""
        state = init_server(recipe, parameters, len(weights), optimizer, downlink, rule)
        publisher = None
        if not isinstance(downlink, Full):
            log = initial_state(public_of(state.model), len(weights))
            publisher = Publisher(parameters, log)
        zero = Snapshot.zero(recipe, len(parameters), str(parameters.dtype))
        entry = Entry(zero.stamp, zero.lineage)
        entries = [entry] * len(weights)
        return MirrorBook(recipe, state, entries, weights, downlink, publisher, rule)

    @property
    def entries(self) -> Sequence[Entry]:
        """What is held of each client beside its mirror."""
        return tuple(self._entries)

    @property
    def round(self) -> int:
        """``k``, the round in progress."""
        return self.state.round

    @property
    def parameters(self) -> FloatArray:
        """``θ^k``."""
        return self.state.parameters

    @property
    def movement(self) -> float:
        """The scalar that clients are told with the model."""
        return self.recipe.movement.of(self.state.model.history)

    def entry(self, client: int) -> Entry:
        """Return what is held of one client beside its mirror."""
        return self._entries[client]

    def order(self, client: int, optimizer: str, **terms: Any) -> Order:
        """Return what a client is to be sent in this round.

        Args:
            client: its number.
            optimizer: of the server, where clients follow a log.
            terms: what the book does not know: the run, the recipe, and what is asked for.

        """
        stamp, parcel = self.entry(client).stamp, self.parcel(client)
        if parcel is not None:
            terms |= {
                "optimizer": optimizer,
                "public": parcel.digest,
                "log": parcel.log,
                "snapshot": parcel.snapshot,
            }
        return Order(
            num_params=len(self.parameters),
            dtype=str(self.parameters.dtype),
            round=self.round,
            client=client,
            movement=self.movement,
            noise=self.state.model.budget.noise,
            epoch=stamp.epoch,
            uploads=stamp.uploads,
            digest=stamp.digest,
            **terms,
        )

    def parcel(self, client: int) -> Parcel | None:
        """Return what leads a client to the model; None where it receives the model itself."""
        if self.publisher is None:
            return None
        return self.publisher.parcel(client, self.state.model)

    def is_new(self, client: int) -> bool:
        """Tell whether a client has never said what it holds of the model."""
        return self.publisher is not None and self.publisher.is_new(client)

    def note_holding(self, client: int, reply: Reply) -> None:
        """Take note of the model that a client holds, by its reply to an order of this round."""
        if self.publisher is None or reply.round != self.round:
            return
        if reply.lost:
            self.publisher.lost(client, reply.holding)
        elif reply.held_round == self.round:
            self.publisher.followed(client)

    def note_start(self, client: int) -> None:
        """Take note that a client is sent the starting model with its next order."""
        if self.publisher is not None:
            self.publisher.started(client)

    def note_followed(self, client: int) -> None:
        """Take note that a client holds the model of this round."""
        if self.publisher is not None:
            self.publisher.followed(client)

    def accept(self, client: int, reply: Reply, incarnation: int) -> Verdict:
        """Take client ``m``'s reply to this round's order, or say why not."""
        try:
            state, entry, message = self._read(client, reply, incarnation)
        except (MessageError, WireError) as error:
            return Verdict(None, str(error))
        self.state = state
        self._entries[client] = entry
        return Verdict(message)

    def _read(
        self, client: int, reply: Reply, incarnation: int
    ) -> tuple[ServerState, Entry, Message]:
        """Return state, entry and message after ``reply``."""
        if (reply.incarnation, reply.round) != (incarnation, self.round):
            raise MessageError(
                f"the reply is to round {reply.round} of incarnation {reply.incarnation}, "
                f"not to round {self.round} of {incarnation}"
            )
        num_params = len(self.parameters)
        if len(reply.frame) > max_frame_bytes(num_params):
            raise MessageError(
                f"the frame has {len(reply.frame)} bytes; "
                f"{max_frame_bytes(num_params)} are the most for {num_params} parameters"
            )
        weight = float(self.weights[client])
        state, entry = self.state, self._entries[client]
        if reply.restarted:
            state, entry = _restart(self.recipe, state, client, entry, reply, weight)
        if reply.base != entry.stamp:
            raise MessageError(
                f"the frame is for upload {reply.uploads} of epoch {reply.epoch}, digest "
                f"{reply.base_digest.hex()}; the mirror is at {entry.stamp.uploads} of "
                f"{entry.stamp.epoch}, {entry.stamp.digest.hex()}"
            )
        message = decode(reply.frame, num_params, known=known(state.peers[client].link))
        with np.errstate(over="ignore", invalid="ignore"):  # looked at below
            state = hear(self.recipe, state, client, message, weight)
        if not isinstance(message, Skip):
            link = state.peers[client].link
            if not np.isfinite(link.mirror).all():
                raise MessageError("the mirror would hold NaN or infinity after the frame")
            entry = _advance(entry, reply.frame, link, state.round)
        if reply.digest != entry.stamp.digest:
            raise MessageError(
                f"the mirror after the frame has digest {entry.stamp.digest.hex()}; "
                f"the client says {reply.digest.hex()}"
            )
        return state, entry, message

    def reweigh(self, weights: Float64Array) -> None:
        """Go on with other weights ``w_m``, and the sum that belongs to them."""
        total = np.zeros(len(self.parameters))
        for weight, peer in zip(weights, self.state.peers, strict=True):
            if peer.link.is_held[0]:
                total += weight * peer.link.mirror[0].astype(np.float64)
        if self.recipe.memory.keeps_mirror:
            model = self.state.model._replace(total=total, is_moved=True)
            self.state = self.state._replace(model=model)
        self.weights = weights

    def step(
        self, step_size: float, dropout_rate: float, sampled: float, optimizer: ServerOptimizer
    ) -> None:
        """Take ``θ^{k+1} = θ^k - α Σ_m ref_m`` and go to the next round.

        ``step_size`` is ``α``, or the natural step of the rule that finds it.
        """
        before = self.state.model.downlink
        self.state, entry = publish_round(
            self.recipe,
            self.state,
            step_size,
            dropout_rate,
            sampled,
            optimizer,
            self.downlink,
            self.rule,
        )
        self._publish(entry, before)

    def skip_step(self) -> None:
        """Go to the next round with the model as it is, because too few clients answered.

        What was sent with error feedback waits for the next step: it is in no residual any more.
        """
        model = self.state.model._replace(round=self.round + 1)
        if not (self.recipe.memory.keeps_mirror or self.recipe.keeps_residual):
            total = np.zeros_like(model.total)
            model = model._replace(total=total, num_sent=0, upload_energy=0.0)
        number, before = self.round, self.state.model.downlink
        self.state = self.state._replace(model=model)
        self._publish(LogEntry(number, is_step=False), before)

    def _publish(self, entry: LogEntry, before: DownlinkState | None) -> None:
        if self.publisher is not None:
            assert before is not None
            self.publisher.publish(entry, before, self.state.model)


def _restart(
    recipe: Recipe, state: ServerState, client: int, entry: Entry, reply: Reply, weight: float
) -> tuple[ServerState, Entry]:
    """Take a client's ``ref_m`` out of the sum and begin it again from zero."""
    last = entry.stamp.epoch + EPOCH_DRAWS
    if reply.uploads != 0 or not entry.stamp.epoch < reply.epoch <= last:
        raise MessageError(
            f"a restart at upload {reply.uploads} of epoch {reply.epoch}; "
            f"it must be at upload 0 of an epoch after {entry.stamp.epoch}, {last} at the most"
        )
    state = forget(recipe, state, client, weight)
    lineage = first_lineage(reply.epoch)
    digest = content_digest(lineage, state.peers[client].link)
    return state, Entry(Stamp(reply.epoch, 0, digest), lineage, entry.last_upload)


def _advance(entry: Entry, frame: bytes, link: Link, round_number: int) -> Entry:
    lineage = next_lineage(entry.stamp.digest, frame)
    stamp = Stamp(entry.stamp.epoch, entry.stamp.uploads + 1, content_digest(lineage, link))
    return Entry(stamp, lineage, round_number)
