"""A task of the user's own: the settings of a run as `aqg.runs` knows them, and a target."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from aqg.errors import ConfigError
from aqg.runs.code import Code
from aqg.runs.config import (
    RunConfig,
    check_files,
    read_stored,
    refuse_unnamed_code,
    resolve,
)
from aqg.runs.setup import make_simulation, try_out
from aqg.studies.compare.tasks import Target, Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from aqg.sim.problem import Problem
    from aqg.studies.compare.trial import Setting

_OF_THE_COMPARISON = ("recipe", "seed", "bits", "device", "engine", "eval_every", "plugins")


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
        if not 0 < loss < float("inf"):
            raise ConfigError(f"target is {loss}, a loss; it must be above 0")
        return Target("loss", loss)
    if accuracy is not None:
        if not 0 < accuracy <= 1:
            raise ConfigError(f"target accuracy is {accuracy}; it must be above 0 and at most 1")
        return Target("accuracy", accuracy)
    return None


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
    for key in (*_OF_THE_COMPARISON, "target"):
        if key in named:
            meant = "use --target or --target-accuracy" if key == "target" else "leave it out"
            raise ConfigError(f"{key} cannot be set for a task: the comparison does that; {meant}")
    config = _resolve(named, data_dir)
    stored = next((task for task in before if task.name == _name(config)), None)
    if stored is None or stored.config is None:
        if target is None:
            raise ConfigError(
                f"task {_name(config)} has no target; give --target LOSS or --target-accuracy SHARE"
            )
        return _make(config, target)
    stored_settings = asdict(stored.config)
    for key in _OF_THE_COMPARISON:
        stored_settings.pop(key)
    config = _resolve({**stored_settings, **named}, data_dir)
    asked = _make(config, target or stored.target)
    if asked != stored:
        pairs = {**asdict(stored.config), "target": stored.target}
        others = {**asdict(config), "target": asked.target}
        key = next(key for key in pairs if pairs[key] != others[key])
        raise ConfigError(
            f"task {stored.name} has {key} {pairs[key]}, not {others[key]}; drop the option, or "
            "start a new comparison"
        )
    return stored


def _resolve(settings: Mapping[str, Any], data_dir: Path | None) -> RunConfig:
    (config,) = resolve({**settings, "recipe": "gd"}, data_dir)
    # A file's SETTINGS may hold what is not the task's to say.
    return replace(
        config,
        **{key: getattr(RunConfig, key) for key in (*_OF_THE_COMPARISON[1:], "target")},
    )


def _make(config: RunConfig, target: Target) -> Task:
    if config.rounds <= target.hold:
        raise ConfigError(
            f"rounds is {config.rounds}; a target counts once it is met {target.hold} rounds in a "
            f"row, so there must be more than {target.hold}"
        )
    return Task(
        name=_name(config),
        dataset=config.dataset,
        partition=config.partition,
        model=config.model,
        clients=config.clients,
        step_size=config.alpha,
        rounds=config.rounds,
        target=target,
        training=config.training(),
        dropout=config.dropout,
        l2=config.l2,
        dtype=config.dtype,
        config=config,
    )


def _name(config: RunConfig) -> str:
    """Name a task after its files and functions; no task of ours has a colon in its name."""
    parts = [config.problem] if config.problem is not None else [config.data_name, config.model]
    codes = [(part, Code.parse(part)) for part in parts]
    return ":".join(part if code is None else code.short for part, code in codes)


def to_row(task: Task) -> dict[str, Any]:
    """Return what a plan remembers of the task."""
    assert task.config is not None
    settings = {k: v for k, v in asdict(task.config).items() if v is not None and v != ()}
    return {"target": asdict(task.target), "settings": settings}


def from_row(row: Mapping[str, Any]) -> Task:
    """Read what `to_row` wrote; no file that it names is opened."""
    return _make(read_stored(row["settings"]), Target(**row["target"]))


def check_code_and_files(
    tasks: Iterable[Task], named: Mapping[str, Any], *, allowed: bool, where: str
) -> None:
    """Refuse to go on with code that the command line does not name, or with changed files."""
    for task in tasks:
        if task.config is not None:
            refuse_unnamed_code(asdict(task.config), named, allowed=allowed, where=where)
            check_files(task.config)


def trial_config(config: RunConfig, setting: Setting, seed: int, device: str) -> RunConfig:
    """Return the config of one trial."""
    return replace(
        config,
        recipe=setting.spec,
        bits=setting.bits,
        alpha=config.alpha * setting.multiplier,
        seed=seed,
        device=device,
    )


def check_problem(task: Task, problem: Problem) -> None:
    """Raise where a run would fail, the target cannot be measured, or it is met at the start."""
    assert task.config is not None
    try_out(task.config, problem)
    simulation = make_simulation(task.config, problem)
    if task.target.kind == "loss":
        start = simulation.loss()
    else:
        measured = simulation.problem.measure(simulation.parameters)
        if "accuracy" not in measured:
            found = f"only {', '.join(measured)}" if measured else "nothing"
            raise ConfigError(
                f"the target of {task.name} is an accuracy, and on its test set {found} is "
                "measured; give --target LOSS"
            )
        start = measured["accuracy"]
    if task.target.is_met(start):
        raise ConfigError(
            f"the target of {task.name}, {task.target}, is met before the first round "
            f"({start:.4g}); ask for more"
        )
