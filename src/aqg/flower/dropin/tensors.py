"""The tensors of an ArrayRecord: which are compressed, which go as they are, and how.

Floating-point tensors that training changes make one flat vector, which recipes compress. All
others are *kept*: integers, tensors named in ``exclude``, running statistics of normalization
layers, and what no client has changed. A kept tensor travels when it has changed, statistics in
half precision and everything else as it is.
"""

from __future__ import annotations

import enum
import hashlib
from fnmatch import fnmatchcase
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord

from aqg.errors import ConfigError, MessageError, WireError
from aqg.protocol.digests import DIGEST_BYTES
from aqg.wire.statistics import Section, StatisticsMessage, decode_statistics, encode_statistics
from aqg.wire.varint import read_varint, write_varint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from aqg.core.types import FloatArray

    Tensor = NDArray[Any]
    Values = Mapping[str, Tensor]

_FLOATS = ("float16", "float32", "float64")
_STATISTICS = ("running_mean", "running_var")
_COUNTERS = ("num_batches_tracked",)
_NUMPY = "numpy.ndarray"
PIECE = 1 << 20
"""Values that are looked at together: large models need no second vector to be compared."""


class Kind(enum.Enum):
    """How a tensor travels."""

    VECTOR = "compressed"
    HALF = "half precision"
    EXACT = "as it is"
    STILL = "never after the first time"


class Spec(NamedTuple):
    """A tensor of a record."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many values it has."""
        return int(np.prod(self.shape, dtype=np.int64))


class Schema:
    """Names, types and shapes of a record, in order.

    Args:
        specs: of the tensors.

    """

    def __init__(self, specs: Iterable[Spec]) -> None:
        self.specs = tuple(specs)
        self.places = {spec.name: place for place, spec in enumerate(self.specs)}
        text = "|".join(f"{s.name} {s.dtype} {s.shape}" for s in self.specs)
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
        self.bitmap_bytes = (len(self.specs) + 7) // 8

    @staticmethod
    def of(record: ArrayRecord) -> Schema | None:
        """Return the schema of a record; None where it holds something else than NumPy arrays."""
        if not record or any(array.stype != _NUMPY for array in record.values()):
            return None
        return Schema(Spec(n, a.dtype, tuple(a.shape)) for n, a in record.items())

    def chosen(self, bitmap: bytes) -> list[Spec]:
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

    def bitmap(self, names: Iterable[str]) -> bytes:
        """Return the bits of some tensors."""
        wanted = set(names)
        bits = [spec.name in wanted for spec in self.specs]
        return np.packbits(np.array(bits, np.bool_), bitorder="little").tobytes()


def kinds_of(schema: Schema, include: Sequence[str], exclude: Sequence[str]) -> dict[str, Kind]:
    """Return how each tensor travels, by its type, its name, and patterns for names.

    >>> specs = [Spec("conv.weight", "float32", (2, 2)), Spec("bn.running_mean", "float32", (2,))]
    >>> schema = Schema([*specs, Spec("bn.num_batches_tracked", "int64", ())])
    >>> [kind.name for kind in kinds_of(schema, (), ()).values()]
    ['VECTOR', 'HALF', 'STILL']
    >>> schema = Schema([Spec("base.w", "float32", (2,)), Spec("base.lora_A", "float32", (2,))])
    >>> [kind.name for kind in kinds_of(schema, ["*.lora_*"], ()).values()]
    ['EXACT', 'VECTOR']
    """
    kinds = {}
    for spec in schema.specs:
        last = spec.name.rpartition(".")[2]
        if spec.dtype not in _FLOATS:
            kinds[spec.name] = Kind.STILL if last in _COUNTERS else Kind.EXACT
        elif last in _STATISTICS:
            kinds[spec.name] = Kind.HALF
        else:
            wanted = not include or any(fnmatchcase(spec.name, p) for p in include)
            wanted = wanted and not any(fnmatchcase(spec.name, p) for p in exclude)
            kinds[spec.name] = Kind.VECTOR if wanted else Kind.EXACT
    if Kind.VECTOR not in kinds.values():
        raise ConfigError(
            f"none of the {len(kinds)} tensors is left to compress; "
            f"include is {list(include)}, exclude is {list(exclude)}"
        )
    return kinds


def vector_dtype(specs: Iterable[Spec]) -> str:
    """Return the precision of the flat vector."""
    return "float64" if any(spec.dtype == "float64" for spec in specs) else "float32"


def flatten(values: Values, specs: Sequence[Spec]) -> FloatArray:
    """Return tensors as one vector."""
    dtype = np.dtype(vector_dtype(specs))
    vector = np.empty(sum(spec.size for spec in specs), dtype)
    position = 0
    for spec in specs:
        vector[position : position + spec.size] = values[spec.name].reshape(-1)
        position += spec.size
    return vector


def unflatten(
    vector: FloatArray, specs: Sequence[Spec], dtype: np.dtype[Any] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a vector, each in its own precision, or all in one."""
    tensors: dict[str, Tensor] = {}
    position = 0
    for spec in specs:
        part = vector[position : position + spec.size].reshape(spec.shape)
        with np.errstate(over="ignore"):
            tensors[spec.name] = part.astype(dtype or spec.dtype, copy=False)
        position += spec.size
    return tensors


def rounded(vector: FloatArray, specs: Sequence[Spec]) -> FloatArray:
    """Return a vector whose values are numbers of their tensors' own precision."""
    if all(spec.dtype == vector.dtype for spec in specs):
        return vector
    return flatten(unflatten(vector, specs), specs)


def tensor_of(array: Array) -> Tensor:
    """Return the tensor of an array; it lies in the array's own bytes, and cannot be written to."""
    if array.stype != _NUMPY:
        raise MessageError(f"an array is {array.stype!r}; {_NUMPY!r} can be read")
    stream = BytesIO(array.data)
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0}
    reader = readers.get(version, np.lib.format.read_array_header_2_0)
    shape, is_fortran, dtype = reader(stream)
    if dtype.hasobject:
        raise MessageError("an array holds Python objects; numbers can be read")
    size = int(np.prod(shape, dtype=np.int64))
    if not size:
        return np.zeros(shape, dtype)
    flat = np.frombuffer(array.data, dtype, size, stream.tell())
    return flat.reshape(shape, order="F" if is_fortran else "C")


def array_of(tensor: Tensor) -> Array:
    """Return the array of a tensor, as `flwr.app.Array` makes it, with a single copy of it."""
    tensor = np.asarray(tensor, order="C")
    head = BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(tensor))
    data = b"".join([head.getvalue(), _bits(tensor).data])
    return Array(str(tensor.dtype), tuple(tensor.shape), _NUMPY, data)


def values_of(record: ArrayRecord) -> dict[str, Tensor]:
    """Return the tensors of a record, without a copy (`tensor_of`)."""
    return {name: tensor_of(array) for name, array in record.items()}


def values_like(record: ArrayRecord, schema: Schema) -> dict[str, Tensor]:
    """Return the tensors of a record in the schema's types; strategies turn counts into floats."""
    if set(record) != set(schema.places):
        other = sorted(set(record) ^ set(schema.places))
        raise MessageError(f"the model has other tensors than at first, such as {other[0]!r}")
    values = {}
    for spec in schema.specs:
        tensor = tensor_of(record[spec.name])
        if tensor.shape != spec.shape:
            raise MessageError(f"{spec.name!r} is {tensor.shape}; at first it was {spec.shape}")
        values[spec.name] = tensor.astype(spec.dtype, copy=False)
    return values


def record_of(values: Values, schema: Schema) -> ArrayRecord:
    """Return a record of tensors, in the schema's order."""
    return ArrayRecord({spec.name: array_of(values[spec.name]) for spec in schema.specs})


def is_same(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are equal to the bit."""
    if one is other:
        return True
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits, others = _bits(one), _bits(other)
    return all(
        np.array_equal(bits[start : start + PIECE], others[start : start + PIECE])
        for start in range(0, len(bits), PIECE)
    )


def subtract(vector: FloatArray, values: Values, specs: Sequence[Spec]) -> None:
    """Take tensors off a flat vector, in place."""
    position = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for spec in specs:
            vector[position : position + spec.size] -= values[spec.name].reshape(-1)
            position += spec.size


def shifted(values: Values, update: FloatArray, specs: Sequence[Spec]) -> dict[str, Tensor]:
    """Return tensors less an update, a flat vector, each in its own precision."""
    parts = unflatten(update, specs, update.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        return {
            spec.name: np.subtract(values[spec.name], parts[spec.name], dtype=update.dtype).astype(
                spec.dtype, copy=False
            )
            for spec in specs
        }


def encode_kept(values: Values, names: Iterable[str], schema: Schema, kinds: Kinds) -> bytes:
    """Write kept tensors: how many are in half precision and how many not, which, and the values.

    Half-precision tensors that hold NaN or infinity are written as they are.
    """
    names = sorted(names, key=schema.places.__getitem__)
    halves = [n for n in names if kinds[n] is Kind.HALF and np.isfinite(values[n]).all()]
    exact = [n for n in names if n not in halves]
    parts = [write_varint(len(halves)), write_varint(len(exact))]
    parts += [write_varint(schema.places[n]) for n in (*halves, *exact)]
    if halves:
        flat = np.concatenate([values[n].reshape(-1).astype(np.float64) for n in halves])
        message = StatisticsMessage(flat, np.zeros(0, np.int64), np.ones(len(halves), np.bool_))
        frame = encode_statistics(message, _sections(halves, schema), "half")
        parts += [write_varint(len(frame)), frame]
    for name in exact:
        tensor = values[name]
        parts.append(np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<")).tobytes())
    return b"".join(parts)


def decode_kept(data: bytes, schema: Schema) -> dict[str, Tensor]:
    """Return what `encode_kept` wrote; raise `WireError` or `MessageError` on anything else."""
    num_halves, position = read_varint(data, 0)
    num_exact, position = read_varint(data, position)
    if num_halves + num_exact > len(schema.specs):
        raise WireError(f"{num_halves + num_exact} tensors; the model has {len(schema.specs)}")
    places = []
    for _ in range(num_halves + num_exact):
        place, position = read_varint(data, position)
        if place >= len(schema.specs):
            raise WireError(f"tensor {place}; the model has {len(schema.specs)}")
        places.append(place)
    if len(set(places)) < len(places):
        raise WireError("a tensor comes twice")
    names = [schema.specs[place].name for place in places]
    values: dict[str, Tensor] = {}
    if num_halves:
        length, position = read_varint(data, position)
        frame, position = data[position : position + length], position + length
        flat = decode_statistics(frame, _sections(names[:num_halves], schema)).values
        start = 0
        for name in names[:num_halves]:
            spec = schema.specs[schema.places[name]]
            with np.errstate(over="ignore"):
                part = flat[start : start + spec.size].astype(spec.dtype)
            values[name] = part.reshape(spec.shape)
            start += spec.size
    for name in names[num_halves:]:
        spec = schema.specs[schema.places[name]]
        dtype = np.dtype(spec.dtype).newbyteorder("<")
        end = position + spec.size * dtype.itemsize
        if end > len(data):
            raise WireError(f"the message ends at byte {len(data)}, inside tensor {name!r}")
        tensor = np.frombuffer(data[position:end], dtype).astype(spec.dtype)
        values[name] = tensor.reshape(spec.shape)
        position = end
    if position != len(data):
        raise WireError(f"{len(data) - position} bytes follow the last tensor")
    return values


def as_received(tensor: Tensor, kind: Kind) -> Tensor:
    """Return a kept tensor as the other side has it after `encode_kept` and `decode_kept`."""
    if kind is not Kind.HALF:
        return tensor
    schema = Schema([Spec("t", str(tensor.dtype), tensor.shape)])
    return decode_kept(encode_kept({"t": tensor}, ["t"], schema, {"t": kind}), schema)["t"]


def _bits(tensor: Tensor) -> NDArray[np.uint8]:
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


def _sections(names: Sequence[str], schema: Schema) -> list[Section]:
    specs = [schema.specs[schema.places[name]] for name in names]
    return [Section(spec.size, spec.dtype) for spec in specs]


Kinds = dict[str, Kind]
