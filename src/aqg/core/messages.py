"""What a client and a server say to each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aqg.core.blockwise import BlockUpload as BlockUpload
from aqg.core.grids import MAX_WIDTH, Grid, is_valid_step, level_dtype, num_levels, value_table
from aqg.core.halves import HalfUpload as HalfUpload
from aqg.core.halves import SparseUpload as SparseUpload
from aqg.core.rotation import RotatedUpload as RotatedUpload
from aqg.core.types import ByValue, FloatArray, Levels
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

    @property
    def width(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, eq=False)
class Upload(ByValue):
    """A vector quantized on a grid, one level per coordinate.

    >>> import numpy as np
    >>> upload = Upload(np.array([0, 1, 2], np.uint8), step=0.5, width=2, grid=Grid.MIDTREAD)
    >>> upload.values(np.float32)
    array([-0.5,  0. ,  0.5], dtype=float32)
    """

    levels: Levels
    step: float
    width: int
    grid: Grid

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MAX_WIDTH:
            raise MessageError(f"width {self.width} is outside 1..{MAX_WIDTH}")
        if not is_valid_step(self.step):
            raise MessageError(f"step {self.step!r} is not a bfloat16 number in range")
        if self.levels.ndim != 1 or self.levels.dtype != level_dtype(self.width):
            raise MessageError(
                f"levels are {self.levels.ndim}-d {self.levels.dtype}; "
                f"width {self.width} needs 1-d {level_dtype(self.width).__name__}"
            )

    def __len__(self) -> int:
        return len(self.levels)

    def validate(self) -> None:
        """Raise `MessageError` if a level is not on the grid."""
        bound = num_levels(self.grid, self.width)
        if len(self.levels) and int(self.levels.max()) >= bound:
            raise MessageError(
                f"level {int(self.levels.max())} is not below {bound}, the number of levels of "
                f"{self.grid} at width {self.width}"
            )

    def values(self, dtype: type[np.floating]) -> FloatArray:
        """Return the vector the levels stand for; exact in float32 and float64 alike."""
        table = value_table(self.grid, self.width, self.step, dtype)
        values: FloatArray = table[self.levels]
        return values


@dataclass(frozen=True, slots=True, eq=False)
class DenseUpload(ByValue):
    """A vector sent as it is, in float32."""

    dense: NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.dense.ndim != 1 or self.dense.dtype != np.float32:
            raise MessageError(
                f"values are {self.dense.ndim}-d {self.dense.dtype}, not 1-d float32"
            )

    @property
    def width(self) -> int:
        return 32

    def __len__(self) -> int:
        return len(self.dense)

    def validate(self) -> None:
        if not np.isfinite(self.dense).all():
            raise MessageError("a dense upload holds NaN or infinity")

    def values(self, dtype: type[np.floating]) -> FloatArray:
        return self.dense.astype(dtype)


AnyUpload = Upload | DenseUpload | HalfUpload | SparseUpload | BlockUpload | RotatedUpload
"""Everything that stands for a vector."""
Message = AnyUpload | Skip


def is_message(value: object) -> bool:
    """Tell whether this is something that a client can send."""
    return isinstance(value, Message)


def num_nonzero(upload: AnyUpload) -> int:
    """Return how many coordinates of an upload are not zero.

    >>> num_nonzero(Upload(np.array([0, 1, 2], np.uint8), 0.5, width=2, grid=Grid.MIDTREAD))
    2
    """
    if isinstance(upload, Upload) and upload.grid is Grid.MIDTREAD and upload.width > 1:
        middle = num_levels(upload.grid, upload.width) // 2
        return int(np.count_nonzero(upload.levels != middle)) if upload.step else 0
    return int(np.count_nonzero(upload.values(np.float32)))


def energy_of(upload: AnyUpload) -> float:
    """Return ``‖v‖²`` of the vector that an upload stands for.

    >>> energy_of(Upload(np.array([0, 1, 2], np.uint8), 0.5, width=2, grid=Grid.MIDTREAD))
    0.5
    """
    if isinstance(upload, Upload):
        values = value_table(upload.grid, upload.width, upload.step, np.float64)
        counts = np.zeros(len(values), np.int64)
        for start in range(0, len(upload), _PIECE):  # what is counted is first made wider
            piece = upload.levels[start : start + _PIECE]
            counts += np.bincount(piece, minlength=len(values))[: len(values)]
        return float(counts @ np.square(values))
    values = upload.values(np.float64)
    return float(np.vdot(values, values))
