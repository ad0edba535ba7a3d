"""The server's round: uploads go in, a model comes out, and an entry that says how it moved.

`add_uploads` and `take_step` are written for many clients at a time; the simulator calls them on
tables of all clients. `take_message` and `finish_round` are the server of a deployment and of the
reference loop, which takes in one client's message at a time.

The step is the server's own affair: its optimizer, the length of steps and their mean are
not published. What clients hold, the position of the public track, is the model that counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from aqg.core.auto import Budget, first_budget
from aqg.core.downlink import Condensed, Downlink, Entry, Exact, Full, Public, rounded_up
from aqg.core.grids import choose_quantum, largest_multiple, nearest_power_of_two, num_levels, snap
from aqg.core.messages import AnyUpload, Broadcast, Message, Skip, Upload, energy_of, num_nonzero
from aqg.core.optimizers import SGD, OptimizerState, ServerOptimizer
from aqg.core.quantizers import TERNARY_WIDTH
from aqg.core.recipe import Recipe
from aqg.core.round import check_precision
from aqg.core.space import Array, NumpySpace, Space
from aqg.core.step_sizes import Fixed, StepRule, StepState
from aqg.core.track import Change, Flow, Track, correct, init_mirrors, next_direction
from aqg.core.types import Float64Array, FloatArray, IntArray, is_number, is_whole
from aqg.errors import ConfigError, MessageError, require

_SPACE = NumpySpace(in_place=True)
"""Everything that is written to below is a copy of the server's own."""
_NO_NOISE = Budget()
_FIRST = np.arange(1)
_PIECE = 1 << 18


class Step(NamedTuple):
    """How the server steps."""

    size: float  # ``α``, or the natural step of a rule that finds its own
    dropout_rate: float = 0.0  # ``p``, against which recipes may amplify their sums
    sampled: float = 1.0  # the share of the clients that take part in a round
    optimizer: ServerOptimizer = SGD()  # what is made of the sums
    rule: StepRule = Fixed()  # how long steps are
    downlink: Downlink = Full()  # how clients receive the model

    def factor(self, recipe: Recipe) -> float:
        """Return the factor on the server's sum: 1, or ``1/(1-p)`` for Augmented AQG.

        Where the server keeps no ``ref_m`` and asks only a share of the clients, the sum over these
        is divided by it: an unbiased estimate of the sum over all.
        """
        factor = 1.0 / (1.0 - self.dropout_rate) if recipe.amplify_dropouts else 1.0
        return factor if recipe.memory.keeps_mirror else factor / self.sampled

    def senders(self, num_clients: int) -> float:
        return num_clients * self.sampled * (1.0 - self.dropout_rate)

    @property
    def is_steady(self) -> bool:
        """Whether equal sums make equal steps in every round."""
        return isinstance(self.optimizer, SGD) and isinstance(self.rule, Fixed)


_PLAIN = Step(0.0)


class Model(NamedTuple):
    """The model and what moves it."""

    round: int  # ``k``, the round in progress, counted from 1
    parameters: Array  # ``θ^k``, which clients hold
    velocity: Array  # of the public track, ``(n,)`` in float64; ``(0,)`` where there are no mirrors
    direction: NDArray[np.int8]  # which way the velocity went in its last correction, in NumPy
    # ``Σ_m w_m ref_m`` as a running sum in float64; where the recipe keeps no mirrors, the sum of
    # this round's uploads
    total: Array
    # the newest numbers of `Entry.movement`, newest first: ``‖direction‖²/M²`` of the steps that
    # were taken, times the optimizer's `fresh_share`
    history: tuple[float, ...]
    optimizer: OptimizerState  # what the server optimizer remembers
    # what clients have not learned of the updates, ``(n,)`` in float64; ``(0,)`` where nothing is
    # left out, or what is left out is forgotten
    rest: Array
    # of which the parameters are multiples; 0 before the first, and on no grid
    quantum: float = 0.0
    gap: float = 0.0  # ``‖wanted velocity - velocity‖²`` when it was last looked at
    is_moved: bool = False  # whether the sum of mirrors has changed since the last step
    # what the rule for step sizes remembers; None where it needs nothing
    step: StepState | None = None
    # how many coordinates the uploads of this round have, all taken together; not counted where the
    # recipe keeps mirrors
    num_sent: int = 0
    budget: Budget = _NO_NOISE  # the noise that uploads may carry
    # ``Σ_m ‖w_m Q_m‖²`` of this round's uploads, where that is looked at
    upload_energy: float = 0.0

    @property
    def averaged(self) -> Array:
        if self.step is None or not self.step.num_models:
            return self.parameters
        return self.step.mean

    def public(self, space: Space) -> Public:
        position, velocity = space.get(self.parameters), space.get(self.velocity)
        track = Track(position[None], velocity[None], self.direction[None], np.ones(1, np.bool_))
        return Public(self.round, track, self.history, self.quantum)


def init_model(recipe: Recipe, parameters: FloatArray, step: Step) -> Model:
    length, follows = len(parameters), not isinstance(step.downlink, Full)
    moves = recipe.memory.keeps_mirror and follows
    waits = not recipe.memory.keeps_mirror and isinstance(step.downlink, Condensed)
    return Model(
        round=1,
        parameters=parameters,
        velocity=np.zeros(length if moves else 0),
        direction=np.zeros(length if moves else 0, np.int8),
        total=np.zeros(length),
        history=(),
        optimizer=step.optimizer.init(length),
        rest=np.zeros(length if waits else 0),
        step=step.rule.init(parameters),
        budget=_NO_NOISE if recipe.keeps_residual else first_budget(recipe.noise),
    )


def add_uploads(
    space: Space,
    recipe: Recipe,
    model: Model,  # whose sums are moved
    mirrors: Track,  # of all clients
    clients: IntArray,  # who sent, as rows of the mirrors
    uploads: Sequence[AnyUpload],  # what each of them sent
    weights: Float64Array,  # ``w_m`` of each of them
) -> Model:
    """Take in uploads: ``ref_m ← ref_m + Q_b(Δ)``, and the sum with it, in the order given.

    The arrays of model and mirrors are the space's own and written to.
    """
    if not recipe.memory.keeps_mirror:
        space.add_values(model.total, uploads, weights)
        if recipe.noise:
            energy = model.upload_energy  # in the order of clients, however many come at a time
            for weight, upload in zip(weights.tolist(), uploads, strict=True):
                energy += weight * weight * energy_of(upload)
            model = model._replace(upload_energy=energy)
        return model._replace(num_sent=model.num_sent + sum(map(num_nonzero, uploads)))
    space.move(recipe.memory, mirrors.position, model.total, clients, uploads, weights)
    mirrors.is_held[clients] = True
    for row, upload in zip(clients.tolist(), uploads, strict=True):
        mirrors.direction[row] = next_direction(mirrors.direction[row], upload)
    return model._replace(is_moved=True)


@np.errstate(over="ignore", invalid="ignore")  # a diverging run is a result, not an error
def take_step(
    space: Space, recipe: Recipe, model: Model, step: Step, num_clients: int
) -> tuple[Model, Entry]:
    """Take the step ``θ^{k+1} = θ^k - α·update``, as far as clients learn of it.

    Where the recipe keeps mirrors, the wanted velocity is ``-α·update``, and the step that is taken
    is the velocity that clients have; what they did not learn is forgotten, as the next gradients
    know where the model is. Otherwise what they did not learn is added to the next update. With
    `Full` the entry says nothing: clients receive the model.
    """
    model = _noise_of_round(space, recipe, model, step.senders(num_clients))
    factor = step.factor(recipe)
    direction = model.total if factor == 1 else model.total * factor
    optimizer, update = step.optimizer.step(model.optimizer, direction, space.root)
    model, is_rounded = model._replace(optimizer=optimizer), isinstance(step.downlink, Condensed)
    if is_rounded and not recipe.memory.keeps_mirror:
        moved, entry, length = _catch_up(space, model, step, direction, update, num_clients)
    else:
        rule, size = step.rule.next(space, model.step, model.parameters, update, step.size)
        wanted, model = (direction, update, size), model._replace(step=rule)
        if is_rounded:
            moved, entry, length = _steer(space, recipe, model, step, wanted, num_clients)
        else:
            moved, entry, length = _say_all(space, recipe, model, step, wanted)
    movement = last = model.history[0] if model.history else 0.0
    if length is not None:  # else the model moved as it did before
        squared_norm, share = length
        movement = space.number(squared_norm) / num_clients**2 * share
        movement = rounded_up(movement) if is_rounded else movement
    if recipe.noise and recipe.keeps_residual:
        if not is_rounded:
            walked = size**2 * space.squared_norm(update)
        else:
            walked = energy_of(entry.position) if isinstance(entry.position, Upload) else 0.0
        moved = moved._replace(budget=_noise_while_steady(space, moved, walked))
    is_news = length is not None and movement != last
    entry = entry._replace(movement=movement if is_news else None, is_rounded=is_rounded)
    moved = moved._replace(
        round=model.round + 1,
        history=recipe.movement.extend(model.history, movement),
        total=model.total if recipe.memory.keeps_mirror else space.zeros_like(model.total),
        is_moved=False,
        num_sent=0,
        step=step.rule.follow(moved.step, moved.parameters),
    )
    return moved, entry


Wanted = tuple[Array, Array, float]
"""The step as it would be if everything were said: direction, update and ``α``."""
Moved = tuple[Model, Entry, tuple[Array, float] | None]
"""The model and the entry after a step, and ``‖step‖²`` with a factor that makes it one of clients'
vectors; None where the model moved as it did before."""


def _say_all(space: Space, recipe: Recipe, model: Model, step: Step, wanted: Wanted) -> Moved:
    """Take the whole step; with `Exact`, say it to the bit."""
    (direction, update, size), params, entry = wanted, model.parameters, Entry(model.round)
    is_exact = isinstance(step.downlink, Exact)
    if is_exact and recipe.memory.keeps_mirror:
        velocity = model.velocity
        if model.is_moved or not step.is_steady:
            rounded = space.cast(update * -size, params)
            velocity = space.cast(rounded, model.velocity)
            entry = entry._replace(velocity=_change(space, model.velocity, velocity))
        model = model._replace(velocity=velocity)
        stepped, squared_norm = space.take_step(params, velocity, direction, -1.0)
    else:
        before = np.array(space.get(params)) if is_exact else None
        stepped, squared_norm = space.take_step(params, update, direction, size)
        if before is not None:
            entry = entry._replace(position=_change(space.host, before, space.get(stepped)))
    return model._replace(parameters=stepped), entry, (squared_norm, step.optimizer.fresh_share)


def _steer(
    space: Space, recipe: Recipe, model: Model, step: Step, wanted: Wanted, num_clients: int
) -> Moved:
    """Correct the velocity if it has to be, and move by it."""
    assert isinstance(step.downlink, Condensed)
    direction, update, size = wanted
    velocity, entry, scale = model.velocity, Entry(model.round), size**2
    if not isinstance(step.optimizer, SGD):
        before = space.squared_norm(direction)
        scale *= space.squared_norm(update) / before if before else 1.0
    movement = recipe.movement.of(model.history)
    tolerance = step.downlink.tolerance * num_clients**2 * movement * scale
    if model.is_moved or not step.is_steady or model.gap > tolerance:
        gap = update * -size - velocity
        found = correct(step.downlink.of_velocity, Flow(gap[None], tolerance, space))
        model = model._replace(gap=float(found.innovation.squared_norm[0]))
        if found.uploads:
            upload = found.uploads[0]
            velocity = velocity + space.put(upload.values(np.float64))
            model = model._replace(
                velocity=velocity,
                direction=next_direction(model.direction, upload),
                gap=float(found.innovation.errors[0, upload.width - 1]),
            )
            entry = entry._replace(velocity=upload)
    stepped, squared_norm = space.take_step(model.parameters, velocity, velocity, -1.0)
    share = step.optimizer.fresh_share / scale if scale else 0.0
    length = None if entry.velocity is None else (squared_norm, share)
    return model._replace(parameters=stepped), entry, length


def _catch_up(
    space: Space, model: Model, step: Step, direction: Array, update: Array, num_clients: int
) -> Moved:
    """Say the largest coordinates of the update and of what was not said of earlier ones.

    What waits is kept as an update: it moves the model by the step of the round that says it. The
    rule for step sizes sees what clients do.
    """
    assert isinstance(step.downlink, Condensed)
    params, rest = model.parameters, model.rest + update
    uploads: Sequence[AnyUpload] = ()
    if (model.total != 0).any():  # else as if no one had sent: equal sums are published alike
        senders = step.senders(num_clients)
        coder = step.downlink.of_position(len(params), model.num_sent, senders, step.sampled)
        vector = rest * math.copysign(1.0, -step.size)
        found = correct(coder, Flow(vector[None], 0.0, space))
        uploads = found.uploads
        if len(found.faulty):  # a run that diverges: its steps are beyond any grid
            rest = model.rest
    if not uploads:
        return model._replace(rest=rest), Entry(model.round), None
    upload = uploads[0]
    assert isinstance(upload, Upload)
    shown = space.put(upload.values(np.float64))
    rule, size = step.rule.next(space, model.step, params, shown, step.size)
    moved = on_grid(space, params, model.quantum, upload, vector, abs(size))
    if moved is None:
        return model._replace(rest=rest, step=rule), Entry(model.round), None
    upload, quantum = moved
    base = params if quantum == model.quantum else snap(params, quantum)
    values = space.put(upload.values(np.float64))
    stepped, squared_norm = space.take_step(base, values, direction, -1.0)
    rest = rest + values / size
    entry = Entry(model.round, position=upload)
    if quantum != model.quantum:
        rest, entry = rest + (base - params) / size, entry._replace(quantum=quantum)
    model = model._replace(parameters=stepped, rest=rest, step=rule, quantum=quantum)
    return model, entry, (squared_norm, step.optimizer.fresh_share)


def on_grid(
    space: Space, base: Array, quantum: float, upload: Upload, vector: Array, size: float = 1.0
) -> tuple[Upload, float] | None:
    """Return the upload times ``size`` on the exact grid that a model lies on, and the quantum.

    The step is the nearest power of two, or the next one above for uploads of many levels, which
    are chosen anew; as they are where the quantum is longer. None where nothing is left.
    """
    dtype, middle = space.get(base[:0]).dtype, num_levels(upload.grid, upload.width) // 2
    if not upload.step * size:
        return None
    power = nearest_power_of_two(upload.step * size)
    if upload.width > TERNARY_WIDTH and power < upload.step * size:
        power *= 2  # the largest coordinate has a level
    reach = max(float(base.max()), -float(base.min())) + middle * power
    if math.isfinite(reach) and reach > quantum * largest_multiple(dtype):
        quantum = choose_quantum(reach, power, dtype)
    if upload.width > TERNARY_WIDTH or power < quantum:
        power = max(power, quantum)
        levels, whole = np.empty_like(upload.levels), space.get(vector)
        for start in range(0, len(levels), _PIECE):
            piece = slice(start, start + _PIECE)
            numbers = np.rint(whole[piece] * (size / power)).clip(-middle, middle)
            levels[piece] = np.where(upload.levels[piece] == middle, 0, numbers) + middle
        if (levels == middle).all():
            return None
        upload = replace(upload, levels=levels)
    return replace(upload, step=power), quantum


def _noise_of_round(space: Space, recipe: Recipe, model: Model, senders: float) -> Model:
    if not recipe.noise:
        return model
    budget, energy = model.budget, model.upload_energy
    if energy:
        of_sum = space.squared_norm(model.total)
        budget = budget.after(recipe.noise, of_sum, energy, senders)
    return model._replace(budget=budget, upload_energy=0.0)


def _noise_while_steady(space: Space, model: Model, walked: float) -> Budget:
    """Return the noise of the next round: some if the model gets nowhere, else none."""
    if model.step is None or not len(model.step.start):
        return model.budget.while_steady(0.0, 0.0)
    distance = space.squared_norm(model.parameters - model.step.start)
    return model.budget.while_steady(walked, distance)


def _change(space: Space, old: Array, new: Array) -> Change | None:
    change = Change(space.get(old), space.get(new))
    return None if change.old.tobytes() == change.new.tobytes() else change


class Peer(NamedTuple):
    """What the server holds of one client."""

    track: Track  # the client's mirror, which it holds as well
    last_round: int = 0  # the last round in which a message of it was taken; 0 before the first
    # what a protocol notes beside it (`aqg.protocol.messages.Held`); None in a simulation
    held: Any = None


class ServerState(NamedTuple):
    """What the server remembers between messages: the model, and a `Peer` for every client.

    A client that has no mirror takes no memory, and taking in a message costs the same however many
    clients there are.
    """

    model: Model
    peers: PerClient[Peer]

    @property
    def round(self) -> int:
        return self.model.round

    @property
    def parameters(self) -> FloatArray:
        return self.model.parameters

    @property
    def averaged(self) -> FloatArray:
        return self.model.averaged

    @property
    def public(self) -> Public:
        return self.model.public(_SPACE)

    @property
    def num_clients(self) -> int:
        return len(self.peers)

    def mirror(self, client: int) -> FloatArray:
        """Return ``ref_m`` of a client, ``(n,)``; ``(0,)`` where the recipe keeps none."""
        return self.peers[client].track.position[0]


def init_server(
    recipe: Recipe,
    parameters: FloatArray,
    num_clients: int,
    step: Step = _PLAIN,
    held: Any = None,
) -> ServerState:
    """Return the state before the first round, with every ``ref_m`` zero.

    ``step`` says which optimizer, rule and downlink the state is for, ``held`` what is noted of
    each client.
    """
    is_count = is_whole(num_clients) and num_clients >= 1
    require(is_count, "num_clients", repr(num_clients), "a whole number above 0")
    if getattr(parameters, "ndim", None) != 1 or not len(parameters):
        shape = getattr(parameters, "shape", type(parameters).__name__)
        raise ConfigError(f"parameters are {shape}; they must be a NumPy array of shape (n,)")
    check_precision(parameters.dtype)
    track = init_mirrors(recipe.memory, len(parameters), parameters.dtype)
    model = init_model(recipe, parameters, step)
    return ServerState(model, PerClient.alike(int(num_clients), Peer(track, held=held)))


def join_server(model: Model, all_peers: Sequence[Peer]) -> ServerState:
    rows = (tuple(all_peers[k : k + _ROW]) for k in range(0, len(all_peers), _ROW))
    return ServerState(model, PerClient(len(all_peers), tuple(rows)))


def broadcast(recipe: Recipe, state: ServerState) -> Broadcast:
    movement = recipe.movement.of(state.model.history)
    return Broadcast(state.round, state.parameters, movement, state.model.budget.noise)


def take_message(
    recipe: Recipe, state: ServerState, client: int, message: Message, weight: float = 1.0
) -> ServerState:
    """Return the state after one client's message; the old state is left as it was.

    With a ``weight`` other than 1, the same in every round, the sum is ``Σ_m weight_m·ref_m``. A
    client sends one message in a round. What is not in order raises `MessageError`.
    """
    check_client(state, client)
    if not isinstance(message, Message):
        raise MessageError(f"client {client} sent a {type(message).__name__}, which is no message")
    peer = state.peers[client]
    if peer.last_round == state.round:
        raise MessageError(f"client {client} has sent a message in round {state.round} already")
    if isinstance(message, Skip):
        peer = peer._replace(last_round=state.round)
        return state._replace(peers=state.peers.replaced(client, peer))
    num_params = len(state.parameters)
    if len(message) != num_params:
        raise MessageError(
            f"client {client} sent {len(message)} coordinates; the model has {num_params}"
        )
    if not is_number(weight):
        raise MessageError(f"weight of client {client} is {weight!r}; it must be a finite number")
    message.validate()
    model = state.model._replace(total=state.model.total.copy())
    own = peer.track.copy()
    weights = np.array([float(weight)])
    model = add_uploads(_SPACE, recipe, model, own, _FIRST, [message], weights)
    peer = peer._replace(track=own, last_round=state.round)
    return ServerState(model, state.peers.replaced(client, peer))


def check_client(state: ServerState, client: int) -> None:
    if not is_whole(client) or not 0 <= client < state.num_clients:
        raise MessageError(
            f"client is {client!r}; it must be a whole number in 0..{state.num_clients - 1}"
        )


def forget(recipe: Recipe, state: ServerState, client: int, weight: float = 1.0) -> ServerState:
    """Return the state with a client's ``ref_m`` zero again and out of the sum."""
    check_client(state, client)
    peer, model = state.peers[client], state.model
    if recipe.memory.keeps_mirror:
        total = model.total - weight * peer.track.position[0].astype(np.float64)
        model = model._replace(total=total, is_moved=True)
    track = init_mirrors(recipe.memory, len(state.parameters), state.parameters.dtype)
    return ServerState(model, state.peers.replaced(client, peer._replace(track=track)))


def finish_round(
    recipe: Recipe,
    state: ServerState,
    step_size: float,
    dropout_rate: float = 0.0,
    sampled: float = 1.0,
    optimizer: ServerOptimizer = _PLAIN.optimizer,
) -> ServerState:
    """Return the state after the server's step, for clients that receive the whole model."""
    return publish_round(recipe, state, Step(step_size, dropout_rate, sampled, optimizer))[0]


def publish_round(recipe: Recipe, state: ServerState, step: Step) -> tuple[ServerState, Entry]:
    """Return the state after the server's step, and the entry that tells clients of it.

    The state must have been made for the same optimizer, rule and downlink.
    """
    require(is_number(step.size), "step_size", repr(step.size), "a finite number")
    rate, sampled = step.dropout_rate, step.sampled
    is_rate, is_share = is_number(rate) and 0 <= rate < 1, is_number(sampled) and 0 < sampled <= 1
    require(is_rate, "dropout_rate", repr(rate), "at least 0 and below 1")
    require(is_share, "sampled", repr(sampled), "above 0 and at most 1")
    fitting = init_model(recipe, state.parameters[:1], step)
    for name in ("velocity", "rest"):
        if len(getattr(fitting, name)) != (len(getattr(state.model, name)) > 0):
            raise ConfigError(f"the server's state was not made for downlink {step.downlink!r}")
    if (state.model.step is None) != (fitting.step is None):
        raise ConfigError(f"the server's state was not made for the step {step.rule.name!r}")
    model, entry = take_step(_SPACE, recipe, state.model, step, state.num_clients)
    return ServerState(model, state.peers), entry


def age_weight(age: int) -> float:
    """Return what an update counts for whose client began so many rounds ago: FedBuff's weight.

    >>> [age_weight(age) for age in (0, 3)]
    [1.0, 0.5]
    """
    return 1.0 / math.sqrt(1.0 + age)


Value = TypeVar("Value")
_ROW = 1 << 10


@dataclass(frozen=True)
class PerClient(Sequence[Value]):
    """An immutable sequence, all of whose entries are alike at first.

    `replaced` copies one row of entries and the list of rows, however many entries there are.

    >>> empty = PerClient.alike(1_000_000, "nothing")
    >>> one = empty.replaced(999_999, "something")
    >>> one[999_999], one[0], empty[999_999]
    ('something', 'nothing', 'nothing')
    """

    length: int
    rows: tuple[tuple[Value, ...], ...]

    @staticmethod
    def alike(length: int, value: Value) -> PerClient[Value]:
        return PerClient(length, ((value,) * _ROW,) * (length // _ROW + 1))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.rows[index // _ROW][index % _ROW]

    def replaced(self, index: int, value: Value) -> PerClient[Value]:
        place, within = divmod(index, _ROW)
        row = (*self.rows[place][:within], value, *self.rows[place][within + 1 :])
        return replace(self, rows=(*self.rows[:place], row, *self.rows[place + 1 :]))
