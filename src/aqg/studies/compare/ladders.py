"""A search along one axis after the other that goes on where it ends at an edge.

Every axis is a `Ladder`: all values that may be tried, and those that are tried in any case. The
search goes along each ladder in turn, the others staying at the best value so far. While the best
is the outermost value tried, the next one on the ladder is tried as well. At last it goes along the
first ladder again, beside the best value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from aqg.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Point: TypeAlias = tuple[float, ...]
"""A value on each ladder."""


@dataclass(frozen=True)
class Ladder:
    """One axis of a search.

    Attributes:
        name: of the parameter.
        values: that may be tried, increasing.
        first: those that are tried in any case, the likely ones first. One that is not among the
            values is tried but has no neighbors, such as a step that sets itself.

    """

    name: str
    values: tuple[float, ...]
    first: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.first or list(self.values) != sorted(set(self.values)):
            raise ConfigError(
                f"parameter {self.name} has values {self.values} and first {self.first}; values "
                "must increase, and one must be first"
            )

    def beside(self, value: float) -> list[float]:
        """Return the next smaller and the next larger value, as far as there are any."""
        if value not in self.values:
            return []
        place = self.values.index(value)
        return [*self.values[max(0, place - 1) : place], *self.values[place + 1 : place + 2]]

    def beyond(self, tried: Sequence[float], best: float) -> float | None:
        """Return what to try next where the best value is the outermost tried; else None.

        >>> steps = Ladder("step", (0.5, 1, 2, 4, 8), (1, 2, 4))
        >>> steps.beyond([1, 2, 4], best=4), steps.beyond([1, 2, 4], best=2)
        (8, None)
        """
        others = [value for value in self.beside(best) if value not in tried]
        known = [value for value in tried if value in self.values]
        return next(
            (v for v in others if not any(_between(best, v, other) for other in known)), None
        )


def _between(best: float, value: float, other: float) -> bool:
    """Tell whether ``other`` lies on the same side of ``best`` as ``value``."""
    return (value < best) == (other < best) and other != best


def next_points(ladders: Sequence[Ladder], rank: Callable[[Point], Any | None]) -> list[Point]:
    """Return what the search needs next; nothing when it is over.

    Args:
        ladders: in the order in which they are searched.
        rank: of a point that was tried, to be compared, the best being the smallest; None for one
            that was not.

    >>> ladders = [Ladder("step", (1, 2, 4, 8, 16), (1, 2)), Ladder("keep", (0.1, 1), (1, 0.1))]
    >>> tried = {}
    >>> while needed := next_points(ladders, tried.get):
    ...     tried |= {point: abs(point[0] - 8) + point[1] for point in needed}
    >>> min(tried, key=tried.get), len(tried)
    ((8, 0.1), 8)

    """
    best = [ladder.first[0] for ladder in ladders]
    axes = list(range(len(ladders)))
    for turn, axis in enumerate([*axes, 0] if len(axes) > 1 else axes):
        ladder = ladders[axis]
        values = list(ladder.first)
        if turn >= len(axes):
            values = [best[0], *ladder.beside(best[0])]
        while True:
            points = {value: (*best[:axis], value, *best[axis + 1 :]) for value in values}
            ranks: dict[float, Any] = {value: rank(point) for value, point in points.items()}
            if needed := [points[value] for value, found in ranks.items() if found is None]:
                return needed
            winner = min(values, key=ranks.__getitem__)
            further = ladder.beyond(values, winner)
            if further is None:
                break
            values.append(further)
        best[axis] = winner
    return []


def most_points(ladders: Sequence[Ladder]) -> int:
    """Return about how many points a search takes, where it goes on once at every edge."""
    return sum(len(ladder.first) for ladder in ladders) + 2
