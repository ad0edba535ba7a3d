"""When replies come: simulated wall-clock time, and rounds that do not wait for everyone.

A round begins when the one before it has ended. Clients that are not at work receive the model and
train from it; a reply is there once download, training and upload are done. The round ends with the
``B``-th reply that comes. One that comes later counts in the round in which it comes, with the
weight ``1/√(1 + age)``; its age is the number of rounds that have ended since its client began
(FedBuff; Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022).

An update is relative to the model that its client began with, so a late one needs nothing else
of the past. Where both ends keep mirrors that is not so, and recipes with mirrors are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqg.core.messages import AnyUpload, Message, Skip
from aqg.core.recipe import Recipe
from aqg.core.server import age_weight
from aqg.core.types import BoolArray, Float64Array, IntArray
from aqg.errors import ConfigError, require
from aqg.sim.record import AT_WORK, DROPPED
from aqg.spec import make_named
from aqg.wire import decode, encode

if TYPE_CHECKING:
    from aqg.sim.problem import Problem

_SPEEDS, _JITTER, _OUTAGES = 0x57EE, 0x717E, 0x0A6E
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
