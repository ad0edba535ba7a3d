"""What of the difference between the model and its public copy is sent.

A change of few coordinates, as sparse replies make it, is answered in kind: the largest coordinates
of the difference as sparse ternary. Any other change is quantized with the fewest bits that bring
the copy within a tolerance of the model. What is left out stays in the difference.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqg.core.links import Link
from aqg.core.round import Clients, News, speak
from aqg.core.selection import largest
from aqg.core.space import NumpySpace
from aqg.core.sparsifiers import TERNARY_WIDTH, ternary

if TYPE_CHECKING:
    from aqg.core.downlink import Condensed
    from aqg.core.messages import AnyUpload
    from aqg.core.types import FloatArray

_SPACE = NumpySpace()
_FIRST = np.arange(1)
_NO_LOSS = np.full(1, math.nan)
_FEWEST = 32
_SPARSE = 8
"""A change of less than one coordinate in so many is sparse."""
_STEPS = 10
"""How many past steps the tolerance looks at."""


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


def condense(
    model: FloatArray,
    copy: FloatArray,
    num_changed: int,
    steps: Steps,
    senders: int,
    version: int,
    downlink: Condensed,
) -> AnyUpload | None:
    """Return what is to be added to the public copy; None for nothing.

    Args:
        model: the strategy's model, flat.
        copy: the public copy.
        num_changed: how many coordinates of the model changed in its last step.
        steps: how far it moved.
        senders: how many clients had a part in that.
        version: of the copy.
        downlink: the settings.

    """
    if not np.isfinite(model).all():  # it diverged; clients stay where they are
        return None
    if num_changed * _SPARSE <= len(model):
        gap = model - copy
        count = max(_FEWEST, round(downlink.ratio * num_changed / max(1, senders)))
        kept = largest(gap, min(count, len(gap)))
        return ternary(gap, kept, TERNARY_WIDTH) if len(kept) else None
    link = Link(copy[None], np.zeros((1, 0), np.int8), np.ones(1, np.bool_))
    holder = Clients(len(copy), link, np.zeros(1, np.int64), {})
    news = News(version, downlink.tolerance * steps.mean, _NO_LOSS)
    spoken = speak(_SPACE, downlink.lasting, holder, _FIRST, model.copy()[None], news)
    return spoken.uploads[0] if spoken.uploads else None
