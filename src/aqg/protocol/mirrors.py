"""The mirror protocol: both sides hold the same ``ref_m``, or find out and start again.

Pure functions, without network or files; the server's book of mirrors is `aqg.protocol.book`. Every
state of a mirror has a `Stamp`: an epoch, a count of uploads, and a digest of its content and
history. An order carries the stamp the server holds, and the client looks for it among what it has:

* its current state: the last upload arrived (or there was none), go on;
* the state before its last answer: the upload was lost, roll back as a whole;
* neither: start again from zero under a new epoch, and say so. The server takes the old ``ref_m``
  out of its sum in the same step in which it takes the new upload in.

The server recomputes the digest after every frame and takes nothing from a reply that does not
give the same, so a mirror that differs from its client's cannot live past the next contact.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np

from aqg.core.messages import Message, Skip, Upload
from aqg.core.recipe import Recipe
from aqg.core.round import ClientState, init_client, respond
from aqg.core.server import Peer
from aqg.core.track import Track, follow, init_mirrors
from aqg.core.types import FloatArray
from aqg.errors import MessageError
from aqg.protocol.digests import DIGEST_BYTES, STATE_DIGEST_BYTES, xor
from aqg.protocol.follower import Holding
from aqg.protocol.messages import MAX_FAULT_LENGTH, Order, Reply, Stamp
from aqg.wire import decode, encode, known

PROTOCOL_VERSION = 1
NO_LAYOUT = bytes(DIGEST_BYTES)
EPOCH_DRAWS = 2**32
"""How many epochs a client that starts again chooses from, beginning with the server's next."""
_FRAME_MARGIN = 1024
"""More than any frame needs around its payload."""


def fingerprint(
    recipe: Recipe, num_params: int, dtype: str, seed: int, layout: bytes = NO_LAYOUT
) -> bytes:
    """Return a digest of everything both sides must have alike, one of the tensors included."""
    text = f"{PROTOCOL_VERSION}|{recipe!r}|{num_params}|{dtype}|{seed}"
    return xor(hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest(), layout)


def max_frame_bytes(num_params: int) -> int:
    """Return the length of the longest frame that can be valid: 32 bits per parameter, raw."""
    return 4 * num_params + _FRAME_MARGIN


def content_digest(lineage: bytes, track: Track) -> bytes:
    """Return the digest of a link: of how it came to be, and of every bit it consists of."""
    digest = hashlib.blake2b(key=lineage, digest_size=STATE_DIGEST_BYTES)
    mirror = track.position
    digest.update(np.ascontiguousarray(mirror, mirror.dtype.newbyteorder("<")).data)
    digest.update(np.ascontiguousarray(track.direction).data)
    return digest.digest()


def first_stamp(epoch: int, track: Track) -> tuple[Stamp, bytes]:
    """Return stamp and lineage of a link that begins with an epoch."""
    lineage = hashlib.blake2b(b"zero %d" % epoch, digest_size=DIGEST_BYTES).digest()
    return Stamp(epoch, 0, content_digest(lineage, track)), lineage


def after_upload(stamp: Stamp, frame: bytes, track: Track) -> tuple[Stamp, bytes]:
    """Return stamp and lineage of a link that a frame has moved, the same on both sides."""
    lineage = hashlib.blake2b(frame, key=stamp.digest, digest_size=DIGEST_BYTES).digest()
    return Stamp(stamp.epoch, stamp.uploads + 1, content_digest(lineage, track)), lineage


class Snapshot(NamedTuple):
    """All that a client carries from round to round, at one moment."""

    state: ClientState  # the client's state, with its end of the link
    lineage: bytes  # of the mirror
    stamp: Stamp  # of the mirror

    @staticmethod
    def zero(recipe: Recipe, num_params: int, dtype: str, epoch: int = 0) -> Snapshot:
        state = init_client(recipe, num_params, np.dtype(dtype))
        stamp, lineage = first_stamp(epoch, state.track)
        return Snapshot(state, lineage, stamp)

    @property
    def is_intact(self) -> bool:
        return content_digest(self.lineage, self.state.track) == self.stamp.digest


class ClientMirror(NamedTuple):
    """A client's memory: where it is, where it was before its last answer, and which that was."""

    current: Snapshot  # the state after the last answer
    before: Snapshot | None = None  # the state before it; None before the first
    answered: tuple[int, int] = (0, 0)  # `Order.serial` of the last order answered

    @staticmethod
    def first(recipe: Recipe, num_params: int, dtype: str) -> ClientMirror:
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


def idle_reply(order: Order, **said: Any) -> Reply:
    """Return the answer of a client that has moved no mirror."""
    said |= {"base_digest": order.digest, **order.stamp._asdict()}
    return Reply(incarnation=order.incarnation, round=order.round, **said)


def stale_reply(order: Order) -> Reply:
    return idle_reply(order, stale=True)


def lost_reply(order: Order, holding: Holding, why: str) -> Reply:
    """Return the answer of a client that cannot reach the model of the order: nothing was done."""
    return idle_reply(
        order,
        held_round=holding.round,
        held_digest=holding.digest,
        held_start=holding.start,
        lost=why[:MAX_FAULT_LENGTH] or "no reason",
    )


def answer(
    recipe: Recipe, base: Base, order: Order, gradient: FloatArray, loss: float = float("nan")
) -> tuple[ClientMirror, Reply]:
    """Take the client's step from ``base`` and return its memory and the reply.

    The ``loss`` is for a recipe's schedule; what the reply only reports is left to the caller.
    """
    old = base.snapshot
    key = (order.seed, order.client, order.round)
    state, message = respond(
        recipe, old.state, gradient, order.movement, key, loss, noise=order.noise
    )
    frame = encode(message, known=known(old.state.track))
    if isinstance(message, Skip):
        new = old._replace(state=state)
    else:
        stamp, lineage = after_upload(old.stamp, frame, state.track)
        new = Snapshot(state, lineage, stamp)
    fault = (message.fault or "") if isinstance(message, Skip) else ""
    reply = Reply(
        *order.serial,
        restarted=base.restarted,
        rolled_back=base.rolled_back,
        epoch=old.stamp.epoch,
        uploads=old.stamp.uploads,
        base_digest=old.stamp.digest,
        digest=new.stamp.digest,
        frame=frame,
        fault=fault[:MAX_FAULT_LENGTH],
        held_round=order.round if order.public else 0,
    )
    return ClientMirror(new, old, order.serial), reply


class Held(NamedTuple):
    """What the server holds of one client beside its end of the link."""

    stamp: Stamp  # of the mirror
    lineage: bytes  # of the mirror
    last_upload: int = 0  # the round in which the last upload was taken; 0 before the first


def first_peer(recipe: Recipe, num_params: int, dtype: str, epoch: int = 0) -> Peer:
    track = init_mirrors(recipe.memory, num_params, np.dtype(dtype))
    return Peer(track, held=Held(*first_stamp(epoch, track)))


def take_reply(
    recipe: Recipe, peer: Peer, reply: Reply, num_params: int, dtype: str
) -> tuple[Peer, Message]:
    """Return the peer after a reply, and its message; raise where it does not fit the mirror."""
    most = max_frame_bytes(num_params)
    if len(reply.frame) > most:
        raise MessageError(
            f"the frame has {len(reply.frame)} bytes; {most} are the most for "
            f"{num_params} parameters"
        )
    if reply.restarted:
        epoch = peer.held.stamp.epoch
        if reply.uploads != 0 or not epoch < reply.epoch <= epoch + EPOCH_DRAWS:
            raise MessageError(
                f"a restart at upload {reply.uploads} of epoch {reply.epoch}; it must be at "
                f"upload 0 of an epoch after {epoch}, {epoch + EPOCH_DRAWS} at the most"
            )
        peer = first_peer(recipe, num_params, dtype, reply.epoch)
    stamp = peer.held.stamp
    if reply.base != stamp:
        raise MessageError(
            f"the frame is for upload {reply.uploads} of epoch {reply.epoch}, digest "
            f"{reply.base_digest.hex()}; the mirror is at {stamp.uploads} of {stamp.epoch}, "
            f"{stamp.digest.hex()}"
        )
    message = decode(reply.frame, num_params, known=known(peer.track))
    if not isinstance(message, Skip):
        message.validate()
        with np.errstate(over="ignore", invalid="ignore"):  # looked at below
            track = follow(peer.track, message, memory=recipe.memory)
        if not np.isfinite(track.position).all():
            raise MessageError("the mirror would hold NaN or infinity after the frame")
        stamp, lineage = after_upload(stamp, reply.frame, track)
        peer = peer._replace(track=track, held=peer.held._replace(stamp=stamp, lineage=lineage))
    if reply.digest != peer.held.stamp.digest:
        raise MessageError(
            f"the mirror after the frame has digest {peer.held.stamp.digest.hex()}; "
            f"the client says {reply.digest.hex()}"
        )
    return peer, message


def update_of(recipe: Recipe, peer: Peer, message: Message, num_params: int) -> FloatArray | Upload:
    """Return the update that a reply stands for: what was sent, or the mirror."""
    mirror = peer.track.position
    if recipe.memory.keeps_mirror:
        return mirror[0]
    if isinstance(message, Skip):
        return np.zeros(num_params, mirror.dtype)
    return message if isinstance(message, Upload) else message.values(mirror.dtype.type)
