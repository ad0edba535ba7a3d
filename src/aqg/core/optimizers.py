"""What the server makes of the aggregated direction before it takes its step.

The paper's server steps along the sum itself, ``θ^{k+1} = θ^k - α·Σ_m ref_m``. The optimizers of
Reddi et al., Adaptive Federated Optimization (FedOpt), turn the sum into another vector first:
``θ^{k+1} = θ^k - α·update``. Each is a pure function over a small state, and uses only operations
that NumPy and torch spell alike; roots, which they round differently, come from the caller.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from aqg.core.types import Float64Array
from aqg.errors import require
from aqg.spec import make_named


class OptimizerState(NamedTuple):
    """What an optimizer remembers between rounds; empty vectors where it needs none."""

    momentum: Float64Array  # the running direction, ``(n,)`` or ``(0,)``
    variance: Float64Array  # the running mean of squared directions, ``(n,)`` or ``(0,)``


Root = Callable[[Any], Any]
Stepped = tuple[OptimizerState, Any]


class ServerOptimizer:
    """Turns the aggregated direction into the step to take; here the direction itself."""

    @property
    def fresh_share(self) -> float:
        """How much of a steady update is made by the newest direction: ``1 - β``.

        The movement that clients compare with is multiplied by it. The rest of an update is made
        of directions past, which an upload cannot mend any more, so what clients hold back must be
        small against the fresh part.
        """
        return 1.0

    def init(self, _num_params: int) -> OptimizerState:
        """Return the state before the first round."""
        return OptimizerState(np.zeros(0), np.zeros(0))

    def step(self, state: OptimizerState, direction: Any, _root: Root = np.sqrt) -> Stepped:
        """Return the state after the round, and ``update``: the server takes ``-α·update``.

        ``root`` takes the roots of an array's coordinates where it lies.
        """
        return state, direction


@dataclass(frozen=True)
class SGD(ServerOptimizer):
    """The paper's step: ``update = direction``."""


@dataclass(frozen=True)
class Momentum(ServerOptimizer):
    """Heavy ball: ``momentum ← beta·momentum + direction``, and ``update`` is the momentum."""

    beta: float = 0.9

    def __post_init__(self) -> None:
        require(0 <= self.beta < 1, "beta", self.beta, "at least 0 and below 1")

    @property
    def fresh_share(self) -> float:
        return 1.0 - self.beta

    def init(self, num_params: int) -> OptimizerState:
        return OptimizerState(np.zeros(num_params), np.zeros(0))

    @np.errstate(over="ignore", invalid="ignore")  # a diverging run is a result, not an error
    def step(self, state: OptimizerState, direction: Any, _root: Root = np.sqrt) -> Stepped:
        momentum = self.beta * state.momentum + direction
        return state._replace(momentum=momentum), momentum


@dataclass(frozen=True)
class Adam(ServerOptimizer):
    """FedAdam: a running direction, divided by the running size of each coordinate.

    ``momentum ← b1·momentum + (1-b1)·direction``, ``variance ← b2·variance + (1-b2)·direction²``,
    ``update = momentum / (√variance + eps)``. As in FedOpt there is no bias correction, and the
    variance starts at ``eps²``. Coordinates of ``update`` are around 1 whatever the scale of the
    direction, so ``α`` is the length of a coordinate's step.
    """

    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-3

    def __post_init__(self) -> None:
        for name, value in (("b1", self.b1), ("b2", self.b2)):
            require(0 <= value < 1, name, value, "at least 0 and below 1")
        require(0 < self.eps < float("inf"), "eps", self.eps, "above 0")

    @property
    def fresh_share(self) -> float:
        return 1.0 - self.b1

    def init(self, num_params: int) -> OptimizerState:
        return OptimizerState(np.zeros(num_params), np.full(num_params, self.eps**2))

    @np.errstate(over="ignore", invalid="ignore")  # a diverging run is a result, not an error
    def step(self, state: OptimizerState, direction: Any, root: Root = np.sqrt) -> Stepped:
        momentum = self.b1 * state.momentum + (1 - self.b1) * direction
        variance = self.b2 * state.variance + (1 - self.b2) * (direction * direction)
        return OptimizerState(momentum, variance), momentum / (root(variance) + self.eps)


OPTIMIZERS: dict[str, type[SGD | Momentum | Adam]]
OPTIMIZERS = {"sgd": SGD, "momentum": Momentum, "adam": Adam}


def make_optimizer(spec: str) -> SGD | Momentum | Adam:
    """Make a server optimizer from its name and options."""
    return make_named("optimizer", spec, OPTIMIZERS)
