"""The tasks that recipes are compared on: what is learned, by whom, and when it is good enough.

A task is a run's config. With a target, that is its goal; without one, its goal is the plateau of
federated averaging, whose rounds are then the task's, and other recipes may take a quarter more.
Two regimes: with exact gradients updates repeat themselves from round to round, with local training
they are mostly noise. A user's own task is the same thing with the user's settings.
"""

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, cast

from aqg.data import data_directory
from aqg.errors import ConfigError, DataError
from aqg.runs.config import OWN, RunConfig, check_files, read_stored, refuse_unnamed_code, resolve
from aqg.runs.stopping import Kind, Target
from aqg.spec import Code
from aqg.studies.contest.measure import MOST_DELAY, Goal

_HOLD: dict[str, int] = {"residual": 20, "loss": 20, "accuracy": 3}
_LOSS_POINTS = 50
"""About so many rounds of a run also have their training loss computed, where it is not needed."""
_OF_THE_COMPARISON = (
    *("recipe", "seed", "bits", "device", "engine", "eval_every", "plugins", "downlink", "step"),
)
_OF_THE_TARGET = ("target", "target_kind", "hold")


@dataclass(frozen=True)
class Task:
    name: str
    config: RunConfig  # of its runs, up to recipe, step size, seed and device
    files: tuple[str, ...] = ()  # that it needs, relative to the data directory
    uses_device: bool = True  # whether a GPU is worth its while
    is_hold_out: bool = False  # set aside: no choice was made by it
    is_own: bool = False  # the user's own

    @cached_property
    def goal(self) -> Goal:
        config = self.config
        return Goal(cast("Kind", config.target_kind), config.rounds, config.goal)

    @cached_property
    def regime(self) -> str:
        """The part of the grid that is searched: with exact gradients another than with noise."""
        return "full-batch" if self.config.training().local.is_one_gradient else "local"

    def with_target(self, target: Target) -> RunConfig:
        rounds = math.ceil(MOST_DELAY * self.config.rounds)
        return replace(self.config, rounds=rounds, target=target.value, hold=target.hold)

    def missing(self, data_dir: Path | None) -> str | None:
        paths = [data_directory(data_dir) / file for file in self.files]
        code = None if self.config.problem is None else Code.parse(self.config.problem)
        if code is not None:
            paths.append(code.path)
            if not code.path.is_file() and not self.is_own:
                return (
                    f"its problem, {'/'.join(code.path.parts[-2:])}, is in the repository and not "
                    "in the installed package; run it from a checkout, installed with pip install "
                    "-e ."
                )
        return next((f"{str(path)!r} is missing" for path in paths if not path.is_file()), None)


def _with_fixed(config: RunConfig, target: Target) -> RunConfig:
    hold, kind = _HOLD[target.kind], target.kind
    is_followed = kind == "accuracy" or config.validation > 0
    eval_every = max(1, config.rounds // _LOSS_POINTS) if is_followed else 1
    return replace(config, target=target.value, target_kind=kind, hold=hold, eval_every=eval_every)


_CHECKOUT = Path(__file__).parents[4]


def _read_tasks() -> Iterator[Task]:
    text = resources.files("aqg.studies.contest").joinpath("tasks.toml").read_text(encoding="utf-8")
    document = tomllib.loads(text)
    for group in ("task", "unseen"):
        for name, row in document[group].items():
            while base := row.pop("base", None):
                row = document["base"][base] | row
            yield _make_task(name, row, is_hold_out=group == "unseen")


def _make_task(name: str, row: dict[str, Any], *, is_hold_out: bool) -> Task:
    """Make a task of a row of ``tasks.toml``.

    Where its goal is federated averaging's plateau, its step is rate · steps / clients.
    """
    defaults: dict[str, Any] = {"l2": 0.0, "dtype": "float32", "partition": "iid"}
    row = defaults | row
    files, uses_device = tuple(row.pop("files", ())), not row.pop("small", False)
    if "problem" in row:
        row["problem"] = str(_CHECKOUT / row["problem"])
        row |= {"dataset": OWN, "model": OWN, "partition": OWN}
    if local := row.pop("local", None):
        row |= zip(("batch_size", "local_steps", "local_rate"), local, strict=True)
    if length := row.pop("away", 0):
        row["absences"] = _bursts(row["clients"], row["rounds"], length)
    if (target := row.pop("target", None)) is not None:
        goal = Target(row["target_kind"], target)
        config = _with_fixed(RunConfig(recipe="gd", **row), goal)
    else:
        row.setdefault("target_kind", "accuracy")
        row.setdefault("validation", 0.1)
        row["alpha"] = row["local_rate"] * row["local_steps"] / row["clients"]
        row["eval_every"] = max(1, row["rounds"] // _LOSS_POINTS)
        config = RunConfig(recipe="fedavg", **row)
    return Task(name, config, files, uses_device, is_hold_out)


def _bursts(clients: int, rounds: int, length: int) -> tuple[tuple[int, int, int], ...]:
    """Let every client be away for one stretch of rounds, one client after the other."""
    last = rounds - length
    starts = [1 + round(client * last / max(1, clients - 1)) for client in range(clients)]
    return tuple((client, start, start + length - 1) for client, start in enumerate(starts))


TASKS: dict[str, Task] = {task.name: task for task in _read_tasks()}

QUICK_TASKS = ("digits-softmax", "digits-local")
"""One of each kind. They need no download and take seconds."""


def parse_tasks(text: str | None, own: Iterable[Task] = ()) -> tuple[Task, ...]:
    """Return the tasks that ``--task`` names: some, those on digits without it, or many at once.

    ``all`` is those not set aside, ``averaging`` those of them whose goal is federated averaging's
    plateau. Names may be those of the user's ``own``.
    """
    mine = {task.name: task for task in own}
    named = QUICK_TASKS if text is None else [name.strip() for name in text.split(",")]
    names = [name for name in named if name not in mine]
    found = [task for task in TASKS.values() if not task.is_hold_out]
    if names == ["averaging"]:
        found = [task for task in found if task.goal.target is None]
    elif names != ["all"]:
        found = list(select_tasks(names))
    return (*found, *(mine[name] for name in named if name in mine))


def select_tasks(names: Iterable[str]) -> tuple[Task, ...]:
    chosen = set(names)
    for name in sorted(chosen - TASKS.keys()):
        known = ", ".join(["all", "averaging", *TASKS])
        raise ConfigError(f"unknown task {name!r}; choose from {known}")
    return tuple(task for name, task in TASKS.items() if name in chosen)


def in_order(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Return each task once, ours in the order of `TASKS` and then the user's own."""
    chosen = {task.name: task for task in tasks}
    ours = [chosen.pop(name) for name in TASKS if name in chosen]
    return (*ours, *chosen.values())


def available(tasks: Iterable[Task], data_dir: Path | None) -> tuple[tuple[Task, ...], list[str]]:
    """Return the tasks whose files are there, and a line about each of the others."""
    missing = {task: task.missing(data_dir) for task in tasks}
    lines = [f"task {task.name} is left out: {why}" for task, why in missing.items() if why]
    if len(lines) == len(missing):
        raise DataError("; ".join(lines))
    return tuple(task for task, why in missing.items() if not why), lines


def parse_target(loss: float | None, accuracy: float | None) -> Target | None:
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

    Where a comparison has it (``before``), settings and target are the same, or are left out.
    """
    for key in (*_OF_THE_COMPARISON, *_OF_THE_TARGET):
        if key in named:
            is_target = key in _OF_THE_TARGET
            meant = "use --target or --target-accuracy" if is_target else "leave it out"
            raise ConfigError(f"{key} cannot be set for a task: the comparison does that; {meant}")
    config = _resolve(named, target, data_dir)
    stored = next((task for task in before if task.name == _name(config)), None)
    if stored is not None:
        target = target or stored.goal.target
    if target is None:
        raise ConfigError(
            f"task {_name(config)} has no target; give --target LOSS or --target-accuracy SHARE"
        )
    if stored is None:
        return _own(config, target)
    settings = asdict(stored.config)
    for key in (*_OF_THE_COMPARISON, *_OF_THE_TARGET):
        settings.pop(key)
    asked = _own(_resolve({**settings, **named}, target, data_dir), target)
    if asked != stored:
        pairs, others = (asdict(t.config) | {"target": t.goal.target} for t in (stored, asked))
        key = next(key for key in pairs if pairs[key] != others[key])
        raise ConfigError(
            f"task {stored.name} has {key} {pairs[key]}, not {others[key]}; drop the option, or "
            "start a new comparison"
        )
    return stored


def _resolve(
    settings: Mapping[str, Any], target: Target | None, data_dir: Path | None
) -> RunConfig:
    kind = "accuracy" if target is None else target.kind
    (config,) = resolve({**settings, "recipe": "gd", "target_kind": kind}, data_dir)
    # A file's SETTINGS may hold what is not the task's to say.
    plain = {key: getattr(RunConfig, key) for key in (*_OF_THE_COMPARISON[1:], *_OF_THE_TARGET)}
    return replace(config, **plain | {"target_kind": kind})


def _own(config: RunConfig, target: Target) -> Task:
    return Task(_name(config), _with_fixed(config, target), is_own=True)


def _name(config: RunConfig) -> str:
    """Name a task after its files and functions; no task of ours has a colon in its name."""
    parts = [config.problem] if config.problem is not None else [config.data_name, config.model]
    codes = map(Code.parse, parts)
    return ":".join(p if c is None else c.short for p, c in zip(parts, codes, strict=True))


def to_row(task: Task) -> dict[str, Any]:
    return {k: v for k, v in asdict(task.config).items() if v is not None and v != ()}


def from_row(row: Mapping[str, Any]) -> Task:
    config = read_stored(row)
    return Task(_name(config), config, is_own=True)


def check_code_and_files(
    tasks: Iterable[Task], named: Mapping[str, Any], *, allowed: bool, where: str
) -> None:
    """Refuse code that the command line does not name, and changed files."""
    for task in tasks:
        if task.is_own:
            refuse_unnamed_code(asdict(task.config), named, allowed=allowed, where=where)
            check_files(task.config)
