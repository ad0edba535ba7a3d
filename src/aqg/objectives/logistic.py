"""Logistic regression for two classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aqg.jit import HAVE_NUMBA
from aqg.objectives import logistic_kernels
from aqg.objectives.closed_form import ClosedForm, namespace, transpose

if TYPE_CHECKING:
    from aqg.objectives.base import Array, Scaling

_COMPILED_BYTES = 1 << 20
"""Clients with no more data than this go through the compiled loop; larger ones gain nothing."""


class Logistic(ClosedForm):
    """``loss(θ; x, y) = log(1 + exp(-y x·θ))`` with ``y = -1`` for label 0 and ``+1`` for label 1.

    There is no bias, and a run starts from ``θ = 0``.

    >>> import numpy as np
    >>> objective = Logistic(num_features=2, l2=0.0, scaling="sum")
    >>> features, labels = np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([0, 1])
    >>> objective.losses_and_gradients(objective.init_params(seed=0), features, labels)[1]
    array([ 0.5, -1. ])
    """

    def __init__(self, num_features: int, l2: float, scaling: Scaling) -> None:
        layout = (("weight", (num_features,)),)
        super().__init__("logistic", layout, num_features, l2, scaling, convex=True)

    def losses(self, params: Array, features: Array, labels: Array) -> Array:
        """Return the loss of each client, shape ``(...)``."""
        if not _is_compiled(features):
            return super().losses(params, features, labels)
        return self.losses_and_gradients(params, features, labels)[0]

    def losses_and_gradients(
        self, params: Array, features: Array, labels: Array
    ) -> tuple[Array, Array]:
        """Return the loss of each client, ``(...)``, and its gradient, ``(..., num_params)``."""
        if not _is_compiled(features):
            return super().losses_and_gradients(params, features, labels)
        self._check(params, features)
        self._check_labels(features, labels)
        weight = self.sample_weight(features.shape[-2])
        return logistic_kernels.losses_and_gradients(params, features, labels, weight, self.l2)

    def _sample_losses(self, tensors: list[Array], features: Array, labels: Array) -> Array:
        losses, _ = _losses_and_slopes(features @ tensors[0], labels)
        return losses

    def _backpropagate(
        self,
        tensors: list[Array],
        features: Array,
        labels: Array,
        *,
        weight: Array,
        gradients: list[Array],
    ) -> Array:
        losses, slopes = _losses_and_slopes(features @ tensors[0], labels)
        slopes *= weight
        namespace(features).matmul(
            transpose(features), slopes[..., None], out=gradients[0][..., None]
        )
        return losses

    def _predict(self, tensors: list[Array], features: Array) -> Array:
        return (features @ tensors[0] > 0) * 1


def _is_compiled(features: Array) -> bool:
    """Tell by the kind and size of a single client, so that stacking clients changes nothing."""
    if not (HAVE_NUMBA and isinstance(features, np.ndarray) and features.ndim >= 2):
        return False
    client_bytes: int = features.shape[-2] * features.shape[-1] * features.itemsize
    return client_bytes <= _COMPILED_BYTES


def _losses_and_slopes(scores: Array, labels: Array) -> tuple[Array, Array]:
    """Return ``log(1 + exp(-y s))`` and its derivative in ``s`` for each score ``s = x·θ``."""
    xp = namespace(scores)
    positive = labels > 0
    margins = xp.where(positive, scores, -scores)
    decay = xp.exp(-abs(margins))  # in (0, 1]: no score overflows it
    losses = xp.log1p(decay)
    losses += (-margins).clip(min=0)
    wrongness = xp.where(margins < 0, 1.0, decay) / (1 + decay)  # 1 / (1 + exp(margin))
    return losses, xp.where(positive, -wrongness, wrongness)
