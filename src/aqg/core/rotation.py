"""One, two or four bits per coordinate after a random rotation.

Vargaftik et al., DRIVE: One-bit Distributed Mean Estimation, and EDEN: Communication-Efficient and
Robust Distributed Mean Estimation for Federated Learning. With ``R = H·D/√d``, ``H`` the Hadamard
matrix and ``D`` random signs, the coordinates of ``Rx`` are nearly normal whatever ``x`` is, and
their signs say much about it:

    ``x̂ = S · R⁻¹ sign(Rx)``,  ``S = ‖x‖₂²/‖Rx‖₁`` (unbiased)  or  ``‖Rx‖₁/d`` (least error).

With two or four bits, EDEN rounds ``Rx·√d/‖x‖₂`` to the nearest of the points ``c`` that are best
for a normal distribution (Lloyd and Max), and ``S = ‖x‖₂²/⟨Rx, c⟩`` or ``⟨Rx, c⟩/‖c‖₂²``. Points
are multiples of 1/4096, so that the inverse rotation sums integers, the same on every machine.

A Hadamard matrix has a power of two rows. A vector is cut into blocks of such lengths, each with a
scale of its own: the largest that fits, then the largest that fits the rest, and so on; the last
coordinates, fewer than 64, are filled up with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aqg.core.types import ByValue, Float64Array, FloatArray
from aqg.errors import MessageError

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
    """Return the points of a width in multiples of 1/4096, increasing.

    >>> points_of(2)
    array([-6187, -1855,  1855,  6187])
    """
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


def random_signs(seed: int, length: int) -> NDArray[np.int8]:
    """Return the diagonal of ``D``: the bits of the generator SplitMix64 as signs, lowest first.

    >>> random_signs(7, 12)
    array([ 1,  1,  1, -1,  1, -1,  1,  1,  1, -1,  1,  1], dtype=int8)
    """
    counter = np.arange(1, -(-length // 64) + 1, dtype=np.uint64)
    word = counter * np.uint64(_GOLDEN) + np.uint64(seed)
    word = (word ^ word >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ word >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    word ^= word >> np.uint64(31)
    bits = np.unpackbits(word.astype("<u8").view(np.uint8), bitorder="little")[:length]
    return 2 * bits.astype(np.int8) - np.int8(1)


def hadamard(vector: NDArray[np.int32] | NDArray[np.int64] | Float64Array) -> None:
    """Multiply by the Hadamard matrix, in place; ``(n,)`` with ``n`` a power of two.

    >>> vector = np.array([1.0, 0.0, 0.0, 2.0])
    >>> hadamard(vector)
    >>> vector
    array([ 3., -1., -1.,  3.])
    """
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
        if width > 1:
            scales[index] = _round_block(block, squared_norm, unbiased, width)
            start += length
            continue
        norm_1 = float(np.abs(block).sum()) / length**0.5
        if norm_1 > 0:
            scales[index] = squared_norm / norm_1 if unbiased else norm_1 / length
        start += length
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
    """The signs of a rotated vector, or codes of two or four bits.

    Attributes:
        signs: a code below ``2^width`` for every coordinate of all blocks; 0 or 1 at one bit.
        scales: ``S`` of every block.
        seed: of the rotation, below ``2^32``.
        length: how many coordinates the vector has.
        width: bits per coordinate.
    """

    signs: NDArray[np.uint8]
    scales: NDArray[np.float32]
    seed: int
    length: int
    width: int = 1

    def __post_init__(self) -> None:
        if self.width not in WIDTHS:
            raise MessageError(f"a rotated upload has {self.width} bits, not one of {WIDTHS}")
        lengths = block_lengths(self.length)
        if self.signs.shape != (sum(lengths),) or self.scales.shape != (len(lengths),):
            raise MessageError(
                f"{self.signs.shape} signs and {self.scales.shape} scales; {self.length} rotated "
                f"coordinates need {sum(lengths)} and {len(lengths)}"
            )
        if self.signs.dtype != np.uint8 or self.scales.dtype != np.float32:
            raise MessageError(
                f"signs are {self.signs.dtype} and scales {self.scales.dtype}, "
                "not uint8 and float32"
            )
        if not 0 <= self.seed < 1 << 32:
            raise MessageError(f"seed {self.seed} of a rotation is outside 0..2^32 - 1")

    def __len__(self) -> int:
        return self.length

    def validate(self) -> None:
        """Raise `MessageError` if a sign is no bit, or a scale is negative or not finite."""
        if len(self.signs) and int(self.signs.max()) >> self.width:
            if self.width == 1:
                raise MessageError(f"sign {int(self.signs.max())} is neither 0 nor 1")
            raise MessageError(f"code {int(self.signs.max())} does not have {self.width} bits")
        if not (np.isfinite(self.scales) & ~np.signbit(self.scales)).all():
            raise MessageError("a scale of a rotated upload is negative, NaN or infinite")

    def values(self, dtype: type[np.floating]) -> FloatArray:
        """Return ``S · R⁻¹ signs``: integers from the signs, times one number per block."""
        lengths = block_lengths(self.length)
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
        values: FloatArray = (integers * factors)[: self.length].astype(dtype)
        return values
