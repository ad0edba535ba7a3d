"""The measure: cost and delay until a model is as good as that of federated averaging.

*Plateau*: the mean, over the last tenth of a task's rounds, of what federated averaging reaches on
the validation set in full precision, with the server step for which that is best. *Goals* are
shares of it (90 % of a loss: 1.1 times the plateau), and the plateau less one point (a loss: plus
one percent), which is the one that counts. A goal is reached in the first round that meets it if
the mean over that round and the next ones (`hold_of`) meets it too. *Cost* is every byte that all
clients sent and received until then (`aqg.runs.cost.count_every_byte`), *delay* the rounds over
those of federated averaging, with that of the steps tried for which these are fewest. A recipe
whose delay is at most `MOST_DELAY` is a *swap-in*. Runs that go to the last round have a plateau of
their own, compared in points. Comparisons are paired by seed, with 95 % intervals of Student's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from aqg.runs.stopping import Target

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from aqg.runs.stopping import Kind

MOST_DELAY = 1.25
PLATEAU = "plateau"
"""The goal that counts: the plateau less one point."""
_SHARES = {"90%": 0.90, "95%": 0.95, PLATEAU: None, "99%": 0.99}
GOALS = tuple(_SHARES)
_POINT = 0.01


@dataclass(frozen=True)
class Curve:
    """A run on the validation set; entry ``k`` is after ``k`` rounds.

    Attributes:
        values: accuracies or losses; NaN where the model holds NaN or infinity.
        total_bytes: sent and received by all clients until then.
        tests: pairs of rounds and test accuracy, where it was measured.

    """

    values: tuple[float, ...]
    total_bytes: tuple[int, ...]
    tests: tuple[tuple[int, float], ...] = ()

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Curve:
        """Read the curve in a run's summary."""
        values = (math.nan if value is None else float(value) for value in row["values"])
        tests = ((int(rounds), float(value)) for rounds, value in row["tests"])
        return Curve(tuple(values), tuple(map(int, row["bytes"])), tuple(tests))

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        values = [None if math.isnan(value) else value for value in self.values]
        tests = [list(pair) for pair in self.tests]
        return {"values": values, "bytes": list(self.total_bytes), "tests": tests}

    @property
    def num_rounds(self) -> int:
        """How many rounds were run."""
        return len(self.values) - 1

    def test_after(self, rounds: int) -> float | None:
        """Return the first test accuracy that was measured after so many rounds or more."""
        return next((value for at, value in self.tests if at >= rounds), None)

    def reach(self, goal: Target) -> Crossing | None:
        """Return when the run reaches a goal; None if it does not."""
        rounds = goal.first_reached(self.values)
        if rounds is None:
            return None
        return Crossing(rounds, self.total_bytes[rounds], self.test_after(rounds))


@dataclass(frozen=True)
class Crossing:
    """When a run reached a goal: its rounds and bytes, and the test accuracy then."""

    rounds: int
    total_bytes: int
    test: float | None = None


def hold_of(num_rounds: int) -> int:
    """Return over how many rounds a goal must hold: a fortieth of the task's, and at least 3.

    >>> hold_of(400), hold_of(60)
    (10, 3)
    """
    return max(3, num_rounds // 40)


def plateau_of(curve: Curve, num_rounds: int) -> float:
    """Return the mean over the last tenth of so many rounds; NaN for a run that ended before.

    >>> plateau_of(Curve((0.1, 0.5, 0.9), (0, 1, 2)), num_rounds=2)
    0.9
    """
    if curve.num_rounds < num_rounds:
        return math.nan
    last = curve.values[: num_rounds + 1][-max(1, num_rounds // 10) :]
    return sum(last) / len(last)


def points_above(kind: Kind, plateau: float, reference: float) -> float:
    """Return how many points better a plateau is: of accuracy or, for losses, percent.

    >>> round(points_above("accuracy", 0.91, 0.90), 6), round(points_above("loss", 0.99, 1.0), 6)
    (1.0, 1.0)
    """
    if kind == "accuracy":
        return (plateau - reference) / _POINT
    return (reference - plateau) / reference / _POINT


def goals_of(kind: Kind, plateau: float, num_rounds: int) -> dict[str, Target]:
    """Return the goals of a task by name, the easiest first.

    >>> {name: round(goal.value, 4) for name, goal in goals_of("accuracy", 0.9, 100).items()}
    {'90%': 0.81, '95%': 0.855, 'plateau': 0.89, '99%': 0.891}
    """
    hold = hold_of(num_rounds)

    def value(share: float | None) -> float:
        if kind == "accuracy":
            return plateau - _POINT if share is None else share * plateau
        return plateau * (1 + _POINT) if share is None else plateau * (2 - share)

    return {name: Target(kind, value(share), hold, is_mean=True) for name, share in _SHARES.items()}


@dataclass(frozen=True)
class Reference:
    """Federated averaging on one task and seed: what others are measured against.

    Attributes:
        plateau: of its best run.
        goals: by name.
        crossings: by goal, of the run that reaches it in the fewest rounds.
        all_bytes: that a run to the last round takes.

    """

    plateau: float
    goals: Mapping[str, Target]
    crossings: Mapping[str, Crossing]
    all_bytes: int

    @property
    def hardest(self) -> Target:
        """The goal with which runs of other recipes end."""
        reached = [self.goals[name] for name in self.crossings]
        is_share = reached[0].kind == "accuracy"
        return max(reached, key=lambda goal: goal.value if is_share else -goal.value)

    def to_json(self) -> dict[str, Any]:
        """Return plateau, goals and crossings, for people to read."""
        rows = {}
        for name, goal in self.goals.items():
            crossing = self.crossings.get(name)
            found = {} if crossing is None else vars(crossing)
            rows[name] = {goal.kind: goal.value, "hold": goal.hold, **found}
        return {"plateau": self.plateau, "goals": rows}


def make_reference(kind: Kind, num_rounds: int, curves: Iterable[Curve]) -> Reference | None:
    """Return the reference that federated averaging's runs of one seed make.

    None if no run came to its last round, or none reaches the goal that counts.
    """
    curves = list(curves)
    plateaus = [plateau for c in curves if not math.isnan(plateau := plateau_of(c, num_rounds))]
    if not plateaus:
        return None
    plateau = max(plateaus) if kind == "accuracy" else min(plateaus)
    if kind == "accuracy" and plateau <= _POINT:
        return None
    goals = goals_of(kind, plateau, num_rounds)
    crossings = {}
    for name, goal in goals.items():
        found = [crossing for c in curves if (crossing := c.reach(goal)) is not None]
        if found:
            crossings[name] = min(found, key=lambda crossing: crossing.rounds)
    if PLATEAU not in crossings:
        return None
    return Reference(plateau, goals, crossings, max(curve.total_bytes[-1] for curve in curves))


@dataclass(frozen=True)
class Score:
    """One run against federated averaging's of the same seed, for one goal.

    Attributes:
        cost: total bytes.
        savings: federated averaging's bytes over these.
        delay: rounds over those of federated averaging.
        test: the test accuracy when the goal was reached.
        rounds: until then.

    """

    cost: int
    savings: float
    delay: float
    test: float | None
    rounds: int


def score(curve: Curve, reference: Reference, goal: str = PLATEAU) -> Score | None:
    """Return what a run is worth; None if it or federated averaging does not reach the goal."""
    theirs = reference.crossings.get(goal)
    ours = curve.reach(reference.goals[goal])
    if theirs is None or ours is None:
        return None
    delay = max(1, ours.rounds) / max(1, theirs.rounds)
    savings = theirs.total_bytes / max(1, ours.total_bytes)
    return Score(ours.total_bytes, savings, delay, ours.test, ours.rounds)


@dataclass(frozen=True)
class Mean:
    """A mean over seeds with a 95 % confidence interval; none where there is a single seed."""

    value: float
    low: float | None = None
    high: float | None = None

    def includes(self, value: float) -> bool:
        """Tell whether the interval includes a value; without an interval nothing is known."""
        return self.low is None or self.high is None or self.low <= value <= self.high


def arithmetic_mean(values: Sequence[float]) -> Mean:
    """Return the mean of some numbers, with Student's interval.

    >>> mean = arithmetic_mean([1.0, 2.0, 3.0])
    >>> mean.value, round(mean.low, 3), round(mean.high, 3)
    (2.0, -0.484, 4.484)
    """
    count = len(values)
    center = sum(values) / count
    if count < 2:
        return Mean(center)
    spread = math.sqrt(sum((x - center) ** 2 for x in values) / (count - 1) / count)
    margin = _quantile(count - 1) * spread
    return Mean(center, center - margin, center + margin)


@cache
def _quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's distribution."""
    from scipy.stats import t  # slow to import, and not needed to run a trial

    return float(t.ppf(0.975, degrees))


def geometric_mean(values: Sequence[float]) -> Mean:
    """Return the geometric mean of positive numbers, with Student's interval of the logarithms.

    >>> mean = geometric_mean([1.0, 4.0, 2.0])
    >>> round(mean.value, 6), round(mean.low, 3), round(mean.high, 2)
    (2.0, 0.357, 11.19)
    """
    mean = arithmetic_mean([math.log(value) for value in values])
    if mean.low is None or mean.high is None:
        return Mean(math.exp(mean.value))
    return Mean(math.exp(mean.value), math.exp(mean.low), math.exp(mean.high))
