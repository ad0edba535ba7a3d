"""How long the server's steps are: as given, or found from the steps themselves.

With local training, the server's natural step is that of federated averaging, which makes the mean
of the clients' models the next model. `Fixed` takes that step, or the one that the user gave, in
every round. `DistanceOverGradients` finds its own (DoG; Ivgi, Hinder and Carmon, DoG is SGD's Best
Friend, ICML 2023), with the natural step as its scale. All of it is made from the model
and the published updates, and the result travels in the entry: everyone takes the same step.

Steps that are long enough to come far in few rounds leave the model in a noise around where it is
going. The mean over the last models is nearer to that. It costs no bytes: training goes on from the
model itself, and the mean is what is measured and kept in the end, with the same mean of the
statistics of batch normalization (`aqg.objectives.statistics`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from aqg.core.grids import round_up_to_bfloat16
from aqg.core.optimizers import SGD
from aqg.core.quantizers import Verbatim
from aqg.errors import ConfigError

if TYPE_CHECKING:
    from aqg.core.optimizers import ServerOptimizer
    from aqg.core.recipe import Recipe
    from aqg.core.space import Array, Space
    from aqg.core.types import FloatArray

_LEAST, _MOST = 2.0**-120, 2.0**120
"""Step sizes beyond these are cut: they would not be numbers in single precision."""

_NOTHING = np.zeros(0)
_SPARSE = 0.05
"""The part of all coordinates up to which an update counts as sparse."""
_WIDENING, _LEAST_WIDENING = 0.08, 1.6
"""The factor on the first step, times the density of the update, at most; and the least factor."""
_DENSE, _WIDENING_OF_DENSE = 0.5, 3.2
"""The root of the density from which on updates count as dense, and the factor for these."""
_SMALL_MODEL = 10_000
"""Parameters up to which a model's steps have fewer bounds."""
_MANY_MOVED = 0.02
"""If a larger part of all coordinates moves, long steps wait while updates weaken."""
_WEAKENED = 0.5
"""The energy of a weakened update, in the mean of those before it, at most."""
_FIRST_UPDATES, _LARGE_MOVE = 2, 0.1
"""Too few updates to tell whether they weaken. It is assumed that they will if natural steps move
coordinates by more than this, in typical parameters."""
_ROUNDS_OF_RISE = 5.0
"""In so many rounds, the longest step with weakened updates rises by the first one's length."""
_FEW_UPDATES = 8
"""A mean of fewer says little: one client may have answered in the first round, and then many."""


class StepState(NamedTuple):
    """What a rule remembers of the steps so far.

    Attributes:
        start: the model before the first step, ``(n,)``.
        reach: ``r``, the longest distance from it that counts so far.
        energy: ``G = Σ_k ‖update^k‖²``.
        num_updates: how many updates that were not zero ``G`` has.
        scale: what the natural step is multiplied by: 1, and less after a run began to diverge.
        mean: the mean of the models so far, ``(n,)``; ``(0,)`` where none is kept.
        num_models: of how many.

    """

    start: Array
    reach: float = 0.0
    energy: float = 0.0
    num_updates: float = 0.0
    scale: float = 1.0
    mean: Array = _NOTHING
    num_models: float = 0.0


def share_of_newest(average: float, count: float) -> float:
    """Return what the last of ``count`` models counts for in their mean, if ``γ`` is ``average``.

    >>> [share_of_newest(8.0, count) for count in (1, 10, 100)]
    [1.0, 0.5, 0.083...]
    """
    return (average + 1.0) / (average + count)


class StepRule(Protocol):
    """Finds the length of each step."""

    @property
    def name(self) -> str:
        """How settings call it."""

    @property
    def average(self) -> float:
        """``γ`` of the mean over the models; 0 where none is kept."""

    def init(self, parameters: FloatArray) -> StepState | None:
        """Return the state before the first round; None where nothing is remembered."""

    def next(
        self,
        space: Space,
        state: StepState | None,
        parameters: Array,
        update: Array,
        natural: float,
    ) -> tuple[StepState | None, float]:
        """Return the state and ``α`` for ``θ^{k+1} = θ^k - α·update``.

        Args:
            space: where vectors live.
            state: before the step.
            parameters: ``θ^k``.
            update: what the server optimizer made of the published sums.
            natural: the step of federated averaging, or another that is known to work.

        """

    def follow(self, state: StepState | None, parameters: Array) -> StepState | None:
        """Return the state with the model after a step in the mean, where one is kept."""


@dataclass(frozen=True)
class _Averaging:
    """Keeps a mean of the models in which later ones count for more.

    ``mean_t = mean_{t-1} + (γ + 1)/(γ + t)·(θ^t - mean_{t-1})``, which is about the last
    ``1/(γ + 1)`` of all models, however many there are (Shamir and Zhang, Stochastic Gradient
    Descent for Non-smooth Optimization, ICML 2013).

    Attributes:
        average: ``γ``; 0 for no mean.

    """

    average: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.average < math.inf:
            raise ConfigError(f"average is {self.average}; it must be at least 0 and finite")

    def _first_mean(self, parameters: FloatArray) -> FloatArray:
        """Return the place of the mean, before there is one."""
        return np.zeros_like(parameters if self.average else parameters[:0])

    def follow(self, state: StepState | None, parameters: Array) -> StepState | None:
        """Return the state with the model after a step in the mean, where one is kept."""
        if state is None or not self.average:
            return state
        count = state.num_models + 1.0
        weight = share_of_newest(self.average, count)
        mean = state.mean + weight * (parameters - state.mean) if count > 1 else parameters * 1.0
        return state._replace(mean=mean, num_models=count)


@dataclass(frozen=True)
class Fixed(_Averaging):
    """The natural step in every round."""

    name = "fixed"

    def init(self, parameters: FloatArray) -> StepState | None:
        """Remember nothing but a mean, where one is asked for."""
        if not self.average:
            return None
        return StepState(parameters[:0], mean=self._first_mean(parameters))

    def next(
        self,
        _space: Space,
        state: StepState | None,
        _parameters: Array,
        _update: Array,
        natural: float,
    ) -> tuple[StepState | None, float]:
        """Return the natural step."""
        return state, natural


@dataclass(frozen=True)
class DistanceOverGradients(_Averaging):
    """``α_k = r_k/√G_k``, between the natural step and a multiple of it.

    ``r_k`` is the longest distance of the model from where it started, and ``G_k`` the sum of the
    squared norms of all updates up to this one. The norm of the model sets no scale, as it may be
    zero, or that of a large pretrained model. At the start, ``r`` is ``first`` times what the
    natural step would move the model by. Where updates are sparse, because the rest waits in
    residuals, that is divided by the root of their density, ``‖u‖₁²/(n‖u‖₂²)``: as if all
    coordinates were to move as much as those sent. The largest coordinates say little of the others
    where a few are far larger, as in transformers, so that the factor is at most ``widest``.

    The more coordinates move at once, the less waits in residuals. So the factor is at most
    ``0.08/density`` in the first step, though no less than 1.6; with longer first steps,
    transformers stay on their first plateau. Models of up to 10,000 parameters have no such bound.
    Above a density of a quarter, as in models that are sent whole, the factor is 3.2.

    The step is never shorter than the natural one, nor longer than ``most`` natural ones, divided
    by the same root. Nor does it move the coordinates of a sparse update, in the root mean square,
    by more than ``jump`` times that of the model's parameters at the start; where the natural step
    does already, the model began at zero or near it, and its parameters are no measure. Models
    of up to 10,000 parameters have no such bound.

    Updates that weaken while many coordinates move are those of a model on a plateau, such as a
    transformer that has learned how frequent symbols are and nothing else: with long steps it stays
    there. So where more than a 50th of more than 10,000 coordinates move, and the update has less
    than half the mean energy of those before, step ``t = 0, 1, …`` has at most ``first·(1 + t/5)``
    natural ones. The same holds for the first two steps, before anything is known, if natural ones
    move coordinates by more than a tenth of a typical parameter.

    An update of more than ``burst`` times the mean energy so far is taken for the beginning of
    divergence: the rule begins anew where the model is, with a quarter of the natural step. The
    step is a bfloat16 number, so that entries are short and engines that sum in another order
    agree.

    Attributes:
        first: the first step, in natural ones.
        is_sparse: whether what updates leave out waits in residuals.
        most: the longest step, in natural ones.
        widest: the most that the density of updates makes a step longer.
        jump: how far a step moves a coordinate at most, in typical parameters.
        burst: how much more energy than the mean an update has where a run diverges.
        average: ``γ`` of the mean over the models.

    """

    average: float = 8.0
    first: float = 1.25
    is_sparse: bool = True
    most: float = 4.0
    burst: float = 30.0
    widest: float = 16.0
    jump: float = 4.0

    name = "dog"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("first", self.first), ("jump", self.jump)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be above 0 and finite")
        for name, value in (("most", self.most), ("burst", self.burst), ("widest", self.widest)):
            if not 1 <= value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be at least 1 and finite")

    def init(self, parameters: FloatArray) -> StepState:
        """Start where the model does."""
        return StepState(parameters.copy(), mean=self._first_mean(parameters))

    def next(
        self,
        space: Space,
        state: StepState | None,
        parameters: Array,
        update: Array,
        natural: float,
    ) -> tuple[StepState, float]:
        """Look how far the model has come, and how much that took."""
        assert state is not None
        length = space.squared_norm(update)
        if length == 0:
            return state, _short(natural * state.scale)
        if state.num_updates and not length <= self._most_energy(state):
            start, mean = space.put(space.get(parameters)), state.mean
            state = StepState(start, scale=state.scale / 4.0, mean=mean)
        least = natural * state.scale
        longest = least / self._fill(space, update, length)
        energy, reach = state.energy + length, state.reach
        if not state.num_updates:
            widening = self._first_widening(least / longest, len(update))
            reach = self.first * widening * least * math.sqrt(length)
        reach = max(reach, math.sqrt(space.squared_norm(parameters - state.start)))
        if not (math.isfinite(energy) and math.isfinite(reach)):
            return state, _short(least)
        step_size = min(max(reach / math.sqrt(energy), least), self.most * longest)
        part_moved, typical = self._moved(space, state, update, length)
        if part_moved <= _SPARSE and least <= self.jump * typical < step_size:
            step_size = self.jump * typical
        if part_moved > _MANY_MOVED and self._waits(state, length, least, typical):
            rise = 1.0 + state.num_updates / _ROUNDS_OF_RISE
            step_size = min(step_size, max(1.0, self.first * rise) * least)
        state = state._replace(reach=reach, energy=energy, num_updates=state.num_updates + 1.0)
        return state, _short(step_size)

    def _first_widening(self, fill: float, num_params: int) -> float:
        """Return the factor on the first step, given the root of the update's density."""
        if not self.is_sparse:
            return 1.0
        if fill > _DENSE:
            return _WIDENING_OF_DENSE
        if num_params <= _SMALL_MODEL:
            return 1.0 / fill
        return min(1.0 / fill, max(_LEAST_WIDENING, _WIDENING / fill**2))

    def _moved(
        self, space: Space, state: StepState, update: Array, squared_norm: float
    ) -> tuple[float, float]:
        """Return the part of all coordinates that moves, and the step of a typical parameter.

        That is the step which moves them, in the root mean square, by the size of the model's
        parameters at the start. Where there are no such bounds, it returns 0 and infinity.
        """
        if not self.is_sparse or len(update) <= _SMALL_MODEL:
            return 0.0, math.inf
        num_moved = space.number((update != 0).sum())
        size = space.squared_norm(state.start) / len(update)
        return num_moved / len(update), math.sqrt(size * num_moved / squared_norm)

    def _waits(self, state: StepState, squared_norm: float, least: float, typical: float) -> bool:
        """Tell whether updates weaken, or are assumed to."""
        if state.num_updates < _FIRST_UPDATES:
            return _LARGE_MOVE * typical < least <= self.jump * typical
        return squared_norm * state.num_updates < _WEAKENED * state.energy

    def _most_energy(self, state: StepState) -> float:
        """Return the energy of an update beyond which a run is taken to diverge."""
        doubt = 1.0 + _FEW_UPDATES / state.num_updates
        return self.burst * doubt * state.energy / state.num_updates

    def _fill(self, space: Space, update: Array, squared_norm: float) -> float:
        """Return the root of an update's density, and at least ``1/widest``."""
        if not self.is_sparse:
            return 1.0
        total = space.number(abs(update).sum())
        return max(1.0 / self.widest, min(1.0, total / math.sqrt(len(update) * squared_norm)))


STEPS: dict[str, type[Fixed | DistanceOverGradients]] = {
    rule.name: rule for rule in (Fixed, DistanceOverGradients)
}
AUTO = "auto"
_UNBIASED = DistanceOverGradients(first=4.0, is_sparse=False)


def make_step(spec: str) -> Fixed | DistanceOverGradients:
    """Make a rule from its name and options.

    >>> make_step("dog:most=8").most
    8.0
    """
    name, *settings = spec.split(":")
    if name not in STEPS:
        raise ConfigError(f"unknown step {name!r}; choose from {', '.join((AUTO, *STEPS))}")
    options = {
        field.name: bool if field.default is True else float for field in fields(STEPS[name])
    }
    chosen: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in options:
            known = ", ".join(options) or "none"
            raise ConfigError(f"step {name!r} has no option {key!r}; it has: {known}")
        try:
            chosen[key] = options[key](float(value))
        except ValueError:
            raise ConfigError(f"option {key} of step {name!r} is {value!r}, not a number") from None
    return STEPS[name](**chosen)


def resolve_step(
    spec: str, recipe: Recipe, are_exact: bool, optimizer: ServerOptimizer
) -> StepRule:
    """Return the rule that a setting names; ``"auto"`` chooses one that suits the recipe.

    Args:
        spec: the setting.
        recipe: the compressor.
        are_exact: whether updates are computed on all samples of a client: then the natural step
            is the problem's own.
        optimizer: what the server makes of the sums. With momentum or Adam, steps that set
            themselves diverged or were slower than the optimizer's own (``digits-local``).

    A recipe whose clients keep what they did not send, or one that forgets every upload after its
    round, finds its own step. A mirror of noise is out of date when it is used, and longer steps
    make it more so; and uploads in full precision are federated averaging, whose step is known.

    """
    if spec != AUTO:
        return make_step(spec)
    is_plain = isinstance(optimizer, SGD)
    if are_exact or not is_plain or isinstance(recipe.quantizer, Verbatim):
        return Fixed()
    if recipe.keeps_residual:
        return DistanceOverGradients()
    return Fixed() if recipe.memory.keeps_mirror else _UNBIASED


def is_short(step_size: float) -> bool:
    """Tell whether a step size is one that fits into an entry as a bfloat16 number.

    >>> is_short(0.125), is_short(0.1)
    (True, False)
    """
    return _LEAST <= step_size <= _MOST and round_up_to_bfloat16(step_size) == step_size


def _short(step_size: float) -> float:
    """Return a step size as entries carry it: a bfloat16 number, not below it.

    >>> _short(1.0), _short(1.001)
    (1.0, 1.0078125)
    """
    return round_up_to_bfloat16(min(max(step_size, _LEAST), _MOST))
