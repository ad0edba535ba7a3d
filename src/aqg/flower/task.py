"""What users give: the model that a server starts from, what a client trains, and its ClientApp.

A run starts from a torch module, from an ArrayRecord, or from a flat vector; what a user's function
is given back is the same kind of thing. Which tensors travel is said by one
`aqg.objectives.layout.ModelLayout`.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

from aqg.channel.stepping import Travel
from aqg.channel.tensors import Kind, Schema, Tensor, Values, is_finite, unflatten
from aqg.channel.tensors import flatten as flatten_tensors
from aqg.core.recipe import Recipe
from aqg.core.types import FloatArray
from aqg.errors import AqgError, ConfigError, DataError, GradientError
from aqg.flower.envelope import (
    EVALUATED,
    EXAMPLES,
    as_metrics,
    is_readable,
    loss_in,
    record_of,
    refusal,
    values_of,
)
from aqg.flower.mod import ORDER, UPDATE, make_mod
from aqg.objectives.layout import Buffers, ModelLayout
from aqg.sim.training import LocalTraining
from aqg.weights import as_numpy

if TYPE_CHECKING:
    import torch
    from flwr.clientapp.typing import Mod
    from torch import nn

    from aqg.objectives.base import Objective
    from aqg.objectives.module import ModuleObjective

    Key = tuple[int, int, int]
    Said = float | Mapping[str, float]
    Train = Callable[[FloatArray, int, Key], tuple[Said, FloatArray]]
    Evaluate = Callable[[FloatArray], Said]

VECTOR = "parameters"
"""The name of the one tensor of a model that is nothing but a flat vector."""
_PRECISIONS = ("float32", "float64")


class ServerModel:
    """What a run starts from: all tensors, which of them travel, and what the user gave."""

    def __init__(
        self, values: Values, layout: ModelLayout, aliases: Mapping[str, str], start: Any
    ) -> None:
        for spec in layout.parameters:
            if not is_finite(values[spec.name]):
                raise ConfigError(f"tensor {spec.name!r} to start from holds NaN or infinity")
        self.layout = layout
        self.record = record_of(values.items())
        self.schema = Schema.of(values)
        self._start = start
        own, kinds = frozenset[str](), dict.fromkeys(values, Kind.STILL)
        kinds |= {spec.name: Kind.VECTOR for spec in layout.parameters}
        beside = (*layout.statistics, *layout.counters)
        if layout.policy == "local":
            own = frozenset(spec.name for spec in beside)
        elif layout.policy == "average":
            for place, (spec, is_tracked) in enumerate(zip(beside, layout.tracked, strict=True)):
                is_half = is_tracked and place < len(layout.statistics)
                kinds[spec.name] = Kind.HALF if is_half else Kind.EXACT
        self.travel = Travel(kinds, own, dict(aliases))

    @property
    def can_be_measured(self) -> bool:
        """Whether the server has the statistics that its model is to be used with."""
        return self.layout.policy != "local" or not any(self.layout.tracked)

    def filled(self, values: Values) -> Any:
        if is_module(self._start):
            return filled(self._start, values).eval()
        if isinstance(self._start, ArrayRecord) and list(self._start) != [VECTOR]:
            return record_of(values.items())
        return np.array(values[VECTOR])

    def tensors(self, values: Values) -> dict[str, Any]:
        """Return copies of all tensors, by name, in the types of a module where there is one."""
        if is_module(self._start):
            state = filled(self._start, values).state_dict()
            return {name: tensor.detach().clone() for name, tensor in state.items()}
        return {name: np.array(value) for name, value in values.items()}


def filled(module: nn.Module, values: Values) -> nn.Module:
    import torch

    tensors = {name: torch.from_numpy(np.array(value)) for name, value in values.items()}
    module.load_state_dict(tensors, strict=False)
    return module


def make_model(
    start: object,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    statistics: str = "average",
) -> ServerModel:
    """Return the server's model that starts from a module, an ArrayRecord or a flat vector."""
    if is_module(start):
        layout = ModelLayout.of(start, include=include, exclude=exclude, statistics=statistics)
        return ServerModel(values_in(start), layout, _aliases(start, layout), start)
    if isinstance(start, Strategy):
        raise ConfigError(
            f"the model to start from is a strategy, {type(start).__name__}: to keep that, write "
            f"Compressed({type(start).__name__}(...)) in its place"
        )
    if isinstance(start, ArrayRecord):
        if not is_readable(start):
            raise ConfigError("an array of the model to start from is not a numpy.ndarray")
        values = values_of(start)
    elif isinstance(start, np.ndarray):
        values = {VECTOR: start}
    else:
        raise ConfigError(
            f"the model to start from is a {type(start).__name__}; it must be a torch module, an "
            "ArrayRecord or a flat vector"
        )
    flat = values.get(VECTOR) if len(values) == 1 else None
    if flat is not None and (flat.ndim != 1 or str(flat.dtype) not in _PRECISIONS or not len(flat)):
        raise ConfigError(
            f"initial parameters are {flat.ndim}-d {flat.dtype} of {flat.size} values; they must "
            "be a flat float32 or float64 vector"
        )
    rows = [(name, tensor.shape, str(tensor.dtype)) for name, tensor in values.items()]
    layout = ModelLayout.of_arrays(rows, include, exclude, statistics)
    return ServerModel(values, layout, {}, start)


def is_module(start: object) -> TypeGuard[torch.nn.Module]:
    """Tell whether this is a torch module; where torch was never imported, nothing is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(start, torch.nn.Module)


def values_in(module: nn.Module) -> dict[str, Tensor]:
    state = {name: t for name, t in module.state_dict().items() if hasattr(t, "detach")}
    return {name: np.array(as_numpy(tensor)) for name, tensor in state.items()}


def _aliases(module: nn.Module, layout: ModelLayout) -> dict[str, str]:
    """Return the second names of tensors, such as those of tied weights, and the first ones."""
    state = module.state_dict(keep_vars=True)
    first = {id(state[spec.name]): spec.name for spec in layout.parameters if spec.name in state}
    found = {name: first.get(id(tensor), name) for name, tensor in state.items()}
    return {name: other for name, other in found.items() if name != other}


_TASKS_KEPT = 8
_FARTHEST = 1e300
"""Stands for a loss that is beyond all numbers: nothing non-finite is sent."""


class TaskModel:
    """A client's module, and its buffers, which objectives take from here (`Carrier`)."""

    def __init__(self, layout: ModelLayout, module: torch.nn.Module, buffers: Buffers) -> None:
        self.layout = layout  # which tensors travel
        self.module = module
        self.buffers = buffers
        self._initial = self._opened = buffers  # that the module comes with; and a round
        self._is_agreed = False  # whether it was compared with the server's

    def start(self, client: int) -> Buffers:  # noqa: ARG002  (there is one client here)
        return self.buffers

    def finish(self, client: int, buffers: Buffers) -> None:  # noqa: ARG002
        self.buffers = buffers

    def evaluation(self) -> Buffers:
        return self.buffers

    def views(self) -> Sequence[AbstractContextManager[None]]:
        return [nullcontext()]

    def open(self, values: Values, policy: object) -> FloatArray:
        """Begin a round with the server's model; return its parameters as one vector."""
        layout, vector = self.layout, vector_in(values)
        if vector is not None:
            self._check_vector(len(vector))
            self.buffers = self._opened = self._initial
            return vector
        self._check(values, policy)
        self.buffers = self._opened = Buffers(
            flatten_tensors(values, layout.statistics, np.float64),
            flatten_tensors(values, layout.counters, np.int64),
        )
        return flatten_tensors(values, layout.parameters)

    def update(self, gradient: FloatArray, values: Values) -> dict[str, Tensor]:
        """End a round; return what to send by name: parts of the update, and the new buffers."""
        made, self.buffers = self.buffers, self._opened
        if vector_in(values) is not None:
            if not all(map(np.array_equal, made, self._opened)):
                raise ConfigError(
                    "training changes buffers of the module, and the server was given a flat "
                    "vector without them: give make_server_app the module"
                )
            return {VECTOR: gradient}
        parts = unflatten(gradient, self.layout.parameters, gradient.dtype)
        places = self.layout.statistics, self.layout.counters
        for flat, specs in zip(made, places, strict=True):
            buffers = unflatten(flat, specs, flat.dtype).items()
            parts |= {name: part.astype(values[name].dtype) for name, part in buffers}
        return parts

    def _check_vector(self, num_params: int) -> None:
        """Raise `ConfigError` where a flat vector of the server's does not fit."""
        layout = self.layout
        names = zip((*layout.statistics, *layout.counters), layout.tracked, strict=True)
        tracked = next((spec.name for spec, is_tracked in names if is_tracked), None)
        if layout.carries_buffers and tracked is not None:
            raise ConfigError(
                f"{layout.model} has statistics such as {tracked!r}, and the server was given a "
                "flat vector without them: give make_server_app the module"
            )
        if num_params != layout.num_params:
            raise ConfigError(
                f"the server's model is another: it has {num_params} parameters, and "
                f"{layout.model} {layout.num_params}"
            )

    def _check(self, values: Values, policy: object) -> None:
        """Raise `ConfigError` where the server's model is another; the text names a tensor."""
        layout = self.layout
        for spec in (*layout.parameters, *layout.statistics, *layout.counters):
            found = values.get(spec.name)
            if found is None or found.shape != spec.shape:
                there = "is only here" if found is None else f"has shape {found.shape} there"
                raise ConfigError(
                    f"the server's model is another: {spec} of {layout.model} {there}"
                )
        if any(layout.tracked) and layout.policy != policy:
            raise ConfigError(
                f"statistics are {layout.policy!r} here, and {policy!r} at the server"
            )
        state = {} if self._is_agreed else values_in(self.module)
        for name in values.keys() - state.keys() if state else ():
            raise ConfigError(f"the server's model is another: {layout.model} has no {name!r}")
        frozen = {n for n, p in self.module.named_parameters() if not p.requires_grad}
        for name in frozen & state.keys():
            if name in values and not np.array_equal(state[name], values[name]):
                raise ConfigError(
                    f"frozen parameters or constant buffers of {layout.model}, such as {name!r}, "
                    "differ from the server's; load the same checkpoint on both sides"
                )
        self._is_agreed = True


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
        objective: Objective, features: Any, labels: Any, local: LocalTraining | None = None
    ) -> FlowerTask:
        """Make a task of an objective and a client's samples, trained as the simulator does."""
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
            statistics: what becomes of buffers that training changes; see `AQG`.

        The upload is the pseudo-gradient ``θ - θ_local``. Give `make_server_app` the same module
        and options.
        """
        layout = ModelLayout.of(module, include=include, exclude=exclude, statistics=statistics)
        takes_round = num_arguments(train) > 1
        model = TaskModel(layout, module, layout.read_buffers(module))

        def load(params: FloatArray) -> torch.nn.Module:
            layout.load(module, params)
            layout.write_buffers(module, model.buffers)
            return module

        def run(params: FloatArray, round_number: int, key: Key) -> tuple[Said, FloatArray]:  # noqa: ARG001
            # In half precision the module starts from rounded values.
            start = layout.flatten(load(params), finite=False)
            said = train(module, round_number) if takes_round else train(module)
            model.buffers = layout.read_buffers(module)
            pseudo_gradient: FloatArray = start - layout.flatten(module, finite=False)
            return said, pseudo_gradient.astype(params.dtype, copy=False)

        measure = None if evaluate is None else (lambda params: evaluate(load(params)))
        is_measured = evaluate is None
        return FlowerTask(run, num_samples, measure, train_measures=is_measured, model=model)


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
    """Return the trainable parameters of a module as one vector, each once, without statistics.

    It is float64 where a parameter is, and float32 otherwise; NaN and infinity are refused.
    """
    return ModelLayout.of(module).flatten(module)


def load_flat(module: torch.nn.Module, params: FloatArray) -> None:
    """Write a vector that `flatten` returned, or one like it, into a module."""
    ModelLayout.of(module).load(module, params)


def make_client_app(
    task_factory: Callable[[Context], FlowerTask],
    *,
    recipe: Recipe | None = None,
    mods: list[Mod] | None = None,
) -> ClientApp:
    """Make the ClientApp of a task, for the strategy `AQG`.

    Args:
        task_factory: makes a node's task from its context, with its own data.
        recipe: in place of the one that the server names; the server must have an equal one.
        mods: of Flower, around every handler.

    The client's memory is on disk, where `aqg.flower.mod.state_directory` says, and survives the
    node's process; a client that has lost it starts again from zero. At the start of a run,
    memories of others that were not used for ``aqg-state-days``, 30, are deleted there.
    """
    tasks: OrderedDict[tuple[int, int], FlowerTask] = OrderedDict()

    def task_of(context: Context) -> FlowerTask:
        key = (context.run_id, context.node_id)
        if key not in tasks:
            tasks[key] = task_factory(context)
            while len(tasks) > _TASKS_KEPT:  # one process may serve many nodes of a simulation
                tasks.popitem(last=False)
        return tasks[key]

    app = ClientApp(mods=[*(mods or []), make_mod(recipe=recipe, tells_order=True)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _answer(message, lambda: _train(task_of(context), message.content))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _answer(message, lambda: _evaluate(task_of(context), message.content))

    return app


def _answer(message: Message, make: Callable[[], RecordDict]) -> Message:
    try:
        if ORDER not in message.content:
            raise ConfigError("a task trains for the strategy AQG, and no other")
        return Message(make(), reply_to=message)
    except AqgError as error:
        return refusal(message, error)


def _train(task: FlowerTask, content: RecordDict) -> RecordDict:
    """Return the update that a task makes of the model, and what it measured."""
    values, params = _open(task, content)
    told = content.config_records[ORDER]
    key = (int(told["seed"]), int(told["client"]), int(told["round"]))  # type: ignore[arg-type]
    said, gradient = task.train(params, key[2], key)
    gradient = np.asarray(gradient)
    if gradient.shape != params.shape:
        raise GradientError(f"train returned shape {gradient.shape}; the model has {params.shape}")
    loss, metrics = loss_and_metrics(said)
    gradient = gradient.astype(params.dtype, copy=False)
    update = {VECTOR: gradient} if task.model is None else task.model.update(gradient, values)
    config = next((r for n, r in content.config_records.items() if n != ORDER), ConfigRecord())
    if not config.get("measure", True):
        loss = math.nan
    elif not task.train_measures and task.evaluate is not None:
        loss, evaluated = loss_and_metrics(task.evaluate(params))
        metrics |= {EVALUATED + n.removeprefix(EVALUATED): v for n, v in evaluated.items()}
    record = record_of(update.items())
    marks = {UPDATE: ConfigRecord({"is": True})}
    return RecordDict({"arrays": record, "metrics": _metrics(loss, metrics, task), **marks})


def _evaluate(task: FlowerTask, content: RecordDict) -> RecordDict:
    _, params = _open(task, content)
    said = task.evaluate(params) if task.evaluate is not None else math.nan
    return RecordDict({"metrics": _metrics(*loss_and_metrics(said), task)})


def _open(task: FlowerTask, content: RecordDict) -> tuple[Values, FloatArray]:
    """Return the tensors of the model, and its parameters as one vector; set its buffers."""
    values = values_of(next(iter(content.array_records.values())))
    if task.model is not None:
        return values, task.model.open(values, content.config_records[ORDER]["statistics"])
    vector = vector_in(values)
    if vector is None:
        raise ConfigError(
            f"the server's model has {len(values)} tensors, and this task a flat vector: give the "
            "server a flat vector, or make the task of a module"
        )
    return values, vector


def vector_in(values: Values) -> FloatArray | None:
    """Return the flat vector that is all of a model; None where it has tensors of its own."""
    return np.array(values[VECTOR]) if list(values) == [VECTOR] else None


def _metrics(loss: float, metrics: Mapping[str, float], task: FlowerTask) -> MetricRecord:
    known = {} if math.isnan(loss) else {"loss": min(max(loss, -_FARTHEST), _FARTHEST)}
    return MetricRecord({**metrics, **known, EXAMPLES: task.num_samples})


def loss_and_metrics(said: float | Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """Return the loss that a user's function returned, and metrics where it returned some."""
    metrics = as_metrics(said, "loss")
    loss = loss_in(metrics)
    metrics.pop("loss", None)
    return loss, metrics
