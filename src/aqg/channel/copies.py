"""The public copy of a model: what server and clients both hold.

Tensors that are compressed are one vector, a public model (`aqg.core.public`), which is moved by
the entries of a log (`aqg.wire.entry`). What else has changed is sent as it is now, whatever became
of it in between. Both sides compare a digest of all of it in every round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from aqg.channel.tensors import Schema, Tensor, Values, flatten, unflatten
from aqg.core.public import Public, at_rest
from aqg.core.types import FloatArray
from aqg.protocol.digests import DIGEST_BYTES, STATE_DIGEST_BYTES, public_digest, xor


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
