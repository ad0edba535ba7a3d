"""A recipe: the parts that together make one compressor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from aqg.core.links import Memory
from aqg.core.movement import Movement
from aqg.core.quantizers import Verbatim
from aqg.errors import ConfigError

if TYPE_CHECKING:
    from aqg.core.policies import Policy
    from aqg.core.quantizers import Quantizer
    from aqg.core.stage import Stage, Switch
    from aqg.core.types import Float64Array, IntArray

DEPTH = 10
"""``D``: how many past steps the criteria look at."""
PAPER_MOVEMENT = Movement((1.0 / DEPTH,) * DEPTH)
"""``ξ_d = 1/D``, the paper's setting."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a client does with its gradient, and what the server makes of an upload.

    Attributes:
        policy: decides whether to send and with which width.
        quantizer: measures and encodes.
        memory: what an upload stands for, and what both ends remember of it.
        stages: what a client's vector goes through before it is measured, in order.
        switch: puts clients into other modes, with a policy, quantizer and stages of their own.
        movement: the weights ``ξ_d`` behind the number that the server broadcasts.
        max_staleness: an upload is forced after this many skipped rounds in a row.
        amplify_dropouts: multiply the server's sum by ``1/(1-p)`` (Algorithm 2).
        averages: in the simulators, the server takes the mean over the clients that took part in
            the round, however many there were, times the number of clients.

    """

    policy: Policy
    quantizer: Quantizer
    memory: Memory = Memory.NONE
    stages: tuple[Stage, ...] = ()
    switch: Switch | None = None
    movement: Movement = PAPER_MOVEMENT
    max_staleness: int = 100
    amplify_dropouts: bool = False
    averages: bool = False

    def __post_init__(self) -> None:
        if self.max_staleness < 1:
            raise ConfigError(f"max_staleness is {self.max_staleness}; it must be at least 1")
        for way in self.ways:
            names = [stage.name for stage in way.stages]
            if self.switch is not None:
                names.append(self.switch.name)
            if len(set(names)) < len(names):
                raise ConfigError(f"stages {', '.join(names)} must have different names")
        for branch in self.ways[1:]:
            if branch.memory.keeps_mirror or branch.switch is not None:
                raise ConfigError("a branch of a switch has no mirror and no switch of its own")

    @cached_property
    def ways(self) -> tuple[Recipe, ...]:
        """Every mode a client can be in: the recipe's own, and the branches of its switch."""
        return (self,) if self.switch is None else (self, *self.switch.branches)

    @cached_property
    def all_stages(self) -> dict[str, Stage]:
        """Every stage that a client keeps a state of, by name.

        A stage in several modes is one and the same, and so is its state.
        """
        stages = {stage.name: stage for way in self.ways for stage in way.stages}
        return stages if self.switch is None else {self.switch.name: self.switch, **stages}

    @property
    def is_verbatim(self) -> bool:
        """Whether clients send their vectors as they are."""
        return all(isinstance(way.quantizer, Verbatim) for way in self.ways)

    @property
    def keeps_residual(self) -> bool:
        """Whether clients keep what they did not send: what they sent must not be lost then."""
        return "feedback" in self.all_stages

    def round_weights(
        self, weights: Float64Array, takes_part: IntArray, sampled: float
    ) -> Float64Array:
        """Return how much each client counts in a round: its weight, or its part of a mean.

        Args:
            weights: ``w_m`` of all clients, with mean 1.
            takes_part: the clients that were sampled and have not dropped out.
            sampled: the fraction that is sampled, by which the server divides the sum.

        """
        if not self.averages or not len(takes_part):
            return weights
        return weights * (len(weights) * sampled / float(weights[takes_part].sum()))

    def for_updates(self, are_exact: bool) -> Recipe:
        """Return the recipe for updates that are exact gradients, or that may hold noise.

        Exact gradients hold none, however wildly they change: there is nothing to switch for.
        """
        return replace(self, switch=None) if are_exact else self

    def for_transport(self, overhead: float) -> Recipe:
        """Return the recipe for a transport that adds so many bytes to every message.

        One that was told of another transport stays as it is.
        """
        if self.switch is None:
            return self
        return replace(self, switch=self.switch.for_transport(overhead))

    def for_participation(self, asked: float) -> Recipe:
        """Return the recipe for clients that take part in this share of all rounds."""
        if self.switch is None:
            return self
        return replace(self, switch=self.switch.for_participation(asked))

    @property
    def sends_by_pause(self) -> bool:
        """Whether clients keep up with averaging, and send more after a pause for that."""
        return getattr(self.switch, "keep", 0.0) > 0
