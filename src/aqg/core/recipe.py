"""A recipe: the parts that together make one compressor.

Among them the movement, the one number that replaces the model's history. The paper's criteria
compare an innovation with ``1/(α²M²) Σ_d ξ_d ‖θ^{k+1-d} - θ^{k-d}‖²``. With
``θ^{k+1} = θ^k - α·direction`` each term is ``ξ_d ‖direction^{k-d}‖²/M²``: the step size cancels,
and only the server needs the history. Server optimizers with momentum shrink the number by their
`fresh_share`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import mul

from aqg.core.policies import Policy
from aqg.core.quantizers import Quantizer
from aqg.core.stages import Stage, WiderTolerance
from aqg.core.track import Memory
from aqg.core.types import Float64Array, IntArray
from aqg.errors import ConfigError, require


@dataclass(frozen=True)
class Movement:
    """The weights ``ξ_1..ξ_D`` of the last ``D`` steps."""

    weights: tuple[float, ...]  # ``ξ_d``, newest step first
    # what the steps before the first round count as. ``"zero"``: nothing (the paper). ``"mean"``:
    # the mean of those that exist, so the early rounds are not stricter.
    fill: str = "zero"

    def __post_init__(self) -> None:
        if self.fill not in ("zero", "mean"):
            raise ConfigError(f"fill is {self.fill!r}; choose 'zero' or 'mean'")
        if not self.weights or min(self.weights) < 0:
            raise ConfigError(f"movement weights {self.weights} must be non-empty and not negative")

    def of(self, history: tuple[float, ...]) -> float:
        """Return the movement after steps with these ``‖direction‖²/M²``, newest first.

        >>> Movement((0.5, 0.5)).of((4.0,)), Movement((0.5, 0.5), fill="mean").of((4.0,))
        (2.0, 4.0)
        """
        if not history:
            return 0.0
        total: float = sum(map(mul, self.weights, history))
        if self.fill == "mean" and len(history) < len(self.weights):
            known = sum(self.weights[: len(history)])
            total *= sum(self.weights) / known if known > 0 else 1.0
        return total

    def extend(self, history: tuple[float, ...], step: float) -> tuple[float, ...]:
        """Return ``history`` with a new step in front, no longer than needed."""
        return (step, *history)[: len(self.weights)]


def even_movement(total: float = 1.0, fill: str = "zero", depth: int = 10) -> Movement:
    """Return ``ξ_d = total/D``; in the paper ``D`` is 10, and the total 1."""
    return Movement((total / depth,) * depth, fill)


PAPER_MOVEMENT = even_movement()

EXACT, STEADY, SAMPLED = "exact", "steady", "sampled"
"""The kinds of updates that recipes tell apart."""


def kind_of_updates(are_exact: bool, sampled: float, forgets: bool = False) -> str:
    """Return which kind of updates a run has, by the share of clients that a round asks.

    `EXACT` are gradients over all of a client's samples, without noise. All others are `STEADY`
    from clients that are asked in every round and remember something of the last, or `SAMPLED`.
    """
    if are_exact:
        return EXACT
    return STEADY if sampled >= 1 and not forgets else SAMPLED


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a client does with its gradient, and what the server makes of an upload.

    Attributes:
        policy: decides whether to send and with which width.
        quantizer: measures and encodes.
        memory: what an upload stands for, and what both ends remember of it.
        stages: what a client's vector goes through before it is measured, in order.
        movement: the weights ``ξ_d`` behind the number that the server broadcasts.
        max_staleness: an upload is forced after this many skipped rounds in a row.
        amplify_dropouts: multiply the server's sum by ``1/(1-p)`` (Algorithm 2).
        step: how long the server's steps are with noisy updates, as `make_step` reads it.
        downlink: what the server publishes, as `make_downlink` reads it.
        noise: the noise that the mean of all uploads may carry, in its own energy, where clients
            round at random by that; 0: they do not.
        exact: the recipe that takes this one's place where updates are exact gradients; None: it
            stays.
        steady: likewise, where they are not, and every client is asked in every round.
        averages: in the simulators, the server takes the mean over the clients that took part in
            the round, however many there were, times the number of clients.
    """

    policy: Policy
    quantizer: Quantizer
    memory: Memory = Memory.NONE
    stages: tuple[Stage, ...] = ()
    movement: Movement = PAPER_MOVEMENT
    max_staleness: int = 100
    amplify_dropouts: bool = False
    averages: bool = False
    step: str = "fixed"
    downlink: str = "condensed"
    noise: float = 0.0
    exact: Recipe | None = None
    steady: Recipe | None = None

    def __post_init__(self) -> None:
        require(self.max_staleness >= 1, "max_staleness", self.max_staleness, "at least 1")
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ConfigError(f"stages {', '.join(names)} must have different names")

    @cached_property
    def all_stages(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.stages}

    @property
    def keeps_residual(self) -> bool:
        """Whether clients keep what they did not send: what they sent must not be lost then."""
        return "feedback" in self.all_stages

    def round_weights(
        self, weights: Float64Array, takes_part: IntArray, sampled: float
    ) -> Float64Array:
        """Return how much each client counts in a round: its weight, or its part of a mean.

        ``weights`` of all clients have the mean 1; those that were sampled and have not dropped out
        take part; by ``sampled``, their fraction, the server divides the sum.
        """
        if not self.averages or not len(takes_part):
            return weights
        return weights * (len(weights) * sampled / float(weights[takes_part].sum()))

    def for_updates(self, kind: str) -> Recipe:
        """Return the recipe for updates of a kind, see `kind_of_updates`."""
        return {EXACT: self.exact, STEADY: self.steady}.get(kind) or self


def widest_weights(recipe: Recipe) -> tuple[float, ...]:
    """Return ``ξ_1..ξ_D`` for a client that is tolerated most: what a guarantee has to cover."""
    factors = [stage.widest for stage in recipe.stages if isinstance(stage, WiderTolerance)]
    return tuple(max(factors, default=1.0) * weight for weight in recipe.movement.weights)


MEMORIES = ("model", "none")


def require_memory(memory: str, recipe: Recipe) -> None:
    """Raise unless clients of a recipe may hold that much between rounds."""
    if memory not in MEMORIES:
        raise ConfigError(f"memory is {memory!r}; choose from {', '.join(MEMORIES)}")
    if memory == "none" and (recipe.memory.keeps_mirror or recipe.keeps_residual):
        raise ConfigError(
            "memory is 'none' with a recipe whose clients remember what they sent; use auto with "
            "local steps or batches, or qsgd"
        )
