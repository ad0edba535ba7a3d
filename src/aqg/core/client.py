"""One client: a gradient goes in, a message comes out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from aqg.core.messages import Message, Skip
from aqg.core.recipe import Recipe
from aqg.core.round import Clients, News, compress, init_clients, settle
from aqg.core.space import NumpySpace
from aqg.core.track import follow_one
from aqg.core.types import FloatArray, is_whole
from aqg.errors import ConfigError, GradientError

ClientState = Clients
"""What a client remembers between rounds: `aqg.core.round.Clients` with an axis of length one."""

_SPACE = NumpySpace()
_FIRST = np.arange(1)
_PRECISIONS = ("float32", "float64")


def init_client(
    recipe: Recipe, num_params: int, dtype: np.dtype[np.floating] | str = "float32"
) -> ClientState:
    """Return the state before the first round."""
    if not is_whole(num_params) or num_params < 1:
        raise ConfigError(f"num_params is {num_params!r}; it must be a whole number above 0")
    check_precision(np.dtype(dtype))
    return init_clients(recipe, int(num_params), np.dtype(dtype))


def check_precision(dtype: np.dtype[np.generic]) -> None:
    """Raise unless vectors of this type can be compressed."""
    if dtype.name not in _PRECISIONS:
        raise ConfigError(f"dtype is {dtype.name}; choose from {', '.join(_PRECISIONS)}")


def respond(
    recipe: Recipe,
    state: ClientState,
    gradient: FloatArray,
    movement: float,
    key: Sequence[int],
    loss: float = math.nan,
    level_factor: float = 1.0,
    noise: float = 1.0,
) -> tuple[ClientState, Message]:
    """Decide what to send of this round's ``gradient``, and encode it.

    Args:
        recipe: the compressor.
        state: the client's state before the round.
        gradient: ``g_m^k``, flat, in the precision of the state.
        movement: the number that the server broadcast with the model.
        key: integers (seed, client, round) that make the round's randomness.
        loss: the client's loss, which some recipes follow.
        level_factor: how many levels it uses over the average, in recipes that give more of them
            to clients that count more.
        noise: the noise that the upload may carry, as the server says.

    Returns:
        The state after the round and the message to send. A gradient with NaN, infinity or values
        beyond any grid gives a `Skip` that says so, and leaves the state as it was (the loss, if
        it is finite, is noted all the same).
    """
    check_gradient(state, gradient)
    seed, client, round_number = key
    factors = None if level_factor == 1 else np.array([level_factor])
    news = News(round_number, movement, np.array([loss]), seed, client, factors, noise)
    sent = compress(_SPACE, recipe, state, _FIRST, gradient[None], news)
    track = state.track
    message: Message = Skip(sent.faults[0][1]) if sent.faults else Skip()
    if sent.uploads:
        message = sent.uploads[0]
        track = follow_one(recipe.memory, track, message)
    return settle(_SPACE, recipe, state._replace(track=track), sent), message


def check_gradient(state: ClientState, gradient: object) -> None:
    """Raise `GradientError` unless this is a vector that the client's state is made for."""
    if not isinstance(gradient, np.ndarray):
        raise GradientError(f"a gradient is a NumPy array, not {type(gradient).__name__}")
    dtype = state.track.position.dtype
    if gradient.ndim != 1:
        raise GradientError(f"a gradient is flat, of shape (n,), not {gradient.shape}")
    if gradient.dtype != dtype:
        raise GradientError(f"gradient is {gradient.dtype}, the client's state {dtype}")
    if len(gradient) != state.num_params:
        raise GradientError(
            f"gradient has {len(gradient)} values, the client's state is for {state.num_params}"
        )
