"""Vectors in half precision: all of their coordinates, or a chosen few.

A half has 11 significant bits but a narrow range, so a vector travels as halves times one power of
two, ``v_i ≈ half_i · 2^e``, chosen so that its largest coordinate lies in [1, 2]. The products are
exact in float32: mirrors that add them stay equal to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aqg.core.types import ByValue, FloatArray
from aqg.errors import MessageError

MAX_EXPONENT = 100
"""Exponents go from minus this to this: products stay normal float32 numbers."""


def to_halves(vector: FloatArray) -> tuple[NDArray[np.float16], int]:
    """Return ``halves, e`` with ``halves · 2^e`` as close to ``vector`` as 11 bits can be.

    Coordinates below ``2^-25`` of the largest become zero.

    >>> to_halves(np.array([3.0, -0.1]))
    (array([ 1.5 , -0.05], dtype=float16), 1)
    """
    radius = float(np.abs(vector).max(initial=0.0))
    exponent = math.frexp(radius)[1] - 1 if radius else 0
    exponent = min(max(exponent, -MAX_EXPONENT), MAX_EXPONENT)
    # A power of two only shifts the exponent: the one rounding is that to a half.
    return (vector.astype(np.float64) * math.ldexp(1.0, -exponent)).astype(np.float16), exponent


def check_halves(halves: NDArray[np.float16], exponent: int) -> None:
    """Raise `MessageError` if these are not what `to_halves` returns."""
    if halves.ndim != 1 or halves.dtype != np.float16:
        raise MessageError(f"values are {halves.ndim}-d {halves.dtype}, not 1-d float16")
    if not -MAX_EXPONENT <= exponent <= MAX_EXPONENT:
        raise MessageError(f"exponent {exponent} is outside -{MAX_EXPONENT}..{MAX_EXPONENT}")


def from_halves(halves: NDArray[np.float16], exponent: int, dtype: type[np.floating]) -> FloatArray:
    """Return ``halves · 2^e``, exact in float32 and float64."""
    values: FloatArray = halves.astype(dtype) * dtype(math.ldexp(1.0, exponent))
    return values


@dataclass(frozen=True, slots=True, eq=False)
class HalfUpload(ByValue):
    """A vector with every coordinate in half precision."""

    halves: NDArray[np.float16]
    exponent: int

    def __post_init__(self) -> None:
        check_halves(self.halves, self.exponent)

    @property
    def width(self) -> int:
        return 16

    def __len__(self) -> int:
        return len(self.halves)

    def validate(self) -> None:
        if not np.isfinite(self.halves).all():
            raise MessageError("an upload of halves holds NaN or infinity")

    def values(self, dtype: type[np.floating]) -> FloatArray:
        return from_halves(self.halves, self.exponent, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class SparseUpload(ByValue):
    """A vector that is zero but for a few coordinates, which are halves.

    Attributes:
        indices: where they are, increasing.
        halves: their values over ``2^exponent``; none is zero.
        exponent: ``e``.
        length: how many coordinates the vector has.

    >>> SparseUpload(np.array([1, 4]), np.array([1.5, -1], np.float16), 1, 6).values(np.float32)
    array([ 0.,  3.,  0.,  0., -2.,  0.], dtype=float32)
    """

    indices: NDArray[np.int64]
    halves: NDArray[np.float16]
    exponent: int
    length: int

    def __post_init__(self) -> None:
        check_halves(self.halves, self.exponent)
        if self.indices.shape != self.halves.shape or self.indices.dtype != np.int64:
            raise MessageError(
                f"indices are {self.indices.dtype} of shape {self.indices.shape}; "
                f"{len(self.halves)} values need as many int64"
            )

    @property
    def width(self) -> int:
        return 16

    def __len__(self) -> int:
        return self.length

    def validate(self) -> None:
        """Raise `MessageError` if indices do not increase, or a value is zero or not finite."""
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
