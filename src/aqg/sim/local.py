"""What a client computes in a round: one gradient, or a stretch of local training.

The vector a client hands to the compressor is its pseudo-gradient. After ``K`` local steps
``θ_{j+1} = θ_j - η·g_j`` from the broadcast model ``θ_0``, where ``g_j`` is the gradient on batch
``j``,

    ``pseudo-gradient = (θ_0 - θ_K) / (η·K) = (1/K) Σ_j g_j``,

the mean of the gradients met on the way. It has the scale of a gradient whatever ``η`` and ``K``
are, so the server's step size keeps its meaning, and one step on all samples gives the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aqg.objectives.base import Objective

Array = Any
"""A NumPy array or a torch tensor."""

_STREAM = 0xBA7C
"""Keeps the batches apart from other draws that use the same seed."""


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
        counts = {
            "batch_size": self.batch_size,
            "local_steps": self.steps,
            "local_epochs": self.epochs,
        }
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ConfigError(f"{name} is {count}; it must be at least 1")
        if self.epochs is not None and self.steps != 1:
            raise ConfigError(
                f"local_steps is {self.steps} and local_epochs {self.epochs}; give one of them"
            )
        if not 0 < self.rate < math.inf:
            raise ConfigError(f"local_rate is {self.rate}; it must be above 0")

    @property
    def is_one_gradient(self) -> bool:
        """Whether a client computes one gradient on all its samples, as in the paper."""
        return self.batch_size is None and self.steps == 1 and self.epochs in (None, 1)

    @property
    def sees_all_samples(self) -> bool:
        """Whether the first step uses all samples, so that its loss is the client's."""
        return self.batch_size is None

    def num_steps(self, num_samples: int) -> int:
        """Return ``K`` for a client with this many samples.

        >>> LocalTraining(batch_size=32, epochs=2).num_steps(100)
        8
        """
        if self.epochs is None:
            return self.steps
        batch_size = self.batch_size or num_samples
        return self.epochs * max(1, math.ceil(num_samples / max(1, batch_size)))

    def update(
        self,
        objective: Objective,
        params: Array,
        features: Array,
        labels: Array,
        key: Sequence[int],
    ) -> tuple[Array, Array]:
        """Train from ``params`` and return the loss of the first batch and the pseudo-gradient.

        Args:
            objective: the loss.
            params: ``θ``, ``(num_params,)``.
            features: the client's samples, ``(n, num_features)``.
            labels: their labels, ``(n,)``.
            key: integers (seed, client, round) that make the batches.

        """
        if self.is_one_gradient:
            return objective.losses_and_gradients(params, features, labels)
        num_steps = self.num_steps(len(labels))
        first_loss, total = None, 0.0
        with np.errstate(over="ignore", invalid="ignore"):  # divergence shows in the result
            for batch in islice(self._batches(features, labels, key), num_steps):
                loss, gradient = objective.losses_and_gradients(params, *batch)
                first_loss = loss if first_loss is None else first_loss
                total = total + gradient
                params = params - self.rate * gradient
            return first_loss, total / num_steps

    def _batches(
        self, features: Array, labels: Array, key: Sequence[int]
    ) -> Iterator[tuple[Array, Array]]:
        """Pass over the samples again and again, each time in another order."""
        num_samples = len(labels)
        if self.batch_size is None or self.batch_size >= num_samples:
            yield from repeat((features, labels))
            return
        seed, client, round_number = key
        generator = np.random.default_rng([seed, _STREAM, client, round_number])
        while True:
            order = generator.permutation(num_samples)
            for start in range(0, num_samples, self.batch_size):
                batch = order[start : start + self.batch_size]
                yield features[batch], labels[batch]
