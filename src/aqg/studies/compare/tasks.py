"""The tasks that recipes are compared on: what is learned, by whom, and when it is good enough.

Two kinds. *Full batch*: every client computes its exact gradient in every round, the paper's
regime; updates repeat themselves from round to round. *Local*: clients take minibatch steps of
their own in between; their updates are mostly noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from aqg.errors import ConfigError
from aqg.sim.local import LocalTraining
from aqg.sim.training import Training

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aqg.runs.config import RunConfig

Kind: TypeAlias = Literal["residual", "loss", "accuracy"]

_SMALL = 1e-9
"""No way to a target is longer than that to here."""
_HOLD_LOSS = 20
_HOLD_ACCURACY = 3


@dataclass(frozen=True)
class Target:
    """When a model is good enough.

    Attributes:
        kind: ``"residual"``, the loss above its minimum; ``"loss"`` itself; or ``"accuracy"`` on
            the test set.
        value: at most this loss or residual, at least this accuracy.

    """

    kind: Kind
    value: float

    @property
    def hold(self) -> int:
        """For how many rounds in a row the target has to be met; the first of them counts."""
        return _HOLD_ACCURACY if self.kind == "accuracy" else _HOLD_LOSS

    def is_met(self, value: float) -> bool:
        """Tell whether a loss, residual or accuracy is good enough; NaN never is.

        >>> Target("accuracy", 0.9).is_met(0.91), Target("residual", 1e-4).is_met(1e-3)
        (True, False)
        """
        return value >= self.value if self.kind == "accuracy" else value <= self.value

    def progress(self, start: float, value: float) -> float:
        """Return which share of the way from ``start`` to the target lies behind.

        Measured in the logarithm of the loss, the residual or the rate of errors, in which training
        is fast first and slow later: whoever is behind at half time does not arrive.

        >>> Target("residual", 1e-4).progress(start=1.0, value=1e-2)
        0.5
        """
        start, value, goal = (
            1 - number if self.kind == "accuracy" else number
            for number in (start, value, self.value)
        )
        if value <= goal:
            return 1.0
        goal = max(goal, _SMALL)
        return math.log(start / value) / math.log(start / goal) if start > goal else 0.0

    def __str__(self) -> str:
        if self.kind == "accuracy":
            return f"accuracy {self.value:.1%}"
        return f"{self.kind} {self.value:g}"


@dataclass(frozen=True)
class Task:
    """One thing to learn.

    Attributes:
        name: how the command line calls it.
        dataset: see ``aqg datasets``.
        partition: how samples are split among clients.
        model: ``"logistic"``, ``"softmax"``, ``"mlp:HIDDEN"`` or ``"cnn"``.
        clients: how many.
        step_size: ``α``, before the multipliers of the search.
        rounds: the most rounds a recipe gets.
        target: when it is done.
        training: what a client computes, and who is asked.
        dropout: the chance that a client is away in a round.
        samples: so many training samples, drawn at random; all by default.
        l2: the weight of the regularizer.
        dtype: the precision of everything.
        uses_device: whether a GPU is worth its while.
        is_late: first run when the default recipe was nearly finished. Two changes to the default
            followed from what was seen there, so the task is no independent test of it.
        config: of a task of the user's own, all settings of its runs.

    """

    name: str
    dataset: str
    partition: str
    model: str
    clients: int
    step_size: float
    rounds: int
    target: Target
    training: Training = field(default_factory=Training)
    dropout: float = 0.0
    samples: int | None = None
    l2: float = 0.0
    dtype: str = "float32"
    uses_device: bool = True
    is_late: bool = False
    config: RunConfig | None = None

    @property
    def is_local(self) -> bool:
        """Whether clients train on minibatches of their own."""
        return not self.training.local.is_one_gradient

    def describe(self) -> str:
        """Return the task in words, for a table."""
        text = f"{self.model} on {self.dataset}, {self.clients} clients, {self.partition}"
        if self.config is not None:
            text = self.config.title
        local = self.training.local
        if local.epochs is not None:
            text += f", {local.epochs} local epoch, batches of {local.batch_size}"
        elif self.is_local:
            text += f", {local.steps} local steps of {local.batch_size}"
        if self.training.participation < 1:
            text += f", {self.training.participation:.0%} sampled"
        if self.dropout:
            text += f", dropout {self.dropout:g}"
        return text


def _local(rate: float, steps: int, batch_size: int, participation: float = 1.0) -> Training:
    return Training(LocalTraining(batch_size, steps, rate=rate), participation=participation)


_LOGISTIC = Task(
    name="logistic-iid",
    dataset="heterogeneous",
    partition="iid",
    model="logistic",
    clients=18,
    step_size=0.008,
    rounds=1000,
    target=Target("residual", 1e-4),
    l2=0.01,
    dtype="float64",
    uses_device=False,
)
_SOFTMAX = Task(
    name="softmax-iid",
    dataset="mnist",
    partition="iid",
    model="softmax",
    clients=10,
    step_size=0.02,
    rounds=2000,
    target=Target("residual", 1e-4),
    l2=0.01,
)
_PERCEPTRON = replace(
    _SOFTMAX, name="mlp-iid", model="mlp:200", rounds=1500, target=Target("loss", 0.525)
)
_LOCAL = Task(
    name="local-iid",
    dataset="mnist",
    partition="iid",
    model="mlp:200",
    clients=10,
    step_size=0.1 * 5 / 10,  # the step of federated averaging: rate · steps / clients
    rounds=400,
    target=Target("accuracy", 0.92),
    training=_local(rate=0.1, steps=5, batch_size=64),
)
_LOCAL_DIRICHLET = replace(
    _LOCAL, name="local-dirichlet", partition="dirichlet:0.3", target=Target("accuracy", 0.90)
)
_CNN_SAMPLES = 10_000
_CNN_BATCH = 64

_SAMPLED = replace(
    _LOCAL_DIRICHLET,
    name="sampled-dirichlet",
    clients=100,
    step_size=0.1 * 5 / 100,
    training=_local(rate=0.1, steps=5, batch_size=64, participation=0.1),
)
_CNN = Task(
    name="cnn-dirichlet",
    dataset="mnist",
    partition="dirichlet:0.3",
    model="cnn",
    clients=10,
    step_size=0.1 * (_CNN_SAMPLES / 10 / _CNN_BATCH) / 10,
    rounds=100,
    target=Target("accuracy", 0.90),
    training=Training(LocalTraining(_CNN_BATCH, epochs=1, rate=0.1)),
    samples=_CNN_SAMPLES,
    is_late=True,
)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="digits-softmax",
            dataset="digits",
            partition="label",
            model="softmax",
            clients=10,
            step_size=0.1,
            rounds=1000,
            target=Target("residual", 1e-3),
            l2=0.01,
            dtype="float64",
            uses_device=False,
        ),
        Task(
            name="digits-local",
            dataset="digits",
            partition="dirichlet:0.3",
            model="mlp:32",
            clients=10,
            step_size=0.1 * 5 / 10,
            rounds=400,
            target=Target("accuracy", 0.90),
            training=_local(rate=0.1, steps=5, batch_size=16),
            dtype="float64",
            uses_device=False,
        ),
        _LOGISTIC,
        replace(_LOGISTIC, name="logistic-source", partition="source"),
        _SOFTMAX,
        replace(_SOFTMAX, name="softmax-label", partition="label"),
        replace(_SOFTMAX, name="softmax-label-dropout", partition="label", dropout=0.5),
        _LOCAL,
        _LOCAL_DIRICHLET,
        replace(_LOCAL_DIRICHLET, name="local-dirichlet-dropout", dropout=0.5),
        _PERCEPTRON,
        replace(_PERCEPTRON, name="mlp-label", partition="label"),
        _SAMPLED,
        replace(
            _SAMPLED,
            name="sampled-iid",
            partition="iid",
            target=Target("accuracy", 0.92),
            is_late=True,
        ),
        _CNN,
        replace(_CNN, name="cnn-iid", partition="iid"),
    )
}
"""By name, the cheap ones first."""

QUICK_TASKS = ("digits-softmax", "digits-local")
"""Need no download and take seconds."""


def parse_tasks(text: str | None) -> tuple[Task, ...]:
    """Return the tasks that ``--task`` names: some, ``all``, or those on digits without it.

    >>> [task.name for task in parse_tasks(None)]
    ['digits-softmax', 'digits-local']
    >>> parse_tasks("mnist")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    aqg.errors.ConfigError: unknown task 'mnist'; choose from all, digits-softmax, digits-local, ...
    """
    if text is None:
        return select_tasks(QUICK_TASKS)
    if text.strip() == "all":
        return tuple(TASKS.values())
    return select_tasks(name.strip() for name in text.split(","))


def select_tasks(names: Iterable[str]) -> tuple[Task, ...]:
    """Return the tasks of these names, in the order of `TASKS`."""
    chosen = set(names)
    for name in sorted(chosen):
        if name not in TASKS:
            raise ConfigError(f"unknown task {name!r}; choose from all, {', '.join(TASKS)}")
    return tuple(task for name, task in TASKS.items() if name in chosen)


def in_order(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Return each task once, ours in the order of `TASKS` and then the user's own."""
    chosen = {task.name: task for task in tasks}
    own = [task for name, task in chosen.items() if name not in TASKS]
    return (*select_tasks(name for name in chosen if name in TASKS), *own)
