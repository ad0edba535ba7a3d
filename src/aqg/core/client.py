"""The client's state machine: a gradient goes in, a message comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqg.core.grids import MAX_RADIUS
from aqg.core.messages import Message, Skip
from aqg.core.mirror import Memory, advance, empty_mirror
from aqg.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.core.recipe import Recipe
    from aqg.core.types import Float64Array, FloatArray


class ClientState(NamedTuple):
    """What a client remembers between rounds.

    Attributes:
        mirror: ``ref_m``, the last gradient the server knows (empty where the recipe keeps none).
        residual: what error feedback still owes (empty where the recipe has none).
        stored_errors: ``‖ε̂_b‖²`` for ``b = 1..b_max`` as they were at the last upload.
        silent_rounds: how many rounds in a row it computed and sent nothing.

    """

    mirror: FloatArray
    residual: FloatArray
    stored_errors: Float64Array
    silent_rounds: int


def init_client(recipe: Recipe, num_params: int, dtype: np.dtype[np.floating]) -> ClientState:
    """Return the state before the first round."""
    return ClientState(
        mirror=empty_mirror(recipe.memory, num_params, dtype),
        residual=np.zeros(num_params if recipe.memory is Memory.FEEDBACK else 0, dtype),
        stored_errors=np.zeros(recipe.quantizer.num_errors),
        silent_rounds=0,
    )


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
) -> tuple[ClientState, Message]:
    """Decide on a bit width for this round's ``gradient`` and encode it.

    Args:
        recipe: the compressor.
        state: the client's state before the round.
        gradient: ``g_m^k``, flat, in the dtype of the state.
        movement: the number the server broadcast with the model.
        key: integers (seed, client, round) that make the round's randomness.

    Returns:
        The state after the round and the message to send. A gradient with NaN, infinity or values
        beyond any grid gives a `Skip` that says so, and leaves the state as it was.

    """
    if gradient.dtype != state.mirror.dtype:
        raise GradientError(
            f"gradient is {gradient.dtype}, the client's state {state.mirror.dtype}"
        )
    delta = innovation_target(recipe, state, gradient)
    innovation = recipe.quantizer.measure(delta)
    if not innovation.in_range:
        return state, Skip(fault=describe_fault(gradient))

    decision = recipe.policy.decide(innovation, movement, state.stored_errors)
    stale = state.silent_rounds >= recipe.max_staleness
    if not (decision.send or stale):
        if recipe.memory is Memory.FEEDBACK:
            state = state._replace(residual=delta)
        return state._replace(silent_rounds=state.silent_rounds + 1), Skip()

    upload = recipe.quantizer.quantize(delta, innovation, int(decision.width), key)
    residual = state.residual
    if recipe.memory is Memory.FEEDBACK:
        residual = delta - upload.values(delta.dtype.type)
    return ClientState(
        mirror=advance(recipe.memory, state.mirror, upload),
        residual=residual,
        stored_errors=innovation.errors,
        silent_rounds=0,
    ), upload


def describe_fault(gradient: FloatArray) -> str:
    """Say why a gradient cannot be quantized."""
    num_bad = int(np.count_nonzero(~np.isfinite(gradient)))
    if num_bad:
        return f"gradient has {num_bad} non-finite values of {gradient.size}"
    return f"innovation exceeds the largest magnitude a grid accepts, {MAX_RADIUS:.3g}"
