"""A recipe: the parts that together make one compressor."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from aqg.core.mirror import Memory
from aqg.core.movement import Movement
from aqg.core.policies import Always
from aqg.core.quantizers import Stochastic
from aqg.core.sparsifiers import TERNARY_WIDTH, Trickle
from aqg.errors import ConfigError

if TYPE_CHECKING:
    from aqg.core.noise import NoiseMeter
    from aqg.core.policies import Policy
    from aqg.core.quantizers import Quantizer
    from aqg.core.schedules import Schedule
    from aqg.core.types import Float64Array

DEPTH = 10
"""``D``: how many past steps the criteria look at."""
RARELY = 4.0
"""A client that is asked every so many rounds, or more seldom, draws what it sends."""
PAPER_MOVEMENT = Movement((1.0 / DEPTH,) * DEPTH)
"""``ξ_d = 1/D``, the paper's setting."""


@dataclass(frozen=True)
class Noisy:
    """A trickle with error feedback, and the meter that tells when it is better than a memory.

    What is sent so counts in its round alone: the server forgets ``ref_m``.

    Attributes:
        meter: tells noise from signal.
        overhead: bytes that the transport adds to every message; 0 if nothing is known of it.

    """

    meter: NoiseMeter
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.overhead < math.inf:
            raise ConfigError(f"overhead is {self.overhead}; it must be at least 0 and finite")

    @property
    def recipe(self) -> Recipe:
        """What a client does of which nothing is known but that it is noisy."""
        return Recipe(memory=Memory.FEEDBACK, policy=Always(TERNARY_WIDTH), quantizer=Trickle())

    def quantizer(self, notes: Float64Array) -> Trickle | Stochastic:
        """Return the quantizer for a client with these notes.

        The less noise there is, and the more seldom the client is asked, the more it sends. One
        that is asked very seldom draws at random what it sends, in proportion to its size.
        """
        if not self.owes(notes):
            return Stochastic()
        return Trickle(self.meter.noise_share(notes), self.meter.mean_pause(notes), self.overhead)

    def owes(self, notes: Float64Array) -> bool:
        """Tell whether a client is asked often enough to owe what it does not send.

        Otherwise a debt would be long out of date when it is paid.
        """
        return self.meter.mean_pause(notes) < RARELY


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is quantized (memory), whether and how finely (policy), and how (quantizer).

    Attributes:
        memory: which vector is quantized and what the server remembers.
        policy: decides whether to send and with which width.
        quantizer: measures and encodes.
        movement: the weights ``ξ_d`` behind the number that the server broadcasts.
        max_staleness: an upload is forced after this many silent rounds in a row.
        averaging: ``η``, the weight of the newest gradient in the running average that a client
            keeps and compresses, ``v ← (1 - η)·v + η·g``; with 1, the gradient itself.
        own_movement: give the policy ``‖v^k - v^{k-1}‖²``, how far the client's own vector moved,
            in place of the movement that the server broadcasts.
        schedule: follows the client's losses and gives the policy a number of its own, in place
            of the movement.
        amplify_dropouts: multiply the server's sum by ``1/(1-p)`` (Algorithm 2).
        noisy: what a client does instead while its updates are mostly noise.

    """

    memory: Memory
    policy: Policy
    quantizer: Quantizer
    movement: Movement = PAPER_MOVEMENT
    max_staleness: int = 100
    averaging: float = 1.0
    own_movement: bool = False
    schedule: Schedule | None = None
    amplify_dropouts: bool = False
    noisy: Noisy | None = None

    def __post_init__(self) -> None:
        if self.max_staleness < 1:
            raise ConfigError(f"max_staleness is {self.max_staleness}; it must be at least 1")
        if not 0 < self.averaging <= 1:
            raise ConfigError(f"averaging is {self.averaging}; it must be above 0 and at most 1")

    def initial_notes(self, num_params: int) -> Float64Array:
        """Return what a client's schedule or noise meter starts from; nothing without either."""
        if self.noisy is not None:
            return self.noisy.meter.init(num_params)
        return np.zeros(0) if self.schedule is None else self.schedule.init()

    def for_updates(self, are_exact: bool) -> Recipe:
        """Return the recipe for updates that are exact gradients, or that may hold noise.

        Exact gradients hold none, however wildly they change: there is nothing to measure.
        """
        return replace(self, noisy=None) if are_exact else self

    def for_transport(self, overhead: float) -> Recipe:
        """Return the recipe for a transport that adds so many bytes to every message.

        One that was told of another transport stays as it is.
        """
        if self.noisy is None or self.noisy.overhead:
            return self
        return replace(self, noisy=replace(self.noisy, overhead=overhead))

    @property
    def keeps_residual(self) -> bool:
        """Whether a client remembers what error feedback owes."""
        return self.memory is Memory.FEEDBACK or self.noisy is not None

    @property
    def keeps_average(self) -> bool:
        """Whether a client remembers the vector it compressed last."""
        return self.averaging < 1 or self.own_movement
