"""Who of many clients speaks in a round, once each has decided for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.jit import njit

if TYPE_CHECKING:
    from aqg.core.types import BoolArray, IntArray


def who_speaks(
    wanting: BoolArray, in_range: BoolArray, silent_rounds: IntArray, max_staleness: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the places of those who send, who stay silent, and whose vectors are out of range.

    A client sends if it wants to, or if it was silent for ``max_staleness`` rounds in a row, which
    ``silent_rounds`` counts; it is brought up to date. All arrays are ``(M,)``.

    >>> silent_rounds = np.array([0, 7, 2, 3])
    >>> wanting, in_range = np.array([1, 0, 0, 1], bool), np.array([1, 1, 1, 0], bool)
    >>> who_speaks(wanting, in_range, silent_rounds, max_staleness=7)
    (array([0, 1]), array([2]), array([3]))
    >>> silent_rounds
    array([0, 0, 3, 3])
    """
    places = np.empty((3, len(wanting)), np.int64)
    num_sending, num_silent, num_faulty = _sort(
        wanting, in_range, silent_rounds, max_staleness, places
    )
    return places[0, :num_sending], places[1, :num_silent], places[2, :num_faulty]


@njit()
def _sort(
    wanting: Any, in_range: Any, silent_rounds: Any, max_staleness: Any, places: Any
) -> tuple[int, int, int]:
    num_sending, num_silent, num_faulty = 0, 0, 0
    for m in range(len(wanting)):
        if not in_range[m]:
            places[2, num_faulty] = m
            num_faulty += 1
        elif wanting[m] or silent_rounds[m] >= max_staleness:
            places[0, num_sending] = m
            num_sending += 1
            silent_rounds[m] = 0
        else:
            places[1, num_silent] = m
            num_silent += 1
            silent_rounds[m] += 1
    return num_sending, num_silent, num_faulty
