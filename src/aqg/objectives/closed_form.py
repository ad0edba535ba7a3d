"""What the objectives with a hand-written gradient share.

One implementation serves NumPy and torch: it uses only operations that both spell alike, from the
module that `namespace` returns. Clients are never looped over. Every product is a stacked ``@``
that runs one matrix product per client, and every sum runs within one client, so the numbers of a
client do not depend on which clients it is stacked with: on NumPy they are the same to the last
bit (for features laid out alike in memory).
"""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.errors import ConfigError, DataError
from aqg.objectives.base import Array, Layout, Objective, Scaling

if TYPE_CHECKING:
    from numpy.typing import NDArray


def namespace(array: Array) -> Any:
    """Return the module whose functions fit ``array``: ``numpy`` or ``torch``.

    >>> namespace(np.zeros(3)).__name__
    'numpy'
    """
    torch = sys.modules.get("torch")  # a tensor can exist only if its module was imported
    if torch is not None and isinstance(array, torch.Tensor):
        return torch
    return np


def transpose(array: Array) -> Array:
    """Swap the last two axes; a view."""
    return array.swapaxes(-1, -2)


class ClosedForm(Objective):
    """An objective given by the loss of each sample and the gradient of their weighted sum.

    Subclasses see the parameters as the tensors of their layout and need not know about scaling,
    regularization or the flat vector.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        num_features: int,
        l2: float,
        scaling: Scaling,
        *,
        convex: bool,
    ) -> None:
        super().__init__(name, layout, l2, convex=convex and l2 > 0)
        self.num_features = num_features
        self.scaling = scaling

    def init_params(self, seed: int) -> NDArray[np.float64]:
        """Draw weights uniformly within ``±sqrt(6 / (fan_in + fan_out))`` (Glorot), biases zero."""
        if seed < 0:
            raise ConfigError(f"seed {seed} is not an integer of at least 0")
        random = np.random.default_rng(seed)
        params = np.zeros(self.num_params)
        for tensor in self._tensors(params):
            if tensor.ndim == 2:
                bound = math.sqrt(6 / sum(tensor.shape))
                tensor[:] = random.uniform(-bound, bound, tensor.shape)
        return params

    # Overflow is how divergence looks, and shows in the results: no warning is due.
    @np.errstate(over="ignore", invalid="ignore")
    def losses(self, params: Array, features: Array, labels: Array) -> Array:
        """Return the loss of each client, shape ``(...)``."""
        self._check(params, features)
        self._check_labels(features, labels)
        samples = self._sample_losses(self._tensors(params), features, labels)
        return self._client_losses(params, samples)

    @np.errstate(over="ignore", invalid="ignore")
    def losses_and_gradients(
        self, params: Array, features: Array, labels: Array
    ) -> tuple[Array, Array]:
        """Return the loss of each client, ``(...)``, and its gradient, ``(..., num_params)``."""
        self._check(params, features)
        self._check_labels(features, labels)
        gradients = namespace(features).empty(
            (*features.shape[:-2], self.num_params), dtype=features.dtype, device=features.device
        )
        samples = self._backpropagate(
            self._tensors(params),
            features,
            labels,
            weight=self.sample_weight(features.shape[-2]),
            gradients=self._tensors(gradients),
        )
        if self.l2:
            gradients += self.l2 * params
        return self._client_losses(params, samples), gradients

    @np.errstate(over="ignore", invalid="ignore")
    def weighted_losses_and_gradients(
        self, params: Array, features: Array, labels: Array, weights: Array
    ) -> tuple[Array, Array]:
        """Return ``Σ_i w_i loss_i`` for weights ``(..., n)``, and its gradient; no regularizer.

        For objectives with classes: a weight is that of a column of slopes, ``(..., C, n)``. Each
        client may have a model of its own: ``params`` is ``(num_params,)`` or ``(...,
        num_params)``.
        """
        one = params if params.ndim == 1 else params[(0,) * (params.ndim - 1)]
        self._check(one, features)
        if params.ndim > 1 and params.shape[:-1] != features.shape[:-2]:
            raise ConfigError(
                f"parameters have shape {tuple(params.shape)}; features of shape "
                f"{tuple(features.shape)} need ({self.num_params},) or one such row per client"
            )
        self._check_labels(features, labels)
        gradients = namespace(features).empty(
            (*features.shape[:-2], self.num_params), dtype=features.dtype, device=features.device
        )
        samples = self._backpropagate(
            self._tensors(params),
            features,
            labels,
            weight=weights[..., None, :],
            gradients=self._tensors(gradients),
        )
        return (weights * samples).sum(axis=-1), gradients

    @np.errstate(over="ignore", invalid="ignore")
    def predict(self, params: Array, features: Array) -> Array:
        """Return the most likely label of each sample, shape ``(..., n)``."""
        self._check(params, features)
        return self._predict(self._tensors(params), features)

    @abstractmethod
    def _sample_losses(self, tensors: list[Array], features: Array, labels: Array) -> Array:
        """Return the loss of each sample, shape ``(..., n)``."""

    @abstractmethod
    def _backpropagate(
        self,
        tensors: list[Array],
        features: Array,
        labels: Array,
        *,
        weight: Array,
        gradients: list[Array],
    ) -> Array:
        """Return the loss of each sample; write the gradients of ``weight`` times their sum.

        ``weight`` is a number, or one per sample in the shape of a row of slopes.
        """

    @abstractmethod
    def _predict(self, tensors: list[Array], features: Array) -> Array:
        """Return the most likely label of each sample, shape ``(..., n)``."""

    def _tensors(self, flat: Array) -> list[Array]:
        """Return views of the tensors that lie in ``flat``, ``(..., num_params)``."""
        views = []
        start = 0
        for _, shape in self.layout:
            stop = start + math.prod(shape)
            views.append(flat[..., start:stop].reshape((*flat.shape[:-1], *shape)))
            start = stop
        return views

    def _client_losses(self, params: Array, samples: Array) -> Array:
        losses = self.sample_weight(samples.shape[-1]) * samples.sum(axis=-1)
        return losses + self.l2 / 2 * (params @ params) if self.l2 else losses

    def sample_weight(self, num_samples: int) -> float:
        """Return ``w``: what each of so many samples counts in its client's loss."""
        if self.scaling == "sum":
            return 1.0
        if num_samples == 0:
            raise DataError("a client has 0 samples; a mean loss needs at least 1")
        return 1 / num_samples

    def _check(self, params: Array, features: Array) -> None:
        if params.shape != (self.num_params,):
            raise ConfigError(
                f"parameters have shape {tuple(params.shape)}; {self.name} on "
                f"{self.num_features} features needs ({self.num_params},)"
            )
        if features.ndim < 2 or features.shape[-1] != self.num_features:
            raise ConfigError(
                f"features have shape {tuple(features.shape)}; {self.name} needs "
                f"(..., samples, {self.num_features})"
            )
        if params.dtype != features.dtype:
            raise ConfigError(
                f"parameters are {params.dtype} and features {features.dtype}; they must agree"
            )

    def _check_labels(self, features: Array, labels: Array) -> None:
        if labels.shape != features.shape[:-1]:
            raise ConfigError(
                f"labels have shape {tuple(labels.shape)}; features of shape "
                f"{tuple(features.shape)} need {tuple(features.shape[:-1])}"
            )
