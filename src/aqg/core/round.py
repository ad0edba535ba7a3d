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
from aqg.core.messages import AnyUpload, for_one_round
from aqg.core.policies import Case
from aqg.core.quantizers import Request
from aqg.core.space import with_rows
from aqg.core.stage import Flow, Outcome
from aqg.jit import njit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aqg.core.innovation import Innovation
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

    """

    round: int
    movement: float
    losses: Any
    seed: int = 0
    first: int = 0
    level_factors: Float64Array | None = None


class Part(NamedTuple):
    """What the clients in one mode have decided; all arrays have a row for each."""

    way: Recipe
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
        parts: for `settle`.
        switched: the switch's state before and after, of the clients in ``asked``.
        asked: whose vectors could be used by the switch.

    """

    clients: IntArray
    uploads: list[AnyUpload]
    widths: IntArray
    faults: list[tuple[int, str]]
    parts: list[Part]
    switched: tuple[StageState, StageState] | None
    asked: IntArray


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
    if recipe.switch is None:
        part = _speak_one_way(space, recipe, recipe, state, clients, flow, news, None)
        return _join(space, [part], [], None, clients)
    usable = space.usable(vectors)
    faults: list[tuple[int, str]] = []
    if not usable.all():
        refused, kept = np.flatnonzero(~usable), np.flatnonzero(usable)
        faults = _describe(space, clients, vectors, refused)
        flow, clients = flow.of(kept), clients[kept]
    if not len(clients):
        return _join(space, [], faults, None, clients)
    before = stage_state.take(space, recipe.switch, state.stages, clients)
    after, flow = recipe.switch.before(before, flow)
    parts = []
    for number in np.unique(after["branch"]).tolist():
        places = np.flatnonzero(after["branch"] == number)
        enters = (before["branch"][places] != number) & (number > 0)
        members, own = clients, flow
        if len(places) < len(clients):
            members, own = clients[places], flow.of(places)
        way = recipe.ways[number]
        part = _speak_one_way(space, recipe, way, state, members, own, news, enters)
        parts.append(part)
    return _join(space, parts, faults, (before, after), clients)


def _speak_one_way(
    space: Space,
    recipe: Recipe,
    way: Recipe,
    state: Clients,
    clients: IntArray,
    flow: Flow,
    news: News,
    enters: BoolArray | None,
) -> Part:
    """Take clients through one way's stages; ``enters`` marks those who begin with them as new."""
    stages: dict[str, tuple[StageState, StageState]] = {}
    for stage in way.stages:
        old = stage_state.take(space, stage, state.stages, clients)
        fresh: StageState = old
        if enters is not None and enters.any():
            fresh = stage_state.begin_anew(space, stage, old, enters, flow.vectors)
        new, flow = stage_state.before(space, stage, fresh, flow)
        stages[stage.name] = old, new
    mirrors = state.link.mirror if way.memory is Memory.INNOVATION else None
    vectors, innovation = space.measure(way.quantizer, flow.vectors, mirrors, clients)
    decision = way.policy.decide(Case(innovation, flow.movement, flow.stored_errors))
    silent_rounds = space.host.take(state.silent_rounds, clients).copy()
    senders, silent, faulty = who_speaks(
        decision.send, innovation.in_range, silent_rounds, way.max_staleness
    )
    part = Part(
        way,
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
    if len(senders):
        uploads = _quantize(space, part, flow, news)
        if recipe.memory.keeps_mirror and not way.memory.keeps_mirror:
            uploads = [for_one_round(upload) for upload in uploads]
        part.uploads.extend(uploads)
    return part


def _quantize(space: Space, part: Part, flow: Flow, news: News) -> list[AnyUpload]:
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
        )
        return part.way.quantizer.quantize(rows[index], request)

    return space.map(encode, range(len(senders)), len(senders) * rows[0].size)


def _join(
    space: Space,
    parts: list[Part],
    faults: list[tuple[int, str]],
    switched: tuple[StageState, StageState] | None,
    asked: IntArray,
) -> Spoken:
    """Put together what the clients in all modes upload, in the clients' order."""
    for part in parts:
        if len(part.faulty):
            faults += _describe(space, part.clients, part.vectors, part.faulty)
            faults.sort()
    if len(parts) == 1:
        part = parts[0]
        if not part.uploads:
            return Spoken(part.senders, [], part.senders, faults, parts, switched, asked)
        clients, widths = part.clients[part.senders], part.widths[part.senders]
        return Spoken(clients, part.uploads, widths, faults, parts, switched, asked)
    clients = np.concatenate([asked[:0], *(part.clients[part.senders] for part in parts)])
    widths = np.concatenate([asked[:0], *(part.widths[part.senders] for part in parts)])
    uploads = [upload for part in parts for upload in part.uploads]
    order = np.argsort(clients)
    in_order = [uploads[index] for index in order.tolist()]
    return Spoken(clients[order], in_order, widths[order], faults, parts, switched, asked)


def settle(space: Space, recipe: Recipe, state: Clients, spoken: Spoken) -> Clients:
    """Return the clients' state after the round; the uploads have moved ``state.link`` already.

    Of a client whose vector was faulty nothing changes.
    """
    stages, silent_rounds = dict(state.stages), state.silent_rounds
    for part in spoken.parts:
        silent_rounds = with_rows(silent_rounds, part.clients, part.silent_rounds)
        if not part.way.stages:
            continue

        def mirrors(senders: IntArray = part.clients[part.senders]) -> Sequence[FloatArray]:
            return space.rows(state.link.mirror, senders)

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
        for stage in part.way.stages:
            old, new = part.stages[stage.name]
            after = stage_state.after(space, stage, new, outcome)
            after = stage_state.undo(space, stage, old, after, part.faulty)
            stage_state.store(space, stage, stages, part.clients, old, after)
    if spoken.switched is not None:
        _settle_switch(space, recipe, stages, spoken)
    return Clients(state.num_params, state.link, silent_rounds, stages)


def _settle_switch(
    space: Space, recipe: Recipe, stages: dict[str, StageState], spoken: Spoken
) -> None:
    """Note which way everyone went, and let stages begin anew that a client has left behind.

    An upload that counts in its round alone makes both ends forget the mirror; the stages of the
    recipe's own way, which may know of it, forget with them.
    """
    assert recipe.switch is not None
    assert spoken.switched is not None
    before, after = spoken.switched
    faulty = np.concatenate([part.clients[part.faulty] for part in spoken.parts])
    is_faulty = np.isin(spoken.asked, faulty)
    left, entered = before["branch"], after["branch"]
    ways, vectors = recipe.ways, spoken.parts[0].vectors
    for number, other in set(zip(left.tolist(), entered.tolist(), strict=True)):
        if number > 0 and number != other:
            gone = spoken.asked[(left == number) & (entered == other) & ~is_faulty]
            stage_state.forget(space, ways[number], ways[other], stages, gone, vectors)
    if recipe.memory.keeps_mirror:
        for part in spoken.parts:
            if not part.way.memory.keeps_mirror:
                senders = part.clients[part.senders]
                stage_state.forget(space, recipe, part.way, stages, senders, vectors)
    switch = recipe.switch
    after = stage_state.undo(space, switch, before, after, np.flatnonzero(is_faulty))
    stage_state.store(space, switch, stages, spoken.asked, before, after)


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
