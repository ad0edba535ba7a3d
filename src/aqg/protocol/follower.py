"""A client's side of the model's log: follow it, or say what is missing.

A `Parcel` brings a client from what it holds to the model of a round. The client takes the digest
of what it arrives at and compares it with the server's. A client that cannot follow, or arrives
elsewhere, changes nothing and says what it holds; the server then sends what it lacks.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from aqg.core.public import Public, at_rest, init_public
from aqg.core.recipe import Recipe
from aqg.core.types import FloatArray
from aqg.errors import MessageError, WireError
from aqg.protocol.digests import STATE_DIGEST_BYTES, public_digest, start_digest
from aqg.start import MARK, unpack
from aqg.wire.entry import decode_snapshot, follow_log, log_rounds, log_since

Start: TypeAlias = "Callable[[], FloatArray | None]"
"""Returns a client's own starting model, where it has one."""
CONTENT_EVERY = 16
"""Rounds from one look at all coordinates of a model on an exact grid to the next."""


class LostError(MessageError):
    """The model of a round cannot be reached from what is held here."""


class Parcel(NamedTuple):
    """What brings a client to the model of a round."""

    round: int  # ``k``
    digest: bytes  # of the public model before round ``k``
    log: bytes  # a frame of entries; those that the client has are left out of account
    # a frame to start from instead of what the client holds, or the message of a first model; empty
    # where it needs none
    snapshot: bytes = b""


class Holding(NamedTuple):
    """What a client says that it holds."""

    round: int = 0  # of its public model; 0 where it has none
    digest: bytes = bytes(STATE_DIGEST_BYTES)  # of that; zeros where it has none
    start: bytes = b""  # digest of the starting model that it has; empty where it has none


class Terms(NamedTuple):
    """What must be known before a log can be followed."""

    recipe: Recipe  # as the server has it
    num_params: int  # length of the model
    dtype: str  # of the model
    is_at_rest: bool = False  # whether the model has no velocity, whatever the recipe

    def first(self, start: FloatArray) -> Public:
        return at_rest(start) if self.is_at_rest else init_public(self.recipe, start)

    def blank(self) -> Public:
        return self.first(np.zeros(self.num_params, self.dtype))

    def fits(self, public: Public) -> bool:
        return all(
            mine.dtype == theirs.dtype and mine.shape == theirs.shape
            for mine, theirs in zip(public.vectors, self.blank().vectors, strict=True)
        )


def follow(
    terms: Terms, parcel: Parcel, held: Public | None, start: Start, in_place: bool = False
) -> Public:
    """Return the model that a parcel leads to, its digest compared; raise `LostError` if not.

    With ``in_place`` what is held, or the start, is given away, then, too.
    """
    try:
        public = _open(terms, parcel, held, start)
        rounds = log_rounds(parcel.log)
        if public.round < rounds.start:
            raise LostError(
                f"the log begins with round {rounds.start}, and round {public.round} is held here"
            )
        if public.round > rounds.stop:
            raise LostError(
                f"round {public.round} is held here, which is later than round {rounds.stop}"
            )
        log = log_since(parcel.log, public.round)
        public = follow_log(log, public, terms.recipe.movement, in_place=in_place)
    except WireError as error:
        raise LostError(str(error)) from error
    if public.round != parcel.round:
        raise LostError(f"the log leads to round {public.round}; it should to {parcel.round}")
    if public.round % CONTENT_EVERY == 0:
        public = public.marked()
    digest = public_digest(public)
    if digest != parcel.digest:
        raise LostError(
            f"the model of round {public.round} has digest {digest.hex()} here; "
            f"the server says {parcel.digest.hex()}"
        )
    return public


def _open(terms: Terms, parcel: Parcel, held: Public | None, start: Start) -> Public:
    if parcel.snapshot[:1] == bytes([MARK]):
        return terms.first(unpack(parcel.snapshot, terms.num_params, terms.dtype, start()))
    if parcel.snapshot:
        is_relative = parcel.snapshot[1:2] == b"\1"
        base = start() if is_relative else None
        if base is not None and not _is_start(terms, base):
            raise LostError(f"the starting model here is {base.dtype}{base.shape}, another one")
        return decode_snapshot(parcel.snapshot, terms.blank(), base)
    held = first_held(terms, start) if held is None else held
    if held is None:
        raise LostError("no model is held here, and no snapshot was sent")
    return held


def first_held(terms: Terms, start: Start) -> Public | None:
    own = start()
    return terms.first(own) if own is not None and _is_start(terms, own) else None


def holding_of(terms: Terms, held: Public | None, start: Start) -> Holding:
    first = first_held(terms, start)
    held = first if held is None else held
    if held is None:
        return Holding()
    digest = b"" if first is None else start_digest(first.parameters)
    return Holding(held.round, public_digest(held), digest)


def _is_start(terms: Terms, own: FloatArray) -> bool:
    return own.shape == (terms.num_params,) and own.dtype == np.dtype(terms.dtype)
