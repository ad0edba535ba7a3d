"""The mirror protocol: both sides hold the same ``ref_m``, or find out and start again.

Pure functions and one book; no network. Every state of a mirror has a `Stamp`: an epoch, a count
of uploads, and a digest of its content and history. An order carries the stamp the server holds,
and the client looks for it among what it has:

* its current state: the last upload arrived (or it was silent), go on;
* the state before its last answer: the upload was lost, roll back as a whole;
* neither: start again from zero under a new epoch, and say so. The server takes the old ``ref_m``
  out of its sum in the same step in which it takes the new upload in.

The server recomputes the digest after every frame and takes nothing from a reply that does not
give the same, so a mirror that differs from its client's cannot live past the next contact.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqg.core.client import ClientState, init_client, respond
from aqg.core.downlink import Downlink, Full
from aqg.core.messages import Skip
from aqg.core.public import Entry as LogEntry
from aqg.core.server import ServerState, forget, hear, init_server, publish_round
from aqg.core.step_sizes import Fixed
from aqg.errors import MessageError, WireError
from aqg.protocol.digests import DIGEST_BYTES
from aqg.protocol.messages import MAX_FAULT_LENGTH, Order, Reply, Stamp
from aqg.protocol.publisher import Publisher, initial_state, public_of
from aqg.wire import decode, encode, known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.core.downlink import DownlinkState
    from aqg.core.links import Link
    from aqg.core.messages import Message
    from aqg.core.optimizers import ServerOptimizer
    from aqg.core.recipe import Recipe
    from aqg.core.step_sizes import StepRule
    from aqg.core.types import Float64Array, FloatArray
    from aqg.protocol.follower import Holding, Parcel

PROTOCOL_VERSION = 1
EPOCH_DRAWS = 2**32
"""How many epochs a client that starts again chooses from, beginning with the server's next."""
_FRAME_MARGIN = 1024
"""More than any frame needs around its payload."""
_FULL = Full()
_FIXED = Fixed()


def fingerprint(recipe: Recipe, num_params: int, dtype: str, seed: int) -> bytes:
    """Return a digest of everything both sides must have alike before they can talk."""
    text = f"{PROTOCOL_VERSION}|{recipe!r}|{num_params}|{dtype}|{seed}"
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def max_frame_bytes(num_params: int) -> int:
    """Return the length of the longest frame that can be valid: 32 bits per parameter, raw."""
    return 4 * num_params + _FRAME_MARGIN


def first_lineage(epoch: int) -> bytes:
    """Return the lineage of a mirror that starts from zero."""
    return hashlib.blake2b(b"zero %d" % epoch, digest_size=DIGEST_BYTES).digest()


def next_lineage(digest: bytes, frame: bytes) -> bytes:
    """Return the lineage after ``frame`` was added to the mirror with this digest."""
    return hashlib.blake2b(frame, key=digest, digest_size=DIGEST_BYTES).digest()


def content_digest(lineage: bytes, link: Link) -> bytes:
    """Return the digest of a link: of how it came to be, and of every bit it consists of."""
    digest = hashlib.blake2b(key=lineage, digest_size=DIGEST_BYTES)
    mirror = link.mirror
    digest.update(np.ascontiguousarray(mirror, mirror.dtype.newbyteorder("<")).data)
    digest.update(np.ascontiguousarray(link.direction).data)
    return digest.digest()


class Snapshot(NamedTuple):
    """All that a client carries from round to round, at one moment.

    Attributes:
        state: the client's state, with its end of the link.
        lineage: of the mirror.
        stamp: of the mirror.

    """

    state: ClientState
    lineage: bytes
    stamp: Stamp

    @staticmethod
    def zero(recipe: Recipe, num_params: int, dtype: str, epoch: int = 0) -> Snapshot:
        """Return the state before the first upload of an epoch."""
        state = init_client(recipe, num_params, np.dtype(dtype))
        lineage = first_lineage(epoch)
        return Snapshot(state, lineage, Stamp(epoch, 0, content_digest(lineage, state.link)))

    @property
    def is_intact(self) -> bool:
        """Whether the content still has the digest that the stamp says."""
        return content_digest(self.lineage, self.state.link) == self.stamp.digest


class ClientMirror(NamedTuple):
    """A client's memory: where it is, where it was before its last answer, and which that was.

    Attributes:
        current: the state after the last answer.
        before: the state before it; None before the first.
        answered: `Order.serial` of the last order answered.

    """

    current: Snapshot
    before: Snapshot | None = None
    answered: tuple[int, int] = (0, 0)

    @staticmethod
    def first(recipe: Recipe, num_params: int, dtype: str) -> ClientMirror:
        """Return the memory of a client that has never answered."""
        return ClientMirror(Snapshot.zero(recipe, num_params, dtype))


class Base(NamedTuple):
    """The state from which an order is answered, and how it was found."""

    snapshot: Snapshot
    restarted: bool = False
    rolled_back: bool = False


def find_base(recipe: Recipe, mirror: ClientMirror, order: Order, draw: int) -> Base | None:
    """Return the state that matches the server's; None where the order is an old one.

    ``draw`` is a random number below `EPOCH_DRAWS`, by which a new epoch is beyond the server's
    next: later than every epoch the server knew, and unlike any that it may have forgotten.
    """
    if order.serial <= mirror.answered:
        return None
    # The same round again, by a restarted server: undo also an answer that moved no mirror.
    repeated = order.round == mirror.answered[1]
    if mirror.before is not None and repeated and mirror.before.stamp == order.stamp:
        return Base(mirror.before, rolled_back=mirror.current.stamp != order.stamp)
    if mirror.current.stamp == order.stamp:
        return Base(mirror.current)
    if mirror.before is not None and mirror.before.stamp == order.stamp:
        return Base(mirror.before, rolled_back=True)
    zero = Snapshot.zero(recipe, order.num_params, order.dtype, order.epoch + 1 + draw)
    return Base(zero, restarted=True)


def stale_reply(order: Order) -> Reply:
    """Return the answer to an order that came too late: nothing was done."""
    return Reply(
        incarnation=order.incarnation,
        round=order.round,
        stale=True,
        restarted=False,
        rolled_back=False,
        epoch=order.epoch,
        uploads=order.uploads,
        base_digest=order.digest,
        digest=order.digest,
        frame=b"",
        loss=float("nan"),
        num_samples=0,
        fault="",
        work_seconds=0.0,
    )


def lost_reply(order: Order, holding: Holding, why: str) -> Reply:
    """Return the answer of a client that cannot reach the model of the order: nothing was done."""
    return replace(
        stale_reply(order),
        stale=False,
        held_round=holding.round,
        held_digest=holding.digest,
        held_start=holding.start,
        lost=why[:MAX_FAULT_LENGTH] or "no reason",
    )


def answer(
    recipe: Recipe, base: Base, order: Order, gradient: FloatArray, loss: float = float("nan")
) -> tuple[ClientMirror, Reply]:
    """Take the client's step from ``base`` and return its memory and the reply.

    The reply's ``num_samples`` and ``work_seconds`` are left to the caller, and its ``loss``: that
    given here is the one a recipe's schedule follows.
    """
    old = base.snapshot
    key = (order.seed, order.client, order.round)
    state, message = respond(recipe, old.state, gradient, order.movement, key, loss)
    frame = encode(message, known=known(old.state.link))
    if isinstance(message, Skip):
        new = old._replace(state=state)
    else:
        lineage = next_lineage(old.stamp.digest, frame)
        digest = content_digest(lineage, state.link)
        stamp = Stamp(old.stamp.epoch, old.stamp.uploads + 1, digest)
        new = Snapshot(state, lineage, stamp)
    fault = (message.fault or "") if isinstance(message, Skip) else ""
    reply = Reply(
        incarnation=order.incarnation,
        round=order.round,
        stale=False,
        restarted=base.restarted,
        rolled_back=base.rolled_back,
        epoch=old.stamp.epoch,
        uploads=old.stamp.uploads,
        base_digest=old.stamp.digest,
        digest=new.stamp.digest,
        frame=frame,
        loss=float("nan"),
        num_samples=0,
        fault=fault[:MAX_FAULT_LENGTH],
        work_seconds=0.0,
        held_round=order.round if order.public else 0,
    )
    return ClientMirror(new, old, order.serial), reply


class Entry(NamedTuple):
    """What the server holds of one client beside its end of the link.

    Attributes:
        stamp: of the mirror.
        lineage: of the mirror.
        last_upload: the round in which the last upload was taken; 0 before the first.

    """

    stamp: Stamp
    lineage: bytes
    last_upload: int = 0


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
            model = model._replace(total=np.zeros_like(model.total))
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
