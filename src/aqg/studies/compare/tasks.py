"""The tasks that recipes are compared on: what is learned, by whom, and when it is good enough.

A task is a run's config with a target that ends it. Two kinds. *Full batch*: every client computes
its exact gradient in every round, the paper's regime; updates repeat themselves from round to
round. *Local*: clients take minibatch steps of their own in between; their updates are mostly
noise. A user's own task is the same thing with the user's settings.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from aqg.errors import ConfigError
from aqg.runs.config import RunConfig, check_files, read_stored, refuse_unnamed_code, resolve
from aqg.runs.stopping import Target
from aqg.spec import Code

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from aqg.runs.stopping import Kind

_HOLD: dict[str, int] = {"residual": 20, "loss": 20, "accuracy": 3}
_LOSS_POINTS = 50
"""Where the target is an accuracy, about so many rounds of a run also have their loss computed."""
_OF_THE_COMPARISON = (
    "recipe",
    "seed",
    "bits",
    "device",
    "engine",
    "eval_every",
    "plugins",
    "downlink",
)
_OF_THE_TARGET = ("target", "target_kind", "hold")


@dataclass(frozen=True)
class Task:
    """One thing to learn.

    Attributes:
        name: how the command line calls it.
        config: of its runs, up to recipe, step size, seed and device.
        uses_device: whether a GPU is worth its while.
        is_late: first run when the default recipe was nearly finished. Two changes to the default
            followed from what was seen there, so the task is no independent test of it.
        is_own: whether it is the user's own.

    """

    name: str
    config: RunConfig
    uses_device: bool = True
    is_late: bool = False
    is_own: bool = False

    @property
    def target(self) -> Target:
        """When it is learned."""
        goal = self.config.goal
        assert goal is not None
        return goal

    @property
    def dropout(self) -> float:
        """The probability that a client drops out of a round."""
        return self.config.dropout

    @property
    def is_local(self) -> bool:
        """Whether clients train on minibatches of their own."""
        return not self.config.training().local.is_one_gradient

    def describe(self) -> str:
        """Return the task in words, for a table."""
        config = self.config
        text = f"{config.model} on {config.dataset}, {config.clients} clients, {config.partition}"
        if self.is_own:
            text = config.title
        if config.local_epochs is not None:
            text += f", {config.local_epochs} local epoch, batches of {config.batch_size}"
        elif self.is_local:
            text += f", {config.local_steps} local steps of {config.batch_size}"
        if config.participation < 1:
            text += f", {config.participation:.0%} sampled"
        if config.dropout:
            text += f", dropout {config.dropout:g}"
        return text


def with_target(config: RunConfig, kind: Kind, value: float) -> RunConfig:
    """Return the config with a target that ends the run once it is met some rounds in a row."""
    eval_every = max(1, config.rounds // _LOSS_POINTS) if kind == "accuracy" else 1
    return replace(config, target=value, target_kind=kind, hold=_HOLD[kind], eval_every=eval_every)


def _task(
    name: str,
    kind: Kind,
    value: float,
    *,
    uses_device: bool = True,
    is_late: bool = False,
    **settings: Any,
) -> Task:
    chosen: dict[str, Any] = {"l2": 0.0, "dtype": "float32"} | settings
    config = RunConfig(recipe="gd", **chosen)
    return Task(name, with_target(config, kind, value), uses_device, is_late)


_LOGISTIC: dict[str, Any] = {
    "dataset": "heterogeneous",
    "model": "logistic",
    "clients": 18,
    "alpha": 0.008,
    "rounds": 1000,
    "l2": 0.01,
    "dtype": "float64",
}
_SOFTMAX: dict[str, Any] = {
    "dataset": "mnist",
    "model": "softmax",
    "clients": 10,
    "alpha": 0.02,
    "rounds": 2000,
    "l2": 0.01,
}
_PERCEPTRON = {**_SOFTMAX, "model": "mlp:200", "rounds": 1500}
_LOCAL: dict[str, Any] = {
    "dataset": "mnist",
    "model": "mlp:200",
    "clients": 10,
    "alpha": 0.1 * 5 / 10,  # the step of federated averaging: rate · steps / clients
    "rounds": 400,
    "batch_size": 64,
    "local_steps": 5,
    "local_rate": 0.1,
}
_SAMPLED = {**_LOCAL, "clients": 100, "alpha": 0.1 * 5 / 100, "participation": 0.1}
_CNN_SAMPLES = 10_000
_CNN_BATCH = 64
_CNN: dict[str, Any] = {
    "dataset": "mnist",
    "model": "cnn",
    "clients": 10,
    "alpha": 0.1 * (_CNN_SAMPLES / 10 / _CNN_BATCH) / 10,
    "rounds": 100,
    "batch_size": _CNN_BATCH,
    "local_epochs": 1,
    "local_rate": 0.1,
    "samples": _CNN_SAMPLES,
    "reset": True,
}
_DIRICHLET = "dirichlet:0.3"

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _task(
            "digits-softmax",
            "residual",
            1e-3,
            uses_device=False,
            dataset="digits",
            partition="label",
            model="softmax",
            clients=10,
            alpha=0.1,
            rounds=1000,
            l2=0.01,
            dtype="float64",
        ),
        _task(
            "digits-local",
            "accuracy",
            0.90,
            uses_device=False,
            dataset="digits",
            partition=_DIRICHLET,
            model="mlp:32",
            clients=10,
            alpha=0.1 * 5 / 10,
            rounds=400,
            batch_size=16,
            local_steps=5,
            local_rate=0.1,
            dtype="float64",
        ),
        _task("logistic-iid", "residual", 1e-4, uses_device=False, partition="iid", **_LOGISTIC),
        _task(
            "logistic-source", "residual", 1e-4, uses_device=False, partition="source", **_LOGISTIC
        ),
        _task("softmax-iid", "residual", 1e-4, partition="iid", **_SOFTMAX),
        _task("softmax-label", "residual", 1e-4, partition="label", **_SOFTMAX),
        _task(
            "softmax-label-dropout", "residual", 1e-4, partition="label", dropout=0.5, **_SOFTMAX
        ),
        _task("local-iid", "accuracy", 0.92, partition="iid", **_LOCAL),
        _task("local-dirichlet", "accuracy", 0.90, partition=_DIRICHLET, **_LOCAL),
        _task(
            "local-dirichlet-dropout",
            "accuracy",
            0.90,
            partition=_DIRICHLET,
            dropout=0.5,
            **_LOCAL,
        ),
        _task("mlp-iid", "loss", 0.525, partition="iid", **_PERCEPTRON),
        _task("mlp-label", "loss", 0.525, partition="label", **_PERCEPTRON),
        _task("sampled-dirichlet", "accuracy", 0.90, partition=_DIRICHLET, **_SAMPLED),
        _task("sampled-iid", "accuracy", 0.92, is_late=True, partition="iid", **_SAMPLED),
        _task("cnn-dirichlet", "accuracy", 0.90, is_late=True, partition=_DIRICHLET, **_CNN),
        _task("cnn-iid", "accuracy", 0.90, is_late=True, partition="iid", **_CNN),
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


def parse_target(loss: float | None, accuracy: float | None) -> Target | None:
    """Return what ``--target`` or ``--target-accuracy`` asks for; None without either.

    >>> str(parse_target(None, 0.9))
    'accuracy 90.0%'
    >>> parse_target(None, 90)
    Traceback (most recent call last):
    aqg.errors.ConfigError: target accuracy is 90; it must be above 0 and at most 1
    """
    if loss is not None and accuracy is not None:
        raise ConfigError("--target and --target-accuracy exclude each other: a task has 1 target")
    if loss is not None:
        return Target("loss", loss)
    return None if accuracy is None else Target("accuracy", accuracy)


def make_own_task(
    named: Mapping[str, Any],
    target: Target | None,
    data_dir: Path | None = None,
    before: Iterable[Task] = (),
) -> Task:
    """Return the task that settings on the command line describe.

    Where a comparison has the task already (``before``), the settings and the target must be those
    that it has; they need not be repeated.
    """
    for key in (*_OF_THE_COMPARISON, *_OF_THE_TARGET):
        if key in named:
            is_target = key in _OF_THE_TARGET
            meant = "use --target or --target-accuracy" if is_target else "leave it out"
            raise ConfigError(f"{key} cannot be set for a task: the comparison does that; {meant}")
    config = _resolve(named, data_dir)
    name = _name(config)
    stored = next((task for task in before if task.name == name), None)
    if stored is None:
        if target is None:
            raise ConfigError(
                f"task {name} has no target; give --target LOSS or --target-accuracy SHARE"
            )
        return _own(config, target.kind, target.value)
    settings = asdict(stored.config)
    for key in (*_OF_THE_COMPARISON, *_OF_THE_TARGET):
        settings.pop(key)
    target = target or stored.target
    asked = _own(_resolve({**settings, **named}, data_dir), target.kind, target.value)
    if asked != stored:
        pairs = asdict(stored.config) | {"target": stored.target}
        others = asdict(asked.config) | {"target": asked.target}
        key = next(key for key in pairs if pairs[key] != others[key])
        raise ConfigError(
            f"task {stored.name} has {key} {pairs[key]}, not {others[key]}; drop the option, or "
            "start a new comparison"
        )
    return stored


def _resolve(settings: Mapping[str, Any], data_dir: Path | None) -> RunConfig:
    (config,) = resolve({**settings, "recipe": "gd"}, data_dir)
    # A file's SETTINGS may hold what is not the task's to say.
    plain = {key: getattr(RunConfig, key) for key in (*_OF_THE_COMPARISON[1:], *_OF_THE_TARGET)}
    return replace(config, **plain)


def _own(config: RunConfig, kind: Kind, value: float) -> Task:
    return Task(_name(config), with_target(config, kind, value), is_own=True)


def _name(config: RunConfig) -> str:
    """Name a task after its files and functions; no task of ours has a colon in its name."""
    parts = [config.problem] if config.problem is not None else [config.data_name, config.model]
    codes = [(part, Code.parse(part)) for part in parts]
    return ":".join(part if code is None else code.short for part, code in codes)


def to_row(task: Task) -> dict[str, Any]:
    """Return what a comparison's file remembers of an own task."""
    settings = {
        key: value
        for key, value in asdict(task.config).items()
        if value is not None and value != () and key not in _OF_THE_TARGET
    }
    settings["eval_every"] = 1  # follows from the target
    return {"target": {"kind": task.target.kind, "value": task.target.value}, "settings": settings}


def from_row(row: Mapping[str, Any]) -> Task:
    """Read what `to_row` wrote; no file that it names is opened."""
    target = row["target"]
    return _own(read_stored(row["settings"]), target["kind"], target["value"])


def check_code_and_files(
    tasks: Iterable[Task], named: Mapping[str, Any], *, allowed: bool, where: str
) -> None:
    """Refuse to go on with code that the command line does not name, or with changed files."""
    for task in tasks:
        if task.is_own:
            refuse_unnamed_code(asdict(task.config), named, allowed=allowed, where=where)
            check_files(task.config)
