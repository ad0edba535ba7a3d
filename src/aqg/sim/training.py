"""How a federation trains, beyond the paper's one full gradient from every client.

Everything here defaults to the paper: all clients, weighted alike, one gradient each, plain steps,
and rounds that wait for everyone.

Where time is simulated (`Late`), a round begins when the one before it has ended. Clients that are
not at work receive the model and train from it; a reply is there once download, training and upload
are done. The round ends with the ``B``-th reply that comes. One that comes later counts in the
round in which it comes, with the weight ``1/√(1 + age)``; its age is the number of rounds that have
ended since its client began (FedBuff; Nguyen et al., Federated Learning with Buffered Asynchronous
Aggregation, AISTATS 2022).

An update is relative to the model that its client began with, so a late one needs nothing else
of the past. Where both ends keep mirrors that is not so, and recipes with mirrors are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqg.core.downlink import Downlink, Full
from aqg.core.messages import AnyUpload, Message, Skip
from aqg.core.optimizers import SGD, ServerOptimizer
from aqg.core.recipe import Recipe, kind_of_updates, require_memory
from aqg.core.server import Step, age_weight
from aqg.core.step_sizes import Fixed, StepRule
from aqg.core.types import BoolArray, Float64Array, IntArray
from aqg.errors import ConfigError, require
from aqg.objectives.base import ClosedForm, Learner, Objective
from aqg.sim.problem import Problem
from aqg.sim.record import AT_WORK, DROPPED
from aqg.spec import make_named
from aqg.wire import decode, encode

_SPEEDS, _JITTER, _OUTAGES = 0x57EE, 0x717E, 0x0A6E
_BATCHES, _DROPOUTS, _PARTICIPANTS = 0xBA7C, 0xD209, 0x5A3D
"""Keep these random numbers apart from others of the same seed."""
_BITS_PER_BYTE, _MEGA = 8, 1e6


@dataclass(frozen=True)
class Speeds:
    """How long clients train in a round: each has a time of its own, which may vary."""

    seconds: float = 1.0  # the median over clients
    sigma: float = 0.0  # ``σ`` of the logarithm over clients
    share: float = 0.0  # of the clients that need so many ``times`` as long
    times: float = 1.0  # see there
    jitter: float = 0.0  # ``σ`` of the logarithm from round to round

    def __post_init__(self) -> None:
        require(0 < self.seconds < math.inf, "option seconds", f"{self.seconds:g}", "above 0")
        require(0 <= self.sigma < math.inf, "option sigma", f"{self.sigma:g}", "at least 0")
        require(0 <= self.share <= 1, "option share", f"{self.share:g}", "at least 0 and at most 1")
        require(0 < self.times < math.inf, "option times", f"{self.times:g}", "above 0")
        require(0 <= self.jitter < math.inf, "option jitter", f"{self.jitter:g}", "at least 0")

    def of_clients(self, num_clients: int, seed: int) -> Float64Array:
        random = np.random.default_rng([seed, _SPEEDS])
        times: Float64Array = self.seconds * np.exp(self.sigma * random.normal(size=num_clients))
        times[random.permutation(num_clients)[: round(self.share * num_clients)]] *= self.times
        return times

    def of_round(self, number: int, times: Float64Array, seed: int) -> Float64Array:
        if not self.jitter:
            return times
        random = np.random.default_rng([seed, _JITTER, number])
        return times * np.exp(self.jitter * random.normal(size=len(times)))


SPEEDS: dict[str, Callable[..., Speeds]] = {
    "equal": lambda *, seconds=1.0, jitter=0.0: Speeds(seconds, jitter=jitter),
    "lognormal": lambda *, sigma=1.0, seconds=1.0, jitter=0.0: Speeds(
        seconds, sigma, jitter=jitter
    ),
    "stragglers": lambda *, share=0.2, times=10.0, seconds=1.0, jitter=0.0: Speeds(
        seconds, 0.0, share, times, jitter
    ),
}


@dataclass(frozen=True)
class Outages:
    """A reply is held up with probability ``chance``, for ``seconds`` on average."""

    chance: float = 0.05
    seconds: float = 20.0

    def __post_init__(self) -> None:
        require(
            0 <= self.chance <= 1, "option chance", f"{self.chance:g}", "at least 0 and at most 1"
        )
        require(0 < self.seconds < math.inf, "option seconds", f"{self.seconds:g}", "above 0")

    def of_round(self, number: int, num_clients: int, seed: int) -> Float64Array:
        random = np.random.default_rng([seed, _OUTAGES, number])
        is_held_up = random.random(num_clients) < self.chance
        return is_held_up * random.exponential(self.seconds, num_clients)


OUTAGES = {"random": Outages}


@dataclass(frozen=True)
class Late:
    """What time replies take, and for how many of them a round waits."""

    speeds: Speeds  # how long clients train
    # ``B``, the replies after which a round ends; None: all that are on their way
    buffer_size: int | None = None
    outages: Outages | None = None  # what holds replies up; None: nothing
    # megabits per second of each client's link in either direction; 0: transfers take no time
    mbit: float = 0.0


def make_late(
    speeds: str | None, buffer_size: int | None, outages: str | None, mbit: float
) -> Late | None:
    """Make what settings say; None where nothing is said."""
    if speeds is None:
        given = {"buffer_size": buffer_size, "outages": outages, "link_mbit": mbit}
        for name, value in given.items():
            if value:
                raise ConfigError(
                    f"{name} is {value} without speeds; without them no reply is late"
                )
        return None
    made: Speeds = make_named("speeds", speeds, SPEEDS)
    held: Outages | None = None if outages is None else make_named("outages", outages, OUTAGES)
    return Late(made, buffer_size, held, mbit)


def check_late(
    late: Late | None, recipe: Recipe, num_at_work: int, averages_statistics: bool = False
) -> None:
    """Raise unless rounds can end early."""
    if late is None or late.buffer_size is None:
        return
    if not 1 <= late.buffer_size <= num_at_work:
        raise ConfigError(
            f"buffer_size is {late.buffer_size}; it must be in 1..{num_at_work}, the number of "
            "clients that train at a time"
        )
    if recipe.memory.keeps_mirror:
        raise ConfigError(
            f"buffer_size is {late.buffer_size} with a recipe whose server keeps a mirror of every "
            "client, which a late reply would not fit; use auto with local steps or batches, or "
            "another recipe without mirrors"
        )
    if averages_statistics:
        raise ConfigError(
            f"buffer_size is {late.buffer_size} with a module whose running statistics the server "
            "averages, which come with the round; keep them on the clients, or use another "
            "normalization"
        )


class Reply(NamedTuple):
    """What a client sent."""

    message: Message  # an upload, or a skip
    size: int  # of its frame


class Closed(NamedTuple):
    """The replies that count in a round, in the order of their clients."""

    clients: IntArray  # who sent them
    replies: list[Reply]  # of each
    factors: Float64Array  # what each counts for by its age, ``(M,)``
    at_work: BoolArray  # who has not replied yet, ``(M,)``

    def uploads(self) -> tuple[IntArray, list[AnyUpload]]:
        found = zip(self.clients.tolist(), self.replies, strict=True)
        pairs = [(client, r.message) for client, r in found if not isinstance(r.message, Skip)]
        return np.array([c for c, _ in pairs], np.int64), [message for _, message in pairs]

    def widths_and_sizes(self) -> tuple[IntArray, IntArray]:
        """Return for each client the width of what came, and how many bytes."""
        widths = np.where(self.at_work, AT_WORK, DROPPED)
        sizes = np.zeros(len(widths), np.int64)
        widths[self.clients] = [reply.message.width for reply in self.replies]
        sizes[self.clients] = [reply.size for reply in self.replies]
        return widths, sizes


class Pending(NamedTuple):
    """The replies that are on their way between two rounds."""

    clock: float  # seconds since the first round began
    round: IntArray  # in which each client began; 0: is not at work
    arrival: Float64Array  # when the reply of each comes
    frames: tuple[bytes, ...] = ()  # of those that are at work, in their order


class Replies:
    """The replies of a simulation that are on their way, and its clock."""

    def __init__(self, late: Late, problem: Problem, seed: int) -> None:
        self.late, self.seed = late, seed
        self.clock = 0.0
        self._num_params, count = len(problem.initial_params), problem.num_clients
        self._times = late.speeds.of_clients(count, seed)
        self._rounds = np.zeros(count, np.int64)
        self._arrivals = np.zeros(count)
        self._waiting: dict[int, Reply] = {}

    @property
    def at_work(self) -> BoolArray:
        """Who has not replied yet, ``(M,)``."""
        return self._rounds > 0

    def send(self, number: int, replies: Mapping[int, Reply], received: IntArray) -> None:
        """Let clients begin; their replies come after download, training, outage and upload."""
        late, count = self.late, len(self._times)
        seconds = late.speeds.of_round(number, self._times, self.seed)
        if late.outages is not None:
            seconds = seconds + late.outages.of_round(number, count, self.seed)
        for client, reply in replies.items():
            moved = int(received[client]) + reply.size if late.mbit else 0
            transfer = moved * _BITS_PER_BYTE / (late.mbit * _MEGA) if moved else 0.0
            self._rounds[client] = number
            self._arrivals[client] = self.clock + seconds[client] + transfer
        self._waiting |= replies

    def close(self, number: int) -> Closed:
        waiting = np.flatnonzero(self.at_work)
        arrivals = self._arrivals[waiting]
        first = np.argsort(arrivals, kind="stable")[: self.late.buffer_size]
        if len(first):
            self.clock = max(self.clock, float(arrivals[first].max()))
        clients = np.sort(waiting[first])
        ages = number - self._rounds[clients]
        self._rounds[clients] = 0
        replies = [self._waiting.pop(client) for client in clients.tolist()]
        factors = np.ones(len(self._rounds))
        factors[clients] = [age_weight(age) for age in ages.tolist()]
        return Closed(clients, replies, factors, self.at_work)

    def pending(self) -> Pending:
        frames = tuple(encode(self._waiting[client].message) for client in sorted(self._waiting))
        return Pending(self.clock, self._rounds.copy(), self._arrivals.copy(), frames)

    def load(self, found: Pending) -> None:
        self.clock = found.clock
        self._rounds, self._arrivals = found.round.copy(), found.arrival.copy()
        replies = [Reply(decode(frame, self._num_params), len(frame)) for frame in found.frames]
        self._waiting = dict(zip(np.flatnonzero(self.at_work).tolist(), replies, strict=True))


Array = Any
"""A NumPy array or a torch tensor."""
Keys = Sequence[Sequence[int]]
"""Integers (seed, client, round) for each client."""


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
