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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aqg.core.types import Float64Array, IntArray
from aqg.errors import ConfigError
from aqg.objectives.base import Learner, Objective
from aqg.objectives.closed_form import ClosedForm

Array = Any
"""A NumPy array or a torch tensor."""

_STREAM = 0xBA7C
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
        with quiet, self._learner(objective, key) as learner:
            for batch in islice(self._batches(len(labels), key), num_steps):
                samples = (features, labels) if batch is None else (features[batch], labels[batch])
                loss, gradient = learner.losses_and_gradients(params, *samples)
                first_loss = loss if first_loss is None else first_loss
                total = total + gradient
                params = params - self.rate * gradient
            return first_loss, total / num_steps

    def _learner(self, objective: Objective, key: Sequence[int]) -> AbstractContextManager[Learner]:
        """Return what gradients come from: exact ones from the objective, others from a session."""
        return nullcontext(objective) if self.sees_all_samples else objective.session(key)

    def update_many(
        self,
        objective: ClosedForm,  # the loss
        params: Array,  # ``θ``, a torch tensor ``(num_params,)``
        features: Array,  # the samples of all clients, ``(N, num_features)``
        labels: Array,  # their labels, ``(N,)``
        starts: Sequence[int],  # where each client's samples begin
        sizes: Sequence[int],  # how many each has
        keys: Sequence[Sequence[int]],  # integers (seed, client, round) for each
    ) -> tuple[Array, Array]:
        """Let many clients take each step together; up to rounding, the same as `update` for each.

        Batches are filled up to one length with samples of weight zero, and clients that have
        taken all their steps wait for the others.

        Returns:
            The loss of the first batch, ``(M,)``, and the pseudo-gradient, ``(M, num_params)``.
        """
        num_steps = [self.num_steps(size) for size in sizes]
        rows, weights = self._lay_out(objective, starts, sizes, keys, num_steps)
        rows, weights = _like(labels, rows), _like(params, weights)
        waiting = [j for j in range(len(rows)) if j >= min(num_steps)]
        models = params.repeat(len(sizes), 1)
        total = first_losses = None
        for j in range(len(rows)):
            losses, gradients = objective.weighted_losses_and_gradients(
                models, features[rows[j]], labels[rows[j]], weights[j]
            )
            if objective.l2:
                losses = losses + objective.l2 / 2 * (models * models).sum(-1)
                gradients += objective.l2 * models
                if j in waiting:
                    gradients *= (weights[j].sum(-1) > 0)[:, None]
            first_losses = losses if first_losses is None else first_losses
            total = gradients.clone() if total is None else total.add_(gradients)
            models = models - self.rate * gradients
        counts = _like(params, np.array(num_steps, np.float64))
        return first_losses, total / counts[:, None]

    def _lay_out(
        self,
        objective: ClosedForm,
        starts: Sequence[int],
        sizes: Sequence[int],
        keys: Sequence[Sequence[int]],
        num_steps: Sequence[int],
    ) -> tuple[IntArray, Float64Array]:
        """Return which samples every step uses and what each counts, ``(K, M, batch size)``."""
        batch_size = min(self.batch_size or max(sizes), max(sizes))
        rows = np.zeros((max(num_steps), len(sizes), batch_size), np.int64)
        weights = np.zeros(rows.shape)
        for m, (start, size, key) in enumerate(zip(starts, sizes, keys, strict=True)):
            for j, batch in enumerate(islice(self._batches(size, key), num_steps[m])):
                chosen = np.arange(size) if batch is None else batch
                rows[j, m, : len(chosen)] = start + chosen
                weights[j, m, : len(chosen)] = objective.sample_weight(len(chosen))
        return rows, weights

    def _batches(self, num_samples: int, key: Sequence[int]) -> Iterator[IntArray | None]:
        """Pass over the samples again and again, each time in another order; None: all of them."""
        if self.batch_size is None or self.batch_size >= num_samples:
            yield from repeat(None)
            return
        seed, client, round_number = key
        generator = np.random.default_rng([seed, _STREAM, client, round_number])
        while True:
            order = generator.permutation(num_samples)
            for start in range(0, num_samples, self.batch_size):
                yield order[start : start + self.batch_size]


def _like(tensor: Array, array: NDArray[Any]) -> Array:
    """Return an array as a torch tensor with the device and the precision of another."""
    import torch

    return torch.as_tensor(array, device=tensor.device, dtype=tensor.dtype)
