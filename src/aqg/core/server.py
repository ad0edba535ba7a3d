"""The server: messages go in, a model comes out.

`take_in` and `step` are the server's round, over a leading axis of clients as in `aqg.core.round`;
the simulator calls them on tables of all clients. Below them, `init_server`, `broadcast`, `hear`
and `finish_round` are a server that hears one client at a time and holds a `Link` for each.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aqg.core.client import check_precision
from aqg.core.downlink import (
    Condensed,
    Downlink,
    DownlinkState,
    Exact,
    Full,
    Published,
    condense,
    init_downlink,
    noted,
    shortened,
)
from aqg.core.links import Link, init_link, is_lasting, move_directions
from aqg.core.messages import Broadcast, Message, Skip, is_message
from aqg.core.optimizers import SGD, OptimizerState, ServerOptimizer
from aqg.core.per_client import PerClient
from aqg.core.public import Change, Entry, Part, Rates, make_direction
from aqg.core.space import NumpySpace
from aqg.core.step_sizes import Fixed, StepRule, StepState, is_short
from aqg.core.types import is_whole
from aqg.errors import ConfigError, MessageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.core.messages import AnyUpload
    from aqg.core.recipe import Recipe
    from aqg.core.space import Array, Space
    from aqg.core.types import Float64Array, FloatArray, IntArray

_SPACE = NumpySpace(in_place=True)
"""Everything that is written to below is a copy of the server's own."""
_PLAIN = SGD()
_FULL = Full()
_FIXED = Fixed()
_FINEST = 1e-6
"""The least part of the usual tolerance on the public sum."""


class Model(NamedTuple):
    """The model and what moves it.

    Attributes:
        round: ``k``, the round in progress, counted from 1.
        parameters: ``θ^k``.
        total: ``Σ_m w_m ref_m`` as a running sum in float64; where the recipe keeps no mirrors, the
            sum of this round's uploads.
        passing: the sum of what counts in this round alone, beside mirrors; None where nothing is.
        history: ``‖direction‖²/M²`` of the last steps, newest first, times the optimizer's
            `fresh_share`.
        last_step: ``‖direction‖²`` of the last step, while it is on its way into the history.
        optimizer: what the server optimizer remembers.
        downlink: what is published of the sums; None where clients receive the whole model.
        is_moved: whether the sum that lasts has changed since the last step.
        step: what the rule for step sizes remembers; None where it needs nothing.

    """

    round: int
    parameters: Array
    total: Array
    passing: Array | None
    history: tuple[float, ...]
    last_step: Array | None
    optimizer: OptimizerState
    downlink: DownlinkState | None = None
    is_moved: bool = False
    step: StepState | None = None

    @property
    def averaged(self) -> Array:
        """The mean of the models so far, where one is kept; else the model. See `step_sizes`."""
        is_kept = self.step is not None and self.step.num_models > 0
        return self.step.mean if is_kept else self.parameters  # type: ignore[union-attr]


def init_model(
    parameters: FloatArray,
    optimizer: ServerOptimizer,
    downlink: DownlinkState | None = None,
    rule: StepRule = _FIXED,
) -> Model:
    """Return the model before the first round."""
    return Model(
        round=1,
        parameters=parameters,
        total=np.zeros(len(parameters)),
        passing=None,
        history=(),
        last_step=None,
        optimizer=optimizer.init(len(parameters)),
        downlink=downlink,
        step=rule.init(parameters),
    )


def take_in(
    space: Space,
    recipe: Recipe,
    model: Model,
    link: Link,
    clients: IntArray,
    uploads: Sequence[AnyUpload],
    weights: Float64Array,
) -> Model:
    """Take in uploads: ``ref_m ← ref_m + Q_b(Δ)``, and the sum with it, in the order given.

    An upload that does not last is added to the passing sum, and both ends forget ``ref_m``. The
    arrays of model and link are the space's own and written to.

    Args:
        space: where vectors live.
        recipe: the compressor.
        model: whose sums are moved.
        link: of all clients.
        clients: who sent, as places on the link's axis.
        uploads: what each of them sent.
        weights: ``w_m`` of each of them.

    """
    if not recipe.memory.keeps_mirror:
        space.add_values(model.total, uploads, weights)
        return model
    if recipe.switch is None:  # all uploads last
        space.move(recipe.memory, link.mirror, model.total, clients, uploads, weights)
        link.is_held[clients] = True
        move_directions(link.direction, clients.tolist(), uploads)
        return model._replace(is_moved=True)
    passing, is_moved = model.passing, model.is_moved
    runs = groupby(range(len(uploads)), lambda index: is_lasting(uploads[index]))
    for lasts, members in runs:
        indices = list(members)
        run = slice(indices[0], indices[-1] + 1)
        senders, sent, factors = clients[run], uploads[run], weights[run]
        if lasts:
            space.move(recipe.memory, link.mirror, model.total, senders, sent, factors)
            link.is_held[senders] = is_moved = True
            continue
        if passing is None:
            passing = space.zeros_like(model.total)
        space.add_values(passing, sent, factors)
        held = link.is_held[senders]
        if held.any():
            space.forget(link.mirror, model.total, senders[held], factors[held])
            link.is_held[senders] = False
            is_moved = True
    move_directions(link.direction, clients.tolist(), uploads)
    return model._replace(passing=passing, is_moved=is_moved)


def make_rates(recipe: Recipe, step_size: float, dropout_rate: float, sampled: float) -> Rates:
    """Return the numbers that turn a round's sums into a step.

    Sums are amplified by ``1/(1-p)`` in Algorithm 2; see `amplification`.
    """
    lasting = passing = amplification(recipe, dropout_rate, sampled)
    if recipe.switch is not None:
        passing = amplification(recipe.ways[-1], dropout_rate, sampled)
    return Rates(step_size, lasting, passing)


def publish(
    space: Space,
    recipe: Recipe,
    downlink: Downlink,
    model: Model,
    num_clients: int,
    senders: float,
) -> tuple[Model, Published]:
    """Decide what of the round's sums is made public; the step is taken with that.

    Args:
        space: where vectors live; the model's are its own and written to.
        recipe: the compressor.
        downlink: how the sums are published.
        model: before the step.
        num_clients: ``M``.
        senders: how many clients are expected to send in a round.

    """
    keeps = recipe.memory.keeps_mirror
    total = model.total if keeps else None
    passing = model.passing if keeps else model.total
    if not isinstance(downlink, Condensed):
        return model, Published(total, passing)
    assert model.downlink is not None
    if passing is not None and not space.number((passing != 0).sum()):
        passing = None  # as if no one had sent: equal sums are published alike
    tolerance = downlink.tolerance * num_clients**2 * recipe.movement.of(model.history)
    if recipe.switch is not None and total is not None and model.downlink.gap > 0:
        # Once clients have left their mirrors, what is left of the public sum would be added to
        # every step, however small it is against the sums that pass.
        near = downlink.tolerance * space.squared_norm(total)
        tolerance = max(_FINEST * tolerance, min(tolerance, near))
    if passing is None and not model.is_moved and model.downlink.gap <= tolerance:
        return model, Published(None if total is None else model.downlink.total, None)
    state, published = condense(
        space,
        downlink,
        model.downlink,
        total,
        passing,
        tolerance,
        senders,
        model.round,
        model.is_moved,
    )
    return model._replace(downlink=state), published


def step(
    space: Space,
    recipe: Recipe,
    downlink: Downlink,
    model: Model,
    published: Published,
    num_clients: int,
    rates: Rates,
    optimizer: ServerOptimizer,
    rule: StepRule = _FIXED,
) -> tuple[Model, Rates]:
    """Take the step ``θ^{k+1} = θ^k - α Σ_m ref_m`` with what was published of the sums.

    Another optimizer than `SGD` turns the sum into another vector first. The movement still comes
    from the sum, which has the scale of the clients' vectors. Where a device is still busy with it,
    `arrived` puts it into the history later. ``rates`` hold the natural step; those of the step
    that was taken are returned.
    """
    direction = make_direction(
        space, len(model.parameters), published.total, published.passing, rates
    )
    optimizer_state, update = optimizer.step(model.optimizer, direction)
    step_state, step_size = rule.next(space, model.step, model.parameters, update, rates.step_size)
    if step_size != rates.step_size:
        rates = rates._replace(step_size=step_size)
    parameters, squared_norm = space.take_step(model.parameters, update, direction, step_size)
    keeps, is_pending = recipe.memory.keeps_mirror, space.is_asynchronous
    history = model.history
    if not is_pending:
        history = _extended(space, recipe, downlink, model, squared_norm, num_clients, optimizer)
    moved = Model(
        round=model.round + 1,
        parameters=parameters,
        total=model.total if keeps else space.zeros_like(model.total),
        passing=None,
        history=history,
        last_step=squared_norm if is_pending else None,
        optimizer=optimizer_state,
        downlink=model.downlink,
        step=rule.follow(step_state, parameters),
    )
    return moved, rates


def arrived(
    space: Space,
    recipe: Recipe,
    downlink: Downlink,
    model: Model,
    num_clients: int,
    optimizer: ServerOptimizer,
) -> Model:
    """Wait for the length of the last step if it is on its way, and put it into the history."""
    if model.last_step is None:
        return model
    history = _extended(space, recipe, downlink, model, model.last_step, num_clients, optimizer)
    return model._replace(history=history, last_step=None)


def _extended(
    space: Space,
    recipe: Recipe,
    downlink: Downlink,
    model: Model,
    squared_norm: Array,
    num_clients: int,
    optimizer: ServerOptimizer,
) -> tuple[float, ...]:
    """Return the history with the newest step in front."""
    newest = space.number(squared_norm) / num_clients**2 * optimizer.fresh_share
    if isinstance(downlink, Condensed):
        newest = shortened(newest)
    return recipe.movement.extend(model.history, newest)


def amplification(recipe: Recipe, dropout_rate: float, sampled: float = 1.0) -> float:
    """Return the factor on the server's sum: 1, or ``1/(1-p)`` for Augmented AQG.

    Where the server keeps no ``ref_m`` and asks only the fraction ``sampled`` of the clients, the
    sum over these is divided by it: an unbiased estimate of the sum over all.
    """
    factor = 1.0 / (1.0 - dropout_rate) if recipe.amplify_dropouts else 1.0
    return factor if recipe.memory.keeps_mirror else factor / sampled


class Peer(NamedTuple):
    """What the server holds of one client.

    Attributes:
        link: what the client holds as well.
        heard: the last round in which the client was heard; 0 before the first.

    """

    link: Link
    heard: int = 0


class ServerState(NamedTuple):
    """What the server remembers between messages: the model, and a `Peer` for every client.

    A client that has no mirror takes no memory, and taking in a message costs the same however many
    clients there are.
    """

    model: Model
    peers: PerClient[Peer]

    @property
    def round(self) -> int:
        """``k``, the round in progress."""
        return self.model.round

    @property
    def parameters(self) -> FloatArray:
        """The model ``θ^k``."""
        params: FloatArray = self.model.parameters
        return params

    @property
    def averaged(self) -> FloatArray:
        """The mean of the models so far, where one is kept; else the model."""
        params: FloatArray = self.model.averaged
        return params

    @property
    def num_clients(self) -> int:
        """``M``."""
        return len(self.peers)

    def mirror(self, client: int) -> FloatArray:
        """Return ``ref_m`` of a client, ``(n,)``; ``(0,)`` where the recipe keeps none."""
        mirror: FloatArray = self.peers[client].link.mirror[0]
        return mirror


def init_server(
    recipe: Recipe,
    parameters: FloatArray,
    num_clients: int,
    optimizer: ServerOptimizer = _PLAIN,
    downlink: Downlink = _FULL,
    rule: StepRule = _FIXED,
) -> ServerState:
    """Return the state before the first round, with every ``ref_m`` zero."""
    if not is_whole(num_clients) or num_clients < 1:
        raise ConfigError(f"num_clients is {num_clients!r}; it must be a whole number above 0")
    if getattr(parameters, "ndim", None) != 1 or not len(parameters):
        shape = getattr(parameters, "shape", type(parameters).__name__)
        raise ConfigError(f"parameters are {shape}; they must be a NumPy array of shape (n,)")
    check_precision(parameters.dtype)
    link = init_link(recipe.memory, len(parameters), parameters.dtype)
    public = init_downlink(downlink, recipe, len(parameters))
    model = init_model(parameters, optimizer, public, rule)
    return ServerState(model, PerClient(int(num_clients), Peer(link)))


def broadcast(recipe: Recipe, state: ServerState) -> Broadcast:
    """Return what every client is told at the start of the round."""
    movement = recipe.movement.of(state.model.history)
    return Broadcast(state.round, state.parameters, movement)


def hear(
    recipe: Recipe, state: ServerState, client: int, message: Message, weight: float = 1.0
) -> ServerState:
    """Return the state after one client's message; the old state is left as it was.

    With a ``weight`` other than 1, the same in every round, the sum is ``Σ_m weight_m·ref_m``. A
    client is heard once in a round. What is not in order raises `MessageError`.
    """
    check_client(state, client)
    if not is_message(message):
        raise MessageError(f"client {client} sent a {type(message).__name__}, which is no message")
    peer = state.peers[client]
    if peer.heard == state.round:
        raise MessageError(f"client {client} was heard in round {state.round} already")
    if isinstance(message, Skip):
        return state._replace(peers=state.peers.replaced(client, Peer(peer.link, state.round)))
    check_message(recipe, state.model, client, message, weight)
    model, own = state.model, peer.link
    is_short = not is_lasting(message)
    if is_short:
        passing = None if model.passing is None else model.passing.copy()
        model = model._replace(passing=passing)
    if not is_short or own.is_held[0] or not recipe.memory.keeps_mirror:
        model = model._replace(total=model.total.copy())
        own = Link(own.mirror.copy(), own.direction.copy(), own.is_held.copy())
    model = take_in(_SPACE, recipe, model, own, _FIRST, [message], np.array([float(weight)]))
    if not own.is_held[0]:  # no mirror: all such clients share one of zeros
        own = own._replace(mirror=_no_mirror(own.mirror.shape[1], own.mirror.dtype))
    peers = state.peers.replaced(client, Peer(own, state.round))
    return ServerState(model, peers)


_FIRST = np.arange(1)


@lru_cache(maxsize=4)
def _no_mirror(length: int, dtype: np.dtype[Any]) -> FloatArray:
    """Return the one mirror of zeros that stands for all clients that have none."""
    zeros = np.zeros((1, length), dtype)
    zeros.flags.writeable = False
    return zeros


def check_client(state: ServerState, client: int) -> None:
    """Raise unless there is such a client."""
    if not is_whole(client) or not 0 <= client < state.num_clients:
        raise MessageError(
            f"client is {client!r}; it must be a whole number in 0..{state.num_clients - 1}"
        )


def check_message(
    recipe: Recipe, model: Model, client: int, message: AnyUpload, weight: float
) -> None:
    """Raise `MessageError` unless an upload can be taken in."""
    num_params = len(model.parameters)
    if len(message) != num_params:
        raise MessageError(
            f"client {client} sent {len(message)} coordinates; the model has {num_params}"
        )
    if not _is_number(weight):
        raise MessageError(f"weight of client {client} is {weight!r}; it must be a finite number")
    message.validate()
    if recipe.memory.keeps_mirror and recipe.switch is None and not is_lasting(message):
        raise MessageError(f"client {client} sent for one round; the recipe is to remember")


def forget(recipe: Recipe, state: ServerState, client: int, weight: float = 1.0) -> ServerState:
    """Return the state with a client's ``ref_m`` zero again and out of the sum."""
    check_client(state, client)
    peer = state.peers[client]
    model = state.model
    if recipe.memory.keeps_mirror:
        total = model.total - weight * peer.link.mirror[0].astype(np.float64)
        model = model._replace(total=total, is_moved=True)
    link = init_link(recipe.memory, len(state.parameters), state.parameters.dtype)
    return ServerState(model, state.peers.replaced(client, Peer(link, peer.heard)))


def finish_round(
    recipe: Recipe,
    state: ServerState,
    step_size: float,
    dropout_rate: float = 0.0,
    sampled: float = 1.0,
    optimizer: ServerOptimizer = _PLAIN,
) -> ServerState:
    """Return the state after the server's step, for clients that receive the whole model."""
    return publish_round(recipe, state, step_size, dropout_rate, sampled, optimizer)[0]


def publish_round(
    recipe: Recipe,
    state: ServerState,
    step_size: float,
    dropout_rate: float = 0.0,
    sampled: float = 1.0,
    optimizer: ServerOptimizer = _PLAIN,
    downlink: Downlink = _FULL,
    rule: StepRule = _FIXED,
) -> tuple[ServerState, Entry]:
    """Return the state after the server's step, and the entry that tells clients of it.

    The state must have been made for the same downlink and the same rule for step sizes, for which
    ``step_size`` is the natural one. With `Full` the entry says nothing of the sums: clients
    receive the model.
    """
    if not _is_number(step_size):
        raise ConfigError(f"step_size is {step_size!r}; it must be a finite number")
    if not (_is_number(dropout_rate) and 0 <= dropout_rate < 1):
        raise ConfigError(f"dropout_rate is {dropout_rate!r}; it must be at least 0 and below 1")
    if not (_is_number(sampled) and 0 < sampled <= 1):
        raise ConfigError(f"sampled is {sampled!r}; it must be above 0 and at most 1")
    if (state.model.downlink is None) != isinstance(downlink, Full):
        raise ConfigError(f"the server's state was not made for the downlink {downlink!r}")
    if (state.model.step is None) != (rule.init(state.parameters[:0]) is None):
        raise ConfigError(f"the server's state was not made for the step {rule.name!r}")
    count, before = state.num_clients, state.model
    model = _copied(before) if isinstance(downlink, Condensed) else before
    rates = make_rates(recipe, step_size, dropout_rate, sampled)
    senders = expected_senders(count, dropout_rate, sampled)
    model, published = publish(_SPACE, recipe, downlink, model, count, senders)
    model, rates = step(_SPACE, recipe, downlink, model, published, count, rates, optimizer, rule)
    entry = make_entry(recipe, downlink, before, published, model.history[0], rates)
    if model.downlink is not None:
        public = noted(model.downlink, entry)
        if isinstance(downlink, Exact) and recipe.memory.keeps_mirror:
            public = public._replace(total=model.total)
        model = model._replace(downlink=public)
    return ServerState(model, state.peers), entry


def _copied(model: Model) -> Model:
    """Return the model with copies of what is written to when sums are condensed."""
    assert model.downlink is not None
    passing = None if model.passing is None else model.passing.copy()
    public = model.downlink._replace(residual=model.downlink.residual.copy())
    return model._replace(total=model.total.copy(), passing=passing, downlink=public)


def make_entry(
    recipe: Recipe,
    downlink: Downlink,
    before: Model,
    published: Published,
    movement: float,
    rates: Rates,
) -> Entry:
    """Return the entry of a round: what changed of the published sums, and the numbers.

    It is a function of the sums alone. ``before`` is the server's model before the step.
    """
    lasting: Part = None
    passing: Part = None
    state = before.downlink
    if state is None:
        return Entry(before.round, None, None, movement, rates)
    if isinstance(downlink, Condensed):
        lasting, passing = published.lasting_message, published.passing_message
    else:
        if recipe.memory.keeps_mirror and before.is_moved:
            assert published.total is not None
            lasting = changed(state.total, published.total)
        if published.passing is not None:
            passing = changed(None, published.passing)
    told, step_size = rates == state.rates, None
    if not told and state.rates is not None and is_short(rates.step_size):
        alone = state.rates._replace(step_size=rates.step_size) == rates
        step_size = rates.step_size if alone else None
    is_repeated = told and lasting is None and passing is None and not state.passed
    return Entry(
        before.round,
        lasting,
        passing,
        None if is_repeated else movement,
        None if told or step_size is not None else rates,
        is_short=isinstance(downlink, Condensed),
        step_size=step_size,
    )


def changed(old: Float64Array | None, new: Float64Array) -> Change | None:
    """Return the change from ``old``, or from zero; None where there is none."""
    if new is old:
        return None
    old = np.zeros(len(new)) if old is None else old
    return None if old.tobytes() == new.tobytes() else Change(old, new)


def expected_senders(num_clients: int, dropout_rate: float, sampled: float) -> float:
    """Return how many clients are expected to answer in a round."""
    return num_clients * sampled * (1.0 - dropout_rate)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.floating | np.integer) and math.isfinite(value)
