"""A recipe: the parts that together make one compressor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aqg.core.movement import Movement
from aqg.errors import ConfigError

if TYPE_CHECKING:
    from aqg.core.mirror import Memory
    from aqg.core.policies import Policy
    from aqg.core.quantizers import Quantizer

DEPTH = 10
"""``D``: how many past steps the criteria look at."""
PAPER_MOVEMENT = Movement((1.0 / DEPTH,) * DEPTH)
"""``ξ_d = 1/D``, the paper's setting."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is quantized (memory), whether and how finely (policy), and how (quantizer).

    Attributes:
        memory: which vector is quantized and what the server remembers.
        policy: decides whether to send and with which width.
        quantizer: measures and encodes.
        movement: the weights ``ξ_d`` behind the number that the server broadcasts.
        max_staleness: an upload is forced after this many silent rounds in a row.
        amplify_dropouts: multiply the server's sum by ``1/(1-p)`` (Algorithm 2).

    """

    memory: Memory
    policy: Policy
    quantizer: Quantizer
    movement: Movement = PAPER_MOVEMENT
    max_staleness: int = 100
    amplify_dropouts: bool = False

    def __post_init__(self) -> None:
        if self.max_staleness < 1:
            raise ConfigError(f"max_staleness is {self.max_staleness}; it must be at least 1")
