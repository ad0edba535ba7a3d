"""One bit per coordinate after a random rotation.

Vargaftik et al., DRIVE: One-bit Distributed Mean Estimation, and EDEN: Communication-Efficient and
Robust Distributed Mean Estimation for Federated Learning. With ``R = H·D/√d``, ``H`` the Hadamard
matrix and ``D`` random signs, the coordinates of ``Rx`` are nearly normal whatever ``x`` is, and
their signs say much about it:

    ``x̂ = S · R⁻¹ sign(Rx)``,  ``S = ‖x‖₂²/‖Rx‖₁`` (unbiased)  or  ``‖Rx‖₁/d`` (least error).

A Hadamard matrix has a power of two rows. A vector is cut into blocks of such lengths, each with a
scale of its own: the largest that fits, then the largest that fits the rest, and so on; the last
coordinates, fewer than 64, are filled up with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aqg.errors import MessageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aqg.core.types import Float64Array, FloatArray

LEAST_BLOCK = 64
_GOLDEN = 0x9E3779B97F4A7C15


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


def hadamard(vector: NDArray[np.int32] | Float64Array) -> None:
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
    vector: FloatArray, seed: int, unbiased: bool
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return the signs of the rotated vector as bits, and the scale ``S`` of every block."""
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
        norm_1 = float(np.abs(block).sum()) / length**0.5
        if norm_1 > 0:
            scales[index] = squared_norm / norm_1 if unbiased else norm_1 / length
        start += length
    return (rotated >= 0).astype(np.uint8), scales.astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class RotatedUpload:
    """The signs of a rotated vector.

    Attributes:
        signs: 0 or 1 for every coordinate of all blocks.
        scales: ``S`` of every block.
        seed: of the rotation, below ``2^32``.
        length: how many coordinates the vector has.

    """

    signs: NDArray[np.uint8]
    scales: NDArray[np.float32]
    seed: int
    length: int

    def __post_init__(self) -> None:
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

    @property
    def width(self) -> int:
        """Bits per parameter."""
        return 1

    def __len__(self) -> int:
        return self.length

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RotatedUpload)
            and (self.seed, self.length) == (other.seed, other.length)
            and np.array_equal(self.signs, other.signs)
            and self.scales.tobytes() == other.scales.tobytes()
        )

    __hash__ = None  # type: ignore[assignment]  # arrays do not hash

    def validate(self) -> None:
        """Raise `MessageError` if a sign is no bit, or a scale is negative or not finite."""
        if len(self.signs) and int(self.signs.max()) > 1:
            raise MessageError(f"sign {int(self.signs.max())} is neither 0 nor 1")
        if not (np.isfinite(self.scales) & ~np.signbit(self.scales)).all():
            raise MessageError("a scale of a rotated upload is negative, NaN or infinite")

    def values(self, dtype: type[np.floating]) -> FloatArray:
        """Return ``S · R⁻¹ signs``: integers from the signs, times one number per block."""
        lengths = block_lengths(self.length)
        integers = 2 * self.signs.astype(np.int32) - np.int32(1)
        factors = np.empty(len(integers))
        start = 0
        for scale, length in zip(self.scales.tolist(), lengths, strict=True):
            hadamard(integers[start : start + length])
            factors[start : start + length] = scale / length**0.5
            start += length
        integers *= random_signs(self.seed, len(integers))
        values: FloatArray = (integers * factors)[: self.length].astype(dtype)
        return values
