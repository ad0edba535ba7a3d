"""A client's round: measure, decide, upload, settle. Written once, over a leading axis of clients.

One client is an axis of length one (`respond`); the simulator hands in blocks of many. What
differs between them is the `aqg.core.space.Space` in which vectors live.

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
from aqg.core.space import Array, NumpySpace, Space, with_rows
from aqg.core.stages import Flow, Outcome, StageState, call_before, settle_stage
from aqg.core.track import Gaps, Memory, Terms, Track, correct, follow, init_mirrors
from aqg.core.types import Float64Array, FloatArray, IntArray, is_whole
from aqg.errors import ConfigError, GradientError


class Clients(NamedTuple):
    """What ``M`` clients remember between rounds."""

    num_params: int  # ``n``, the length of their vectors
    track: Track  # the mirrors, which client and server both hold
    skipped_rounds: IntArray  # how many rounds in a row each computed and sent nothing, ``(M,)``
    stages: Mapping[str, StageState]  # the state of every stage of the recipe, by the stage's name


class News(NamedTuple):
    """What a round's clients receive, and what they know besides their vectors."""

    round: int  # ``k``, counted from 1
    movement: float  # the number that the server broadcast with the model
    losses: Any  # of each client whose vector is given, in their order
    seed: int = 0  # makes the round's randomness, with client and round
    first: int = 0  # the number of the first client on the axis
    # how many levels each of them uses over the average, where recipes give more of them to clients
    # that count more; None: all the same
    level_factors: Float64Array | None = None
    noise: float = 1.0  # ``b``, the noise that uploads may carry, in their own energy


class Compressed(NamedTuple):
    """What a block of clients uploads in a round."""

    senders: IntArray  # who sent something, increasing
    uploads: list[AnyUpload]  # what each of them sent
    widths: IntArray  # with how many bits per parameter
    # what was wrong with the vectors of others, as ``(client, text)``
    faults: list[tuple[int, str]]
    clients: IntArray  # all of the block
    gaps: Gaps  # what was found of their vectors
    # the state of each stage, before the round and on the way
    stages: dict[str, tuple[StageState, StageState]]
    noise: float  # what the server allowed


def init_clients(
    recipe: Recipe, num_params: int, dtype: np.dtype[Any], num_clients: int = 1
) -> Clients:
    stages = {}
    for name, stage in recipe.all_stages.items():
        fields = {field: np.asarray(v) for field, v in stage.init(num_params, dtype).items()}
        stages[name] = {f: np.repeat(v[None], num_clients, axis=0) for f, v in fields.items()}
    track = init_mirrors(recipe.memory, num_params, dtype, num_clients)
    return Clients(num_params, track, np.zeros(num_clients, np.int64), stages)


def join_clients(states: Sequence[Clients]) -> Clients:
    first = states[0]
    track = Track(*map(np.concatenate, zip(*(state.track for state in states), strict=True)))
    stages = {
        name: {f: np.concatenate([state.stages[name][f] for state in states]) for f in fields}
        for name, fields in first.stages.items()
    }
    skipped_rounds = np.concatenate([state.skipped_rounds for state in states])
    return Clients(first.num_params, track, skipped_rounds, stages)


def split_clients(state: Clients) -> list[Clients]:
    def split(m: int) -> Clients:
        row = slice(m, m + 1)
        stages = {n: {f: t[row] for f, t in fields.items()} for n, fields in state.stages.items()}
        return Clients(state.num_params, state.track.row(m), state.skipped_rounds[row], stages)

    return [split(m) for m in range(len(state.skipped_rounds))]


def compress(
    space: Space, recipe: Recipe, state: Clients, clients: IntArray, vectors: Array, news: News
) -> Compressed:
    """Decide for each of these clients what it sends, and quantize it; nothing else changes.

    ``vectors`` are what each of ``clients``, increasing places on the state's axis, has computed:
    its gradient ``g_m^k`` or another update, ``(m, n)``.
    """
    flow = Flow(
        vectors, news.movement, news.losses, news.round, space, level_factors=news.level_factors
    )
    stages: dict[str, tuple[StageState, StageState]] = {}
    for stage in recipe.stages:
        home = stage.home(space)
        old = {f: home.take(column, clients) for f, column in state.stages[stage.name].items()}
        new, flow = call_before(space, stage, old, flow)
        stages[stage.name] = old, new
    positions = state.track.position if recipe.memory is Memory.INNOVATION else None
    terms = Terms(
        flow.movement,
        space.host.take(state.skipped_rounds, clients),
        (news.seed, news.first, news.round),
        news.noise,
        flow.stored_errors,
    )
    uploads, gaps = correct(space, recipe, positions, clients, flow.vectors, terms)
    faults: list[tuple[int, str]] = []
    if len(gaps.faulty):
        members, rows = clients[gaps.faulty].tolist(), space.rows(gaps.vectors, gaps.faulty)
        faults = [(m, describe_fault(row)) for m, row in zip(members, rows, strict=True)]
    widths = np.array([upload.width for upload in uploads], np.int64)
    return Compressed(
        clients[gaps.senders], uploads, widths, faults, clients, gaps, stages, news.noise
    )


def settle(space: Space, recipe: Recipe, state: Clients, sent: Compressed) -> Clients:
    """Return the clients' state after the round; the uploads have moved ``state.track`` already.

    Of a client whose vector was faulty nothing changes.
    """
    gaps = sent.gaps
    skipped_rounds = with_rows(state.skipped_rounds, sent.clients, gaps.skipped_rounds)
    if not recipe.stages:
        return state._replace(skipped_rounds=skipped_rounds)

    def mirrors() -> Sequence[FloatArray]:
        return space.rows(state.track.position, sent.senders)

    outcome = Outcome(*gaps[:5], sent.uploads, space, mirrors, sent.noise)
    stages = dict(state.stages)
    for stage in recipe.stages:
        settle_stage(space, stage, stages, sent.clients, sent.stages[stage.name], outcome)
    return Clients(state.num_params, state.track, skipped_rounds, stages)


def describe_fault(vector: FloatArray) -> str:
    num_bad = int(np.count_nonzero(~np.isfinite(vector)))
    if num_bad:
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
    news = News(round_number, movement, np.array([loss]), seed, client, factors, noise)
    sent = compress(_SPACE, recipe, state, _FIRST, gradient[None], news)
    track = state.track
    message: Message = Skip(sent.faults[0][1]) if sent.faults else Skip()
    if sent.uploads:
        message = sent.uploads[0]
        track = follow(track, message, memory=recipe.memory)
    return settle(_SPACE, recipe, state._replace(track=track), sent), message


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
