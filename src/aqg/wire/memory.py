"""What the two ends of a link remember of each other's messages, so that frames can say less."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aqg.core.grids import num_levels
from aqg.core.messages import Message, Upload
from aqg.wire.frame import Known
from aqg.wire.hints import direction_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aqg.core.types import FloatArray


def initial_direction(mirror: FloatArray) -> NDArray[np.int8]:
    """Return the direction before the first upload: zeros, one per coordinate of the mirror."""
    return np.zeros(mirror.shape, np.int8)


def known(mirror: FloatArray, direction: NDArray[np.int8]) -> Known | None:
    """Return what both ends hold before a message; None where the recipe keeps no mirror."""
    return Known(mirror, direction) if len(mirror) else None


def next_direction(direction: NDArray[np.int8], message: Message) -> NDArray[np.int8]:
    """Return the direction after ``message``: that of the last quantized upload."""
    if not isinstance(message, Upload) or not message.lasting or not len(direction):
        return direction
    return direction_of(message.levels, num_levels(message.grid, message.width))
