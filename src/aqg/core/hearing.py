"""A server that hears one client at a time, and holds a `Link` for each.

`init_server`, `broadcast`, `hear` and `finish_round` are the server of a deployment and of the
reference loop. What they do to sums and model is that of `aqg.core.server`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aqg.core.client import check_precision
from aqg.core.downlink import Condensed, Downlink, Exact, Full, init_downlink, noted
from aqg.core.links import Link, init_link
from aqg.core.messages import Broadcast, Message, Skip, is_message
from aqg.core.optimizers import SGD, ServerOptimizer
from aqg.core.per_client import PerClient
from aqg.core.server import (
    Model,
    expected_senders,
    init_model,
    make_entry,
    make_rates,
    publish,
    step,
    take_in,
)
from aqg.core.space import NumpySpace
from aqg.core.step_sizes import Fixed, StepRule
from aqg.core.types import is_whole
from aqg.errors import ConfigError, MessageError

if TYPE_CHECKING:
    from aqg.core.messages import AnyUpload
    from aqg.core.public import Entry
    from aqg.core.recipe import Recipe
    from aqg.core.types import FloatArray

_SPACE = NumpySpace(in_place=True)
"""Everything that is written to below is a copy of the server's own."""
_PLAIN = SGD()
_FULL = Full()
_FIXED = Fixed()
_FIRST = np.arange(1)


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
    model = init_model(parameters, optimizer, public, rule, recipe.noise)
    return ServerState(model, PerClient(int(num_clients), Peer(link)))


def broadcast(recipe: Recipe, state: ServerState) -> Broadcast:
    """Return what every client is told at the start of the round."""
    movement = recipe.movement.of(state.model.history)
    return Broadcast(state.round, state.parameters, movement, state.model.budget.noise)


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
    check_message(state.model, client, message, weight)
    model, own = state.model, peer.link
    model = model._replace(total=model.total.copy())
    own = Link(own.mirror.copy(), own.direction.copy(), own.is_held.copy())
    model = take_in(_SPACE, recipe, model, own, _FIRST, [message], np.array([float(weight)]))
    peers = state.peers.replaced(client, Peer(own, state.round))
    return ServerState(model, peers)


def check_client(state: ServerState, client: int) -> None:
    """Raise unless there is such a client."""
    if not is_whole(client) or not 0 <= client < state.num_clients:
        raise MessageError(
            f"client is {client!r}; it must be a whole number in 0..{state.num_clients - 1}"
        )


def check_message(model: Model, client: int, message: AnyUpload, weight: float) -> None:
    """Raise `MessageError` unless an upload can be taken in."""
    num_params = len(model.parameters)
    if len(message) != num_params:
        raise MessageError(
            f"client {client} sent {len(message)} coordinates; the model has {num_params}"
        )
    if not _is_number(weight):
        raise MessageError(f"weight of client {client} is {weight!r}; it must be a finite number")
    message.validate()


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
    public = model.downlink._replace(residual=model.downlink.residual.copy())
    return model._replace(total=model.total.copy(), downlink=public)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.floating | np.integer) and math.isfinite(value)
