"""Which clients drop out of a round.

A client that dropped computes nothing and sends nothing; its clock stops and its ``ref_m`` is
reused. Every schedule is a pure function of the round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from aqg.core.types import BoolArray
from aqg.errors import ConfigError

_STREAM = 0xD209
"""Keeps dropouts apart from other random numbers of the same seed."""


class Dropout(Protocol):
    """Says who drops out."""

    @property
    def rate(self) -> float:
        """The dropping probability ``p`` that Algorithm 2 amplifies by."""

    def dropped(self, round_number: int, num_clients: int) -> BoolArray:
        """Return, for each client, whether it drops out of this round."""


@dataclass(frozen=True)
class BernoulliDropout:
    """Each client drops out with probability ``rate``, independently in every round.

    >>> BernoulliDropout(0.5, seed=3).dropped(round_number=1, num_clients=6).tolist()
    [False, False, True, True, True, True]
    """

    rate: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate < 1.0:
            raise ConfigError(f"dropout is {self.rate}; it must be at least 0 and below 1")

    def dropped(self, round_number: int, num_clients: int) -> BoolArray:
        """Draw ``z_m^k ~ Bernoulli(p)``."""
        if self.rate == 0.0:
            return np.zeros(num_clients, np.bool_)
        generator = np.random.default_rng([self.seed, _STREAM, round_number])
        away: BoolArray = generator.random(num_clients) < self.rate
        return away


@dataclass(frozen=True)
class Absence:
    """Client ``client`` takes no part from round ``first`` to round ``last``, both included."""

    client: int
    first: int
    last: int

    def __post_init__(self) -> None:
        if self.client < 0 or not 1 <= self.first <= self.last:
            raise ConfigError(
                f"absence of client {self.client} in rounds {self.first}..{self.last}; "
                "clients count from 0, rounds from 1, and the first is not after the last"
            )


@dataclass(frozen=True)
class ScriptedDropout:
    """Absences written down one by one, on top of an optional random schedule.

    >>> script = ScriptedDropout((Absence(client=1, first=2, last=3),))
    >>> [script.dropped(k, 3).tolist() for k in (1, 2)]
    [[False, False, False], [False, True, False]]
    """

    absences: tuple[Absence, ...]
    random: BernoulliDropout = field(default_factory=BernoulliDropout)

    @property
    def rate(self) -> float:
        """The rate of the random part; what is scripted is not amplified."""
        return self.random.rate

    def dropped(self, round_number: int, num_clients: int) -> BoolArray:
        """Return who drops out, by the script or by chance."""
        away = self.random.dropped(round_number, num_clients)
        for absence in self.absences:
            if absence.client < num_clients and absence.first <= round_number <= absence.last:
                away[absence.client] = True
        return away
