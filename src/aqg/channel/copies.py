"""The public copy of a model: what server and clients both hold, and how an entry moves it.

The copy's vector is a track (`aqg.core.track`). Where a strategy makes the model in its own way,
what travels is the difference between the model and the public copy; what is left out of it stays
there, as the residual of error feedback. Our own server says its steps (`aqg.channel.stepping`).
An entry says how the copy changes from one version to the next:

====================== =====================================================================
byte 0                 flags: 1 other tensors are compressed from here on, 2 the vector moves,
                       4 kept tensors change, 8 a step is taken
if 1                   one bit per tensor, lowest first: whether it is part of the vector
if 2                   number of bytes, a varint; a frame, to be added to the vector
if 4                   number of bytes, a varint; kept tensors (`aqg.channel.tensors`)
if 8                   number of bytes, a varint; an entry of a model's log (`aqg.wire.entry`)
====================== =====================================================================

Both sides compare a digest in every round. It covers the digest before and the entry, and every
`CONTENT_EVERY` versions all that the copy holds: a large model need not be read as a whole in
every round, and copies that came apart are found out a few rounds later.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqg.channel.tensors import decode_kept, flatten, rounded, unflatten
from aqg.core.messages import Skip
from aqg.core.public import Public
from aqg.core.recipe import Movement
from aqg.core.track import Memory, Track, advance
from aqg.errors import MessageError, WireError
from aqg.protocol.digests import DIGEST_BYTES, STATE_DIGEST_BYTES
from aqg.wire import decode
from aqg.wire import entry as steps
from aqg.wire.varint import read_varint, write_varint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aqg.channel.tensors import Schema, Tensor, Values
    from aqg.core.messages import AnyUpload
    from aqg.core.types import FloatArray
    from aqg.objectives.layout import TensorSpec

_LAYOUT, _VECTOR, _KEPT, _STEP = 1, 2, 4, 8
_FORGETFUL = Movement((1.0,))
"""A server says what has become of its history with every order."""
CONTENT_EVERY = 16
"""Versions from one digest of the whole copy to the next."""


class PublicCopy(NamedTuple):
    """A version of the public copy; nothing of it is ever changed.

    Attributes:
        version: counted from 1.
        layout: which tensors the vector is made of, a bit for each.
        track: of the tensors that are compressed, flat.
        kept: all others.
        digests: of the kept tensors.
        digest: of how the copy came to be, or of what it holds.

    """

    version: int
    layout: bytes
    track: Track
    kept: Mapping[str, Tensor]
    digests: Mapping[str, bytes]
    digest: bytes = b""

    @staticmethod
    def of(values: Values, schema: Schema, layout: bytes, version: int = 1) -> PublicCopy:
        """Return a copy that is equal to the model."""
        chosen = schema.chosen(layout)
        inside = {spec.name for spec in chosen}
        kept = {s.name: values[s.name] for s in schema.specs if s.name not in inside}
        digests = {name: tensor_digest(tensor) for name, tensor in kept.items()}
        return PublicCopy(version, layout, at_rest(flatten(values, chosen)), kept, digests)

    @property
    def vector(self) -> FloatArray:
        """The tensors that are compressed, flat."""
        vector: FloatArray = self.track.position[0]
        return vector

    def moved_to(self, vector: FloatArray) -> PublicCopy:
        """Return the copy with another vector."""
        return self._replace(track=self.track._replace(position=vector[None]))

    def values(self, schema: Schema) -> dict[str, Tensor]:
        """Return all tensors, as a client's handler receives them."""
        found = {**unflatten(self.vector, schema.chosen(self.layout)), **self.kept}
        return {spec.name: found[spec.name] for spec in schema.specs}

    def content_digest(self) -> bytes:
        """Return a digest of every bit."""
        digest = hashlib.blake2b(digest_size=STATE_DIGEST_BYTES)
        digest.update(b"%d|" % self.version + self.layout)
        vector = self.vector
        for part in (vector, self.track.velocity, self.track.direction):
            digest.update(np.ascontiguousarray(part, part.dtype.newbyteorder("<")).data)
        for name in sorted(self.digests):
            digest.update(self.digests[name])
        return digest.digest()

    def after(self, entry: bytes) -> PublicCopy:
        """Return the copy, which an entry has moved, under its next version and digest."""
        copy = self._replace(version=self.version + 1)
        if copy.version % CONTENT_EVERY == 0:
            return copy._replace(digest=copy.content_digest())
        digest = hashlib.blake2b(entry, key=self.digest, digest_size=STATE_DIGEST_BYTES)
        return copy._replace(digest=digest.digest())

    def with_layout(self, schema: Schema, layout: bytes) -> PublicCopy:
        """Return the same copy with other tensors in the vector."""
        if layout == self.layout:
            return self
        values = self.values(schema)
        chosen = schema.chosen(layout)
        inside = {spec.name for spec in chosen}
        kept = {s.name: values[s.name] for s in schema.specs if s.name not in inside}
        digests = {n: self.digests.get(n) or tensor_digest(t) for n, t in kept.items()}
        return self._replace(
            layout=layout, track=at_rest(flatten(values, chosen)), kept=kept, digests=digests
        )


def at_rest(vector: FloatArray) -> Track:
    """Return the track of a vector without a velocity."""
    none = np.zeros((1, 0))
    return Track(vector[None], none, none.astype(np.int8), np.ones(1, np.bool_))


def tensor_digest(tensor: Tensor) -> bytes:
    """Return the digest of a kept tensor."""
    data = np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<"))
    digest = hashlib.blake2b(f"{tensor.dtype} {tensor.shape}|".encode(), digest_size=DIGEST_BYTES)
    digest.update(data.reshape(-1).view(np.uint8).data)
    return digest.digest()


def moved(vector: FloatArray, message: AnyUpload, specs: Sequence[TensorSpec]) -> FloatArray:
    """Return the vector after a message: the same bits on both sides."""
    return rounded(advance(Memory.INNOVATION, vector, message), specs)


def encode_entry(layout: bytes | None, frame: bytes, kept: bytes, step: bytes = b"") -> bytes:
    """Write an entry; empty parts are left out."""
    flags = _LAYOUT * (layout is not None) + _VECTOR * bool(frame) + _KEPT * bool(kept)
    parts = [bytes([flags + _STEP * bool(step)]), layout or b""]
    for part in (frame, kept, step):
        if part:
            parts += [write_varint(len(part)), part]
    return b"".join(parts)


def apply_entry(copy: PublicCopy, entry: bytes, schema: Schema) -> PublicCopy:
    """Return the copy after an entry; the old one is left as it was."""
    if not entry or entry[0] > _LAYOUT + _VECTOR + _KEPT + _STEP:
        raise WireError(f"bytes {entry[:1].hex()} do not begin an entry")
    flags, position = entry[0], 1
    if flags & _LAYOUT:
        layout = entry[position : position + schema.bitmap_bytes]
        position += schema.bitmap_bytes
        copy = copy.with_layout(schema, layout)
    kept, digests = copy.kept, copy.digests
    if flags & _VECTOR:
        frame, position = _part(entry, position)
        message = decode(frame, len(copy.vector))
        if isinstance(message, Skip):
            raise WireError("an entry moves the vector by nothing")
        copy = copy.moved_to(moved(copy.vector, message, schema.chosen(copy.layout)))
    if flags & _KEPT:
        data, position = _part(entry, position)
        changed = decode_kept(data, schema)
        if unknown := sorted(set(changed) - set(kept)):
            raise MessageError(f"tensor {unknown[0]!r} is compressed; it does not come as it is")
        kept = {**kept, **changed}
        digests = {**digests, **{name: tensor_digest(t) for name, t in changed.items()}}
    if flags & _STEP:
        step, position = _part(entry, position)
        log = steps.encode_log(copy.version, [step])
        public = steps.follow_log(log, Public(copy.version, copy.track), _FORGETFUL)
        copy = copy._replace(track=public.track)
    if position != len(entry):
        raise WireError(f"{len(entry) - position} bytes follow the entry")
    return copy._replace(kept=kept, digests=digests).after(entry)


def encode_log(first: int, entries: Sequence[bytes]) -> bytes:
    """Write the entries that follow the version ``first``."""
    parts = [write_varint(first), write_varint(len(entries))]
    for entry in entries:
        parts += [write_varint(len(entry)), entry]
    return b"".join(parts)


def follow_log(copy: PublicCopy, log: bytes, schema: Schema) -> PublicCopy:
    """Return the copy after a log; entries that it has are left out of account."""
    first, position = read_varint(log, 0)
    count, position = read_varint(log, position)
    if not first <= copy.version <= first + count:
        raise MessageError(
            f"the log leads from version {first} to {first + count}; {copy.version} is held here"
        )
    for version in range(first, first + count):
        entry, position = _part(log, position)
        if version >= copy.version:
            copy = apply_entry(copy, entry, schema)
    if position != len(log):
        raise WireError(f"{len(log) - position} bytes follow the log")
    return copy


def _part(data: bytes, position: int) -> tuple[bytes, int]:
    length, position = read_varint(data, position)
    if length > len(data) - position:
        raise WireError(f"a part claims {length} bytes; {len(data) - position} are left")
    return data[position : position + length], position + length
