"""The server's round: uploads go in, a model comes out.

`take_in`, `publish` and `step` are written over a leading axis of clients, as in `aqg.core.round`.
The simulator calls them on tables of all clients; `aqg.core.hearing` is a server that hears one
client at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqg.core.budget import Budget, first_budget
from aqg.core.downlink import (
    Condensed,
    Downlink,
    DownlinkState,
    Published,
    condense,
    shortened,
)
from aqg.core.links import Link, move_directions
from aqg.core.messages import energy_of, num_nonzero
from aqg.core.public import Change, Entry, Part, Rates, make_direction
from aqg.core.step_sizes import Fixed, StepRule, StepState, is_short

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.core.messages import AnyUpload
    from aqg.core.optimizers import OptimizerState, ServerOptimizer
    from aqg.core.recipe import Recipe
    from aqg.core.space import Array, Space
    from aqg.core.types import Float64Array, FloatArray, IntArray

_FIXED = Fixed()
_NO_NOISE = Budget()


class Model(NamedTuple):
    """The model and what moves it.

    Attributes:
        round: ``k``, the round in progress, counted from 1.
        parameters: ``θ^k``.
        total: ``Σ_m w_m ref_m`` as a running sum in float64; where the recipe keeps no mirrors, the
            sum of this round's uploads.
        history: ``‖direction‖²/M²`` of the last steps, newest first, times the optimizer's
            `fresh_share`.
        optimizer: what the server optimizer remembers.
        downlink: what is published of the sums; None where clients receive the whole model.
        is_moved: whether the sum that lasts has changed since the last step.
        step: what the rule for step sizes remembers; None where it needs nothing.
        num_sent: how many coordinates the uploads of this round have, all taken together; not
            counted where the recipe keeps mirrors.
        budget: the noise that uploads may carry.
        upload_energy: ``Σ_m ‖w_m Q_m‖²`` of this round's uploads, where that is looked at.

    """

    round: int
    parameters: Array
    total: Array
    history: tuple[float, ...]
    optimizer: OptimizerState
    downlink: DownlinkState | None = None
    is_moved: bool = False
    step: StepState | None = None
    num_sent: int = 0
    budget: Budget = _NO_NOISE
    upload_energy: float = 0.0

    @property
    def averaged(self) -> Array:
        """The mean of the models so far, where one is kept; else the model. See `step_sizes`."""
        if self.step is None or not self.step.num_models:
            return self.parameters
        return self.step.mean


def init_model(
    parameters: FloatArray,
    optimizer: ServerOptimizer,
    downlink: DownlinkState | None = None,
    rule: StepRule = _FIXED,
    noise: float = 0.0,
) -> Model:
    """Return the model before the first round; ``noise`` is the recipe's."""
    return Model(
        round=1,
        parameters=parameters,
        total=np.zeros(len(parameters)),
        history=(),
        optimizer=optimizer.init(len(parameters)),
        downlink=downlink,
        step=rule.init(parameters),
        budget=first_budget(noise),
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

    The arrays of model and link are the space's own and written to.

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
        if recipe.noise:
            energy = model.upload_energy  # in the order of clients, however many come at a time
            for weight, upload in zip(weights.tolist(), uploads, strict=True):
                energy += weight * weight * energy_of(upload)
            model = model._replace(upload_energy=energy)
        return model._replace(num_sent=model.num_sent + sum(map(num_nonzero, uploads)))
    space.move(recipe.memory, link.mirror, model.total, clients, uploads, weights)
    link.is_held[clients] = True
    move_directions(link.direction, clients.tolist(), uploads)
    return model._replace(is_moved=True)


def make_rates(recipe: Recipe, step_size: float, dropout_rate: float, sampled: float) -> Rates:
    """Return the numbers that turn a round's sums into a step.

    Sums are amplified by ``1/(1-p)`` in Algorithm 2; see `amplification`.
    """
    return Rates(step_size, amplification(recipe, dropout_rate, sampled))


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
    passing = None if keeps else model.total
    if recipe.noise:
        budget, energy = model.budget, model.upload_energy
        if energy:
            of_sum = space.squared_norm(model.total)
            budget = budget.after(recipe.noise, of_sum, energy, senders)
        model = model._replace(budget=budget, upload_energy=0.0)
    if not isinstance(downlink, Condensed):
        return model, Published(total, passing)
    assert model.downlink is not None
    if passing is not None and not space.number((passing != 0).sum()):
        passing = None  # as if no one had sent: equal sums are published alike
    tolerance = downlink.tolerance * num_clients**2 * recipe.movement.of(model.history)
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
        model.num_sent,
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
    from the sum, which has the scale of the clients' vectors. ``rates`` hold the natural step;
    those of the step that was taken are returned.
    """
    direction = make_direction(
        space, len(model.parameters), published.total, published.passing, rates
    )
    optimizer_state, update = optimizer.step(model.optimizer, direction, space.root)
    step_state, step_size = rule.next(space, model.step, model.parameters, update, rates.step_size)
    if step_size != rates.step_size:
        rates = rates._replace(step_size=step_size)
    parameters, squared_norm = space.take_step(model.parameters, update, direction, step_size)
    keeps = recipe.memory.keeps_mirror
    movement = space.number(squared_norm) / num_clients**2 * optimizer.fresh_share
    if isinstance(downlink, Condensed):
        movement = shortened(movement)
    moved = Model(
        round=model.round + 1,
        parameters=parameters,
        total=model.total if keeps else space.zeros_like(model.total),
        history=recipe.movement.extend(model.history, movement),
        optimizer=optimizer_state,
        downlink=model.downlink,
        step=rule.follow(step_state, parameters),
        budget=model.budget,
    )
    return moved, rates


def amplification(recipe: Recipe, dropout_rate: float, sampled: float = 1.0) -> float:
    """Return the factor on the server's sum: 1, or ``1/(1-p)`` for Augmented AQG.

    Where the server keeps no ``ref_m`` and asks only the fraction ``sampled`` of the clients, the
    sum over these is divided by it: an unbiased estimate of the sum over all.
    """
    factor = 1.0 / (1.0 - dropout_rate) if recipe.amplify_dropouts else 1.0
    return factor if recipe.memory.keeps_mirror else factor / sampled


def make_entry(
    recipe: Recipe,
    downlink: Downlink,
    before: Model,
    published: Published,
    movement: float,
    rates: Rates,
) -> Entry:
    """Return the entry of a round: what changed of the published sums, and the numbers.

    It is a function of sums over clients: of their vectors, and of how many coordinates they sent.
    ``before`` is the server's model before the step.
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
