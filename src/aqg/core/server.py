"""The server's state machine: messages go in, a model comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqg.core.messages import Broadcast, Message, Skip, Upload
from aqg.core.mirror import advance, empty_mirror
from aqg.core.optimizers import SGD, OptimizerState, ServerOptimizer
from aqg.errors import MessageError

if TYPE_CHECKING:
    from aqg.core.recipe import Recipe
    from aqg.core.types import Float64Array, FloatArray


_NOTHING = np.zeros(0)


class ServerState(NamedTuple):
    """What the server remembers between messages.

    Attributes:
        round: ``k``, the round in progress, counted from 1.
        parameters: the model ``θ^k``.
        mirrors: ``ref_m`` of every client.
        total: ``Σ_m ref_m`` as a running sum in float64; where the recipe keeps no mirrors, the sum
            of this round's uploads.
        history: ``‖direction‖²/M²`` of the last steps, newest first, times `fresh_share`.
        optimizer: what the server optimizer remembers.
        passing: the sum of what counts in this round alone, or nothing.

    """

    round: int
    parameters: FloatArray
    mirrors: tuple[FloatArray, ...]
    total: Float64Array
    history: tuple[float, ...]
    optimizer: OptimizerState
    passing: Float64Array = _NOTHING


_PLAIN = SGD()


def init_server(
    recipe: Recipe,
    parameters: FloatArray,
    num_clients: int,
    optimizer: ServerOptimizer = _PLAIN,
) -> ServerState:
    """Return the state before the first round, with every ``ref_m`` zero."""
    mirror = empty_mirror(recipe.memory, len(parameters), parameters.dtype)
    return ServerState(
        round=1,
        parameters=parameters,
        mirrors=(mirror,) * num_clients,
        total=np.zeros(len(parameters)),
        history=(),
        optimizer=optimizer.init(len(parameters)),
    )


def broadcast(recipe: Recipe, state: ServerState) -> Broadcast:
    """Return what every client is told at the start of the round."""
    return Broadcast(state.round, state.parameters, recipe.movement.of(state.history))


def receive(
    recipe: Recipe, state: ServerState, client: int, message: Message, weight: float = 1.0
) -> ServerState:
    """Take one client's message: ``ref_m ← ref_m + Q_b(Δ)``, and the sum with it.

    With a ``weight`` other than 1, the same in every round, the sum is ``Σ_m weight_m·ref_m``.
    The whole message is checked before anything changes; a bad one raises `MessageError`.
    """
    if isinstance(message, Skip):
        return state
    num_params = len(state.parameters)
    if len(message) != num_params:
        raise MessageError(
            f"client {client} sent {len(message)} coordinates; the model has {num_params}"
        )
    message.validate()
    if not recipe.memory.keeps_mirror:
        return state._replace(total=state.total + weight * message.values(np.float64))
    old = state.mirrors[client]
    if isinstance(message, Upload) and not message.lasting:
        if recipe.noisy is None:
            raise MessageError(f"client {client} sent for one round; the recipe is to remember")
        passing = state.passing if len(state.passing) else np.zeros(num_params)
        state = state._replace(passing=passing + weight * message.values(np.float64))
        new = np.zeros_like(old)
    else:
        new = advance(recipe.memory, old, message)
    mirrors = (*state.mirrors[:client], new, *state.mirrors[client + 1 :])
    change = new.astype(np.float64) - old
    return state._replace(mirrors=mirrors, total=state.total + weight * change)


def finish_round(
    recipe: Recipe,
    state: ServerState,
    step_size: float,
    dropout_rate: float = 0.0,
    sampled: float = 1.0,
    optimizer: ServerOptimizer = _PLAIN,
) -> ServerState:
    """Take the step ``θ^{k+1} = θ^k - α Σ_m ref_m``, amplified by ``1/(1-p)`` in Algorithm 2.

    Another optimizer than `SGD` turns the sum into another vector first. The movement still comes
    from the sum, which has the scale of the clients' vectors, times the optimizer's `fresh_share`.
    """
    direction = state.total * amplification(recipe, dropout_rate, sampled)
    if recipe.noisy is not None and len(state.passing):
        factor = amplification(recipe.noisy.recipe, dropout_rate, sampled)
        direction = direction + state.passing * factor
    optimizer_state, update = optimizer.step(state.optimizer, direction)
    with np.errstate(over="ignore", invalid="ignore"):  # a diverging run is a result, not an error
        parameters = state.parameters - (step_size * update).astype(state.parameters.dtype)
        step = float(direction @ direction) / len(state.mirrors) ** 2
        step *= optimizer.fresh_share
    return ServerState(
        round=state.round + 1,
        parameters=parameters,
        mirrors=state.mirrors,
        total=state.total if recipe.memory.keeps_mirror else np.zeros_like(state.total),
        history=recipe.movement.extend(state.history, step),
        optimizer=optimizer_state,
    )


def amplification(recipe: Recipe, dropout_rate: float, sampled: float = 1.0) -> float:
    """Return the factor on the server's sum: 1, or ``1/(1-p)`` for Augmented AQG.

    Where the server keeps no ``ref_m`` and asks only the fraction ``sampled`` of the clients, the
    sum over these is divided by it: an unbiased estimate of the sum over all.
    """
    factor = 1.0 / (1.0 - dropout_rate) if recipe.amplify_dropouts else 1.0
    return factor if recipe.memory.keeps_mirror else factor / sampled
