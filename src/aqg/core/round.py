"""A client's round: measure, decide, upload, settle. Written once, over a leading axis of clients.

One client is an axis of length one (`respond`); the simulator hands in blocks of many.

`compress` takes the clients' vectors through the stages of their recipe, and corrects the clients'
tracks towards what comes out (`aqg.core.track.correct`). It changes nothing. Once the uploads have
moved the mirrors, on this side as on the other, `settle` brings the clients' own state up to date.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aqg.core.grids import MAX_RADIUS
from aqg.core.messages import AnyUpload, Message, Skip
from aqg.core.recipe import Recipe
from aqg.core.space import NumpySpace, with_rows
from aqg.core.stages import StageState, call_before, settle_stage
from aqg.core.track import Flow, Memory, Outcome, Track, correct, follow, init_mirrors
from aqg.core.types import FloatArray, IntArray, is_whole
from aqg.errors import ConfigError, GradientError


class Clients(NamedTuple):
    """What ``M`` clients remember between rounds."""

    num_params: int  # ``n``, the length of their vectors
    track: Track  # the mirrors, which client and server both hold
    skipped_rounds: IntArray  # how many rounds in a row each computed and sent nothing, ``(M,)``
    stages: Mapping[str, StageState]  # the state of every stage of the recipe, by the stage's name


class Compressed(NamedTuple):
    """What a block of clients uploads in a round."""

    clients: IntArray  # all of the block
    senders: IntArray  # who of them sent something, increasing
    uploads: Sequence[AnyUpload]  # what each of these sent
    # what was wrong with the vectors of others, as ``(client, text)``
    faults: list[tuple[int, str]]
    outcome: Outcome  # what became of the vectors
    # the state of each stage, before the round and on the way
    stages: dict[str, tuple[StageState, StageState]]


def init_clients(
    recipe: Recipe, num_params: int, dtype: np.dtype[Any], num_clients: int = 1
) -> Clients:
    stages = {}
    for name, stage in recipe.all_stages.items():
        fields = {field: np.asarray(v) for field, v in stage.init(num_params, dtype).items()}
        stages[name] = {f: np.repeat(v[None], num_clients, axis=0) for f, v in fields.items()}
    track = init_mirrors(recipe.memory, num_params, dtype, num_clients)
    return Clients(num_params, track, np.zeros(num_clients, np.int64), stages)


def compress(recipe: Recipe, state: Clients, clients: IntArray, flow: Flow) -> Compressed:
    """Decide for each of these clients what it sends, and quantize it; nothing else changes.

    The flow holds what each of ``clients``, increasing places on the state's axis, has computed:
    its gradient ``g_m^k`` or another update.
    """
    space = flow.space
    stages: dict[str, tuple[StageState, StageState]] = {}
    for stage in recipe.stages:
        home = stage.home(space)
        old = {f: home.take(column, clients) for f, column in state.stages[stage.name].items()}
        new, flow = call_before(stage, old, flow)
        stages[stage.name] = old, new
    positions = state.track.position if recipe.memory is Memory.INNOVATION else None
    skipped_rounds = space.host.take(state.skipped_rounds, clients)
    found = correct(recipe, flow, positions, clients, skipped_rounds)
    faults: list[tuple[int, str]] = []
    if len(found.faulty):
        members, rows = clients[found.faulty].tolist(), space.rows(found.vectors, found.faulty)
        faults = [(m, describe_fault(row)) for m, row in zip(members, rows, strict=True)]
    return Compressed(clients, clients[found.senders], found.uploads, faults, found, stages)


def settle(recipe: Recipe, state: Clients, sent: Compressed) -> Clients:
    """Return the clients' state after the round; the uploads have moved ``state.track`` already.

    Of a client whose vector was faulty nothing changes.
    """
    found = sent.outcome
    skipped_rounds = with_rows(state.skipped_rounds, sent.clients, found.skipped_rounds)

    def mirrors() -> Sequence[FloatArray]:
        return found.space.rows(state.track.position, sent.senders)

    outcome, stages = found._replace(mirrors=mirrors), dict(state.stages)
    for stage in recipe.stages:
        settle_stage(stage, stages, sent.clients, sent.stages[stage.name], outcome)
    return Clients(state.num_params, state.track, skipped_rounds, stages)


def describe_fault(vector: FloatArray) -> str:
    if num_bad := int(np.count_nonzero(~np.isfinite(vector))):
        return f"gradient has {num_bad} non-finite values of {vector.size}"
    return f"innovation exceeds the largest magnitude a grid accepts, {MAX_RADIUS:.3g}"


ClientState = Clients
"""What a client remembers between rounds: `Clients` with an axis of length one."""

_SPACE = NumpySpace()
_FIRST = np.arange(1)
_PRECISIONS = ("float32", "float64")


def init_client(
    recipe: Recipe, num_params: int, dtype: np.dtype[np.floating] | str = "float32"
) -> ClientState:
    if not is_whole(num_params) or num_params < 1:
        raise ConfigError(f"num_params is {num_params!r}; it must be a whole number above 0")
    check_precision(np.dtype(dtype))
    return init_clients(recipe, int(num_params), np.dtype(dtype))


def check_precision(dtype: np.dtype[np.generic]) -> None:
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

    ``key`` are integers (seed, client, round) that make the round's randomness; ``noise`` is what
    the upload may carry, as the server says; ``level_factor`` is how many levels the client uses
    over the average, in recipes that give more of them to clients that count more.

    A gradient with NaN, infinity or values beyond any grid gives a `Skip` that says so, and leaves
    the state as it was (the loss, if it is finite, is noted all the same).
    """
    check_gradient(state, gradient)
    seed, client, round_number = key
    factors = None if level_factor == 1 else np.array([level_factor])
    terms = round_number, seed, client, np.array([loss]), factors, noise
    sent = compress(recipe, state, _FIRST, Flow(gradient[None], movement, _SPACE, *terms))
    track = state.track
    message: Message = Skip(sent.faults[0][1]) if sent.faults else Skip()
    if sent.uploads:
        message = sent.uploads[0]
        track = follow(track, message, memory=recipe.memory)
    return settle(recipe, state._replace(track=track), sent), message


def check_gradient(state: ClientState, gradient: object) -> None:
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
