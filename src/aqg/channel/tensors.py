"""The tensors of a model and its public copy, what both server and clients hold of it.

Floating-point tensors that training changes make one flat vector, which recipes compress. All
others are *kept*: integers, tensors named in ``exclude``, running statistics of normalization
layers, and what no client has changed. A kept tensor travels when it has changed, statistics in
half precision and everything else as it is.

In the public copy, the vector is a public model (`aqg.core.downlink`), which is moved by the
entries of a log (`aqg.wire.entry`). What else has changed is sent as it is now, whatever became of
it in between. Both sides compare a digest of all of it in every round.

A node that holds nothing starts from a first model in few bytes, and the server from exactly what
it sent: compressed tensors as `aqg.start` has it, others as they are. With ``exact``, and where
this would not be shorter, the whole model travels in the framework's own arrays.
``docs/reference/frame-format.md`` describes each byte.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqg.core.downlink import AUTO, DIGEST_BYTES, STATE_DIGEST_BYTES, Public, xor
from aqg.core.messages import Upload
from aqg.core.types import FloatArray
from aqg.errors import MessageError, WireError
from aqg.objectives.layout import ModelLayout, TensorSpec, read_specs
from aqg.start import OtherModelError, laws_of, pack, settle, unpack
from aqg.wire.statistics import Section, StatisticsMessage, decode_statistics, encode_statistics
from aqg.wire.varint import Reader, write_part, write_varint

Tensor = NDArray[Any]
Values = Mapping[str, Tensor]

PIECE = 1 << 20
"""Values that are looked at together: large models need no second vector to be compared."""
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


class Kind(enum.Enum):
    """How a tensor travels."""

    VECTOR = "compressed"
    HALF = "half precision"
    EXACT = "as it is"
    STILL = "never after the first time"


class Schema:
    """Names, types and shapes of a model's tensors, in order.

    >>> schema = Schema.of({"w": np.zeros((2, 3), "f4"), "n": np.zeros((), "i8")})
    >>> [spec.name for spec in schema.chosen(schema.bitmap(["n"]))]
    ['n']
    """

    def __init__(self, rows: Iterable[tuple[str, Sequence[int], str]]) -> None:
        self.specs = read_specs(rows)
        self.places = {spec.name: place for place, spec in enumerate(self.specs)}
        text = "|".join(f"{s.name} {s.dtype} {s.shape}" for s in self.specs)
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
        self.bitmap_bytes = (len(self.specs) + 7) // 8

    @staticmethod
    def of(values: Values) -> Schema:
        return Schema((name, t.shape, str(t.dtype)) for name, t in values.items())

    def rows(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Return what the schema was made from."""
        return [(spec.name, spec.shape, spec.dtype) for spec in self.specs]

    def fits(self, values: Values) -> bool:
        """Tell whether a model has these tensors in these shapes, whatever their types."""
        return set(values) == set(self.places) and all(
            values[spec.name].shape == spec.shape for spec in self.specs
        )

    def cast(self, values: Values) -> dict[str, Tensor]:
        """Return a model's tensors in their own types; strategies turn counts into floats."""
        return {s.name: values[s.name].astype(s.dtype, copy=False) for s in self.specs}

    def chosen(self, bitmap: bytes) -> list[TensorSpec]:
        """Return the tensors whose bits are set."""
        if len(bitmap) != self.bitmap_bytes:
            raise MessageError(
                f"a choice of tensors has {len(bitmap)} bytes; "
                f"{len(self.specs)} tensors take {self.bitmap_bytes}"
            )
        bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little").tolist()
        if any(bits[len(self.specs) :]):
            raise MessageError(f"a choice names tensors beyond the {len(self.specs)} there are")
        return [spec for spec, bit in zip(self.specs, bits, strict=False) if bit]

    def names(self, bitmap: bytes) -> set[str]:
        return {spec.name for spec in self.chosen(bitmap)}

    def vector_of(self, bitmap: bytes) -> tuple[int, str]:
        """Return length and precision of the vector of these tensors."""
        specs = self.chosen(bitmap)
        return sum(spec.size for spec in specs), vector_dtype(specs)

    def bitmap(self, names: Iterable[str]) -> bytes:
        wanted = set(names)
        bits = [spec.name in wanted for spec in self.specs]
        return np.packbits(np.array(bits, np.bool_), bitorder="little").tobytes()

    def kinds(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> dict[str, Kind]:
        """Return how each tensor travels, by its type, its name, and patterns for names.

        >>> values = {"conv.w": np.zeros((2, 2)), "bn.running_mean": np.zeros(2)}
        >>> values |= {"bn.num_batches_tracked": np.zeros((), np.int64)}
        >>> [kind.name for kind in Schema.of(values).kinds().values()]
        ['VECTOR', 'HALF', 'STILL']
        >>> values = {"base.w": np.zeros(2), "base.lora_A": np.zeros(2)}
        >>> [kind.name for kind in Schema.of(values).kinds(["*.lora_*"]).values()]
        ['EXACT', 'VECTOR']
        """
        layout = ModelLayout.of_arrays(self.rows(), include, exclude)
        kinds = dict.fromkeys(self.places, Kind.EXACT)
        kinds |= {spec.name: Kind.VECTOR for spec in layout.parameters}
        tracked = dict(zip((*layout.statistics, *layout.counters), layout.tracked, strict=True))
        kinds |= {spec.name: Kind.HALF for spec in layout.statistics if tracked[spec]}
        return kinds | {spec.name: Kind.STILL for spec in layout.counters if tracked[spec]}

    def encode(self, values: Values, names: Iterable[str], kinds: Kinds) -> bytes:
        """Write kept tensors: how many are in half precision, how many not, which, and values.

        Half-precision tensors that hold NaN or infinity are written as they are.
        """
        names = sorted(names, key=self.places.__getitem__)
        halves = [n for n in names if kinds[n] is Kind.HALF and np.isfinite(values[n]).all()]
        exact = [n for n in names if n not in halves]
        parts = [write_varint(len(halves)), write_varint(len(exact))]
        parts += [write_varint(self.places[n]) for n in (*halves, *exact)]
        if halves:
            flat = np.concatenate([values[n].reshape(-1).astype(np.float64) for n in halves])
            message = StatisticsMessage(flat, np.zeros(0, np.int64), np.ones(len(halves), np.bool_))
            sections = _sections(self.specs[self.places[name]] for name in halves)
            frame = encode_statistics(message, sections, "half")
            parts.append(write_part(frame))
        for name in exact:
            tensor = values[name]
            parts.append(np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<")).tobytes())
        return b"".join(parts)

    def decode(self, data: bytes) -> dict[str, Tensor]:
        """Return what `encode` wrote; raise `WireError` or `MessageError` on anything else."""
        reader = Reader(data, "the message")
        num_halves, num_exact = reader.varint(), reader.varint()
        if num_halves + num_exact > len(self.specs):
            raise WireError(f"{num_halves + num_exact} tensors; the model has {len(self.specs)}")
        places = [reader.varint() for _ in range(num_halves + num_exact)]
        if max(places, default=0) >= len(self.specs):
            raise WireError(f"tensor {max(places)}; the model has {len(self.specs)}")
        if len(set(places)) < len(places):
            raise WireError("a tensor comes twice")
        specs = [self.specs[place] for place in places]
        values: dict[str, Tensor] = {}
        if num_halves:
            frame = reader.part("half precision").tobytes()
            halves = specs[:num_halves]
            values |= unflatten(decode_statistics(frame, _sections(halves)).values, halves)
        for spec in specs[num_halves:]:
            kind = np.dtype(spec.dtype).newbyteorder("<")
            tensor = reader.array(spec.size, kind.str, f"tensor {spec.name!r}")
            values[spec.name] = tensor.astype(spec.dtype).reshape(spec.shape)
        reader.finish("the last tensor")
        return values


def pieces(length: int, size: int = 0) -> Iterator[slice]:
    """Yield the places of what is looked at together of a vector."""
    size = size or PIECE
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def is_finite(tensor: Tensor) -> bool:
    """Tell whether a tensor holds neither NaN nor infinity."""
    if tensor.dtype.kind not in "fc":
        return True
    flat = tensor.reshape(-1)
    return all(bool(np.isfinite(flat[piece]).all()) for piece in pieces(len(flat)))


def vector_dtype(specs: Iterable[TensorSpec]) -> str:
    """Return the precision of the flat vector."""
    return "float64" if any(spec.dtype == "float64" for spec in specs) else "float32"


def placed(specs: Iterable[TensorSpec]) -> Iterator[tuple[TensorSpec, slice]]:
    """Yield tensors, and the place of each in a vector of just these."""
    start = 0
    for spec in specs:
        yield spec, slice(start, start + spec.size)
        start += spec.size


def flatten(values: Values, specs: Sequence[TensorSpec], dtype: Any = None) -> NDArray[Any]:
    """Return tensors as one vector, by default in the precision of a model's."""
    vector = np.empty(sum(spec.size for spec in specs), dtype or vector_dtype(specs))
    for spec, place in placed(specs):
        vector[place] = values[spec.name].reshape(-1)
    return vector


def unflatten(
    vector: NDArray[Any], specs: Sequence[TensorSpec], dtype: np.dtype[Any] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a vector, each in its own precision, or all in one."""
    with np.errstate(over="ignore"):
        return {
            spec.name: vector[place].reshape(spec.shape).astype(dtype or spec.dtype, copy=False)
            for spec, place in placed(specs)
        }


def is_same(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are equal to the bit."""
    if one is other:
        return True
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits, others = bits_of(one), bits_of(other)
    return all(np.array_equal(bits[piece], others[piece]) for piece in pieces(len(bits)))


class Update:
    """A flat vector that a message stands for; of levels it is made part by part, in ``dtype``."""

    def __init__(self, content: FloatArray | Upload, dtype: str) -> None:
        self._content = content
        self.dtype = np.dtype(dtype)

    def __len__(self) -> int:
        return len(self._content)

    def __getitem__(self, places: slice) -> FloatArray:
        """Return some values, which must not be written to."""
        content = self._content
        if isinstance(content, Upload):
            levels = np.ascontiguousarray(content.levels[places])
            return replace(content, levels=levels).values(self.dtype.type)
        return content[places]

    def sample(self, most: int) -> FloatArray:
        """Return every value, or of a longer vector every so many-th."""
        return np.array(self[:: max(1, -(-len(self) // most))])


def squared_norm(vector: FloatArray | Update) -> float:
    """Return ``‖v‖²``, summed in double precision, without a second vector."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for piece in pieces(len(vector)):
            part = vector[piece].astype(np.float64)
            total += float(np.vdot(part, part))
    return total


def shifted(
    values: Values, update: Update, specs: Sequence[TensorSpec], factor: float = 1.0
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors less an update, each in its own precision."""
    for spec, place in placed(specs):
        old, shown = values[spec.name].reshape(-1), np.empty(spec.size, spec.dtype)
        for piece in pieces(spec.size):
            part = update[place.start + piece.start : place.start + piece.stop]
            with np.errstate(over="ignore", invalid="ignore"):
                part = part if factor == 1.0 else factor * part
                shown[piece] = np.subtract(old[piece], part, dtype=update.dtype)
        yield spec.name, shown.reshape(spec.shape)


def as_received(tensor: Tensor) -> Tensor:
    """Return a tensor as the other side has it that was sent in half precision."""
    schema = Schema.of({"t": tensor})
    return schema.decode(schema.encode({"t": tensor}, ["t"], {"t": Kind.HALF}))["t"]


def give_back() -> None:
    """Return to the system what was let go of; glibc keeps it where something lies above it."""
    if _TRIM is not None:
        _TRIM(0)


def bits_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a tensor, flat."""
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


def _sections(specs: Iterable[TensorSpec]) -> list[Section]:
    return [Section(spec.size, spec.dtype) for spec in specs]


Kinds = dict[str, Kind]


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
        public = Public.at_rest(flatten(values, schema.chosen(layout)), version)
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
        return self._replace(digest=xor(self.public.digest(), self.beside_digest()))

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
        parts.append(self.schema.encode(kept, chosen & set(kept), exact))
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
    found |= schema.decode(reader.rest().tobytes())
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
