"""What of the difference between the model and its public copy is sent.

A change of few coordinates, as sparse replies make it, is answered in kind: the largest coordinates
of the difference as sparse ternary, while that leaves the copy within `FARTHEST` steps of the model.
Clients whose copy falls back farther go on correcting what the model has long had, and it swings.
Any other change is quantized with the fewest bits that bring the copy within a tolerance of the
model. What is left out stays in the difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqg.core.selection import largest
from aqg.core.space import NumpySpace
from aqg.core.sparsifiers import TERNARY_WIDTH, ternary
from aqg.core.track import Terms, correct
from aqg.flower.dropin.tensors import PIECE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.core.downlink import Condensed
    from aqg.core.messages import AnyUpload
    from aqg.core.types import FloatArray
    from aqg.flower.dropin.tensors import Spec, Values

_SPACE = NumpySpace(in_place=True)
_FIRST = np.arange(1)
_STEPS = 10
"""How many past steps the tolerance looks at."""


FARTHEST = 1.0
"""How far a sparse entry may leave the copy from the model, squared, in squared steps of it."""


_ROUNDING = 64.0
"""Averages of equal numbers are off by less than this many units in the last place."""


class Steps(NamedTuple):
    """How far the model moved lately: ``‖θ^{k+1} - θ^k‖²``, newest first."""

    squares: tuple[float, ...] = ()

    def after(self, square: float) -> Steps:
        """Return the steps with a new one."""
        return Steps((square, *self.squares)[:_STEPS])

    @property
    def mean(self) -> float:
        """The mean of those known."""
        return sum(self.squares) / len(self.squares) if self.squares else 0.0


def squared_norm(vector: FloatArray) -> float:
    """Return ``‖v‖²``, summed in double precision, without a second vector."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(vector), PIECE):
            piece = vector[start : start + PIECE].astype(np.float64)
            total += float(np.vdot(piece, piece))
    return total


def measure_change(
    values: Values, before: Values, specs: Sequence[Spec], dtype: str
) -> tuple[float, int]:
    """Return ``‖θ - θ'‖²``, and how many values changed by more than rounding in ``dtype`` does."""
    square, count, bound = 0.0, 0, _ROUNDING * float(np.finfo(dtype).eps)
    with np.errstate(over="ignore", invalid="ignore"):
        for spec in specs:
            new, old = values[spec.name].reshape(-1), before[spec.name].reshape(-1)
            for start in range(0, len(new), PIECE):
                was = old[start : start + PIECE].astype(np.float64)
                change = new[start : start + PIECE] - was
                square += float(np.vdot(change, change))
                np.abs(was, out=was)
                was *= bound
                count += int(np.count_nonzero(np.abs(change) > was))
    return square, count


def condense(
    model: FloatArray,
    copy: FloatArray,
    count: int | None,
    steps: Steps,
    version: int,
    downlink: Condensed,
) -> AnyUpload | None:
    """Return what is to be added to the public copy; None for nothing.

    Args:
        model: the strategy's model, flat; it is written to.
        copy: the public copy.
        count: how many coordinates a sparse entry has; None: it is not to be sparse.
        steps: how far the model moved.
        version: of the copy.
        downlink: the settings.

    """
    if not np.isfinite(model).all():  # it diverged; clients stay where they are
        return None
    if count is not None:
        gap = model - copy
        kept = largest(gap, min(count, len(gap)))
        if not len(kept):
            return None
        sparse = ternary(gap, kept, TERNARY_WIDTH)
        gap -= sparse.values(gap.dtype.type)
        if squared_norm(gap) <= FARTHEST * steps.mean:
            return sparse
        del gap
    terms = Terms(downlink.tolerance * steps.mean, np.zeros(1, np.int64), (0, 0, version))
    uploads, _ = correct(_SPACE, downlink.of_velocity, copy[None], _FIRST, model[None], terms)
    return uploads[0] if uploads else None
