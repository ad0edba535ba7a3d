"""The ClientApp of a task: the mod, with a task in the place of a handler."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from flwr.clientapp import ClientApp

from aqg.errors import ConfigError
from aqg.flower.metrics import EXAMPLES, loss_in
from aqg.flower.envelope import refusal
from aqg.flower.mod import mod_with
from aqg.flower.serving import Trained

if TYPE_CHECKING:
    from collections.abc import Callable

    from flwr.app import Context, Message
    from flwr.clientapp.typing import ClientAppCallable, Mod

    from aqg.core.recipe import Recipe
    from aqg.core.types import FloatArray
    from aqg.flower.statistics import ClientStatistics
    from aqg.flower.task import FlowerTask
    from aqg.protocol.messages import Order

_TASKS_KEPT = 8


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
        mods: of Flower, around every handler. Before training begins the model is taken out of the
            message, to save memory: read it there before the handler runs, not after.

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

    def host_of(context: Context, _: ClientAppCallable) -> TaskHost:
        return TaskHost(task_of(context), lambda: task_factory(context))

    app = ClientApp(mods=[*(mods or []), mod_with(host_of, recipe=recipe)])

    @app.train()
    @app.evaluate()
    def handle(message: Message, context: Context) -> Message:  # noqa: ARG001
        return refusal(message, ConfigError("a task trains for the strategy AQG, and no other"))

    return app


class TaskHost:
    """A node with a task.

    Args:
        task: the node's.
        make_task: makes another, should training have changed the module that it starts from.

    """

    def __init__(self, task: FlowerTask, make_task: Callable[[], FlowerTask]) -> None:
        self.num_samples: int | None = task.num_samples
        self._learner = TaskLearner(task, make_task)

    def learner(self, *_: object) -> TaskLearner:
        """Return what trains."""
        return self._learner


class TaskLearner:
    """Trains and measures with a task.

    Args:
        task: the node's.
        make_task: makes another, should training have changed the module that it starts from.

    """

    def __init__(self, task: FlowerTask, make_task: Callable[[], FlowerTask]) -> None:
        self.model = task.model
        self._task = task
        self._make_task = make_task

    def start(self) -> FloatArray | None:
        """Return the model that the run started from, where the task knows it."""
        own = self._task.start
        found = None if own is None else own()
        if own is not None and found is None:
            fresh = self._make_task().start
            found = None if fresh is None else fresh()
        return found

    def train(self, order: Order, params: FloatArray, statistics: ClientStatistics) -> Trained:
        """Train, and measure the model where that is wanted and training did not."""
        task = self._task
        key = (order.seed, order.client, order.round)
        statistics.load()
        said, gradient = task.train(params, order.round, key)
        statistics.take()
        loss, metrics = loss_and_metrics(said)
        evaluated: dict[str, float] = {}
        if not order.evaluate:
            loss = float("nan")
        elif not task.train_measures and task.evaluate is not None:
            statistics.load()
            loss, evaluated = loss_and_metrics(task.evaluate(params))
        return Trained(np.asarray(gradient), loss, task.num_samples, metrics, evaluated)

    def evaluate(
        self,
        order: Order,  # noqa: ARG002
        params: FloatArray,
        statistics: ClientStatistics,
    ) -> Mapping[str, float]:
        """Measure the model, where the task can."""
        task = self._task
        statistics.load()
        said = task.evaluate(params) if task.evaluate is not None else float("nan")
        loss, metrics = loss_and_metrics(said)
        return {"loss": loss, EXAMPLES: task.num_samples, **metrics}


def loss_and_metrics(said: float | Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """Return the loss that a user's function returned, and metrics where it returned a mapping.

    >>> loss_and_metrics({"loss": 0.5, "accuracy": 0.75})
    (0.5, {'accuracy': 0.75})
    """
    if not isinstance(said, Mapping):
        return float(said), {}
    metrics = {}
    for name, value in said.items():
        try:
            metrics[str(name)] = float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"metric {name!r} is {value!r:.80}; it must be a number") from None
    loss = loss_in(metrics)
    metrics.pop("loss", None)
    return loss, metrics
