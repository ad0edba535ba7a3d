"""How a federation trains, beyond the paper's one full gradient from every client.

Everything here defaults to the paper: all clients, weighted alike, one gradient each, plain steps.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aqg.core.downlink import Downlink, Full
from aqg.core.optimizers import SGD, ServerOptimizer
from aqg.core.recipe import Recipe, kind_of_updates, require_memory
from aqg.core.server import Step
from aqg.core.step_sizes import Fixed, StepRule
from aqg.core.types import BoolArray, Float64Array, IntArray
from aqg.errors import ConfigError, require
from aqg.objectives.base import ClosedForm, Learner, Objective
from aqg.sim.late import Late
from aqg.sim.problem import Problem

Array = Any
"""A NumPy array or a torch tensor."""
Keys = Sequence[Sequence[int]]
"""Integers (seed, client, round) for each client."""

_BATCHES = 0xBA7C
"""Keeps the batches apart from other random numbers of the same seed."""


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains within a round; the default is one gradient on all its samples.

    Attributes:
        batch_size: samples per step, drawn without replacement until all were seen, then
            reshuffled; the last batch of such a pass may be smaller. None: all samples.
        steps: ``K``, local steps per round.
        epochs: passes over the client's samples per round, in place of ``steps``.
        rate: ``η``, the step size of the local steps.
    """

    batch_size: int | None = None
    steps: int = 1
    epochs: int | None = None
    rate: float = 0.1

    def __post_init__(self) -> None:
        counts = (self.batch_size, self.steps, self.epochs)
        for name, count in zip(("batch_size", "local_steps", "local_epochs"), counts, strict=True):
            require(count is None or count >= 1, name, count, "at least 1")
        if self.epochs is not None and self.steps != 1:
            raise ConfigError(
                f"local_steps is {self.steps} and local_epochs {self.epochs}; give one of them"
            )
        require(0 < self.rate < math.inf, "local_rate", self.rate, "above 0")

    @property
    def is_one_gradient(self) -> bool:
        """Whether a client computes one gradient on all its samples, as in the paper."""
        return self.batch_size is None and self.steps == 1 and self.epochs in (None, 1)

    @property
    def sees_all_samples(self) -> bool:
        """Whether the first step uses all samples, so that its loss is the client's."""
        return self.batch_size is None

    def num_steps(self, num_samples: int) -> int:
        """Return ``K`` for a client with this many samples."""
        if self.epochs is None:
            return self.steps
        batch_size = self.batch_size or num_samples
        return self.epochs * max(1, math.ceil(num_samples / max(1, batch_size)))

    def update(
        self,
        objective: Objective,  # the loss
        params: Array,  # ``θ``, ``(num_params,)``
        features: Array,  # the client's samples, ``(n, num_features)``
        labels: Array,  # their labels, ``(n,)``
        key: Sequence[int],  # integers (seed, client, round) that make the batches
    ) -> tuple[Array, Array]:
        """Train from ``params`` and return the loss of the first batch and the pseudo-gradient."""
        if self.is_one_gradient:
            return objective.losses_and_gradients(params, features, labels)
        num_steps = self.num_steps(len(labels))
        first_loss, total = None, 0.0
        quiet = np.errstate(over="ignore", invalid="ignore")  # divergence shows in the result
        session: AbstractContextManager[Learner] = nullcontext(objective)  # gives exact gradients
        if not self.sees_all_samples:
            session = objective.session(key)
        with quiet, session as learner:
            for batch in islice(self._batches(len(labels), key), num_steps):
                samples = (features, labels) if batch is None else (features[batch], labels[batch])
                loss, gradient = learner.losses_and_gradients(params, *samples)
                first_loss = loss if first_loss is None else first_loss
                total = total + gradient
                params = params - self.rate * gradient
            return first_loss, total / num_steps

    def update_many(
        self,
        objective: ClosedForm,  # the loss, with classes
        params: Array,  # ``θ``, ``(num_params,)``
        features: Array,  # the samples of all clients, ``(N, num_features)``
        labels: Array,  # their labels, ``(N,)``
        starts: Sequence[int],  # where each client's samples begin
        sizes: Sequence[int],  # how many each has
        keys: Keys,  # integers (seed, client, round) for each
    ) -> tuple[Array, Array]:
        """Let many clients take each step together; up to rounding, the same as `update` for each.

        Of clients of one size it is the same to the bit on NumPy. Otherwise batches are filled up
        to one length with samples of weight zero, and clients that have taken all their steps wait
        for the others.
        """
        num_steps, longest = [self.num_steps(size) for size in sizes], max(sizes)
        shape = max(num_steps), len(sizes), min(self.batch_size or longest, longest)
        places, shares = np.zeros(shape, np.int64), np.zeros(shape)
        for m, (start, size, key) in enumerate(zip(starts, sizes, keys, strict=True)):
            for j, batch in enumerate(islice(self._batches(size, key), num_steps[m])):
                chosen = np.arange(size) if batch is None else batch
                places[j, m, : len(chosen)] = start + chosen
                shares[j, m, : len(chosen)] = objective.sample_weight(len(chosen))
        rows, weights = _like(labels, places), _like(params, shares)
        models, total, first_losses = params, 0.0, None
        with np.errstate(over="ignore", invalid="ignore"):
            for j, lengths in enumerate((shares > 0).sum(axis=2)):
                own = rows[j, :, : lengths.max()]
                samples, weight = (features[own], labels[own]), weights[j, :, : lengths.max()]
                if j == 0 and lengths.min() == lengths.max():
                    losses, gradients = objective.losses_and_gradients(params, *samples)
                else:
                    losses, gradients = objective.weighted_losses_and_gradients(
                        models, *samples, weight
                    )
                    if objective.l2:
                        losses = losses + objective.l2 / 2 * (models * models).sum(-1)
                        gradients += objective.l2 * models
                    if not lengths.all():
                        gradients *= (weight.sum(-1) > 0)[:, None]
                first_losses = losses if first_losses is None else first_losses
                total = total + gradients
                models = models - self.rate * gradients
        return first_losses, total / _like(params, np.array(num_steps))[:, None]

    def _batches(self, num_samples: int, key: Sequence[int]) -> Iterator[IntArray | None]:
        """Pass over the samples again and again, each time in another order; None: all of them."""
        if self.batch_size is None or self.batch_size >= num_samples:
            yield from repeat(None)
            return
        seed, client, round_number = key
        generator = np.random.default_rng([seed, _BATCHES, client, round_number])
        while True:
            order = generator.permutation(num_samples)
            for start in range(0, num_samples, self.batch_size):
                yield order[start : start + self.batch_size]


def _like(other: Array, array: NDArray[Any]) -> Array:
    """Return an array of the other's kind and type, where that is."""
    if isinstance(other, np.ndarray):
        return array.astype(other.dtype)
    import torch

    return torch.as_tensor(array, device=other.device, dtype=other.dtype)


_DROPOUTS = 0xD209
"""Keeps dropouts apart from other random numbers of the same seed."""


@dataclass(frozen=True)
class Dropout:
    """Who drops out of which round: clients at random, and absences written down one by one."""

    # ``p``, with which each client drops out of every round; Algorithm 2 amplifies by it
    rate: float = 0.0
    seed: int = 0  # of these random numbers
    # clients, and the first and the last round of the absence of each
    absences: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        require(0.0 <= self.rate < 1.0, "dropout", self.rate, "at least 0 and below 1")
        for client, first, last in self.absences:
            if client < 0 or not 1 <= first <= last:
                raise ConfigError(
                    f"absence of client {client} in rounds {first}..{last}; clients count from 0, "
                    "rounds from 1, and the first is not after the last"
                )

    def dropped(self, round_number: int, num_clients: int) -> BoolArray:
        """Return, for each client, whether it drops out of this round."""
        away = np.zeros(num_clients, np.bool_)
        if self.rate:
            generator = np.random.default_rng([self.seed, _DROPOUTS, round_number])
            away = generator.random(num_clients) < self.rate
        for client, first, last in self.absences:
            if client < num_clients and first <= round_number <= last:
                away[client] = True
        return away


WEIGHTINGS = ("equal", "samples")

_PARTICIPANTS = 0x5A3D
"""Keeps the random choice of participants apart from others that use the same seed."""


@dataclass(frozen=True)
class Training:
    """The options of practical federated training.

    Attributes:
        local: what a client computes in a round.
        optimizer: what the server makes of the clients' sum.
        weighting: how much a client counts in the server's sum and in the loss: ``"equal"``, or
            by its number of ``"samples"``.
        participation: the fraction of clients that the server asks in a round; the others are
            treated as dropped out.
        downlink: how clients receive the model: whole, or as a log of what was published.
        step: how long the server's steps are: the simulation's ``step_size`` in every round, or
            found from round to round with that as the natural one.
        late: what time replies take, and for how many of them a round waits; None: time is not
            simulated, and rounds wait for all.
        memory: what clients hold between rounds: the ``"model"`` and what the recipe keeps, or
            ``"none"`` of it.
    """

    local: LocalTraining = field(default_factory=LocalTraining)
    optimizer: ServerOptimizer = field(default_factory=SGD)
    weighting: str = "equal"
    participation: float = 1.0
    downlink: Downlink = field(default_factory=Full)
    step: StepRule = field(default_factory=Fixed)
    late: Late | None = None
    memory: str = "model"

    def __post_init__(self) -> None:
        if self.weighting not in WEIGHTINGS:
            choices = ", ".join(WEIGHTINGS)
            raise ConfigError(f"unknown weighting {self.weighting!r}; choose from {choices}")
        asked = self.participation
        require(0 < asked <= 1, "participation", asked, "above 0 and at most 1")

    def make_step(self, size: float, dropout_rate: float, num_clients: int) -> Step:
        counted = self.num_sampled(num_clients)
        if self.buffer_size is not None:
            counted, dropout_rate = self.buffer_size, 0.0  # of those who have not dropped out
        sampled = counted / num_clients
        return Step(size, dropout_rate, sampled, self.optimizer, self.step, self.downlink)

    def check_memory(self, recipe: Recipe, averages_statistics: bool) -> None:
        """Raise where clients that hold nothing between rounds would have to."""
        require_memory(self.memory, recipe)
        if self.memory == "none" and averages_statistics:
            raise ConfigError(
                f"memory is {self.memory!r} with a module whose running statistics the server "
                "averages, and of which clients are told the changes; use another normalization"
            )

    @property
    def buffer_size(self) -> int | None:
        """After how many replies a round ends; None: after all."""
        return None if self.late is None else self.late.buffer_size

    @property
    def updates(self) -> str:
        """What kind of updates clients send, as recipes tell them apart."""
        forgets = self.memory == "none" or self.buffer_size is not None
        return kind_of_updates(self.local.sees_all_samples, self.participation, forgets)

    def client_weights(self, problem: Problem) -> Float64Array:
        """Return ``w_m``: 1, or ``M·n_m/Σn``. The mean is 1, so that ``α`` keeps its meaning."""
        if self.weighting == "equal":
            return np.ones(problem.num_clients)
        sizes = np.array([len(samples.labels) for samples in problem.clients], np.float64)
        return sizes / sizes.mean()

    def num_sampled(self, num_clients: int) -> int:
        """Return how many of ``M`` clients the server asks in a round, or has at work at a time."""
        return max(1, round(self.participation * num_clients))

    def unsampled(
        self, round_number: int, num_clients: int, seed: int, at_work: BoolArray | None = None
    ) -> BoolArray:
        """Return, for each client, whether the server does not ask it in this round.

        Those ``at_work`` for earlier rounds are among the sampled already.
        """
        num_sampled = self.num_sampled(num_clients)
        unsampled = np.zeros(num_clients, np.bool_) if at_work is None else at_work.copy()
        if num_sampled == num_clients:
            return unsampled
        idle = np.flatnonzero(~unsampled)
        num_sampled = max(0, num_sampled - (num_clients - len(idle)))
        generator = np.random.default_rng([seed, _PARTICIPANTS, round_number])
        unsampled[:] = True
        unsampled[generator.choice(idle, num_sampled, replace=False)] = False
        return unsampled
