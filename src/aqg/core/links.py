"""What both ends of a connection hold of each other, and how an upload moves it.

A `Link` has a row per client; one client is an axis of length one. Client and server call `advance`
with the same upload and end with the same bits: quantized values are exact products, and one
addition per coordinate rounds the same way everywhere. The coder reads both fields to write less.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aqg.core.grids import num_levels, value_table
from aqg.core.kernels import add_levels
from aqg.core.messages import AnyUpload, Upload
from aqg.jit import HAVE_NUMBA, njit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from aqg.core.types import BoolArray, FloatArray

MAX_DIRECTION = 3


class Memory(enum.Enum):
    """What an upload stands for, and what both ends remember of it."""

    INNOVATION = "innovation"
    """``Δ = g - ref_m`` is sent and added to ``ref_m``; silence repeats ``ref_m``."""
    LATEST = "latest"
    """``g`` is sent and replaces ``ref_m``; silence repeats ``ref_m``."""
    NONE = "none"
    """What is sent counts in its round alone; silence contributes nothing."""

    @property
    def keeps_mirror(self) -> bool:
        """Whether both ends hold a ``ref_m``."""
        return self is not Memory.NONE


class Link(NamedTuple):
    """Both ends' view of ``M`` clients.

    Attributes:
        mirror: ``ref_m``, the last gradient the server knows, ``(M, n)``; ``(M, 0)`` where the
            recipe keeps none. On the device where vectors live.
        direction: which way each coordinate went in the last upload, ``(M, n)`` or ``(M, 0)``.
        is_held: whether the mirror may differ from zero, ``(M,)``.

    """

    mirror: Any
    direction: NDArray[np.int8]
    is_held: BoolArray

    def row(self, client: int) -> Link:
        """Return the link of one client, as an axis of length one."""
        rows = slice(client, client + 1)
        return Link(self.mirror[rows], self.direction[rows], self.is_held[rows])


def init_link(memory: Memory, num_params: int, dtype: np.dtype[Any], num_clients: int = 1) -> Link:
    """Return the link before the first message: every ``ref_m`` is zero."""
    length = num_params if memory.keeps_mirror else 0
    return Link(
        np.zeros((num_clients, length), dtype),
        np.zeros((num_clients, length), np.int8),
        np.zeros(num_clients, np.bool_),
    )


def advance(memory: Memory, mirror: FloatArray, upload: AnyUpload) -> FloatArray:
    """Return one ``ref_m``, of shape ``(n,)``, after ``upload``.

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


def advance_one(memory: Memory, link: Link, upload: AnyUpload) -> Link:
    """Return the link of one client after its upload; the old one is left as it was."""
    if not memory.keeps_mirror:
        return link
    mirror = advance(memory, link.mirror[0], upload)
    direction = next_direction(link.direction[0], upload)
    return Link(mirror[None], direction[None], np.ones(1, np.bool_))


def move_directions(
    directions: NDArray[np.int8], clients: Sequence[int], uploads: Sequence[AnyUpload]
) -> None:
    """Bring the directions of many clients up to date, in place."""
    for client, upload in zip(clients, uploads, strict=True):
        directions[client] = next_direction(directions[client], upload)


def next_direction(direction: NDArray[np.int8], upload: AnyUpload) -> NDArray[np.int8]:
    """Return the direction after ``upload``: that of the last quantized one."""
    if not isinstance(upload, Upload) or not len(direction):
        return direction
    return direction_of(upload.levels, num_levels(upload.grid, upload.width))


def direction_of(levels: NDArray[np.unsignedinteger], num_symbols: int) -> NDArray[np.int8]:
    """Return where an upload went, ``v = 2q - (num_symbols - 1)`` cut to ``-3..3``.

    >>> direction_of(np.array([0, 6, 7, 8], np.uint8), num_symbols=15)
    array([-3, -2,  0,  2], dtype=int8)
    """
    if HAVE_NUMBA:
        direction = np.empty(len(levels), np.int8)
        _write_direction(levels, num_symbols, direction)
        return direction
    v = 2 * levels.astype(np.int32) - (num_symbols - 1)
    return v.clip(-MAX_DIRECTION, MAX_DIRECTION).astype(np.int8)


@njit()
def _write_direction(levels: Any, num_symbols: Any, direction: Any) -> None:
    for i in range(len(levels)):
        v = 2 * np.int32(levels[i]) - np.int32(num_symbols - 1)
        direction[i] = min(max(v, -MAX_DIRECTION), MAX_DIRECTION)
