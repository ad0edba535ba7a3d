"""A server's mirrors without a sum: for servers that make the model from the replies themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqg.core.messages import Message, Skip
from aqg.core.track import Track, follow_one, init_mirrors
from aqg.errors import MessageError
from aqg.protocol.messages import Reply, Stamp
from aqg.protocol.mirrors import (
    EPOCH_DRAWS,
    Held,
    content_digest,
    first_lineage,
    max_frame_bytes,
    next_lineage,
)
from aqg.wire import decode, known

if TYPE_CHECKING:
    from aqg.core.recipe import Recipe
    from aqg.core.types import FloatArray


class Peer(NamedTuple):
    """What the server holds of one client.

    Attributes:
        link: what the client holds as well.
        entry: the stamp of that.

    """

    track: Track
    entry: Held


def first_peer(recipe: Recipe, num_params: int, dtype: str, epoch: int = 0) -> Peer:
    """Return the peer before the first upload of an epoch."""
    track = init_mirrors(recipe.memory, num_params, np.dtype(dtype))
    lineage = first_lineage(epoch)
    stamp = Stamp(epoch, 0, content_digest(lineage, track))
    return Peer(track, Held(stamp, lineage))


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
        epoch = peer.entry.stamp.epoch
        if reply.uploads != 0 or not epoch < reply.epoch <= epoch + EPOCH_DRAWS:
            raise MessageError(
                f"a restart at upload {reply.uploads} of epoch {reply.epoch}; it must be at "
                f"upload 0 of an epoch after {epoch}, {epoch + EPOCH_DRAWS} at the most"
            )
        peer = first_peer(recipe, num_params, dtype, reply.epoch)
    stamp = peer.entry.stamp
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
            track = follow_one(recipe.memory, peer.track, message)
        if not np.isfinite(track.position).all():
            raise MessageError("the mirror would hold NaN or infinity after the frame")
        lineage = next_lineage(stamp.digest, reply.frame)
        digest = content_digest(lineage, track)
        peer = Peer(track, Held(Stamp(stamp.epoch, stamp.uploads + 1, digest), lineage))
    if reply.digest != peer.entry.stamp.digest:
        raise MessageError(
            f"the mirror after the frame has digest {peer.entry.stamp.digest.hex()}; "
            f"the client says {reply.digest.hex()}"
        )
    return peer, message


def update_of(recipe: Recipe, peer: Peer, message: Message, num_params: int) -> FloatArray:
    """Return the update that a reply stands for: what was sent, or the mirror."""
    mirror = peer.track.position
    if recipe.memory.keeps_mirror:
        update: FloatArray = mirror[0]
        return update
    if isinstance(message, Skip):
        return np.zeros(num_params, mirror.dtype)
    return message.values(mirror.dtype.type)
