"""Coarse messages for strategies that average replies.

Local training makes updates that are noise for the greater part, with a few large coordinates. Both
directions round them to multiples of a step that is several times the root mean square of the
coordinates: most become zero, which the coder writes in a fraction of a bit. What is left out is
sent later: a client keeps it as the residual of error feedback, the server has it in the difference
between model and public copy.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.core.downlink import Condensed, make_downlink
from aqg.core.grids import MIN_STEP, Grid, round_up_to_bfloat16
from aqg.core.messages import Upload
from aqg.core.noise import NoiseMeter
from aqg.core.policies import Always
from aqg.core.quantizers import NormOnly, Request
from aqg.core.recipe import Recipe
from aqg.core.recipes import make_recipe
from aqg.core.stages import ErrorFeedback, NoiseSwitch
from aqg.core.stages.noise_switch import MIRROR, SPARSE
from aqg.errors import ConfigError
from aqg.flower.dropin.tensors import PIECE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aqg.core.stage import Flow, StageState
    from aqg.core.types import Float64Array, FloatArray, Levels
    from aqg.flower.dropin.copies import Move

COARSE = "coarse"
"""The name of the recipe and of the downlink."""
_STEPS, _SMALL_STEPS, _SMALL_MODEL = 3.5, 1.0, 10_000
_WIDTH = 8
_TOP = (1 << (_WIDTH - 1)) - 1
_ROUNDING = 0.4
"""Added before rounding down: what is below 0.6 steps becomes zero, which costs least."""
_REPEATS = 0.02
"""Updates repeat themselves if less than this part of their energy changes from one to the next.
Those of clients with unlike data, which change by 5 % for some rounds, are no case for a mirror."""
_SMOOTHING = 0.25
"""Weight of the newest round in the mean response."""
_POINTS_BACK = -0.08
"""Mean response below which updates undo what was sent. It stayed above -0.05 in training of neural
networks, with like and with unlike data, and fell to -0.1 and below where a round goes a fifth of
the way to the optimum or more."""


@dataclass(frozen=True)
class Coarse(NormOnly):
    """Multiples of a step that is ``width`` times the root mean square of the coordinates.

    What is below 0.6 steps becomes zero. Without a ``width`` it is 3.5, and 1 with up to 10,000
    coordinates: Flower adds more to a message than finer steps do.

    >>> vector = np.array([0.1, -0.1, 4.0, 0.1, -2.2, 0.1], np.float32)
    >>> upload = Coarse(1.0).quantize(vector, Request(8, squared_norm=float(vector @ vector)))
    >>> [round(value, 2) for value in upload.values(np.float32).tolist()]
    [0.0, 0.0, 3.73, 0.0, -1.87, 0.0]
    """

    width: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.width < math.inf:
            raise ConfigError(f"width is {self.width}; it must be at least 0 and finite")

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        """Round to the nearest multiple, or to the one below."""
        steps = self.width or (_SMALL_STEPS if len(vector) <= _SMALL_MODEL else _STEPS)
        step = steps * math.sqrt(request.squared_norm / max(1, len(vector)))
        if step < MIN_STEP:  # rounding up would overshoot
            return Upload(np.ones(len(vector), np.uint8), 0.0, 2, Grid.MIDTREAD)
        step = round_up_to_bfloat16(step)
        largest = math.floor(float(np.abs(vector).max(initial=0.0)) / step + _ROUNDING)
        width = max(2, min(largest, _TOP).bit_length() + 1)
        return Upload(_round(vector, step, (1 << (width - 1)) - 1), step, width, Grid.MIDTREAD)


def _round(vector: FloatArray, step: float, top: int) -> Levels:
    """Return the levels, from 0 for ``-top`` to ``2·top``."""
    levels = np.empty(len(vector), np.uint8)
    for start in range(0, len(vector), PIECE):
        piece = vector[start : start + PIECE] / vector.dtype.type(step)
        sizes = np.minimum(np.floor(np.abs(piece) + vector.dtype.type(_ROUNDING)), top)
        levels[start : start + PIECE] = top + np.copysign(sizes, piece).astype(np.int16)
    return levels


@dataclass(frozen=True)
class CoarseSwitch(NoiseSwitch):
    """Coarse messages with error feedback while updates are noise; the recipe's mirror otherwise.

    Error feedback makes updates that repeat themselves overshoot, and those of training that goes
    most of the way to its optimum in a round: what is sent late is sent too often. Updates then
    point back along the last move of the model, and the client goes over to the mirror for good.

    Attributes:
        width: of `Coarse`.
        response: ``⟨u, δ⟩/‖δ‖²`` of this round's update ``u`` and the last move ``δ`` of the public
            copy, as a client sets it; NaN where that is not known.

    """

    width: float = Coarse.width
    response: float = math.nan

    @cached_property
    def branches(self) -> tuple[Recipe, ...]:
        """Return the one for noise."""
        quantizer = Coarse(self.width)
        return (Recipe(policy=Always(_WIDTH), quantizer=quantizer, stages=(ErrorFeedback(),)),)

    def init(self, num_params: int, dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        """Start where the meter does, with updates that do not point back."""
        return {**super().init(num_params, dtype), "response": np.array(0.0)}

    def before(self, state: StageState, flow: Flow) -> tuple[StageState, Flow]:
        """Take note of the response, and choose."""
        after, flow = super().before(state, flow)
        mean = state["response"]
        if math.isfinite(self.response):
            newest = max(-1.0, min(self.response, 1.0))
            mean = np.where(mean < _POINTS_BACK, mean, mean + _SMOOTHING * (newest - mean))
        branch = np.where(mean < _POINTS_BACK, MIRROR, after["branch"]).astype(np.int8)
        return {**after, "branch": branch, "response": mean}, flow

    def _branch(self, notes: Float64Array) -> int:
        return SPARSE if self.meter.is_noisy(notes) else MIRROR


def with_response(recipe: Recipe, move: Move | None, update: FloatArray) -> Recipe:
    """Return the recipe for an update that followed a move of the copy."""
    switch = recipe.switch
    if not isinstance(switch, CoarseSwitch) or move is None:
        return recipe
    with np.errstate(over="ignore", invalid="ignore"):  # looked at by the switch
        steps = move.values.astype(np.float64)
        square = float(np.vdot(steps, steps))
        against = float(np.vdot(update[move.places].astype(np.float64), steps))
        response = -against / square if square else math.nan
    return replace(recipe, switch=replace(switch, response=response))


@dataclass(frozen=True)
class CoarseDownlink:
    """The difference between model and public copy as a coarse message.

    After a round in which most nodes used their mirrors, it is sent as by `Condensed`, which stays
    nearer to the model.

    Attributes:
        width: of `Coarse`.

    """

    width: float = Coarse.width

    name = COARSE

    def __post_init__(self) -> None:
        Coarse(self.width)


def recipe_of(spec: str, bits: int, max_staleness: int) -> Recipe:
    """Return the recipe of a name with options: ``coarse``, or one of `aqg.core.recipes`.

    >>> recipe_of("coarse:width=3", 4, 100).switch.width
    3.0
    """
    name, *settings = spec.split(":")
    if name != COARSE:
        return make_recipe(spec, bits, max_staleness)
    width = _options("recipe", settings, {"width": Coarse.width})["width"]
    base = make_recipe("auto", bits, max_staleness)
    return replace(base, switch=CoarseSwitch(NoiseMeter(repeats_below=_REPEATS), width=width))


def downlink_of(spec: str) -> Condensed | CoarseDownlink:
    """Return the downlink of a name with options: ``condensed`` or ``coarse``."""
    name, *settings = spec.split(":")
    if name == COARSE:
        return CoarseDownlink(**_options("downlink", settings, asdict(CoarseDownlink())))
    condensed = make_downlink(spec)
    if not isinstance(condensed, Condensed):
        raise ConfigError(f"downlink is {spec!r}; here it is 'condensed' or 'coarse', with options")
    return condensed


def _options(what: str, settings: list[str], defaults: dict[str, float]) -> dict[str, float]:
    chosen = dict(defaults)
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in defaults:
            known = ", ".join(defaults)
            raise ConfigError(f"{what} {COARSE!r} has no option {key!r}; it has: {known}")
        try:
            chosen[key] = float(value)
        except ValueError:
            raise ConfigError(
                f"option {key} of {what} {COARSE!r} is {value!r}, not a number"
            ) from None
    return chosen
