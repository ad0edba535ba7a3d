"""A client's round: measure, decide, upload, settle. Written once, over a leading axis of clients.

One client is an axis of length one (`aqg.core.client`); the simulator hands in blocks of many. What
differs between them is the `aqg.core.space.Space` in which vectors live.

`speak` takes the clients' vectors through the stages of their recipe, measures what comes out, lets
the policy decide who sends, and quantizes for those. It changes nothing. Once the uploads have
moved the mirrors, on this side as on the other, `settle` brings the clients' own state up to date.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aqg.core import stage_state
from aqg.core.grids import MAX_RADIUS
from aqg.core.links import Link, Memory, init_link
from aqg.core.policies import Case
from aqg.core.quantizers import Request
from aqg.core.space import with_rows
from aqg.core.stage import Flow, Outcome
from aqg.jit import njit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aqg.core.innovation import Innovation
    from aqg.core.messages import AnyUpload
    from aqg.core.recipe import Recipe
    from aqg.core.space import Array, Space
    from aqg.core.stage import StageState
    from aqg.core.types import BoolArray, Float64Array, FloatArray, IntArray


class Clients(NamedTuple):
    """What ``M`` clients remember between rounds.

    Attributes:
        num_params: ``n``, the length of their vectors.
        link: what client and server both hold.
        silent_rounds: how many rounds in a row each computed and sent nothing, ``(M,)``.
        stages: the state of every stage of the recipe, by the stage's name.

    """

    num_params: int
    link: Link
    silent_rounds: IntArray
    stages: Mapping[str, StageState]


class News(NamedTuple):
    """What a round's clients are told, and what they know besides their vectors.

    Attributes:
        round: ``k``, counted from 1.
        movement: the number that the server broadcast with the model.
        losses: of each client whose vector is given, in their order.
        seed: makes the round's randomness, with client and round.
        first: the number of the first client on the axis.
        level_factors: how many levels each of them uses over the average, where recipes give more
            of them to clients that count more; None: all the same.
        noise: ``b``, the noise that uploads may carry, in their own energy.

    """

    round: int
    movement: float
    losses: Any
    seed: int = 0
    first: int = 0
    level_factors: Float64Array | None = None
    noise: float = 1.0


class Part(NamedTuple):
    """What a block of clients has decided; all arrays have a row for each."""

    clients: IntArray
    vectors: Array
    innovation: Innovation
    widths: IntArray
    senders: IntArray
    silent: IntArray
    faulty: IntArray
    silent_rounds: IntArray
    uploads: list[AnyUpload]
    stages: dict[str, tuple[StageState, StageState]]


class Spoken(NamedTuple):
    """What a block of clients uploads in a round.

    Attributes:
        clients: who sent something, increasing.
        uploads: what each of them sent.
        widths: with how many bits per parameter.
        faults: what was wrong with the vectors of others, as ``(client, text)``.
        part: for `settle`.

    """

    clients: IntArray
    uploads: list[AnyUpload]
    widths: IntArray
    faults: list[tuple[int, str]]
    part: Part


def init_clients(
    recipe: Recipe, num_params: int, dtype: np.dtype[Any], num_clients: int = 1
) -> Clients:
    """Return the state before the first round, in NumPy."""
    stages = {}
    for name, stage in recipe.all_stages.items():
        fields = {field: np.asarray(v) for field, v in stage.init(num_params, dtype).items()}
        stages[name] = {f: np.repeat(v[None], num_clients, axis=0) for f, v in fields.items()}
    link = init_link(recipe.memory, num_params, dtype, num_clients)
    return Clients(num_params, link, np.zeros(num_clients, np.int64), stages)


def join_clients(states: Sequence[Clients]) -> Clients:
    """Return the states of several clients, in NumPy, as one."""
    first = states[0]
    link = Link(
        np.concatenate([state.link.mirror for state in states]),
        np.concatenate([state.link.direction for state in states]),
        np.concatenate([state.link.is_held for state in states]),
    )
    stages = {
        name: {f: np.concatenate([state.stages[name][f] for state in states]) for f in fields}
        for name, fields in first.stages.items()
    }
    silent_rounds = np.concatenate([state.silent_rounds for state in states])
    return Clients(first.num_params, link, silent_rounds, stages)


def split_clients(state: Clients) -> list[Clients]:
    """Return the state of each client."""
    rows = [slice(m, m + 1) for m in range(len(state.silent_rounds))]
    return [
        Clients(
            state.num_params,
            state.link.row(row.start),
            state.silent_rounds[row],
            {n: {f: t[row] for f, t in fields.items()} for n, fields in state.stages.items()},
        )
        for row in rows
    ]


def speak(
    space: Space, recipe: Recipe, state: Clients, clients: IntArray, vectors: Array, news: News
) -> Spoken:
    """Decide for each of these clients what it sends, and encode it; nothing else changes.

    Args:
        space: where vectors live.
        recipe: the compressor.
        state: of all clients.
        clients: whose vectors these are: increasing places on the state's axis.
        vectors: what each has computed, its gradient ``g_m^k`` or another update, ``(m, n)``.
        news: what they know besides.

    """
    flow = Flow(
        vectors,
        news.movement,
        news.losses,
        news.round,
        space,
        level_factors=news.level_factors,
    )
    stages: dict[str, tuple[StageState, StageState]] = {}
    for stage in recipe.stages:
        old = stage_state.take(space, stage, state.stages, clients)
        new, flow = stage_state.before(space, stage, old, flow)
        stages[stage.name] = old, new
    mirrors = state.link.mirror if recipe.memory is Memory.INNOVATION else None
    vectors, innovation = space.measure(recipe.quantizer, flow.vectors, mirrors, clients)
    decision = recipe.policy.decide(Case(innovation, flow.movement, flow.stored_errors))
    silent_rounds = space.host.take(state.silent_rounds, clients).copy()
    senders, silent, faulty = who_speaks(
        decision.send, innovation.in_range, silent_rounds, recipe.max_staleness
    )
    part = Part(
        clients,
        vectors,
        innovation,
        decision.width,
        senders,
        silent,
        faulty,
        silent_rounds,
        [],
        stages,
    )
    faults = _describe(space, clients, vectors, faulty) if len(faulty) else []
    if not len(senders):
        return Spoken(senders, [], senders, faults, part)
    part.uploads.extend(_quantize(space, recipe, part, flow, news))
    widths = np.array([upload.width for upload in part.uploads], np.int64)
    return Spoken(clients[senders], part.uploads, widths, faults, part)


def _quantize(space: Space, recipe: Recipe, part: Part, flow: Flow, news: News) -> list[AnyUpload]:
    """Encode the vectors of those who send."""
    senders = part.senders
    rows = space.rows(part.vectors, senders)
    steps, norms = part.innovation.steps, part.innovation.squared_norm

    def encode(index: int) -> AnyUpload:
        place = senders.item(index)
        width = int(part.widths[place])
        request = Request(
            width=width,
            step=steps.item(place, width - 1) if width <= steps.shape[1] else 0.0,
            squared_norm=norms.item(place),
            key=(news.seed, news.first + part.clients.item(place), news.round),
            advice=() if flow.advice is None else tuple(flow.advice[place].tolist()),
            noise=news.noise,
        )
        return recipe.quantizer.quantize(rows[index], request)

    return space.map(encode, range(len(senders)), len(senders) * rows[0].size)


def settle(space: Space, recipe: Recipe, state: Clients, spoken: Spoken) -> Clients:
    """Return the clients' state after the round; the uploads have moved ``state.link`` already.

    Of a client whose vector was faulty nothing changes.
    """
    part = spoken.part
    silent_rounds = with_rows(state.silent_rounds, part.clients, part.silent_rounds)
    if not recipe.stages:
        return state._replace(silent_rounds=silent_rounds)

    def mirrors() -> Sequence[FloatArray]:
        return space.rows(state.link.mirror, part.clients[part.senders])

    outcome = Outcome(
        part.vectors,
        part.innovation,
        part.senders,
        part.silent,
        part.faulty,
        part.uploads,
        space,
        mirrors,
    )
    stages = dict(state.stages)
    for stage in recipe.stages:
        old, new = part.stages[stage.name]
        after = stage_state.after(space, stage, new, outcome)
        after = stage_state.undo(space, stage, old, after, part.faulty)
        stage_state.store(space, stage, stages, part.clients, old, after)
    return Clients(state.num_params, state.link, silent_rounds, stages)


def who_speaks(
    wanting: BoolArray, in_range: BoolArray, silent_rounds: IntArray, max_staleness: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the places of those who upload, who skip, and whose vectors are out of range.

    A client uploads if it wants to, or if it skipped ``max_staleness`` rounds in a row, which
    ``silent_rounds`` counts; it is brought up to date. All arrays are ``(M,)``.

    >>> silent_rounds = np.array([0, 7, 2, 3])
    >>> wanting, in_range = np.array([1, 0, 0, 1], bool), np.array([1, 1, 1, 0], bool)
    >>> who_speaks(wanting, in_range, silent_rounds, max_staleness=7)
    (array([0, 1]), array([2]), array([3]))
    >>> silent_rounds
    array([0, 0, 3, 3])
    """
    places = np.empty((3, len(wanting)), np.int64)
    num_sending, num_silent, num_faulty = _sort(
        np.ascontiguousarray(wanting), in_range, silent_rounds, max_staleness, places
    )
    return places[0, :num_sending], places[1, :num_silent], places[2, :num_faulty]


@njit()
def _sort(
    wanting: Any, in_range: Any, silent_rounds: Any, max_staleness: Any, places: Any
) -> tuple[int, int, int]:
    num_sending, num_silent, num_faulty = 0, 0, 0
    for m in range(len(wanting)):
        if not in_range[m]:
            places[2, num_faulty] = m
            num_faulty += 1
        elif wanting[m] or silent_rounds[m] >= max_staleness:
            places[0, num_sending] = m
            num_sending += 1
            silent_rounds[m] = 0
        else:
            places[1, num_silent] = m
            num_silent += 1
            silent_rounds[m] += 1
    return num_sending, num_silent, num_faulty


def _describe(
    space: Space, clients: IntArray, vectors: Array, faulty: IntArray
) -> list[tuple[int, str]]:
    rows = space.rows(vectors, faulty)
    members = clients[faulty].tolist()
    return [(client, describe_fault(row)) for client, row in zip(members, rows, strict=True)]


def describe_fault(vector: FloatArray) -> str:
    """Say why a vector cannot be quantized."""
    num_bad = int(np.count_nonzero(~np.isfinite(vector)))
    if num_bad:
        return f"gradient has {num_bad} non-finite values of {vector.size}"
    return f"innovation exceeds the largest magnitude a grid accepts, {MAX_RADIUS:.3g}"
