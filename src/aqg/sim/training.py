"""How a federation trains, beyond the paper's one full gradient from every client.

Everything here defaults to the paper: all clients, weighted alike, one gradient each, plain steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from aqg.core.downlink import Downlink, Full
from aqg.core.optimizers import SGD, ServerOptimizer
from aqg.core.server import Step
from aqg.core.step_sizes import Fixed, StepRule
from aqg.core.types import BoolArray, Float64Array
from aqg.errors import ConfigError
from aqg.sim.late import Late
from aqg.sim.local import LocalTraining
from aqg.sim.problem import Problem

WEIGHTINGS = ("equal", "samples")

_STREAM = 0x5A3D
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
    """

    local: LocalTraining = field(default_factory=LocalTraining)
    optimizer: ServerOptimizer = field(default_factory=SGD)
    weighting: str = "equal"
    participation: float = 1.0
    downlink: Downlink = field(default_factory=Full)
    step: StepRule = field(default_factory=Fixed)
    late: Late | None = None

    def __post_init__(self) -> None:
        if self.weighting not in WEIGHTINGS:
            choices = ", ".join(WEIGHTINGS)
            raise ConfigError(f"unknown weighting {self.weighting!r}; choose from {choices}")
        if not 0 < self.participation <= 1:
            raise ConfigError(
                f"participation is {self.participation}; it must be above 0 and at most 1"
            )

    def make_step(self, size: float, dropout_rate: float, num_clients: int) -> Step:
        """Return how the server steps, with a step size, or the natural one of the rule."""
        sampled = self.num_counted(num_clients) / num_clients
        if self.waits_for_some:  # of those who have not dropped out
            dropout_rate = 0.0
        return Step(size, dropout_rate, sampled, self.optimizer, self.step, self.downlink)

    @property
    def waits_for_some(self) -> bool:
        """Whether rounds end before all replies are there."""
        return self.late is not None and self.late.buffer_size is not None

    def client_weights(self, problem: Problem) -> Float64Array:
        """Return ``w_m``: 1, or ``M·n_m/Σn``. The mean is 1, so that ``α`` keeps its meaning."""
        if self.weighting == "equal":
            return np.ones(problem.num_clients)
        sizes = np.array([len(samples.labels) for samples in problem.clients], np.float64)
        weights: Float64Array = sizes / sizes.mean()
        return weights

    def num_sampled(self, num_clients: int) -> int:
        """Return how many of ``M`` clients the server asks in a round, or has at work at a time.

        >>> [Training(participation=0.1).num_sampled(M) for M in (3, 10, 100)]
        [1, 1, 10]
        """
        return max(1, round(self.participation * num_clients))

    def num_counted(self, num_clients: int) -> int:
        """Return how many replies make a round, if no client drops out."""
        late = self.late
        asked = self.num_sampled(num_clients)
        return asked if late is None or late.buffer_size is None else late.buffer_size

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
        generator = np.random.default_rng([seed, _STREAM, round_number])
        unsampled[:] = True
        unsampled[generator.choice(idle, num_sampled, replace=False)] = False
        return unsampled
