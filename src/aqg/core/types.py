"""Names for the arrays that travel through the package."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]
"""A vector or stack of vectors, float32 or float64; outputs keep the dtype of inputs."""
Float64Array = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Levels = NDArray[np.unsignedinteger[Any]]
"""Quantization levels: uint8 up to 8 bits, uint16 above."""


def is_whole(value: object) -> bool:
    """Tell whether this is a whole number; True and False are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
