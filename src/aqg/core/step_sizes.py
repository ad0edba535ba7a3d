"""How long the server's steps are: as given, or found from the steps themselves.

With local training, the server's natural step is that of federated averaging, which makes the mean
of the clients' models the next model. `Fixed` takes that step, or the one that the user gave, in
every round. `DistanceOverGradients` finds its own (DoG; Ivgi, Hinder and Carmon, DoG is SGD's Best
Friend, ICML 2023). All of it is made from the model and the server's updates.

Long steps make the model fluctuate around its trajectory; the mean of the last models fluctuates
less. It costs no bytes: training goes on from the model itself. The mean is what is measured and
kept in the end, with that of the statistics of batch normalization (`aqg.objectives.statistics`).
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from aqg.core.grids import round_up_to_bfloat16
from aqg.core.optimizers import SGD, ServerOptimizer
from aqg.core.recipe import Recipe
from aqg.core.space import Array, Space
from aqg.core.types import FloatArray
from aqg.errors import require
from aqg.spec import make_named

_LEAST, _MOST = 2.0**-120, 2.0**120
"""Step sizes beyond these are cut: they would not be numbers in single precision."""

_NOTHING = np.zeros(0)


class StepState(NamedTuple):
    """What a rule remembers of the steps so far."""

    start: Array  # the model before the first step, ``(n,)``
    reach: float = 0.0  # ``r``, the longest distance from it that counts so far
    energy: float = 0.0  # ``G = Σ_k ‖update^k‖²``
    mean: Array = _NOTHING  # the mean of the models so far, ``(n,)``; ``(0,)`` where none is kept
    num_models: float = 0.0  # of how many


def share_of_newest(average: float, count: float) -> float:
    """Return what the last of ``count`` models counts for in their mean, if ``γ`` is ``average``.

    >>> [share_of_newest(8.0, count) for count in (1, 10, 100)]
    [1.0, 0.5, 0.083...]
    """
    return (average + 1.0) / (average + count)


@dataclass(frozen=True)
class StepRule:
    """Finds the length of each step; keeps a mean of the models in which later ones count for more.

    ``mean_t = mean_{t-1} + (γ + 1)/(γ + t)·(θ^t - mean_{t-1})``, which is about the last
    ``1/(γ + 1)`` of all models, however many there are (Shamir and Zhang, Stochastic Gradient
    Descent for Non-smooth Optimization, ICML 2013).
    """

    average: float = 0.0  # ``γ``; 0 for no mean
    name: ClassVar[str]  # how settings call it

    def __post_init__(self) -> None:
        require(0 <= self.average < math.inf, "average", self.average, "at least 0 and finite")

    def init(self, parameters: FloatArray) -> StepState | None:
        """Return the state before the first round; None where nothing is remembered."""
        if not self.average:
            return None
        return StepState(parameters[:0], mean=np.zeros_like(parameters))

    def next(
        self,
        _space: Space,
        state: StepState | None,  # before the step
        _parameters: Array,  # ``θ^k``
        _update: Array,  # what the server optimizer made of the published sums
        natural: float,  # the step of federated averaging, or another that is known to work
    ) -> tuple[StepState | None, float]:
        """Return the state and ``α`` for ``θ^{k+1} = θ^k - α·update``."""
        return state, natural

    def follow(self, state: StepState | None, parameters: Array) -> StepState | None:
        """Return the state with the model after a step in the mean, where one is kept."""
        if state is None or not self.average:
            return state
        count = state.num_models + 1.0
        weight = share_of_newest(self.average, count)
        mean = state.mean + weight * (parameters - state.mean) if count > 1 else parameters * 1.0
        return state._replace(mean=mean, num_models=count)


class Fixed(StepRule):
    """The natural step in every round."""

    name = "fixed"


@dataclass(frozen=True)
class DistanceOverGradients(StepRule):
    """``α_k = r_k/√G_k``.

    ``r_k`` is the longest distance of the model from where it started, and ``G_k`` the sum of the
    squared norms of all updates up to this one. Updates that agree take the model far, and steps
    grow; those that cancel each other, being noise or swings, make ``G`` grow and ``r`` not, and
    steps shrink, however long a client's own steps are.

    At the start ``r`` is ``first·‖θ^1‖``: the first step moves the model by this part of its own
    length, but by no more than ``widest`` natural ones, as a pretrained model is near to where it
    is going. A model that begins at zero has no length, and the first step is the natural one.
    """

    average: float = 8.0  # ``γ`` of the mean over the models
    first: float = 0.2  # what the first step moves the model by at most, in its own length
    widest: float = 16.0  # likewise, in natural steps

    name = "dog"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("first", self.first), ("widest", self.widest)):
            require(0 < value < math.inf, name, value, "above 0 and finite")

    def init(self, parameters: FloatArray) -> StepState:
        return StepState(
            parameters.copy(), mean=np.zeros_like(parameters if self.average else parameters[:0])
        )

    def next(
        self, space: Space, state: StepState | None, params: Array, update: Array, natural: float
    ) -> tuple[StepState, float]:
        assert state is not None
        length = space.squared_norm(update)
        if length == 0:
            return state, _rounded(natural)
        reach, energy = state.reach, state.energy + length
        if not state.energy:
            first, moved = math.sqrt(space.squared_norm(params)), natural * math.sqrt(length)
            reach = min(self.first * first, self.widest * moved) if first else moved
        reach = max(reach, math.sqrt(space.squared_norm(params - state.start)))
        if not (math.isfinite(energy) and math.isfinite(reach)):
            return state, _rounded(natural)
        return state._replace(reach=reach, energy=energy), _rounded(reach / math.sqrt(energy))


STEPS: dict[str, type[Fixed | DistanceOverGradients]]
STEPS = {rule.name: rule for rule in (Fixed, DistanceOverGradients)}
AUTO = "auto"


def make_step(spec: str) -> Fixed | DistanceOverGradients:
    """Make a rule from its name and options.

    >>> make_step("dog:first=0.1").first
    0.1
    """
    return make_named("step", spec, STEPS, also=(AUTO,))


def resolve_step(
    spec: str, recipe: Recipe, are_exact: bool, optimizer: ServerOptimizer
) -> StepRule:
    """Return the rule that a setting names; ``"auto"`` is the recipe's own.

    Where updates are exact, computed on all samples of a client, the natural step is the problem's
    own, and the one to take. Momentum and Adam have steps of their own.
    """
    if spec != AUTO:
        return make_step(spec)
    if are_exact or not isinstance(optimizer, SGD):
        return Fixed()
    return make_step(recipe.step)


def _rounded(step_size: float) -> float:
    """Return the next bfloat16 number, so that no two libraries step by different last bits.

    >>> _rounded(1.0), _rounded(1.001)
    (1.0, 1.0078125)
    """
    return round_up_to_bfloat16(min(max(step_size, _LEAST), _MOST))
