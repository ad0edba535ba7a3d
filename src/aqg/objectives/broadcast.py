"""Notice when a loss would compare outputs and targets of different shapes.

Outputs ``(n, 1)`` less targets ``(n,)`` are ``(n, n)`` differences: every output is compared with
every target, the mean of which is a number like any other, and nothing is learned. So the first
evaluation of a loss is watched, and such a broadcast is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aqg.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

_ELEMENTWISE = {"sub", "rsub", "add", "radd", "mul", "rmul", "div", "true_divide", "truediv"}
_LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "poisson_nll_loss", "kl_div"}


def watched_loss(
    loss: Callable[[Any, Tensor], Tensor], outputs: Any, targets: Tensor, name: str
) -> Tensor:
    """Return ``loss(outputs, targets)``; raise `ConfigError` where shapes would broadcast."""
    with _Watch(outputs, targets, name):
        return loss(outputs, targets)


class _Watch(TorchFunctionMode):
    def __init__(self, outputs: Any, targets: Tensor, name: str) -> None:
        super().__init__()
        self._ends = (outputs, targets)
        self._name = name

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(given) > 1:
            self._check(getattr(func, "__name__", "").strip("_"), *given[:2])
        return func(*args, **kwargs)

    def _check(self, operation: str, first: Tensor, second: Tensor) -> None:
        shapes = tuple(first.shape), tuple(second.shape)
        if shapes[0] == shapes[1] or operation not in _ELEMENTWISE | _LOSSES:
            return
        try:
            joint = np.broadcast_shapes(*shapes)
        except ValueError:
            return  # torch says so itself
        both_grow = joint not in shapes and len(shapes[0]) != len(shapes[1])
        are_ends = all(any(tensor is end for end in self._ends) for tensor in (first, second))
        if operation in _LOSSES or both_grow or (are_ends and min(map(len, shapes)) > 0):
            raise ConfigError(
                f"the loss of {self._name} compares shapes {shapes[0]} and {shapes[1]}, which "
                f"broadcast to {joint}; give the targets the shape of the outputs, or squeeze "
                "the outputs"
            )
