"""Names for the arrays that travel through the package."""

import math
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]
"""A vector or stack of vectors, float32 or float64; outputs keep the dtype of inputs."""
Float64Array = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
ByteArray = NDArray[np.uint8]
Int8Array = NDArray[np.int8]
Levels = NDArray[np.unsignedinteger[Any]]
"""Quantization levels: uint8 up to 8 bits, uint16 above."""


def is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:  # a finite one
    return isinstance(value, int | float | np.floating | np.integer) and math.isfinite(value)


class ByValue:
    """Equality of dataclasses that hold arrays: of one type, with all fields the same to the bit.

    What went in must come out, signed zeros and NaN payloads included.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._content() == other._content()

    __hash__ = None  # type: ignore[assignment]  # arrays do not hash

    def _content(self) -> list[Any]:
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        arrays = np.ndarray
        return [(v.dtype, v.shape, v.tobytes()) if isinstance(v, arrays) else v for v in values]


def to_numpy(value: Any) -> NDArray[Any]:
    """Return an array, or a torch tensor; half precision of torch is float32, which holds it."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if value.is_floating_point() and value.dtype.itemsize < 4:
            value = value.float()
        value = value.numpy()
    return np.asarray(value)
