"""What a client and a server say to each other, and how vectors become what is sent."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from aqg.core.grids import (
    MAX_RADIUS,
    MAX_WIDTH,
    MIN_STEP,
    Grid,
    is_valid_step,
    level_dtype,
    num_levels,
    value_table,
)
from aqg.core.types import ByValue, Float64Array, FloatArray, IntArray, Levels
from aqg.errors import MessageError

_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Broadcast:
    """What the server sends to every client at the start of round ``k``."""

    round: int  # ``k``, counted from 1
    parameters: FloatArray  # the model ``θ^k``, flat
    # ``1/(α²M²) · Σ_d ξ_d ‖θ^{k+1-d} - θ^{k-d}‖²``, the scale of recent model steps in which every
    # criterion is written. One number replaces the whole model history.
    movement: float
    # ``b``, the noise that uploads may carry, in their own energy (`aqg.core.auto`)
    noise: float = 1.0


@dataclass(frozen=True, slots=True)
class Skip:
    """Nothing to send: the server goes on with what it knows.

    ``fault`` says why, when it was not the client's choice (a gradient with NaN, say).
    """

    fault: str | None = None
    width: ClassVar[int] = 0


@dataclass(frozen=True, slots=True, eq=False)
class Upload(ByValue):
    """A vector quantized on a grid, one level per coordinate."""

    levels: Levels
    step: float
    width: int
    grid: Grid

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MAX_WIDTH:
            raise MessageError(f"width {self.width} is outside 1..{MAX_WIDTH}")
        if not is_valid_step(self.step):
            raise MessageError(f"step {self.step!r} is not a bfloat16 number in range")
        _require("levels", self.levels, level_dtype(self.width))

    def __len__(self) -> int:
        return len(self.levels)

    def validate(self) -> None:
        bound = num_levels(self.grid, self.width)
        if len(self.levels) and int(self.levels.max()) >= bound:
            raise MessageError(
                f"level {int(self.levels.max())} is not below {bound}, the number of levels of "
                f"{self.grid} at width {self.width}"
            )

    def values(self, dtype: type[np.floating]) -> FloatArray:
        return value_table(self.grid, self.width, self.step, dtype)[self.levels]


def _require(
    what: str, array: NDArray[Any], dtype: type[np.generic], length: int | None = None
) -> None:
    shape = array.shape if length is None else (length,)
    if array.ndim != 1 or array.shape != shape or array.dtype != dtype:
        count = "" if length is None else f"{length} "
        raise MessageError(
            f"{what} are {array.dtype} of shape {array.shape}; "
            f"they must be {count}{dtype.__name__} in a row"
        )


@dataclass(frozen=True, slots=True, eq=False)
class DenseUpload(ByValue):
    """A vector sent as it is, in float32."""

    dense: NDArray[np.float32]

    def __post_init__(self) -> None:
        _require("values", self.dense, np.float32)

    width: ClassVar[int] = 32

    def __len__(self) -> int:
        return len(self.dense)

    def validate(self) -> None:
        if not np.isfinite(self.dense).all():
            raise MessageError("a dense upload holds NaN or infinity")

    def values(self, dtype: type[np.floating]) -> FloatArray:
        return self.dense.astype(dtype)


MAX_EXPONENT = 100
"""Exponents go from minus this to this: products stay normal float32 numbers."""


def to_halves(vector: FloatArray) -> tuple[NDArray[np.float16], int]:
    """Return ``halves, e`` with ``halves · 2^e`` as close to ``vector`` as 11 bits can be.

    The largest coordinate lies in [1, 2]; those below ``2^-25`` of it become zero. Products are
    exact in float32: mirrors that add them stay equal to the last bit.
    """
    radius = float(np.abs(vector).max(initial=0.0))
    exponent = math.frexp(radius)[1] - 1 if radius else 0
    exponent = min(max(exponent, -MAX_EXPONENT), MAX_EXPONENT)
    # A power of two only shifts the exponent: the one rounding is that to a half.
    return (vector.astype(np.float64) * math.ldexp(1.0, -exponent)).astype(np.float16), exponent


def check_halves(halves: NDArray[np.float16], exponent: int) -> None:
    _require("values", halves, np.float16)
    if not -MAX_EXPONENT <= exponent <= MAX_EXPONENT:
        raise MessageError(f"exponent {exponent} is outside -{MAX_EXPONENT}..{MAX_EXPONENT}")


def from_halves(halves: NDArray[np.float16], exponent: int, dtype: type[np.floating]) -> FloatArray:
    return halves.astype(dtype) * dtype(math.ldexp(1.0, exponent))


@dataclass(frozen=True, slots=True, eq=False)
class HalfUpload(ByValue):
    """A vector with every coordinate in half precision."""

    halves: NDArray[np.float16]
    exponent: int

    def __post_init__(self) -> None:
        check_halves(self.halves, self.exponent)

    width: ClassVar[int] = 16

    def __len__(self) -> int:
        return len(self.halves)

    def validate(self) -> None:
        if not np.isfinite(self.halves).all():
            raise MessageError("an upload of halves holds NaN or infinity")

    def values(self, dtype: type[np.floating]) -> FloatArray:
        return from_halves(self.halves, self.exponent, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class SparseUpload(ByValue):
    """A vector that is zero but for a few coordinates, which are halves."""

    indices: NDArray[np.int64]  # where these are, increasing
    halves: NDArray[np.float16]  # their values over ``2^exponent``; none is zero
    exponent: int
    length: int  # how many coordinates the vector has

    def __post_init__(self) -> None:
        check_halves(self.halves, self.exponent)
        _require("indices", self.indices, np.int64, len(self.halves))

    width: ClassVar[int] = 16

    def __len__(self) -> int:
        return self.length

    def validate(self) -> None:
        if len(self.indices):
            if int(self.indices[0]) < 0 or int(self.indices[-1]) >= self.length:
                raise MessageError(
                    f"indices {int(self.indices[0])}..{int(self.indices[-1])} do not lie in "
                    f"0..{self.length - 1}"
                )
            if (np.diff(self.indices) <= 0).any():
                raise MessageError("the indices of a sparse upload do not increase")
        if not np.isfinite(self.halves).all() or not self.halves.all():
            raise MessageError("a sparse upload holds NaN, infinity or zero")

    def values(self, dtype: type[np.floating]) -> FloatArray:
        values: FloatArray = np.zeros(self.length, dtype)
        values[self.indices] = from_halves(self.halves, self.exponent, dtype)
        return values


BLOCK = 256
"""Coordinates in a block, unless a message says otherwise."""
LONGEST_BLOCK = 1 << 20
TOP = 127
"""Levels are ``0..2·TOP``, with zero in the middle."""
_BFLOAT16_REST = 45
"""So many of the last bits of a float64 are zero in a bfloat16 number."""


def num_blocks(length: int, block: int = BLOCK) -> int:
    return -(-length // block)


def quantize_blocks(
    vector: FloatArray,
    block: int = BLOCK,
    num_levels: int = TOP,
    uniform: NDArray[np.float64] | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return the levels and the step of every block.

    Steps are ``max|v|/127``, and levels the nearest: Dettmers et al., 8-bit Optimizers via
    Block-wise Quantization, with the linear map. An outlier spoils the resolution of its own block
    only. With ``uniform``, random numbers in [0, 1) for each coordinate, steps are ``‖v‖₂/s`` and
    coordinates are rounded at random: QSGD's buckets.
    """
    rows = np.zeros((num_blocks(len(vector), block), block))
    rows.ravel()[: len(vector)] = vector
    is_random = uniform is not None
    sizes = np.sqrt(np.square(rows).sum(axis=1)) if is_random else np.abs(rows).max(axis=1)
    steps = _rounded_up(sizes / num_levels)
    inverses = np.divide(1.0, steps, out=np.zeros_like(steps), where=steps > 0)
    scaled = (rows * inverses[:, None]).ravel()[: len(vector)]
    integers = np.rint(scaled) if uniform is None else np.floor(scaled + uniform)
    levels = np.clip(integers, -num_levels, num_levels) + TOP
    return levels.astype(np.uint8), steps.astype(np.float32)


def _rounded_up(raw: Float64Array) -> Float64Array:
    """Return the smallest bfloat16 numbers at or above these; positive ones at least `MIN_STEP`."""
    rest = np.int64((1 << _BFLOAT16_REST) - 1)
    rounded = ((raw.view(np.int64) + rest) & ~rest).view(np.float64)
    return np.where(raw > 0, np.maximum(rounded, MIN_STEP), 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class BlockUpload(ByValue):
    """A vector as a level per coordinate, of one byte, and a step per block of coordinates."""

    levels: NDArray[np.uint8]
    steps: NDArray[np.float32]
    block: int = BLOCK

    def __post_init__(self) -> None:
        if not 1 <= self.block <= LONGEST_BLOCK:
            raise MessageError(f"blocks have {self.block} coordinates, not 1..{LONGEST_BLOCK}")
        _require("levels", self.levels, np.uint8)
        _require("steps", self.steps, np.float32, num_blocks(len(self.levels), self.block))

    width: ClassVar[int] = 8

    def __len__(self) -> int:
        return len(self.levels)

    def validate(self) -> None:
        if len(self.levels) and int(self.levels.max()) > 2 * TOP:
            raise MessageError(f"level {int(self.levels.max())} is above {2 * TOP}")
        bits = self.steps.view(np.uint32)
        in_range = (self.steps >= MIN_STEP) & (self.steps <= 2 * MAX_RADIUS)
        is_valid = (bits == 0) | (in_range & (bits & 0xFFFF == 0))
        if not is_valid.all():
            step = float(self.steps[np.argmin(is_valid)])
            raise MessageError(f"step {step!r} of a block is not a bfloat16 number in range")

    def values(self, dtype: type[np.floating]) -> FloatArray:
        integers = self.levels.astype(dtype) - dtype(TOP)
        steps = np.repeat(self.steps.astype(dtype), self.block)[: len(integers)]
        return integers * steps


# Vargaftik et al., DRIVE: One-bit Distributed Mean Estimation; EDEN: Communication-Efficient and
# Robust Distributed Mean Estimation for Federated Learning. With ``R = H·D/√d``, ``H`` the Hadamard
# matrix and ``D`` random signs, the coordinates of ``Rx`` are nearly normal whatever ``x`` is:
#
#     ``x̂ = S · R⁻¹ sign(Rx)``,  ``S = ‖x‖₂²/‖Rx‖₁`` (unbiased)  or  ``‖Rx‖₁/d`` (least error).
#
# With two or four bits, EDEN rounds ``Rx·√d/‖x‖₂`` to the nearest of the points ``c`` that are best
# for a normal distribution (Lloyd and Max), and ``S = ‖x‖₂²/⟨Rx, c⟩`` or ``⟨Rx, c⟩/‖c‖₂²``. Points
# are multiples of 1/4096, so that the inverse rotation sums integers, the same on every machine.
#
# Below one bit ``x`` is ``k`` of the vector's ``n`` coordinates, drawn from the seed. The others
# arrive as zero, and ``S`` is ``n/k`` times as large where it is unbiased.
#
# A Hadamard matrix has a power of two rows: a vector is cut into blocks of such lengths, each with
# a scale of its own. The last coordinates, fewer than 64, are filled up with zeros.

LEAST_BLOCK = 64
_GOLDEN = 0x9E3779B97F4A7C15
_UNIT = 4096
_UPPER_POINTS: dict[int, tuple[float, ...]] = {
    2: (0.4528, 1.5104),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0691, 2.7326),
}
"""By width, the positive half of the best points for a normal distribution (Max, 1960)."""
WIDTHS = (1, *_UPPER_POINTS)


def points_of(width: int) -> NDArray[np.int64]:
    """Return the points of a width in multiples of 1/4096, increasing."""
    upper = [round(_UNIT * point) for point in _UPPER_POINTS[width]]
    return np.array([-point for point in reversed(upper)] + upper, np.int64)


def block_lengths(length: int) -> tuple[int, ...]:
    """Return the blocks of a vector with ``length`` coordinates; the last may be too long.

    >>> block_lengths(159010)
    (131072, 16384, 8192, 2048, 1024, 256, 64)
    """
    lengths = []
    while length >= LEAST_BLOCK:
        lengths.append(1 << (length.bit_length() - 1))
        length -= lengths[-1]
    if length:
        lengths.append(1 << (length - 1).bit_length())
    return tuple(lengths)


def _random_words(seed: int, count: int) -> NDArray[np.uint64]:
    """Return the first numbers of the generator SplitMix64; none comes twice."""
    counter = np.arange(1, count + 1, dtype=np.uint64)
    word = counter * np.uint64(_GOLDEN) + np.uint64(seed)
    word = (word ^ word >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ word >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    word ^= word >> np.uint64(31)
    return word


def random_signs(seed: int, length: int) -> NDArray[np.int8]:
    """Return the diagonal of ``D``: the bits of random words as signs, lowest first."""
    words = _random_words(seed, -(-length // 64)).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:length]
    return 2 * bits.astype(np.int8) - np.int8(1)


def random_places(seed: int, length: int, count: int) -> IntArray:
    """Return ``count`` of the places below ``length``, increasing: those of the smallest words.

    The words start ``2^32`` above the seed, so that the random signs are not made of the same ones.
    """
    words = _random_words(seed + (1 << 32), length)
    return np.flatnonzero(words <= np.partition(words, count - 1)[count - 1])


def hadamard(vector: NDArray[np.int32] | NDArray[np.int64] | Float64Array) -> None:
    """Multiply by the Hadamard matrix, in place; ``(n,)`` with ``n`` a power of two."""
    half = 1
    while half < len(vector):
        pairs = vector.reshape(-1, 2, half)
        difference = pairs[:, 0] - pairs[:, 1]
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] = difference
        half *= 2


def quantize_rotated(
    vector: FloatArray, seed: int, unbiased: bool, width: int = 1
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return a code for every coordinate of the rotated vector, and the scale ``S`` of every block.

    At one bit the codes are the signs.
    """
    lengths = block_lengths(len(vector))
    rotated = np.zeros(sum(lengths))
    rotated[: len(vector)] = vector
    rotated *= random_signs(seed, len(rotated))
    scales = np.zeros(len(lengths))
    start = 0
    for index, length in enumerate(lengths):
        block = rotated[start : start + length]
        squared_norm = float(block @ block)
        hadamard(block)
        start += length
        if width > 1:
            scales[index] = _round_block(block, squared_norm, unbiased, width)
        elif (norm_1 := float(np.abs(block).sum()) / length**0.5) > 0:
            scales[index] = squared_norm / norm_1 if unbiased else norm_1 / length
    codes = rotated >= 0 if width == 1 else rotated
    return codes.astype(np.uint8), scales.astype(np.float32)


def _round_block(block: Float64Array, squared_norm: float, unbiased: bool, width: int) -> float:
    """Replace a rotated block, ``√d`` times too long, by its codes; return the scale."""
    points = points_of(width) / _UNIT
    rotated = block / len(block) ** 0.5
    deviation = (squared_norm / len(block)) ** 0.5
    thresholds = (points[1:] + points[:-1]) / 2
    block[:] = np.searchsorted(thresholds, rotated / deviation) if deviation else 0
    chosen = points[block.astype(np.int64)]
    product = float(rotated @ chosen)
    if product <= 0:
        return 0.0
    return squared_norm / product if unbiased else product / float(chosen @ chosen)


@dataclass(frozen=True, slots=True, eq=False)
class RotatedUpload(ByValue):
    """The signs of a rotated vector, or of a part of it, or codes of two or four bits."""

    signs: NDArray[np.uint8]  # a code below ``2^width`` for every coordinate of all blocks
    scales: NDArray[np.float32]  # ``S`` of every block
    seed: int  # of the rotation, below ``2^32``
    length: int  # how many coordinates the vector has
    width: int = 1  # bits per coordinate
    taken: int = 0  # so many coordinates, at `random_places`, were rotated; 0: all

    def __post_init__(self) -> None:
        if self.width not in WIDTHS:
            raise MessageError(f"a rotated upload has {self.width} bits, not one of {WIDTHS}")
        if self.taken and not (0 < self.taken < self.length and self.width == 1):
            raise MessageError(
                f"{self.taken} of {self.length} coordinates at {self.width} bits are rotated; "
                "it must be all, or fewer at 1 bit"
            )
        lengths = block_lengths(self.taken or self.length)
        _require("signs", self.signs, np.uint8, sum(lengths))
        _require("scales", self.scales, np.float32, len(lengths))
        if not 0 <= self.seed < 1 << 32:
            raise MessageError(f"seed {self.seed} of a rotation is outside 0..2^32 - 1")

    def __len__(self) -> int:
        return self.length

    def validate(self) -> None:
        if len(self.signs) and int(self.signs.max()) >> self.width:
            raise MessageError(f"code {int(self.signs.max())} is not of {self.width} bits")
        if not (np.isfinite(self.scales) & ~np.signbit(self.scales)).all():
            raise MessageError("a scale of a rotated upload is negative, NaN or infinite")

    def values(self, dtype: type[np.floating]) -> FloatArray:
        lengths = block_lengths(self.taken or self.length)
        unit = 1
        integers: NDArray[Any] = 2 * self.signs.astype(np.int32) - np.int32(1)
        if self.width > 1:
            unit, integers = _UNIT, points_of(self.width)[self.signs]
        factors = np.empty(len(integers))
        start = 0
        for scale, length in zip(self.scales.tolist(), lengths, strict=True):
            hadamard(integers[start : start + length])
            factors[start : start + length] = scale / length**0.5 / unit
            start += length
        integers *= random_signs(self.seed, len(integers))
        found: FloatArray = (integers * factors)[: self.taken or self.length].astype(dtype)
        if not self.taken:
            return found
        values: FloatArray = np.zeros(self.length, dtype)
        values[random_places(self.seed, self.length, self.taken)] = found
        return values


AnyUpload = Upload | DenseUpload | HalfUpload | SparseUpload | BlockUpload | RotatedUpload
"""Everything that stands for a vector."""
Message = AnyUpload | Skip


def num_nonzero(upload: AnyUpload) -> int:
    """Return how many coordinates of an upload are not zero."""
    if isinstance(upload, Upload) and upload.grid is Grid.MIDTREAD and upload.width > 1:
        middle = num_levels(upload.grid, upload.width) // 2
        return int(np.count_nonzero(upload.levels != middle)) if upload.step else 0
    return int(np.count_nonzero(upload.values(np.float32)))


def energy_of(upload: AnyUpload) -> float:
    """Return ``‖v‖²`` of the vector that an upload stands for."""
    if isinstance(upload, Upload):
        values = value_table(upload.grid, upload.width, upload.step, np.float64)
        counts = np.zeros(len(values), np.int64)
        for start in range(0, len(upload), _PIECE):  # what is counted is first made wider
            piece = upload.levels[start : start + _PIECE]
            counts += np.bincount(piece, minlength=len(values))[: len(values)]
        return float(counts @ np.square(values))
    values = upload.values(np.float64)
    return float(np.vdot(values, values))
