"""The loss that suits the targets, where nobody names one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor


def default_loss(targets: NDArray[Any]) -> Callable[[Any, Tensor], Tensor]:
    """Return the mean loss of a batch as a function of outputs and targets.

    Cross-entropy where targets are whole numbers: classes, or tokens at every place of a sequence.
    Binary cross-entropy where they are only 0.0 and 1.0, such as several labels at once. The mean
    squared error for other numbers.

    >>> default_loss(np.array([0, 1, 2])).__name__, default_loss(np.array([0.5, 2.0])).__name__
    ('token_cross_entropy', 'mse_loss')
    """
    if targets.dtype.kind in "iub":
        return token_cross_entropy
    if np.isin(targets, (0, 1)).all():
        return functional.binary_cross_entropy_with_logits
    return functional.mse_loss


def token_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, with classes on the last axis of ``(n, ..., classes)``.

    >>> import torch
    >>> token_cross_entropy(torch.zeros(3, 20, 80), torch.zeros(3, 20, dtype=torch.int64)).item()
    4.382026672363281
    """
    if outputs.ndim > 2 and outputs.shape[:-1] == targets.shape:
        outputs, targets = outputs.flatten(0, -2), targets.flatten()
    return functional.cross_entropy(outputs, targets)
