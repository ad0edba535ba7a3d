"""The public copy of a model, what both server and clients hold; and how a node gets the first.

Tensors that are compressed are one vector, a public model (`aqg.core.public`), which is moved by
the entries of a log (`aqg.wire.entry`). What else has changed is sent as it is now, whatever became
of it in between. Both sides compare a digest of all of it in every round.

A node that holds nothing starts from a first model in few bytes, and the server from exactly what
it sent: compressed tensors as `aqg.start` has it, others as they are. With ``exact``, and where
this would not be shorter, the whole model travels in the framework's own arrays.
``docs/reference/frame-format.md`` describes each byte.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from aqg.channel.tensors import (
    Kind,
    Schema,
    Tensor,
    Values,
    decode_kept,
    encode_kept,
    flatten,
    unflatten,
)
from aqg.core.downlink import AUTO
from aqg.core.public import Public, at_rest
from aqg.core.types import FloatArray
from aqg.errors import WireError
from aqg.protocol.digests import DIGEST_BYTES, STATE_DIGEST_BYTES, public_digest, xor
from aqg.start import OtherModelError, laws_of, pack, settle, unpack
from aqg.wire.varint import Reader, write_part

_MOST_BYTES = 1 << 36
_MOST_BESIDE = 1 << 20
"""Bytes of tensors that are not compressed, up to which a first model is drawn without asking."""
_MOST_DRAWN = 1 << 22
"""Values of a tensor, likewise: drawing takes some 50 bytes of memory for each."""


class PublicCopy(NamedTuple):
    """A version of the public copy; nothing of it is ever changed."""

    layout: bytes  # which tensors the vector is made of, a bit for each
    public: Public  # the tensors that are compressed, flat; its round is the copy's version
    kept: Mapping[str, Tensor]  # all others
    digests: Mapping[str, bytes]  # of the kept tensors
    digest: bytes = b""  # of all

    @staticmethod
    def of(
        values: Values,
        schema: Schema,
        layout: bytes,
        version: int = 1,
        digests: Mapping[str, bytes] = {},
    ) -> PublicCopy:
        """Return a copy that is equal to the model; some digests may be known."""
        public = at_rest(flatten(values, schema.chosen(layout)), version)
        inside = schema.names(layout)
        kept = {s.name: values[s.name] for s in schema.specs if s.name not in inside}
        digests = {n: digests.get(n) or tensor_digest(t) for n, t in kept.items()}
        return PublicCopy(layout, public, kept, digests)

    @property
    def version(self) -> int:
        """Counted from 1."""
        return self.public.round

    @property
    def vector(self) -> FloatArray:
        """The tensors that are compressed, flat."""
        return self.public.parameters

    def values(self, schema: Schema) -> dict[str, Tensor]:
        """Return all tensors, as a client's handler receives them."""
        found = {**unflatten(self.vector, schema.chosen(self.layout)), **self.kept}
        return {spec.name: found[spec.name] for spec in schema.specs}

    def beside_digest(self) -> bytes:
        """Return a digest of the layout and the kept tensors."""
        digest = hashlib.blake2b(self.layout, digest_size=STATE_DIGEST_BYTES)
        for name in sorted(self.digests):
            digest.update(self.digests[name])
        return digest.digest()

    def digested(self) -> PublicCopy:
        return self._replace(digest=xor(public_digest(self.public), self.beside_digest()))

    def without(self, names: Collection[str]) -> PublicCopy:
        """Return the copy with a digest that says nothing of some kept tensors."""
        if not names:
            return self
        digests = {name: digest for name, digest in self.digests.items() if name not in names}
        return self._replace(digests=digests)

    def with_kept(self, tensors: Mapping[str, Tensor]) -> PublicCopy:
        if not tensors:
            return self
        digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        kept = {**self.kept, **tensors}
        return self._replace(kept=kept, digests={**self.digests, **digests})

    def with_layout(self, schema: Schema, layout: bytes) -> PublicCopy:
        """Return the same copy with other tensors in the vector."""
        if layout == self.layout:
            return self
        copy = PublicCopy.of(self.values(schema), schema, layout, self.version, self.digests)
        return copy._replace(public=copy.public._replace(history=self.public.history))


def tensor_digest(tensor: Tensor) -> bytes:
    data = np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<"))
    digest = hashlib.blake2b(f"{tensor.dtype} {tensor.shape}|".encode(), digest_size=DIGEST_BYTES)
    digest.update(data.reshape(-1).view(np.uint8).data)
    return digest.digest()


def choose_way(way: str, values: Values, schema: Schema, layout: bytes) -> str:
    """Return how the first model travels where that is left open.

    It is drawn where all of its tensors look freshly drawn themselves: none would notice.
    """
    if way != AUTO:
        return way
    specs, inside = schema.chosen(layout), schema.names(layout)
    beside = sum(t.nbytes for name, t in values.items() if name not in inside)
    is_layered = any(len(spec.shape) > 1 for spec in specs)
    is_large = beside > _MOST_BESIDE or any(spec.size > _MOST_DRAWN for spec in specs)
    if not is_layered or is_large:
        return "exact"
    laws = laws_of(flatten(values, specs), [(spec.name, spec.shape) for spec in specs])
    return "exact" if None in laws else "seed"


class First(NamedTuple):
    schema: Schema  # of all tensors
    layout: bytes  # which of them are in the vector
    message: bytes  # the vector
    held: Values | None  # the vector itself where the message is its digest

    @staticmethod
    def of(way: str, values: Values, schema: Schema, layout: bytes, seed: int) -> First | None:
        """Return the first model that travels in some way; None where it does as a whole."""
        if way == "exact":
            return None
        specs = schema.chosen(layout)
        shapes, vector = [(spec.name, spec.shape) for spec in specs], flatten(values, specs)
        if way == "digest":
            return First(schema, layout, pack(vector, shapes, way), unflatten(vector, specs))
        return First(schema, layout, settle(vector, shapes, way, seed=seed)[1], None)

    def values(self, others: Values) -> Mapping[str, Tensor]:
        """Return the tensors that it stands for, and others that are not part of the vector."""
        held = self.held or _read(self.schema, self.layout, self.message, lambda: None)
        return {**others, **held}

    def encode(self, kept: Values, changed: Iterable[str]) -> bytes:
        """Write it, with tensors that are not compressed as they are now."""
        others = set(kept) - self.schema.names(self.layout)
        chosen = set(changed) if self.held is not None else {*changed, *others}
        rows = json.dumps(self.schema.rows(), separators=(",", ":")).encode()
        exact = dict.fromkeys(self.schema.places, Kind.EXACT)
        parts = [write_part(rows), self.layout, write_part(self.message)]
        parts.append(encode_kept(kept, chosen & set(kept), self.schema, exact))
        return zlib.compress(b"".join(parts), 9)


def decode_first(data: bytes, start: Callable[[], Values | None]) -> dict[str, Tensor]:
    """Return the tensors that `First.encode` wrote.

    Args:
        data: the bytes.
        start: returns the node's own first model; None where it has none.

    Raises `OtherModelError` where they are the digest of another model than that, and `WireError`
    on anything else.
    """
    decoder = zlib.decompressobj()
    try:
        reader = Reader(decoder.decompress(data, _MOST_BYTES), "the first model")
        schema = Schema(json.loads(reader.part("its rows").tobytes()))
    except (zlib.error, ValueError, TypeError) as error:
        raise WireError(f"the first model cannot be read: {error}") from None
    layout = reader.take(schema.bitmap_bytes, "its layout").tobytes()
    found = _read(schema, layout, reader.part("its vector").tobytes(), start)
    found |= decode_kept(reader.rest().tobytes(), schema)
    own = start() if len(found) < len(schema.specs) else None
    missing = [spec.name for spec in schema.specs if spec.name not in found]
    if missing and (own is None or not schema.fits(own)):
        raise WireError(f"the first model has no tensor {missing[0]!r}")
    found |= {name: schema.cast(own or {})[name] for name in missing}
    return {spec.name: found[spec.name] for spec in schema.specs}


def _read(
    schema: Schema, layout: bytes, message: bytes, start: Callable[[], Values | None]
) -> dict[str, Tensor]:
    specs = schema.chosen(layout)
    own, held = start(), None
    if own is not None:
        if not schema.fits(own):
            raise OtherModelError("the first model held here has other tensors than the server's")
        held = flatten(schema.cast(own), specs)
    return unflatten(unpack(message, *schema.vector_of(layout), held), specs)
