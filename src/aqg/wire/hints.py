"""What both ends know of an upload before it is sent, as contexts for the coder.

Where the gradient is small, the innovation is ``Δ ≈ -ref_m``: the memory that both ends hold tells
which way a coordinate will go. And a coordinate often repeats, or takes back, what it did last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.core.track import MAX_DIRECTION
from aqg.errors import WireError
from aqg.jit import HAVE_NUMBA, njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_DIRECTIONS = 2 * MAX_DIRECTION + 1
REFERENCE_EDGES = np.array([1, 3, 5, 7, 11, 17, 25, 39]) / 16
"""In steps: where one class of ``|ref_m|`` ends and the next begins."""


def make_hints(
    reference: NDArray[np.floating], step: float, direction: NDArray[np.int8] | None = None
) -> NDArray[np.int8]:
    """Return a class per coordinate: 17 of ``-ref_m/step``, times 7 of the last direction.

    Args:
        reference: ``ref_m`` before the upload, the same bits at both ends.
        step: the step of the upload's grid, which the frame carries.
        direction: `aqg.core.track.direction_of` the client's last upload; None if it is not kept.

    >>> make_hints(np.array([0.0, -1.0, 0.01]), step=0.5, direction=np.array([2, 0, -2], np.int8))
    array([ 2, 49, -2], dtype=int8)

    """
    if direction is not None and len(direction) != len(reference):
        raise WireError(f"{len(direction)} directions do not fit {len(reference)} coordinates")
    hints = np.zeros(len(reference), np.int8) if direction is None else direction.copy()
    if step > 0:
        if HAVE_NUMBA:
            _add_classes(reference, float(step), hints)
        else:
            hints += _classes_numpy(reference, step)
    return hints


@njit(error_model="numpy")
def _add_classes(reference: Any, step: Any, hints: Any) -> None:
    """Add 7 times the class of ``-ref_m/step``."""
    for i in range(len(reference)):
        # One correctly rounded division: the same class on every machine.
        distance = abs(np.float64(reference[i])) / step
        place = 0
        for edge in REFERENCE_EDGES:
            # NaN belongs to the last class, as it does for a sorted search.
            place += 0 if distance < edge else 1
        hints[i] += NUM_DIRECTIONS * (-place if reference[i] > 0 else place)


def _classes_numpy(reference: NDArray[np.floating], step: float) -> NDArray[np.int8]:
    distance = np.abs(reference.astype(np.float64)) / step
    classes = np.searchsorted(REFERENCE_EDGES, distance, side="right").astype(np.int8)
    hints: NDArray[np.int8] = np.where(reference > 0, -classes, classes) * np.int8(NUM_DIRECTIONS)
    return hints
