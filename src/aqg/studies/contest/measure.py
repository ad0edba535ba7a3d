"""The measure: every byte, and the rounds, until a model is good enough.

``docs/explanation/measure.md`` says what is measured, and why. A `Goal` is a fixed target, or to be
as good as federated averaging. Its targets are then shares of the plateau (90 % of a loss: 1.1
times the plateau), and the plateau less one point, which is the one that counts. Every byte is
counted by `aqg.runs.cost.Meter`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from aqg.runs.stopping import Kind, Target

RESULTS = "results.json"
"""In a comparison's directory, what was measured."""
MOST_DELAY = 1.25
FIXED, PLATEAU = "target", "plateau"
"""What counts: a fixed target, or the plateau less one point."""
_SHARES = {"90%": 0.90, "95%": 0.95, PLATEAU: None, "99%": 0.99}
_POINT = 0.01
_CEILING = 2
"""Where the target is fixed, so many times the bytes of federated averaging are of no interest."""


@dataclass(frozen=True)
class Goal:
    """What is to be reached: ``target``, or without one federated averaging's plateau.

    ``num_rounds`` are those of federated averaging, or at most so many.
    """

    kind: Kind
    num_rounds: int
    target: Target | None = None

    @property
    def name(self) -> str:
        return PLATEAU if self.target is None else FIXED

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(_SHARES) if self.target is None else (FIXED,)

    @property
    def sign(self) -> int:
        return -1 if self.kind == "accuracy" else 1  # times a value: the less, the better

    def targets(self, plateau: float) -> dict[str, Target]:
        """Return the targets by name, the easiest first."""
        if self.target is not None:
            return {FIXED: self.target}
        hold = hold_of(self.num_rounds)

        if self.kind == "accuracy":
            values = [share * plateau if share else plateau - _POINT for share in _SHARES.values()]
        else:
            values = [plateau * (2 - (share or 1 - _POINT)) for share in _SHARES.values()]
        return {
            name: Target(self.kind, value, hold, is_mean=True)
            for name, value in zip(_SHARES, values, strict=True)
        }


@dataclass(frozen=True)
class Curve:
    """A run on the validation set; entry ``k`` is after ``k`` rounds."""

    values: tuple[float, ...]  # accuracies or losses; NaN for a model with NaN or infinity
    total_bytes: tuple[int, ...]  # sent and received by all clients until then
    tests: tuple[tuple[int, float], ...] = ()  # rounds and test accuracy, where it was measured

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Curve:
        values = (math.nan if value is None else float(value) for value in row["values"])
        tests = ((int(rounds), float(value)) for rounds, value in row["tests"])
        return Curve(tuple(values), tuple(map(int, row["bytes"])), tuple(tests))

    def to_json(self) -> dict[str, Any]:
        values = [None if math.isnan(value) else value for value in self.values]
        tests = [list(pair) for pair in self.tests]
        return {"values": values, "bytes": list(self.total_bytes), "tests": tests}

    @property
    def num_rounds(self) -> int:
        return len(self.values) - 1

    def test_after(self, rounds: int) -> float | None:
        return next((value for at, value in self.tests if at >= rounds), None)

    def reach(self, goal: Target) -> Crossing | None:
        rounds = goal.first_reached(self.values)
        if rounds is None:
            return None
        return Crossing(rounds, self.total_bytes[rounds], self.test_after(rounds))


@dataclass(frozen=True)
class Crossing:
    """Where a run reaches a target; savings and delay once federated averaging's is known."""

    rounds: int
    total_bytes: int
    test: float | None = None
    savings: float | None = None
    delay: float | None = None


def hold_of(num_rounds: int) -> int:
    """Return over how many rounds a goal must hold: a fortieth of the task's, and at least 3."""
    return max(3, num_rounds // 40)


def plateau_of(curve: Curve, num_rounds: int) -> float:
    """Return the mean over the last tenth of so many rounds; NaN for a run that ended before."""
    if curve.num_rounds < num_rounds:
        return math.nan
    last = curve.values[: num_rounds + 1][-max(1, num_rounds // 10) :]
    return sum(last) / len(last)


def points_above(kind: Kind, plateau: float, reference: float) -> float:
    """Return how many points better a plateau is: of accuracy or, for losses, percent."""
    if kind == "accuracy":
        return (plateau - reference) / _POINT
    return (reference - plateau) / reference / _POINT


@dataclass(frozen=True)
class Reference:
    """Federated averaging on one task and seed: what others are measured against."""

    plateau: float | None  # of its best run; None where the target is fixed
    targets: Mapping[str, Target]
    crossings: Mapping[str, Crossing]  # of the run that reaches it in the fewest rounds
    ceiling: float  # more bytes than so many are of no interest

    @property
    def hardest(self) -> Target:
        reached = [self.targets[name] for name in self.crossings]
        is_share = reached[0].kind == "accuracy"
        return max(reached, key=lambda target: target.value if is_share else -target.value)

    def to_json(self) -> dict[str, Any]:
        rows = {}
        for name, target in self.targets.items():
            crossing = self.crossings.get(name)
            rows[name] = {target.kind: target.value, "hold": target.hold}
            if crossing is not None:
                rows[name] |= {k: getattr(crossing, k) for k in ("rounds", "total_bytes", "test")}
        return {"plateau": self.plateau, "goals": rows}


def make_reference(goal: Goal, curves: Iterable[Curve]) -> Reference | None:
    """Return what federated averaging's runs of one seed make.

    None where the goal is its plateau and no run came to its last round, or reached the target.
    """
    curves = list(curves)
    plateau = None
    if goal.target is None:
        found = [value for c in curves if not math.isnan(value := plateau_of(c, goal.num_rounds))]
        plateau = min(found, key=lambda value: goal.sign * value, default=None)
        if plateau is None or (goal.kind == "accuracy" and plateau <= _POINT):
            return None
    targets = goal.targets(plateau or math.nan)
    crossings = {}
    for name, target in targets.items():
        reached = [crossing for c in curves if (crossing := c.reach(target)) is not None]
        if reached:
            crossings[name] = min(reached, key=lambda crossing: crossing.rounds)
    if goal.target is None:
        if PLATEAU not in crossings:
            return None
        ceiling = float(max(curve.total_bytes[-1] for curve in curves))
    else:
        ceiling = _CEILING * min((c.total_bytes for c in crossings.values()), default=math.inf)
    return Reference(plateau, targets, crossings, ceiling)


def score(curve: Curve, reference: Reference, name: str) -> Crossing | None:
    """Return what a run is worth beside federated averaging of the same seed, if that is there too.

    None if the run, or the plateau's own recipe, misses the target.
    """
    theirs = reference.crossings.get(name)
    ours = curve.reach(reference.targets[name])
    if ours is None or (theirs is None and name != FIXED):
        return None
    ours = replace(ours, total_bytes=max(1, ours.total_bytes))
    if theirs is None:
        return ours
    delay = max(1, ours.rounds) / max(1, theirs.rounds)
    return replace(ours, savings=theirs.total_bytes / ours.total_bytes, delay=delay)


Rank: TypeAlias = tuple[int, float]
"""Of a setting: the smallest is the best."""


def rank(goal: Goal, curve: Curve, reference: Reference | None) -> Rank:
    """Order runs of one seed: swap-ins by cost, others by delay, then by how far they came.

    Where the target is fixed, all that reach it are ordered by cost. Without a reference it is
    federated averaging that is searched, for its plateau.
    """
    if reference is None:
        plateau = plateau_of(curve, goal.num_rounds)
        return (1, 0.0) if math.isnan(plateau) else (0, goal.sign * plateau)
    found = score(curve, reference, goal.name)
    if found is None:
        values = [goal.sign * value for value in curve.values if math.isfinite(value)]
        return 2, min(values, default=math.inf)
    if goal.target is None and found.delay is not None and found.delay > MOST_DELAY:
        return 1, found.delay
    return 0, found.total_bytes


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
    count = len(values)
    center = sum(values) / count
    if count < 2:
        return Mean(center)
    from scipy import stats  # takes a second to import

    spread = math.sqrt(sum((x - center) ** 2 for x in values) / (count - 1) / count)
    margin = float(stats.t.ppf(0.975, count - 1)) * spread
    return Mean(center, center - margin, center + margin)


def geometric_mean(values: Sequence[float]) -> Mean | None:
    """Return the geometric mean of positive numbers, with Student's interval of the logarithms."""
    if not values:
        return None
    mean = arithmetic_mean([math.log(value) for value in values])
    low, high = (end if end is None else math.exp(end) for end in (mean.low, mean.high))
    return Mean(math.exp(mean.value), low, high)
