"""The ways in which a first model travels: drawn from a seed, known by its digest, rounded, exact.

The server starts from exactly what it sends. ``docs/reference/frame-format.md`` describes each byte
of the message, and ``docs/explanation/first-model.md`` says which tensors are drawn: two models are
only exchanged for each other where nobody can tell. A tensor counts as *fresh* when its values pass
as independent draws of one law, and the largest singular value of a matrix is what independent
numbers have: training leaves it larger.

Draws are the same bits on every machine. They come from Philox4x64-10, a counter-based generator
that is fixed by its publication; integers become numbers by additions, multiplications, divisions
and square roots in double precision alone, which IEEE 754 defines to the last bit. Normal numbers
are the quantiles of uniform ones (Wichura's algorithm AS 241, seven digits), with a logarithm made
of the same operations: libraries' own ``log``, ``cos`` and ``exp`` differ from machine to machine.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aqg.core.downlink import DIGEST_BYTES, start_digest
from aqg.core.types import Float64Array, FloatArray
from aqg.errors import ConfigError, WireError
from aqg.wire import sections
from aqg.wire.entry import decode_vector, encode_vector
from aqg.wire.sections import BYTES, Alphabet, Plane, decode_planes, encode_planes
from aqg.wire.varint import Reader, seal, write_part, write_varint

WAYS = ("seed", "digest", "rounded", "exact")
ROUNDED_BITS = 8
"""Of a first model that is rounded where nobody says otherwise; half a percent of a block's largest
number is the error."""
BITS = range(2, 9)
BLOCK = 64

MARK = 0x66
_SEED, _DIGEST, _ROUNDED, _EXACT = range(4)
_WITH_SIZES = (_SEED, _ROUNDED)
_CENTERED, _EXACT_TENSOR, _ROUNDED_TENSOR = 4, 8, 9
_FEW = 256
"""Fewer values do not tell a uniform from a normal distribution."""
_MOST_COMPARED = 1 << 18
"""Values of a tensor that are compared with a law."""
_KNOWN_DISTANCE = 1.63
"""Times 1/√n, the distance of Kolmogorov and Smirnov that 1 % of true samples exceed."""
_FITTED_DISTANCE = 1.04
"""The same where mean and deviation are the sample's own (Lilliefors)."""
_NEIGHBORS = 4.0
"""Standard deviations that the correlation of neighbors may be from zero."""
_LARGEST_SINGULAR = 512
"""Rows and columns that are looked at."""
_EDGE = (-7.0, 5.0)
"""In units of its fluctuation, how far the largest singular value may be from ``√rows + √cols``;
its mean is at -1.2, its deviation 1.3 (Tracy and Widom)."""

CONSTANT, UNIFORM, NORMAL = range(3)
MAX_SEED = 2**63 - 1
_STREAM = 0xF125
"""Keeps these draws apart from others of the same seed."""
_BITS = 32
_LOG_2 = 0.6931471805599453
_LOG_SERIES = [1.0 / (2 * term + 1) for term in reversed(range(12))]
"""Of the logarithm: the rest is below 1e-17 for mantissas from 0.7 to 1.4."""

_CENTRAL = 0.425
_TAIL_SHIFT = 1.6
_A = (59.109374720, 159.29113202, 50.434271938, 3.3871327179)
_B = (67.187563600, 78.757757664, 17.895169469, 1.0)
_C = (0.17023821103, 1.3067284816, 2.7568153900, 1.4234372777)
_D = (0.12021132975, 0.73700164250, 1.0)

Shapes: TypeAlias = "Sequence[tuple[str, tuple[int, ...]]]"


class Law(NamedTuple):
    """What a fresh tensor is drawn from: a constant, a uniform or a normal distribution."""

    kind: int  # `CONSTANT`, `UNIFORM` or `NORMAL`
    center: float  # the value, the middle or the mean
    scale: float = 0.0  # half the range, or the standard deviation; 0 of a constant

    @property
    def deviation(self) -> float:
        return self.scale / 3**0.5 if self.kind == UNIFORM else self.scale


class OtherModelError(WireError):
    """The weights that are held are not those that a digest is of."""


def pack(
    params: FloatArray, shapes: Shapes, way: str, *, seed: int = 0, bits: int = ROUNDED_BITS
) -> bytes:
    """Write a first model: all tensors in a row, with name and shape of each, in one of `WAYS`.

    Tensors are drawn from the ``seed``, or rounded to so many ``bits`` per number, 2 to 8.

    >>> shapes = (("weight", (30, 20)), ("bias", (30,)))
    >>> params = np.concatenate([np.random.default_rng(1).uniform(-0.2, 0.2, 600), np.zeros(30)])
    >>> [len(pack(params, shapes, way)) for way in WAYS]
    [23, 24, 635, 4370]

    """
    require_way(way)
    _check(params, shapes)
    if bits not in BITS:
        raise ConfigError(f"{bits} bits per parameter; there are {BITS.start} to {BITS.stop - 1}")
    code, sizes = WAYS.index(way), _sizes(shapes)
    if code == _SEED:
        if not 0 <= seed <= MAX_SEED:
            raise ConfigError(f"seed {seed} is not in 0..{MAX_SEED}")
        body = write_varint(seed) + b"".join(_write_tensors(params, shapes, bits))
    elif code == _DIGEST:
        body = start_digest(params)
    elif code == _EXACT:
        body = encode_vector(params, np.zeros_like(params))
    else:
        body = _round(params, sizes, bits)
    if code in _WITH_SIZES:
        body = b"".join(map(write_varint, (len(sizes), *sizes))) + body
    return seal(bytes([MARK, code]) + write_varint(len(params)) + body)


def unpack(
    data: bytes, num_params: int, dtype: str | np.dtype[Any], held: FloatArray | None = None
) -> FloatArray:
    """Return the model of so many parameters that `pack` wrote.

    Raises `OtherModelError` where it is the digest of a model that is not ``held``, and `WireError`
    on bytes that are damaged or of a model of another size.
    """
    reader = Reader.of_sealed(data, "the first model", 3)
    mark, code = reader.byte("its mark"), reader.byte("its way")
    if mark != MARK or code > _EXACT:
        raise WireError(f"bytes {data[:2].hex()} do not begin a first model")
    count = reader.varint()
    if count != num_params:
        raise WireError(f"the first model has {count} parameters; the one here has {num_params}")
    sizes = _read_sizes(reader, count) if code in _WITH_SIZES else []
    if code == _DIGEST:
        digest = reader.rest().tobytes()
        if len(digest) != DIGEST_BYTES:
            raise WireError(f"the digest has {len(digest)} bytes; it must have {DIGEST_BYTES}")
        if held is None or start_digest(held) != digest:
            raise OtherModelError("the first model is another one than that held here")
        return held.copy()
    if code == _EXACT:
        return decode_vector(reader.rest(), np.zeros(count, dtype))
    if code == _SEED:
        return _read_tensors(reader, sizes, np.dtype(dtype))
    return _unround(reader, sizes).astype(dtype)


def settle(
    params: FloatArray, shapes: Shapes, way: str, *, seed: int = 0
) -> tuple[FloatArray, bytes]:
    """Return the model that a run starts from when this one travels so, and the message."""
    message = pack(params, shapes, way, seed=seed)
    return unpack(message, len(params), params.dtype, params), message


def require_way(way: str) -> None:
    if way not in WAYS:
        raise ConfigError(f"start is {way!r}; choose from {', '.join(WAYS)}")


def laws_of(params: FloatArray, shapes: Shapes) -> tuple[Law | None, ...]:
    """Return the law that each tensor passes as a draw of; None where it does of none.

    >>> values = np.random.default_rng(0).standard_normal(512)
    >>> laws_of(np.concatenate([values, np.ones(4)]), (("weight", (32, 16)), ("scale", (4,))))[1]
    Law(kind=0, center=1.0, scale=0.0)
    """
    _check(params, shapes)
    sizes = _sizes(shapes)
    laws: list[Law | None] = []
    few: dict[int, Float64Array] = {}
    for index, values in enumerate(_tensors(params, sizes)):  # one at a time in memory
        laws.append(_law(values, shapes[index][1]))
        few |= {index: values} if len(values) < _FEW else {}
    large = [law for law, size in zip(laws, sizes, strict=True) if size >= _FEW]
    is_fresh = None not in large and any(law and law.scale > 0 for law in large)
    weights = {n.rpartition(".")[0]: i for i, (n, shape) in enumerate(shapes) if len(shape) > 1}
    for index, values in few.items():
        name, shape = shapes[index]
        weight = weights.get(name.rpartition(".")[0]) if len(shape) == 1 else index
        if laws[index] is not None or weight is None:
            continue
        if is_fresh or laws[weight] is not None:
            law = Law(UNIFORM, 0.0, _float32(_fan_in(shapes[weight][1]) ** -0.5))
            laws[index] = law if _distance(values, law) <= _KNOWN_DISTANCE else None
    return tuple(laws)


def _law(values: Float64Array, shape: tuple[int, ...]) -> Law | None:
    if not len(values) or (values == values[0]).all():
        return Law(CONSTANT, float(values[0]) if len(values) else 0.0)
    if len(values) < _FEW:
        return None
    known = [law for law in _known_laws(shape) if _distance(values, law) <= _KNOWN_DISTANCE]
    law = min(known, key=lambda law: _distance(values, law), default=None) or _fitted(values)
    is_fresh = law is not None and _is_shuffled(values) and _is_independent(values, shape, law)
    return law if is_fresh else None


def _known_laws(shape: tuple[int, ...]) -> Iterator[Law]:
    """Yield what layers are commonly initialized by, see ``torch.nn.init``."""
    inputs = _fan_in(shape)
    outputs = math.prod(shape) / shape[1] if len(shape) > 1 else inputs
    for square in (1 / inputs, 6 / inputs, 6 / (inputs + outputs), 3 / inputs):
        yield Law(UNIFORM, 0.0, _float32(square**0.5))
    for square in (1 / inputs, 2 / inputs, 2 / (inputs + outputs), 2 / outputs, 1.0, 0.02**2):
        yield Law(NORMAL, 0.0, _float32(square**0.5))


def _fan_in(shape: tuple[int, ...]) -> float:
    return max(1, math.prod(shape[1:]))


def _fitted(values: Float64Array) -> Law | None:
    """Return a law with the mean and the spread of the values, where it fits them."""
    low, high = float(values.min()), float(values.max())
    reach = (high - low) / 2 * (len(values) + 1) / (len(values) - 1)
    uniform = Law(UNIFORM, _float32((low + high) / 2), _float32(reach))
    normal = Law(NORMAL, _float32(float(values.mean())), _float32(float(values.std())))
    fitting = (law for law in (uniform, normal) if _distance(values, law) <= _FITTED_DISTANCE)
    return next(fitting, None)


def _distance(values: Float64Array, law: Law) -> float:
    """Return the distance of Kolmogorov and Smirnov, times ``√n``."""
    if law.scale == 0:
        return math.inf
    values = values[:: -(-len(values) // _MOST_COMPARED)]
    places = np.sort((values - law.center) / law.scale)
    if law.kind == UNIFORM:
        if max(-places[0], places[-1]) > 1 + 1e-6:
            return math.inf
        shares = (places + 1) / 2
    else:
        shares = np.array([(1 + math.erf(place / math.sqrt(2))) / 2 for place in places.tolist()])
    steps = np.arange(len(places) + 1) / len(places)
    distance = max(float((steps[1:] - shares).max()), float((shares - steps[:-1]).max()))
    return distance * math.sqrt(len(places))


def _is_shuffled(values: Float64Array) -> bool:
    """Tell whether neighbors have nothing in common; those of a ramp or a wave have."""
    centered = values - values.mean()
    common = abs(float(np.vdot(centered[1:], centered[:-1]))) / float(np.var(values))
    return bool(common <= _NEIGHBORS * len(values) ** 0.5)


def _is_independent(values: Float64Array, shape: tuple[int, ...], law: Law) -> bool:
    """Tell whether a matrix has the largest singular value of one with independent entries."""
    if len(shape) < 2:
        return True
    matrix = (values - law.center).reshape(shape[0], -1)[:_LARGEST_SINGULAR, :_LARGEST_SINGULAR]
    if min(matrix.shape) < 2:
        return True
    rows, columns = (length**0.5 for length in matrix.shape)
    fluctuation = (1 / rows + 1 / columns) ** (1 / 3) / 2
    largest = float(np.linalg.norm(matrix, 2)) / law.deviation
    excess = (largest - rows - columns) / fluctuation
    return bool(_EDGE[0] <= excess <= _EDGE[1])


def _float32(number: float) -> float:
    return float(np.float32(number))


def _sizes(shapes: Shapes) -> list[int]:
    return [math.prod(shape) for _, shape in shapes]


def _read_sizes(reader: Reader, count: int) -> list[int]:
    number = reader.varint()
    if number > reader.left:
        raise WireError(f"{number} tensors are claimed where {reader.left} bytes are left")
    sizes = [reader.varint() for _ in range(number)]
    if sum(sizes) != count:
        raise WireError(f"the tensors have {sum(sizes)} of {count} parameters")
    return sizes


def _check(params: FloatArray, shapes: Shapes) -> None:
    expected = sum(_sizes(shapes))
    if params.shape != (expected,):
        raise ConfigError(f"parameters have shape {params.shape}; the tensors need ({expected},)")
    if params.dtype not in (np.float32, np.float64):
        raise ConfigError(f"parameters are {params.dtype}; they must be float32 or float64")
    if not np.isfinite(params).all():
        raise ConfigError("the first model holds NaN or infinity")


def _tensors(params: FloatArray, sizes: Sequence[int]) -> Iterator[Float64Array]:
    position = 0
    for size in sizes:
        yield params[position : position + size].astype(np.float64)
        position += size


def _write_tensors(params: FloatArray, shapes: Shapes, bits: int) -> Iterator[bytes]:
    number = "<d" if params.dtype == np.float64 else "<f"
    laws = laws_of(params, shapes)
    for law, values in zip(laws, _tensors(params, _sizes(shapes)), strict=True):
        if law is None:
            own = values.astype(params.dtype)
            if len(values) < _FEW:
                kind, payload = _EXACT_TENSOR, encode_vector(own, np.zeros_like(own))
            else:
                kind, payload = _ROUNDED_TENSOR, _round(own, [len(own)], bits)
            yield bytes([kind]) + write_part(payload)
            continue
        has_center = law.center != 0 or math.copysign(1, law.center) < 0
        yield bytes([law.kind + _CENTERED * has_center])
        yield struct.pack(number, law.center) if has_center else b""
        yield b"" if law.kind == CONSTANT else struct.pack(number, law.scale)


def _read_tensors(reader: Reader, sizes: list[int], dtype: np.dtype[Any]) -> FloatArray:
    seed, vector, start = reader.varint(), np.empty(sum(sizes), dtype), 0

    def read_number() -> float:
        value = float(reader.array(1, dtype.newbyteorder("<").str, "a number")[0])
        if not math.isfinite(value):
            raise WireError(f"a law of the first model has the number {value}")
        return value

    for stream, count in enumerate(sizes):
        kind = reader.byte(f"tensor {stream}")
        part = vector[start : start + count]
        start += count
        if kind == _EXACT_TENSOR:
            part[:] = decode_vector(reader.part("a tensor"), np.zeros(count, dtype))
            continue
        if kind == _ROUNDED_TENSOR:
            part[:] = _unround(Reader(reader.part("a tensor")), [count])
            continue
        if kind & ~_CENTERED > NORMAL:
            raise WireError(f"tensor {stream} is of kind {kind}, which there is not")
        center = read_number() if kind & _CENTERED else 0.0
        kind &= ~_CENTERED
        scale = 0.0 if kind == CONSTANT else read_number()
        part[:] = draw(Law(kind, center, scale), count, seed, stream)
    reader.finish("the first model")
    return vector


def _blocks(sizes: Sequence[int]) -> NDArray[np.int64]:
    """Return where blocks begin; none reaches over the end of a tensor."""
    starts, position = [np.zeros(0, np.int64)], 0
    for size in sizes:
        starts.append(np.arange(position, position + size, BLOCK))
        position += size
    return np.concatenate(starts)


def _round(params: FloatArray, sizes: list[int], bits: int) -> bytes:
    tensors = list(_tensors(params, sizes))
    is_used = np.array([values.any() for values in tensors], np.bool_)
    head = bytes([bits]) + np.packbits(is_used).tobytes()
    if not is_used.any():
        return head
    values = np.concatenate([values for values, used in zip(tensors, is_used, strict=True) if used])
    starts = _blocks([size for size, used in zip(sizes, is_used, strict=True) if used])
    codes = _round_up(np.maximum.reduceat(np.abs(values), starts))
    scales = np.repeat(_from_codes(codes), np.diff(starts, append=len(values)))
    top = (1 << bits - 1) - 1
    nonzero = scales > 0
    levels = np.rint(values[nonzero] / scales[nonzero] * top) + top
    planes = sections.split_bytes(codes, [BYTES] * 2)
    planes.append(Plane(levels.astype(np.uint8), _alphabet(bits)))
    return head + b"".join(write_part(encode_planes([plane])) for plane in planes)


def _unround(reader: Reader, sizes: list[int]) -> Float64Array:
    bits = reader.byte("the bits of its numbers")
    if bits not in BITS:
        raise WireError(f"numbers are rounded to {bits} bits, not {BITS.start} to {BITS.stop - 1}")
    flags = np.unpackbits(reader.take(-(-len(sizes) // 8), "the flags of its tensors"))
    is_used = flags[: len(sizes)].astype(np.bool_)
    if flags[len(sizes) :].any():
        raise WireError("the rounded model has tensors that this one does not have")
    values = np.zeros(sum(sizes))
    starts = _blocks([size for size, used in zip(sizes, is_used, strict=True) if used])
    if len(starts):
        place = np.repeat(is_used, sizes)
        parts = [reader.part("a list of scales") for _ in range(2)]
        planes = [decode_planes(part, [BYTES], len(starts))[0] for part in parts]
        codes = sections.join_bytes(planes, np.uint16)
        if (codes >= 0x7F80).any() or not codes.any():
            raise WireError("the scales of the rounded model are not numbers above zero")
        scales = np.repeat(_from_codes(codes), np.diff(starts, append=int(place.sum())))
        place[place] = scales > 0
        top, part = (1 << bits - 1) - 1, reader.part("a list of numbers")
        (levels,) = decode_planes(part, [_alphabet(bits)], int(place.sum()))
        if int(levels.max()) > 2 * top:
            raise WireError(f"a level is {int(levels.max())}; {2 * top} is the last")
        values[place] = (levels.astype(np.float64) - top) / top * scales[scales > 0]
    reader.finish("the rounded model")
    return values


def _alphabet(bits: int) -> Alphabet:
    return Alphabet(bits, (1 << bits) - 1)


def _round_up(scales: Float64Array) -> NDArray[np.uint16]:
    """Return bfloat16 numbers, as their bits, that are at least as large."""
    near = scales.astype(np.float32)
    above = np.where(near >= scales, near, np.nextafter(near, np.float32(np.inf)))
    patterns = above.view(np.uint32)
    codes = (patterns.astype(np.uint64) + 0xFFFF) >> np.uint64(16)
    if (codes >= 0x7F80).any():
        raise ConfigError(f"the first model holds {float(scales.max()):g}; it must be below 3e38")
    return codes.astype(np.uint16)


def _from_codes(codes: NDArray[np.uint16]) -> Float64Array:
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def draw(law: Law, count: int, seed: int, stream: int) -> Float64Array:
    """Return ``count`` values of a law; ``stream`` tells apart the tensors of one seed.

    >>> draw(Law(NORMAL, 0.0, 1.0), 2, seed=7, stream=0).tolist()
    [-1.7173647425310925, -1.894787537757483]
    """
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"seed {seed} is not in 0..{MAX_SEED}")
    if law.kind == CONSTANT:
        return np.full(count, law.center)
    generator = np.random.Philox(key=[seed, _STREAM], counter=[0, 0, 0, stream])
    # Odd numbers over 2^33: uniform between 0 and 1, never one of them, and exact.
    raw = generator.random_raw(count) >> np.uint64(64 - _BITS)
    odd = (raw << np.uint64(1) | np.uint64(1)).astype(np.float64)
    shares = odd * 2.0 ** -(_BITS + 1)
    numbers = 2.0 * shares - 1.0 if law.kind == UNIFORM else normal_quantiles(shares)
    return law.center + law.scale * numbers


def normal_quantiles(shares: Float64Array) -> Float64Array:
    """Return the points below which a standard normal number lies with these probabilities.

    >>> normal_quantiles(np.array([0.5, 0.975])).round(6).tolist()
    [0.0, 1.959964]
    """
    offsets = shares - 0.5
    squares = 0.180625 - offsets * offsets
    found = offsets * np.polyval(_A, squares) / np.polyval(_B, squares)
    is_tail = np.abs(offsets) > _CENTRAL
    tails = offsets[is_tail]
    roots = np.sqrt(-_logarithm(0.5 - np.abs(tails))) - _TAIL_SHIFT
    found[is_tail] = np.copysign(np.polyval(_C, roots) / np.polyval(_D, roots), tails)
    return found


def _logarithm(numbers: Float64Array) -> Float64Array:
    mantissas, exponents = np.frexp(numbers)
    is_small = mantissas < 0.5**0.5
    mantissas = np.where(is_small, 2.0 * mantissas, mantissas)
    ratios = (mantissas - 1.0) / (mantissas + 1.0)
    series = 2.0 * ratios * np.polyval(_LOG_SERIES, ratios * ratios)
    return (exponents - is_small) * _LOG_2 + series
