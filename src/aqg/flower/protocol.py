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
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqg.core.client import ClientState, client_step, init_client
from aqg.core.messages import Skip
from aqg.core.mirror import Memory, empty_mirror
from aqg.core.server import ServerState, finish_round, init_server, receive
from aqg.errors import MessageError, WireError
from aqg.flower.messages import DIGEST_BYTES, MAX_FAULT_LENGTH, Order, Reply, Stamp
from aqg.wire import decode, encode
from aqg.wire.memory import initial_direction, known, next_direction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from aqg.core.messages import Message
    from aqg.core.optimizers import ServerOptimizer
    from aqg.core.recipe import Recipe
    from aqg.core.types import Float64Array, FloatArray

PROTOCOL_VERSION = 1
_FRAME_MARGIN = 1024
"""More than any frame needs around its payload."""


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


def content_digest(lineage: bytes, mirror: FloatArray, direction: NDArray[np.int8]) -> bytes:
    """Return the digest of a mirror: of how it came to be, and of every bit it consists of."""
    digest = hashlib.blake2b(key=lineage, digest_size=DIGEST_BYTES)
    digest.update(np.ascontiguousarray(mirror, mirror.dtype.newbyteorder("<")).data)
    digest.update(np.ascontiguousarray(direction).data)
    return digest.digest()


class Snapshot(NamedTuple):
    """All that a client carries from round to round, at one moment.

    Attributes:
        state: the client's state: mirror, residual, stored errors, silent rounds.
        direction: what the wire remembers of the last upload.
        lineage: of the mirror.
        stamp: of the mirror.

    """

    state: ClientState
    direction: NDArray[np.int8]
    lineage: bytes
    stamp: Stamp

    @staticmethod
    def zero(recipe: Recipe, num_params: int, dtype: str, epoch: int = 0) -> Snapshot:
        """Return the state before the first upload of an epoch."""
        state = init_client(recipe, num_params, np.dtype(dtype))
        direction, lineage = initial_direction(state.mirror), first_lineage(epoch)
        digest = content_digest(lineage, state.mirror, direction)
        return Snapshot(state, direction, lineage, Stamp(epoch, 0, digest))

    @property
    def is_intact(self) -> bool:
        """Whether the content still has the digest that the stamp says."""
        computed = content_digest(self.lineage, self.state.mirror, self.direction)
        return computed == self.stamp.digest


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

    ``draw`` is a random number from 0 to 2^32, by which a new epoch is beyond the server's: later
    than every epoch the server knew, and unlike any that it may have forgotten.
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


def answer(
    recipe: Recipe, base: Base, order: Order, gradient: FloatArray, loss: float = float("nan")
) -> tuple[ClientMirror, Reply]:
    """Take the client's step from ``base`` and return its memory and the reply.

    The reply's ``num_samples`` and ``work_seconds`` are left to the caller, and its ``loss``: that
    given here is the one a recipe's schedule follows.
    """
    old = base.snapshot
    key = (order.seed, order.client, order.round)
    state, message = client_step(recipe, old.state, gradient, order.movement, key, loss)
    frame = encode(message, known=known(old.state.mirror, old.direction))
    if isinstance(message, Skip):
        new = old._replace(state=state)
    else:
        direction = next_direction(old.direction, message)
        lineage = next_lineage(old.stamp.digest, frame)
        digest = content_digest(lineage, state.mirror, direction)
        stamp = Stamp(old.stamp.epoch, old.stamp.uploads + 1, digest)
        new = Snapshot(state, direction, lineage, stamp)
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
    )
    return ClientMirror(new, old, order.serial), reply


class Entry(NamedTuple):
    """What the server holds of one client beside ``ref_m``.

    Attributes:
        stamp: of the mirror.
        lineage: of the mirror.
        direction: what the wire remembers of the last upload.
        last_upload: the round in which the last upload was taken; 0 before the first.

    """

    stamp: Stamp
    lineage: bytes
    direction: NDArray[np.int8]
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
    """The server's side: the model, every ``ref_m`` with its stamp, and their sum.

    A reply is checked as a whole and the new state computed beside the old one, which it replaces
    only then; a reply that is not taken changes nothing. Taking one costs the same however many
    clients there are.
    """

    def __init__(
        self,
        recipe: Recipe,
        state: ServerState,
        entries: Sequence[Entry],
        weights: Float64Array,
    ) -> None:
        self.recipe = recipe
        self.weights = weights
        self._shared = state._replace(mirrors=())
        self._mirrors = list(state.mirrors)
        self._entries = list(entries)

    @staticmethod
    def first(
        recipe: Recipe,
        parameters: FloatArray,
        weights: Float64Array,
        optimizer: ServerOptimizer,
    ) -> MirrorBook:
        """Return the book before the first round, with every ``ref_m`` zero."""
        state = init_server(recipe, parameters, len(weights), optimizer)
        zero = Snapshot.zero(recipe, len(parameters), str(parameters.dtype))
        entry = Entry(zero.stamp, zero.lineage, zero.direction)
        return MirrorBook(recipe, state, [entry] * len(weights), weights)

    @property
    def state(self) -> ServerState:
        """The model, the mirrors and their sum."""
        return self._shared._replace(mirrors=tuple(self._mirrors))

    @property
    def entries(self) -> Sequence[Entry]:
        """What is held of each client beside its mirror."""
        return tuple(self._entries)

    @property
    def round(self) -> int:
        """``k``, the round in progress."""
        return self._shared.round

    @property
    def parameters(self) -> FloatArray:
        """``θ^k``."""
        return self._shared.parameters

    @property
    def movement(self) -> float:
        """The scalar that clients are told with the model."""
        return self.recipe.movement.of(self._shared.history)

    def entry(self, client: int) -> Entry:
        """Return what is held of one client beside its mirror."""
        return self._entries[client]

    def accept(self, client: int, reply: Reply, incarnation: int) -> Verdict:
        """Take client ``m``'s reply to this round's order, or say why not."""
        try:
            state, entry, message = self._read(client, reply, incarnation)
        except (MessageError, WireError) as error:
            return Verdict(None, str(error))
        self._shared = state._replace(mirrors=())
        self._mirrors[client] = state.mirrors[0]
        self._entries[client] = entry
        return Verdict(message)

    def _read(
        self, client: int, reply: Reply, incarnation: int
    ) -> tuple[ServerState, Entry, Message]:
        """Return state (with this client alone), entry and message after ``reply``."""
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
        state = self._shared._replace(mirrors=(self._mirrors[client],))
        entry = self._entries[client]
        if reply.restarted:
            state, entry = _restart(self.recipe, state, entry, reply, weight)
        if reply.base != entry.stamp:
            raise MessageError(
                f"the frame is for upload {reply.uploads} of epoch {reply.epoch}, digest "
                f"{reply.base_digest.hex()}; the mirror is at {entry.stamp.uploads} of "
                f"{entry.stamp.epoch}, {entry.stamp.digest.hex()}"
            )
        shared = known(state.mirrors[0], entry.direction)
        message = decode(reply.frame, num_params, known=shared)
        if not isinstance(message, Skip):
            with np.errstate(over="ignore", invalid="ignore"):  # looked at in the next line
                state = receive(self.recipe, state, 0, message, weight)
            if not np.isfinite(state.mirrors[0]).all():
                raise MessageError("the mirror would hold NaN or infinity after the frame")
            entry = _advance(entry, reply.frame, message, state.mirrors[0], state.round)
        if reply.digest != entry.stamp.digest:
            raise MessageError(
                f"the mirror after the frame has digest {entry.stamp.digest.hex()}; "
                f"the client says {reply.digest.hex()}"
            )
        return state, entry, message

    def reweigh(self, weights: Float64Array) -> None:
        """Go on with other weights ``w_m``, and the sum that belongs to them."""
        total = np.zeros(len(self.parameters))
        for weight, mirror in zip(weights, self._mirrors, strict=True):
            if len(mirror):
                total += weight * mirror.astype(np.float64)
        self._shared = self._shared._replace(total=total)
        self.weights = weights

    def step(
        self, step_size: float, dropout_rate: float, sampled: float, optimizer: ServerOptimizer
    ) -> None:
        """Take ``θ^{k+1} = θ^k - α Σ_m ref_m`` and go to the next round."""
        state = finish_round(self.recipe, self.state, step_size, dropout_rate, sampled, optimizer)
        self._shared = state._replace(mirrors=())

    def skip_step(self) -> None:
        """Go to the next round with the model as it is, because too few clients answered.

        What error feedback sent waits for the next step: the clients no longer owe it.
        """
        state = self._shared._replace(round=self.round + 1)
        if self.recipe.memory is Memory.NONE:
            state = state._replace(total=np.zeros_like(state.total))
        self._shared = state


def _restart(
    recipe: Recipe, state: ServerState, entry: Entry, reply: Reply, weight: float
) -> tuple[ServerState, Entry]:
    """Take the one ``ref_m`` of ``state`` out of the sum and begin it again from zero."""
    if reply.uploads != 0 or reply.epoch <= entry.stamp.epoch:
        raise MessageError(
            f"a restart at upload {reply.uploads} of epoch {reply.epoch}; "
            f"it must be at upload 0 of an epoch after {entry.stamp.epoch}"
        )
    (mirror,) = state.mirrors
    zero = empty_mirror(recipe.memory, len(state.parameters), state.parameters.dtype)
    if recipe.memory.keeps_mirror:
        total = state.total - weight * mirror.astype(np.float64)
        state = state._replace(mirrors=(zero,), total=total)
    direction, lineage = initial_direction(zero), first_lineage(reply.epoch)
    stamp = Stamp(reply.epoch, 0, content_digest(lineage, zero, direction))
    return state, Entry(stamp, lineage, direction, entry.last_upload)


def _advance(
    entry: Entry, frame: bytes, message: Message, mirror: FloatArray, round_number: int
) -> Entry:
    direction = next_direction(entry.direction, message)
    lineage = next_lineage(entry.stamp.digest, frame)
    digest = content_digest(lineage, mirror, direction)
    stamp = Stamp(entry.stamp.epoch, entry.stamp.uploads + 1, digest)
    return Entry(stamp, lineage, direction, round_number)
