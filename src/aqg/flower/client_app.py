"""The ClientApp of a task: a handler that trains with it, behind the mod."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from aqg.errors import AqgError, ConfigError, GradientError
from aqg.flower.arrays import record_of, values_of
from aqg.flower.envelope import refusal
from aqg.flower.metrics import EVALUATED, EXAMPLES, as_metrics, loss_in
from aqg.flower.mod import ORDER, UPDATE, make_mod
from aqg.flower.models import VECTOR, values_in
from aqg.objectives.layout import Buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flwr.app import Context
    from flwr.clientapp.typing import Mod
    from numpy.typing import NDArray

    from aqg.channel.tensors import Tensor, Values
    from aqg.core.recipe import Recipe
    from aqg.core.types import FloatArray
    from aqg.flower.task import FlowerTask, TaskModel
    from aqg.objectives.layout import ModelLayout, TensorSpec

_TASKS_KEPT = 8
_FARTHEST = 1e300
"""Stands for a loss that is beyond all numbers: nothing non-finite is sent."""


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

    The client's memory is on disk, where `aqg.flower.memory.state_directory` says, and survives the
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
    values, params, model = *_open(task, content), task.model
    told = content.config_records[ORDER]
    key = (int(told["seed"]), int(told["client"]), int(told["round"]))  # type: ignore[arg-type]
    said, gradient = task.train(params, key[2], key)
    gradient = np.asarray(gradient)
    if gradient.shape != params.shape:
        raise GradientError(f"train returned shape {gradient.shape}; the model has {params.shape}")
    loss, metrics = loss_and_metrics(said)
    gradient, is_vector = gradient.astype(params.dtype, copy=False), list(values) == [VECTOR]
    if model is None or is_vector:
        update: dict[str, Tensor] = {VECTOR: gradient}
    else:
        update = _parts(gradient, model.layout.parameters)
    if model is not None:
        floats, counts = model.buffers
        if is_vector and not all(map(np.array_equal, model.buffers, model.initial)):
            raise ConfigError(
                "training changes buffers of the module, and the server was given a flat vector "
                "without them: give make_server_app the module"
            )
        if not is_vector:
            parts = _parts(floats, model.layout.statistics) | _parts(counts, model.layout.counters)
            update |= {name: part.astype(values[name].dtype) for name, part in parts.items()}
        model.buffers = _buffers_in(model, values)
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
    model = task.model
    if list(values) == [VECTOR]:
        params: FloatArray = np.array(values[VECTOR])
        if model is not None:
            _check_vector(model.layout, len(params))
    elif model is None:
        raise ConfigError(
            f"the server's model has {len(values)} tensors, and this task a flat vector: give the "
            "server a flat vector, or make the task of a module"
        )
    else:
        _check_agreement(model, values, content.config_records[ORDER]["statistics"])
        params = _flat(values, model.layout.parameters, model.layout.dtype)
    if model is not None:
        model.buffers = _buffers_in(model, values)
    return values, params


def _check_vector(layout: ModelLayout, num_params: int) -> None:
    """Raise `ConfigError` where a flat vector of the server's does not fit a module."""
    names = zip((*layout.statistics, *layout.counters), layout.tracked, strict=True)
    tracked = next((spec.name for spec, is_tracked in names if is_tracked), None)
    if layout.carries_buffers and tracked is not None:
        raise ConfigError(
            f"{layout.model} has statistics such as {tracked!r}, and the server was given a flat "
            "vector without them: give make_server_app the module"
        )
    if num_params != layout.num_params:
        raise ConfigError(
            f"the server's model is another: it has {num_params} parameters, and "
            f"{layout.model} {layout.num_params}"
        )


def _check_agreement(model: TaskModel, values: Values, policy: object) -> None:
    """Raise `ConfigError` where the server's model is another; the text names a tensor."""
    layout = model.layout
    for spec in (*layout.parameters, *layout.statistics, *layout.counters):
        found = values.get(spec.name)
        if found is None or found.shape != spec.shape:
            there = "is only here" if found is None else f"has shape {found.shape} there"
            raise ConfigError(f"the server's model is another: {spec} of {layout.model} {there}")
    if any(layout.tracked) and layout.policy != policy:
        raise ConfigError(f"statistics are {layout.policy!r} here, and {policy!r} at the server")
    state = {} if model.is_agreed else values_in(model.module)
    for name in values.keys() - state.keys() if state else ():
        raise ConfigError(f"the server's model is another: {layout.model} has no {name!r}")
    frozen = {n for n, p in model.module.named_parameters() if not p.requires_grad}
    for name in frozen & state.keys():
        if name in values and not np.array_equal(state[name], values[name]):
            raise ConfigError(
                f"frozen parameters or constant buffers of {layout.model}, such as {name!r}, "
                "differ from the server's; load the same checkpoint on both sides"
            )
    model.is_agreed = True


def _buffers_in(model: TaskModel, values: Values) -> Buffers:
    """Return the buffers that came with the model; the module's own where none did."""
    layout = model.layout
    if list(values) == [VECTOR]:
        return model.initial
    floats = _flat(values, layout.statistics, np.dtype(np.float64))
    return Buffers(floats, _flat(values, layout.counters, np.dtype(np.int64)))


def _flat(values: Values, specs: Sequence[TensorSpec], dtype: np.dtype[Any]) -> NDArray[Any]:
    flat = np.empty(sum(spec.size for spec in specs), dtype)
    for spec in specs:
        flat[spec.place] = values[spec.name].reshape(-1)
    return flat


def _parts(flat: NDArray[Any], specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    return {spec.name: flat[spec.place].reshape(spec.shape) for spec in specs}


def _metrics(loss: float, metrics: Mapping[str, float], task: FlowerTask) -> MetricRecord:
    known = {} if math.isnan(loss) else {"loss": min(max(loss, -_FARTHEST), _FARTHEST)}
    return MetricRecord({**metrics, **known, EXAMPLES: task.num_samples})


def loss_and_metrics(said: float | Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """Return the loss that a user's function returned, and metrics where it returned some."""
    metrics = as_metrics(said, "loss")
    loss = loss_in(metrics)
    metrics.pop("loss", None)
    return loss, metrics
