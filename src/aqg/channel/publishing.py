"""What of the difference between the model and its public copy is sent.

A change of few coordinates, as sparse replies make it, is answered in kind: the largest
coordinates of the difference as sparse ternary, while that leaves the copy within `FARTHEST` steps
of the model. Clients whose copy falls back farther go on correcting what the model has long had,
and it swings. Any other change is quantized with the fewest bits that bring the copy within a
tolerance of the model. What is left out stays in the difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aqg.channel.tensors import PIECE, Values, pieces, squared_norm
from aqg.core.downlink import Condensed
from aqg.core.grids import value_table
from aqg.core.messages import AnyUpload, Upload
from aqg.core.public import Entry, Public
from aqg.core.quantizers import TERNARY_WIDTH, largest, ternary
from aqg.core.round import describe_fault
from aqg.core.server import on_grid
from aqg.core.space import NumpySpace
from aqg.core.track import Flow, correct
from aqg.core.types import FloatArray, IntArray
from aqg.objectives.layout import TensorSpec

_SPACE = NumpySpace(in_place=True)
FARTHEST = 1.0
"""How far a sparse entry may leave the copy from the model, squared, in squared steps of it."""
_ROUNDING = 64.0
"""Averages of equal numbers are off by less than this many units in the last place."""
_GRID_SHARE = 0.25
"""Part of the tolerance that is left to a choice of levels whose step is then rounded up to a power
of two, at most to twice itself: the error, squared, to four times itself."""

_FINEST = 2.0**-8
"""In the step of an entry, the longest quantum of a grid that is begun. Where one coordinate is
much larger than all others, its grid is too coarse for them, and the copy stays on none."""


def entry_of(public: Public, upload: AnyUpload | None, gap: FloatArray) -> Entry:
    """Return the entry that adds an upload of a gap to the public model, on its grid if it can."""
    entry = Entry(public.round, position=upload, is_rounded=True)
    if not isinstance(upload, Upload):
        return entry
    moved = on_grid(_SPACE, public.parameters, public.quantum, upload, gap)
    if moved is None:
        return entry._replace(position=None)
    snapped, quantum = moved
    if not public.quantum and quantum > _FINEST * upload.step:
        return entry
    return entry._replace(position=snapped, quantum=None if quantum == public.quantum else quantum)


def measure_change(
    values: Values, before: Values, specs: Sequence[TensorSpec], dtype: str
) -> tuple[float, int]:
    """Return ``‖θ - θ'‖²``, and how many values changed by more than rounding in ``dtype`` does."""
    square, count, bound = 0.0, 0, _ROUNDING * float(np.finfo(dtype).eps)
    with np.errstate(over="ignore", invalid="ignore"):
        for spec in specs:
            new, old = values[spec.name].reshape(-1), before[spec.name].reshape(-1)
            for piece in pieces(len(new)):
                was = old[piece].astype(np.float64)
                change = new[piece] - was
                square += float(np.vdot(change, change))
                np.abs(was, out=was)
                was *= bound
                count += int(np.count_nonzero(np.abs(change) > was))
    return square, count


def condense(
    gap: FloatArray, count: int | None, movement: float, version: int, downlink: Condensed
) -> tuple[AnyUpload | None, str]:
    """Return what is to be added to the public copy, None for nothing; and what is wrong, if any.

    The ``gap``, the strategy's model less the public copy, is left as it was; ``count`` is that of
    a sparse entry's coordinates, None for one that is not, and ``movement`` the mean
    ``‖θ^{k+1} - θ^k‖²`` of the last steps.
    """
    if count is not None:
        kept = largest_of(gap, min(count, len(gap)))
        if not len(kept):
            return None, ""
        sparse = ternary(gap, kept, TERNARY_WIDTH)
        whole = gap[kept]
        value = value_table(sparse.grid, sparse.width, sparse.step, gap.dtype.type)
        gap[kept] -= value[sparse.levels[kept]]
        is_near = squared_norm(gap) <= FARTHEST * movement
        gap[kept] = whole
        if is_near:
            return sparse, ""
        del sparse
    tolerance = _GRID_SHARE * downlink.tolerance * movement
    found = correct(downlink.of_velocity, Flow(gap[None], tolerance, _SPACE, version))
    fault = describe_fault(gap) if len(found.faulty) else ""
    return (found.uploads[0] if found.uploads else None), fault


def largest_of(vector: FloatArray, count: int) -> IntArray:
    """Return what `aqg.core.quantizers.largest` does, in little memory: piece by piece.

    >>> largest_of(np.array([0.5, -2.0, 0.5, 1.0, 0.0], np.float32), 3)
    array([0, 1, 3])
    """
    found = np.arange(0)
    for piece in pieces(len(vector), max(PIECE, 3 * count)):
        found = np.concatenate([found, piece.start + largest(vector[piece], count)])
        found = found[largest(vector[found], count)]
    return found
