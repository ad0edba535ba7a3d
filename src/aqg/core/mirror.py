"""The vector ``ref_m`` that client ``m`` and the server both hold, and how an upload moves it.

Both sides call `advance` with the same upload and end with the same bits: quantized values are
exact products, and one addition per coordinate rounds the same way everywhere.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np

from aqg.core.grids import value_table
from aqg.core.kernels import add_levels
from aqg.core.messages import AnyUpload, Upload

if TYPE_CHECKING:
    from aqg.core.types import FloatArray


class Memory(enum.Enum):
    """What is quantized, and what the server remembers of it."""

    INNOVATION = "innovation"
    """``Δ = g - ref_m`` is sent and added to ``ref_m``; silence repeats ``ref_m``."""
    LATEST = "latest"
    """``g`` is sent and replaces ``ref_m``; silence repeats ``ref_m``."""
    NONE = "none"
    """``g`` is sent and used once; silence contributes nothing."""
    FEEDBACK = "feedback"
    """``g`` plus the residual of earlier rounds is sent and used once (error feedback)."""

    @property
    def keeps_mirror(self) -> bool:
        """Whether the server holds a ``ref_m``."""
        return self in (Memory.INNOVATION, Memory.LATEST)


def empty_mirror(memory: Memory, num_params: int, dtype: np.dtype[np.floating]) -> FloatArray:
    """Return the ``ref_m`` both sides start from: zeros, or nothing where none is kept."""
    return np.zeros(num_params if memory.keeps_mirror else 0, dtype)


def advance(memory: Memory, mirror: FloatArray, upload: AnyUpload) -> FloatArray:
    """Return ``ref_m`` after ``upload``.

    >>> from aqg.core.grids import Grid
    >>> upload = Upload(np.array([2, 1, 0], np.uint8), step=0.5, width=2, grid=Grid.MIDTREAD)
    >>> advance(Memory.INNOVATION, np.array([1.0, 1.0, 1.0]), upload)
    array([1.5, 1. , 0.5])
    """
    if not memory.keeps_mirror:
        return mirror
    dtype = mirror.dtype.type
    if memory is Memory.LATEST:
        return upload.values(dtype)
    if not isinstance(upload, Upload):
        total: FloatArray = mirror + upload.values(dtype)
        return total
    return add_levels(
        mirror, upload.levels, value_table(upload.grid, upload.width, upload.step, dtype)
    )
