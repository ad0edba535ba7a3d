"""The public model: what server and clients both hold, and how one entry of the log moves it.

The model is a function of the sums that the server published. Whoever holds ``P^k`` and gets entry
``k`` has ``P^{k+1}``, to the bit: `advance` takes one IEEE operation per coordinate at a time, and
numbers that are sums over the model, or that the server chose, travel in the entry.

An entry is made from the sum of the round's uploads, whoever sent them. No client learns more of
another than that sum, which it would see in the model, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aqg.core.grids import num_levels
from aqg.core.links import Memory, direction_of
from aqg.core.links import advance as advance_mirror
from aqg.core.messages import Upload
from aqg.core.space import NumpySpace
from aqg.errors import MessageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aqg.core.movement import Movement
    from aqg.core.optimizers import OptimizerState, ServerOptimizer
    from aqg.core.recipe import Recipe
    from aqg.core.space import Array, Space
    from aqg.core.types import Float64Array, FloatArray

_SPACE = NumpySpace()


class Rates(NamedTuple):
    """Numbers that turn the published sums into a step.

    Attributes:
        step_size: ``α``.
        factor: on the sum: 1, or ``1/(1-p)`` against dropouts, or one over the share of clients
            that were sampled.

    """

    step_size: float
    factor: float = 1.0


class Change(NamedTuple):
    """A vector as it was and as it is; what is sent is the difference, exactly."""

    old: Float64Array
    new: Float64Array


Part = Change | Upload | None
"""What an entry says of one of the two sums: the exact change, a quantized one, or nothing."""


class Entry(NamedTuple):
    """What moves the public model from round ``k`` to the next.

    Attributes:
        round: ``k``.
        lasting: the change of the sum that lasts.
        passing: the sum that counts in this round alone.
        movement: ``‖direction‖²/M²``, times the optimizer's `fresh_share`: the newest number of
            the history. None where it is the last one again.
        rates: None where they are the last ones again.
        step_size: a bfloat16 number, where of the rates it alone has changed.
        is_step: False in a round without a step, which only counts.
        is_short: whether the movement is written in single precision, which it then has.

    """

    round: int
    lasting: Part = None
    passing: Part = None
    movement: float | None = None
    rates: Rates | None = None
    is_step: bool = True
    is_short: bool = False
    step_size: float | None = None

    def rates_after(self, before: Rates | None) -> Rates | None:
        """Return the rates that hold from this entry on; None where they are not known."""
        if self.rates is not None:
            return self.rates
        if before is None or self.step_size is None:
            return before
        return before._replace(step_size=self.step_size)


class Public(NamedTuple):
    """``P^k``: the public model before round ``k``.

    Attributes:
        round: ``k``, counted from 1.
        parameters: ``θ^k``.
        total: the published sum that lasts, ``(n,)``; ``(0,)`` where the recipe keeps no mirrors.
        direction: which way it went in the last quantized change, a hint for the coder.
        history: the newest numbers of `Entry.movement`, newest first.
        optimizer: what the server optimizer remembers.
        rates: those of the last entry; None before the first.

    """

    round: int
    parameters: FloatArray
    total: Float64Array
    direction: NDArray[np.int8]
    history: tuple[float, ...]
    optimizer: OptimizerState
    rates: Rates | None = None


def init_public(recipe: Recipe, parameters: FloatArray, optimizer: ServerOptimizer) -> Public:
    """Return the public model before the first round: the starting model, and nothing published."""
    length = len(parameters) if recipe.memory.keeps_mirror else 0
    return Public(
        round=1,
        parameters=parameters,
        total=np.zeros(length),
        direction=np.zeros(length, np.int8),
        history=(),
        optimizer=optimizer.init(len(parameters)),
    )


def advance(public: Public, entry: Entry, movement: Movement, optimizer: ServerOptimizer) -> Public:
    """Return the public model after an entry; the old one is left as it was."""
    if entry.round != public.round:
        raise MessageError(f"entry {entry.round} cannot follow: the model is at {public.round}")
    if not entry.is_step:
        return public._replace(round=public.round + 1)
    rates = entry.rates_after(public.rates)
    if rates is None:
        raise MessageError(f"entry {entry.round} names no step size, and none is known")
    total, direction = public.total, public.direction
    if entry.lasting is not None:
        if not len(total):
            raise MessageError("the entry changes a lasting sum; the recipe keeps none")
        if isinstance(entry.lasting, Upload):
            total = advance_mirror(Memory.INNOVATION, total, entry.lasting).view(np.float64)
            levels = entry.lasting.levels
            direction = direction_of(levels, num_levels(entry.lasting.grid, entry.lasting.width))
        else:
            total = entry.lasting.new
    passing = entry.passing
    if passing is not None and len(total):
        raise MessageError("the entry has the sum of one round; the recipe keeps one that lasts")
    values = passing.values(np.float64) if isinstance(passing, Upload) else None
    if isinstance(passing, Change):
        values = passing.new
    parameters, state, _ = take_step(
        _SPACE,
        public.parameters,
        public.optimizer,
        total if len(total) else None,
        values,
        rates,
        optimizer,
    )
    newest = entry.movement
    if newest is None:
        newest = public.history[0] if public.history else 0.0
    return Public(
        round=public.round + 1,
        parameters=parameters,
        total=total,
        direction=direction,
        history=movement.extend(public.history, newest),
        optimizer=state,
        rates=rates,
    )


def take_step(
    space: Space,
    parameters: Array,
    state: OptimizerState,
    total: Array | None,
    passing: Array | None,
    rates: Rates,
    optimizer: ServerOptimizer,
) -> tuple[Array, OptimizerState, Any]:
    """Take ``θ^{k+1} = θ^k - α·update``; return it, the optimizer's state and ``‖direction‖²``."""
    direction = make_direction(space, len(parameters), total, passing, rates)
    state, update = optimizer.step(state, direction, space.root)
    parameters, squared_norm = space.take_step(parameters, update, direction, rates.step_size)
    return parameters, state, squared_norm


def make_direction(
    space: Space, num_params: int, total: Array | None, passing: Array | None, rates: Rates
) -> Array:
    """Return the sum that there is, times its factor; zero without one."""
    direction = passing if total is None else total
    if direction is None:
        return space.put(np.zeros(num_params))
    return direction if rates.factor == 1 else direction * rates.factor
