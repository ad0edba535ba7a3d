"""The client's state machine: a gradient goes in, a message comes out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqg.core.grids import MAX_RADIUS, Grid
from aqg.core.innovation import measure
from aqg.core.messages import Message, Skip, for_one_round
from aqg.core.mirror import Memory, advance, empty_mirror
from aqg.core.quantizers import left_to_owe
from aqg.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.core.recipe import Noisy, Recipe
    from aqg.core.types import Float64Array, FloatArray


class ClientState(NamedTuple):
    """What a client remembers between rounds.

    Attributes:
        mirror: ``ref_m``, the last gradient the server knows (empty where the recipe keeps none).
        residual: what error feedback still owes (empty where the recipe has none).
        average: the running average of its gradients (empty where the recipe keeps none).
        notes: what the recipe's schedule or noise meter remembers (empty where it has neither).
        stored_errors: ``‖ε̂_b‖²`` for ``b = 1..b_max`` as they were at the last upload.
        silent_rounds: how many rounds in a row it computed and sent nothing.

    """

    mirror: FloatArray
    residual: FloatArray
    average: FloatArray
    notes: Float64Array
    stored_errors: Float64Array
    silent_rounds: int


def init_client(recipe: Recipe, num_params: int, dtype: np.dtype[np.floating]) -> ClientState:
    """Return the state before the first round."""
    return ClientState(
        mirror=empty_mirror(recipe.memory, num_params, dtype),
        residual=np.zeros(num_params if recipe.keeps_residual else 0, dtype),
        average=np.zeros(num_params if recipe.keeps_average else 0, dtype),
        notes=recipe.initial_notes(num_params),
        stored_errors=np.zeros(recipe.quantizer.num_errors),
        silent_rounds=0,
    )


def blend(average: FloatArray, gradient: FloatArray, weight: float) -> FloatArray:
    """Return the new running average ``v ← (1 - η)·v + η·g``; the first gradient starts it.

    An average that is zero everywhere has seen nothing yet. A gradient beyond any grid is returned
    as it is, to be refused.

    >>> blend(np.array([2.0, 0.0]), np.array([4.0, 4.0]), weight=0.25)
    array([2.5, 1. ])
    """
    if weight == 1.0 or not is_usable(gradient) or not average.any():
        return gradient.copy()
    # The order of these operations is part of what engines agree on, bit for bit.
    blended: FloatArray = average * average.dtype.type(1.0 - weight)
    blended += gradient * average.dtype.type(weight)
    return blended


def innovation_target(recipe: Recipe, state: ClientState, gradient: FloatArray) -> FloatArray:
    """Return the vector to quantize: ``Δ = g - ref_m``, ``g``, or ``g`` plus the residual."""
    if recipe.memory is Memory.INNOVATION:
        delta: FloatArray = gradient - state.mirror
        return delta
    if recipe.memory is Memory.FEEDBACK:
        owed: FloatArray = gradient + state.residual
        return owed
    return gradient


def client_step(
    recipe: Recipe,
    state: ClientState,
    gradient: FloatArray,
    movement: float,
    key: Sequence[int],
    loss: float = math.nan,
) -> tuple[ClientState, Message]:
    """Decide on a bit width for this round's ``gradient`` and encode it.

    Args:
        recipe: the compressor.
        state: the client's state before the round.
        gradient: ``g_m^k``, flat, in the dtype of the state.
        movement: the number the server broadcast with the model; a recipe with `own_movement`
            uses the client's own instead.
        key: integers (seed, client, round) that make the round's randomness.
        loss: the client's loss, which a recipe with a `schedule` follows.

    Returns:
        The state after the round and the message to send. A gradient with NaN, infinity or values
        beyond any grid gives a `Skip` that says so, and leaves the state as it was (the loss, if
        it is finite, is noted all the same).

    """
    if gradient.dtype != state.mirror.dtype:
        raise GradientError(
            f"gradient is {gradient.dtype}, the client's state {state.mirror.dtype}"
        )
    if recipe.noisy is not None:
        return _step_by_noise(recipe, recipe.noisy, state, gradient, movement, key)
    if recipe.schedule is not None:
        state = state._replace(notes=recipe.schedule.observe(state.notes, loss))
        movement = recipe.schedule.signal(state.notes)
    vector = gradient
    if recipe.keeps_average:
        vector = blend(state.average, gradient, recipe.averaging)
        if recipe.own_movement:
            movement = own_movement(vector, state.average)
    if recipe.movement.widest > 1:
        movement = float(recipe.movement.widened(movement, energies(state.mirror)))
    delta = innovation_target(recipe, state, vector)
    innovation = recipe.quantizer.measure(delta)
    if not innovation.in_range:
        return state, Skip(fault=describe_fault(gradient))

    state = state._replace(average=vector if recipe.keeps_average else state.average)
    decision = recipe.policy.decide(innovation, movement, state.stored_errors)
    stale = state.silent_rounds >= recipe.max_staleness
    if not (decision.send or stale):
        if recipe.memory is Memory.FEEDBACK:
            state = state._replace(residual=delta)
        return state._replace(silent_rounds=state.silent_rounds + 1), Skip()

    upload = recipe.quantizer.quantize(delta, innovation, int(decision.width), key)
    residual = state.residual
    if recipe.memory is Memory.FEEDBACK:
        residual = left_to_owe(recipe.quantizer, delta, upload)
    return ClientState(
        mirror=advance(recipe.memory, state.mirror, upload),
        residual=residual,
        average=state.average,
        notes=state.notes,
        stored_errors=innovation.errors,
        silent_rounds=0,
    ), upload


def _step_by_noise(
    recipe: Recipe,
    noisy: Noisy,
    state: ClientState,
    gradient: FloatArray,
    movement: float,
    key: Sequence[int],
) -> tuple[ClientState, Message]:
    """Take the step of the recipe for calm updates, or of that for noisy ones."""
    if not is_usable(gradient):
        return state, Skip(fault=describe_fault(gradient))
    notes = noisy.meter.observe(state.notes, gradient, round_number=key[-1])
    if not noisy.meter.is_noisy(notes):
        after, message = client_step(replace(recipe, noisy=None), state, gradient, movement, key)
        return after._replace(notes=notes), message
    before = state
    if not (noisy.meter.is_noisy(state.notes) and noisy.owes(notes)):  # an old debt is history
        before = state._replace(residual=np.zeros_like(state.residual))
    trickle = replace(noisy.recipe, quantizer=noisy.quantizer(notes))
    after, message = client_step(trickle, before, gradient, movement, key)
    if isinstance(message, Skip):
        return state, message
    return after._replace(
        mirror=np.zeros_like(state.mirror),
        notes=notes,
        stored_errors=np.zeros_like(state.stored_errors),
    ), for_one_round(message)


def is_usable(gradient: FloatArray) -> bool:
    """Tell whether every value is finite and within what a grid accepts."""
    return bool(np.abs(gradient).max(initial=0) <= MAX_RADIUS)


def own_movement(vector: FloatArray, average: FloatArray) -> float:
    """Return ``‖v^k - v^{k-1}‖²``, how far the client's own vector moved; zero at the first one."""
    if not average.any():
        return 0.0
    return float(energies(vector - average))


def energies(vectors: FloatArray) -> Float64Array:
    """Return the squared norm of a vector, or of each row."""
    return measure(vectors, Grid.MIDTREAD, max_width=0).squared_norm


def describe_fault(gradient: FloatArray) -> str:
    """Say why a gradient cannot be quantized."""
    num_bad = int(np.count_nonzero(~np.isfinite(gradient)))
    if num_bad:
        return f"gradient has {num_bad} non-finite values of {gradient.size}"
    return f"innovation exceeds the largest magnitude a grid accepts, {MAX_RADIUS:.3g}"
