"""What a client of a deployment trains: the user's part."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.errors import ConfigError, DataError
from aqg.sim.local import LocalTraining

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from aqg.core.types import FloatArray
    from aqg.objectives.base import Objective

    Key = tuple[int, int, int]
    Train = Callable[[FloatArray, int, Key], tuple[float, FloatArray]]
    Evaluate = Callable[[FloatArray], float]


@dataclass(frozen=True)
class FlowerTask:
    """A client's data and training, as functions of the flat model ``θ``.

    Attributes:
        train: from ``θ``, the round and the key ``(seed, client, round)`` of random draws, makes
            the loss at ``θ`` (NaN where it is not known) and the vector to upload: a gradient, or
            a pseudo-gradient like ``θ - θ_local``; ``(num_params,)``.
        num_samples: how many samples the client has.
        evaluate: the client's loss at ``θ``; None where it cannot be measured.
        train_measures: whether the loss that ``train`` returns is that of ``θ`` on all samples.
        is_exact: whether the vector depends on ``θ`` alone, as a gradient on all samples does.
            Otherwise the default recipe measures how much of it is noise.

    """

    train: Train
    num_samples: int
    evaluate: Evaluate | None = None
    train_measures: bool = True
    is_exact: bool = False

    def __post_init__(self) -> None:
        if self.num_samples < 0:
            raise DataError(f"num_samples is {self.num_samples}; it must be at least 0")

    @staticmethod
    def from_objective(
        objective: Objective, features: Any, labels: Any, local: LocalTraining | None = None
    ) -> FlowerTask:
        """Make a task of an objective and a client's samples, trained as the simulator does.

        >>> from aqg.objectives import make_objective
        >>> objective = make_objective("softmax", 2, 2, 0.1, "mean")
        >>> task = FlowerTask.from_objective(objective, np.eye(2), np.array([0, 1]))
        >>> loss, gradient = task.train(np.zeros(6), 1, (0, 0, 1))
        >>> round(loss, 4), gradient.shape
        (0.6931, (6,))
        """
        training = local if local is not None else LocalTraining()

        def train(params: FloatArray, round_number: int, key: Key) -> tuple[float, FloatArray]:  # noqa: ARG001
            loss, gradient = training.update(objective, params, features, labels, key)
            return _beyond_numbers(float(loss)), gradient

        def evaluate(params: FloatArray) -> float:
            return _beyond_numbers(float(objective.losses(params, features, labels)))

        sees_all = training.sees_all_samples
        return FlowerTask(train, len(labels), evaluate, train_measures=sees_all, is_exact=sees_all)

    @staticmethod
    def from_module(
        module: torch.nn.Module,
        features: Any,
        labels: Any,
        loss: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
        *,
        input_shape: tuple[int, ...] | None = None,
        l2: float = 0.0,
        local: LocalTraining | None = None,
    ) -> FlowerTask:
        """Make a task of a torch module and a client's samples; see `Objective.from_module`."""
        from aqg.objectives import Objective

        objective = Objective.from_module(module, loss, input_shape=input_shape, l2=l2)
        return FlowerTask.from_objective(objective, features, labels, local)

    @staticmethod
    def from_training(
        module: torch.nn.Module,
        train: Callable[[torch.nn.Module], float],
        num_samples: int,
        evaluate: Callable[[torch.nn.Module], float] | None = None,
    ) -> FlowerTask:
        """Make a task of a training function that an app has already.

        Args:
            module: takes the server's model before ``train`` and ``evaluate`` are called.
            train: trains the module in place, however it likes, and returns a loss.
            num_samples: how many samples the client has.
            evaluate: returns the module's loss on the client's samples.

        The upload is the pseudo-gradient ``θ - θ_local``. With ``alpha`` at its default ``1/M`` the
        server's step is federated averaging.

        """

        def run(params: FloatArray, round_number: int, key: Key) -> tuple[float, FloatArray]:  # noqa: ARG001
            load_flat(module, params)
            loss = float(train(module))
            pseudo_gradient: FloatArray = params - flatten(module).astype(params.dtype, copy=False)
            return loss, pseudo_gradient

        def measure(params: FloatArray) -> float:
            load_flat(module, params)
            return float(evaluate(module)) if evaluate is not None else float("nan")

        return FlowerTask(run, num_samples, measure if evaluate is not None else None)


def _beyond_numbers(loss: float) -> float:
    """Return infinity for a loss that overflowed to NaN, which stands for one not measured."""
    return math.inf if math.isnan(loss) else loss


def flatten(module: torch.nn.Module) -> FloatArray:
    """Return all floating tensors of a module's state as one float32 vector.

    That is parameters and buffers alike, such as the running statistics of batch normalization;
    integer buffers (counters) stay with the module.
    """
    import torch

    tensors = [
        t.detach().reshape(-1) for t in module.state_dict().values() if t.is_floating_point()
    ]
    if not tensors:
        raise ConfigError(f"{type(module).__name__} has no floating-point state to train")
    flat: FloatArray = torch.cat([tensor.float().cpu() for tensor in tensors]).numpy()
    return flat


def load_flat(module: torch.nn.Module, params: FloatArray) -> None:
    """Write a vector that `flatten` returned, or one like it, into a module."""
    import torch

    tensors = [tensor for tensor in module.state_dict().values() if tensor.is_floating_point()]
    num_params = sum(tensor.numel() for tensor in tensors)
    if params.shape != (num_params,):
        raise ConfigError(
            f"parameters of shape {params.shape} for {type(module).__name__}, "
            f"which has {num_params} of them"
        )
    position = 0
    with torch.no_grad():
        for tensor in tensors:
            part = np.array(params[position : position + tensor.numel()])  # torch wants it writable
            tensor.copy_(torch.from_numpy(part).reshape(tensor.shape))
            position += tensor.numel()
