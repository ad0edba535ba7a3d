"""What a client of a deployment trains: the user's part."""

from __future__ import annotations

import inspect
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from aqg.errors import DataError
from aqg.objectives.layout import ModelLayout
from aqg.sim.training import LocalTraining

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from aqg.core.types import FloatArray
    from aqg.objectives.base import Objective
    from aqg.objectives.layout import Buffers
    from aqg.objectives.module import ModuleObjective

    Key = tuple[int, int, int]
    Said = float | Mapping[str, float]
    Train = Callable[[FloatArray, int, Key], tuple[Said, FloatArray]]
    Evaluate = Callable[[FloatArray], Said]


class TaskModel:
    """A client's module, and its buffers, which objectives take from here (`Carrier`).

    Args:
        layout: which tensors travel.
        module: that is trained.
        buffers: that the module comes with.

    Attributes:
        initial: the same.
        is_agreed: whether it was compared with the server's.

    """

    def __init__(self, layout: ModelLayout, module: torch.nn.Module, buffers: Buffers) -> None:
        self.layout = layout
        self.module = module
        self.initial = self.buffers = buffers
        self.is_agreed = False

    def start(self, client: int) -> Buffers:  # noqa: ARG002  (there is one client here)
        return self.buffers

    def finish(self, client: int, buffers: Buffers) -> None:  # noqa: ARG002
        self.buffers = buffers

    def evaluation(self) -> Buffers:
        return self.buffers

    def views(self) -> Sequence[AbstractContextManager[None]]:
        return [nullcontext()]


@dataclass(frozen=True)
class FlowerTask:
    """A client's data and training, as functions of the flat model ``θ``.

    Attributes:
        train: from ``θ``, the round and the key ``(seed, client, round)`` of random draws, makes
            the loss at ``θ`` (NaN where it is not known) and the vector to upload: a gradient, or
            a pseudo-gradient like ``θ - θ_local``; ``(num_params,)``. In place of the loss it may
            return metrics by name, with ``loss`` among them.
        num_samples: how many samples the client has.
        evaluate: the client's loss at ``θ``, or metrics by name; None where it cannot be measured.
        train_measures: whether the loss that ``train`` returns is that of ``θ`` on all samples.
            Otherwise the default recipe measures how much of it is noise.
        model: the module that is trained, where there is one: which of its tensors travel, and
            its statistics.

    """

    train: Train
    num_samples: int
    evaluate: Evaluate | None = None
    train_measures: bool = True
    model: TaskModel | None = None

    def __post_init__(self) -> None:
        if self.num_samples < 0:
            raise DataError(f"num_samples is {self.num_samples}; it must be at least 0")

    @staticmethod
    def from_objective(
        objective: Objective,
        features: Any,
        labels: Any,
        local: LocalTraining | None = None,
    ) -> FlowerTask:
        """Make a task of an objective and a client's samples, trained as the simulator does.

        >>> import numpy as np
        >>> from aqg.objectives import make_objective
        >>> objective = make_objective("softmax", 2, 2, 0.1, "mean")
        >>> task = FlowerTask.from_objective(objective, np.eye(2), np.array([0, 1]))
        >>> loss, gradient = task.train(np.zeros(6), 1, (0, 0, 1))
        >>> round(loss, 4), gradient.shape
        (0.6931, (6,))
        """
        training = local if local is not None else LocalTraining()
        model = None
        layout = getattr(objective, "model_layout", None)
        if isinstance(layout, ModelLayout):
            of_module = cast("ModuleObjective", objective)
            model = TaskModel(layout, of_module.module, of_module.initial_buffers())
            objective = of_module.carrying(model)

        def train(params: FloatArray, round_number: int, key: Key) -> tuple[float, FloatArray]:  # noqa: ARG001
            loss, gradient = training.update(objective, params, features, labels, key)
            return _beyond_numbers(float(loss)), gradient

        def evaluate(params: FloatArray) -> float:
            return _beyond_numbers(float(objective.losses(params, features, labels)))

        sees_all = training.sees_all_samples
        return FlowerTask(train, len(labels), evaluate, train_measures=sees_all, model=model)

    @staticmethod
    def from_module(
        module: torch.nn.Module,
        features: Any,
        labels: Any,
        loss: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
        *,
        local: LocalTraining | None = None,
        **options: Any,
    ) -> FlowerTask:
        """Make a task of a torch module and a client's samples; see `Objective.from_module`."""
        from aqg.objectives import Objective

        objective = Objective.from_module(module, loss, **options)
        return FlowerTask.from_objective(objective, features, labels, local)

    @staticmethod
    def from_training(
        module: torch.nn.Module,
        train: Callable[..., Said],
        num_samples: int,
        evaluate: Callable[[torch.nn.Module], Said] | None = None,
        *,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        statistics: str = "average",
    ) -> FlowerTask:
        """Make a task of a training function that an app has already.

        Args:
            module: takes the server's model before ``train`` and ``evaluate`` are called.
            train: trains the module in place, however it likes, and returns a loss, or metrics by
                name with ``loss`` among them. If it takes a second argument, that is the round,
                counted from 1: for learning rates that fall.
            num_samples: how many samples the client has.
            evaluate: returns the module's loss on the client's samples, or metrics by name.
            include: name patterns of the parameters that travel, such as ``"*.lora_*"``; by
                default all that require a gradient.
            exclude: name patterns of parameters and buffers that stay with the client.
            statistics: what becomes of buffers that training changes, such as the running
                statistics of batch normalization: ``"average"``, ``"local"`` or ``"frozen"``.

        The upload is the pseudo-gradient ``θ - θ_local``. With ``alpha`` at its default ``1/M`` the
        server's step is federated averaging. Give `make_server_app` the same module and options.

        """
        layout = ModelLayout.of(module, include=include, exclude=exclude, statistics=statistics)
        takes_round = num_arguments(train) > 1
        model = TaskModel(layout, module, layout.read_buffers(module))

        def load(params: FloatArray) -> None:
            layout.load(module, params)
            layout.write_buffers(module, model.buffers)

        def run(params: FloatArray, round_number: int, key: Key) -> tuple[Said, FloatArray]:  # noqa: ARG001
            load(params)
            # In half precision the module starts from rounded values.
            start = layout.flatten(module, finite=False)
            said = train(module, round_number) if takes_round else train(module)
            model.buffers = layout.read_buffers(module)
            pseudo_gradient: FloatArray = start - layout.flatten(module, finite=False)
            return said, pseudo_gradient.astype(params.dtype, copy=False)

        def measure(params: FloatArray) -> Said:
            load(params)
            return evaluate(module) if evaluate is not None else math.nan

        measures = measure if evaluate is not None else None
        is_measured = evaluate is None
        return FlowerTask(run, num_samples, measures, train_measures=is_measured, model=model)


def num_arguments(function: Callable[..., object]) -> int:
    """Return how many arguments must or can be given by place, without defaults.

    >>> num_arguments(lambda net, round: 0.0), num_arguments(lambda net, rate=0.1: 0.0)
    (2, 1)
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in
        return 1
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in by_place and p.default is p.empty for p in parameters)


def _beyond_numbers(loss: float) -> float:
    """Return infinity for a loss that overflowed to NaN, which stands for one not measured."""
    return math.inf if math.isnan(loss) else loss


def flatten(module: torch.nn.Module) -> FloatArray:
    """Return the trainable parameters of a module as one vector, each once.

    It is float64 where a parameter is, and float32 otherwise. Tensors with NaN or infinity are
    named in the error. Statistics of normalization layers are no part of it: give
    `make_server_app` the module itself where it has some.
    """
    return ModelLayout.of(module).flatten(module)


def load_flat(module: torch.nn.Module, params: FloatArray) -> None:
    """Write a vector that `flatten` returned, or one like it, into a module."""
    ModelLayout.of(module).load(module, params)
