"""The tasks on which recipes are to take the place of federated averaging.

A task is a run's config without a target: that comes from federated averaging itself. All have
local training, so updates are noisy. ``rounds`` are those of federated averaging; other recipes may
take a quarter more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from aqg.data import data_directory
from aqg.errors import ConfigError, DataError
from aqg.runs.config import OWN, RunConfig
from aqg.studies.swap_in.measure import MOST_DELAY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aqg.runs.stopping import Kind, Target

_LOSS_POINTS = 50
"""About so many rounds of a run also have their training loss computed."""


@dataclass(frozen=True)
class SwapTask:
    """One thing to learn.

    Attributes:
        name: how the command line calls it.
        config: of federated averaging's runs, up to step size, seed and device.
        files: that it needs, relative to the data directory.
        uses_device: whether a GPU is worth its while.
        is_hold_out: whether it is set aside, to be run once, when the default recipe is final. No
            choice was made by it.

    """

    name: str
    config: RunConfig
    files: tuple[str, ...] = ()
    uses_device: bool = True
    is_hold_out: bool = False

    @property
    def kind(self) -> Kind:
        """What is measured on the validation set."""
        return cast("Kind", self.config.target_kind)

    @property
    def dropout(self) -> float:
        """The probability that a client drops out of a round."""
        return self.config.dropout

    def with_goal(self, goal: Target) -> RunConfig:
        """Return the config of a run of another recipe, which ends when it reaches the goal."""
        rounds = math.ceil(MOST_DELAY * self.config.rounds)
        return replace(self.config, rounds=rounds, target=goal.value, hold=goal.hold)

    def missing_file(self, data_dir: Path | None) -> Path | None:
        """Return the first of its files that is not there."""
        folder = data_directory(data_dir)
        return next((folder / f for f in self.files if not (folder / f).is_file()), None)


def _task(
    name: str,
    kind: str = "accuracy",
    *,
    validation: float = 0.1,
    files: tuple[str, ...] = (),
    uses_device: bool = True,
    is_hold_out: bool = False,
    **settings: Any,
) -> SwapTask:
    """Make a task; ``alpha`` is the step of federated averaging, rate · steps / clients."""
    chosen: dict[str, Any] = {"l2": 0.0, "dtype": "float32", "partition": "iid"} | settings
    if "local_steps" in chosen:
        chosen["alpha"] = chosen["local_rate"] * chosen["local_steps"] / chosen["clients"]
    config = RunConfig(
        recipe="fedavg",
        target_kind=kind,
        validation=validation,
        eval_every=max(1, chosen["rounds"] // _LOSS_POINTS),
        **chosen,
    )
    return SwapTask(name, config, files, uses_device, is_hold_out)


def _natural(function: str, **settings: Any) -> dict[str, Any]:
    """Return the settings of a task whose problem a function in ``natural.py`` makes."""
    file = Path(__file__).with_name("natural.py")
    return {
        "problem": f"{file}:{function}",
        "dataset": OWN,
        "model": OWN,
        "partition": OWN,
    } | settings


_MNIST: dict[str, Any] = {
    "dataset": "mnist",
    "model": "mlp:200",
    "clients": 10,
    "rounds": 200,
    "batch_size": 64,
    "local_steps": 5,
    "local_rate": 0.1,
}
_SAMPLED = {**_MNIST, "clients": 100, "participation": 0.1}
_DIRICHLET = "dirichlet:0.3"
_HEART = tuple(f"heart/processed.{h}.data" for h in ("cleveland", "hungarian", "switzerland", "va"))
_ROLES = ("shakespeare/roles.json.gz",)
_ARMS = 16
"""Both arms of eight persons."""


def _bursts(clients: int, rounds: int, length: int) -> tuple[tuple[int, int, int], ...]:
    """Let every client be away for one stretch of rounds, one client after the other.

    >>> _bursts(clients=3, rounds=10, length=4)
    ((0, 1, 4), (1, 4, 7), (2, 7, 10))
    """
    last = rounds - length
    starts = [1 + round(client * last / max(1, clients - 1)) for client in range(clients)]
    return tuple((client, start, start + length - 1) for client, start in enumerate(starts))


SWAP_TASKS: dict[str, SwapTask] = {
    task.name: task
    for task in (
        _task(
            "digits-local",
            validation=0.2,
            uses_device=False,
            dataset="digits",
            partition=_DIRICHLET,
            model="mlp:32",
            clients=10,
            rounds=200,
            batch_size=16,
            local_steps=5,
            local_rate=0.1,
        ),
        _task(
            "heart",
            "loss",
            validation=0.2,
            files=_HEART,
            uses_device=False,
            **_natural("heart", clients=4, rounds=100),
            batch_size=32,
            local_steps=5,
            local_rate=0.05,
        ),
        _task(
            "watch",
            validation=0.2,
            files=("watch/watch_windows.npz",),
            **_natural("watch", clients=8, rounds=100),
            batch_size=32,
            local_steps=5,
            local_rate=0.1,
        ),
        _task("local-iid", partition="iid", **_MNIST),
        _task("local-dirichlet", partition=_DIRICHLET, **_MNIST),
        _task("local-dirichlet-dropout", partition=_DIRICHLET, dropout=0.5, **_MNIST),
        _task("sampled-dirichlet", partition=_DIRICHLET, **_SAMPLED),
        _task("sampled-iid", partition="iid", **_SAMPLED),
        _task(
            "shakespeare",
            files=_ROLES,
            **_natural("shakespeare:clients=60", clients=60, rounds=200),
            participation=0.2,
            batch_size=16,
            local_steps=20,
            local_rate=0.3,
        ),
        _task(
            "cifar10",
            files=("cifar10.npz",),
            **_natural("cifar10:clients=10:images=12000", clients=10, rounds=200),
            batch_size=32,
            local_steps=10,
            local_rate=0.05,
        ),
        _task(
            "cifar10-batchnorm",
            files=("cifar10.npz",),
            **_natural("cifar10:clients=20:images=24000:norm=batch", clients=20, rounds=200),
            batch_size=32,
            local_steps=10,
            local_rate=0.1,
        ),
        _task(
            "hold-out-cnn",
            partition="dirichlet:0.1",
            dataset="mnist",
            model="cnn",
            clients=50,
            participation=0.2,
            dropout=0.1,
            samples=30_000,
            rounds=150,
            batch_size=32,
            local_steps=10,
            local_rate=0.05,
            reset=True,
        ),
        _task(
            "hold-out-plays",
            files=_ROLES,
            **_natural("shakespeare:clients=30:by=play", clients=30, rounds=150),
            participation=0.5,
            batch_size=16,
            local_steps=10,
            local_rate=0.3,
        ),
        # The next five are set aside. Their settings were written down before any run but two
        # or three rounds of federated averaging, to see that they can be run.
        _task(
            "unseen-synthetic",
            validation=0.2,
            uses_device=False,
            is_hold_out=True,
            **_natural("synthetic:clients=30", clients=30, rounds=100),
            participation=1 / 3,
            batch_size=10,
            local_steps=10,
            local_rate=0.05,
        ),
        _task(
            "unseen-arms",
            validation=0.2,
            files=("watch/watch_windows.npz",),
            uses_device=False,
            is_hold_out=True,
            **_natural("arms", clients=_ARMS, rounds=100),
            absences=_bursts(_ARMS, rounds=100, length=15),
            batch_size=32,
            local_steps=10,
            local_rate=0.1,
        ),
        _task(
            "unseen-many",
            is_hold_out=True,
            partition=_DIRICHLET,
            dataset="mnist",
            model="mlp:64",
            clients=500,
            participation=0.02,
            rounds=200,
            batch_size=20,
            local_steps=5,
            local_rate=0.1,
        ),
        _task(
            "unseen-vit",
            is_hold_out=True,
            **_natural("vision_transformer:clients=6:images=10000", clients=6, rounds=120),
            batch_size=32,
            local_steps=10,
            local_rate=0.05,
        ),
        _task(
            "unseen-lstm",
            files=_ROLES,
            is_hold_out=True,
            **_natural("shakespeare:clients=100:skip=60:net=lstm", clients=100, rounds=150),
            participation=0.1,
            batch_size=16,
            local_steps=10,
            local_rate=0.5,
        ),
    )
}
"""By name, the cheap ones first, and those set aside last."""


def parse_swap_tasks(text: str | None) -> tuple[SwapTask, ...]:
    """Return the tasks that ``--task`` names; without it, or for ``all``, those not set aside.

    >>> [task.name for task in parse_swap_tasks("heart,digits-local")]
    ['digits-local', 'heart']
    >>> parse_swap_tasks("softmax")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    aqg.errors.ConfigError: unknown task 'softmax'; choose from all, digits-local, heart, ...
    """
    if text is None or text.strip() == "all":
        return tuple(task for task in SWAP_TASKS.values() if not task.is_hold_out)
    return select_swap_tasks(name.strip() for name in text.split(","))


def select_swap_tasks(names: Iterable[str]) -> tuple[SwapTask, ...]:
    """Return the tasks of these names, in the order of `SWAP_TASKS`."""
    chosen = set(names)
    for name in sorted(chosen):
        if name not in SWAP_TASKS:
            raise ConfigError(f"unknown task {name!r}; choose from all, {', '.join(SWAP_TASKS)}")
    return tuple(task for name, task in SWAP_TASKS.items() if name in chosen)


def available(
    tasks: Iterable[SwapTask], data_dir: Path | None
) -> tuple[tuple[SwapTask, ...], list[str]]:
    """Return the tasks whose files are there, and a line about each of the others.

    Raises:
        DataError: where nothing is left.

    """
    kept, lines = [], []
    for task in tasks:
        missing = task.missing_file(data_dir)
        if missing is None:
            kept.append(task)
        else:
            lines.append(f"task {task.name} is left out: {str(missing)!r} is missing")
    if not kept:
        raise DataError("; ".join(lines))
    return tuple(kept), lines
