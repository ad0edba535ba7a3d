"""One run's settings, checked.

A `RunConfig` is complete: `aqg.runs.config.resolve` fills in what a user leaves out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_type_hints

from aqg.core.downlink import resolve_downlink
from aqg.core.dropouts import Absence, BernoulliDropout, Dropout, ScriptedDropout
from aqg.core.optimizers import make_optimizer
from aqg.core.recipes import make_recipe
from aqg.core.step_sizes import resolve_step
from aqg.data import DATASETS, is_dataset_file, parse_partition
from aqg.errors import ConfigError
from aqg.runs.stopping import KINDS, Kind, Target
from aqg.sim.local import LocalTraining
from aqg.sim.training import Training
from aqg.spec import Code

if TYPE_CHECKING:
    from collections.abc import Mapping

NUM_SAMPLES = {"digits": 1442, "mnist": 60_000, "heterogeneous": 2314}
"""Training samples of the datasets by name."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines one run of one recipe."""

    recipe: str
    dataset: str
    partition: str
    model: str
    clients: int
    rounds: int
    alpha: float
    l2: float = 0.01
    scaling: str = "mean"
    bits: int = 4
    max_staleness: int = 100
    dropout: float = 0.0
    absences: tuple[tuple[int, int, int], ...] = ()
    target: float | None = None
    target_kind: str = "residual"
    hold: int = 0
    seed: int = 0
    dtype: str = "float64"
    engine: str = "fast"
    device: str = "cpu"
    eval_every: int = 1
    plugins: tuple[str, ...] = ()
    batch_size: int | None = None
    local_steps: int = 1
    local_epochs: int | None = None
    local_rate: float = 0.1
    weighting: str = "equal"
    participation: float = 1.0
    optimizer: str = "sgd"
    downlink: str = "full"
    step: str = "fixed"
    problem: str | None = None
    init: str | None = None
    files: tuple[tuple[str, str], ...] = ()
    perturbation: int = 0
    samples: int | None = None
    reset: bool = False
    validation: float = 0.0

    def __post_init__(self) -> None:
        if self.problem is None and not is_dataset_file(self.dataset):
            require_choice("dataset", self.dataset, DATASETS)
        require_choice("scaling", self.scaling, ("mean", "sum"))
        require_choice("dtype", self.dtype, ("float32", "float64"))
        require_choice("engine", self.engine, ("fast", "reference"))
        if self.engine == "reference" and self.device != "cpu":
            raise ConfigError(f"device is {self.device!r}; the reference engine runs on cpu only")
        for name in ("clients", "rounds", "max_staleness", "eval_every"):
            require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        require("alpha", self.alpha, math.isfinite(self.alpha) and self.alpha > 0, "above 0")
        require("l2", self.l2, math.isfinite(self.l2) and self.l2 >= 0, "at least 0")
        require("dropout", self.dropout, 0 <= self.dropout < 1, "at least 0 and below 1")
        require("seed", self.seed, self.seed >= 0, "at least 0")
        require("perturbation", self.perturbation, self.perturbation >= 0, "at least 0")
        if self.samples is not None:
            require("samples", self.samples, self.samples >= 1, "at least 1")
        require("validation", self.validation, 0 <= self.validation < 1, "at least 0 and below 1")
        self._check_target()
        make_recipe(self.recipe, self.bits, self.max_staleness)
        if self.problem is None:
            parse_partition(self.partition)
        self.dropout_schedule()
        self.training()
        if self.scaling == "sum" and self.batch_size is not None:
            raise ConfigError(
                f"batch_size is {self.batch_size} with scaling sum: a sum over a batch does not "
                "estimate the sum over all samples; use scaling mean"
            )
        if self.scaling == "sum" and self.weighting == "samples":
            raise ConfigError(
                "weighting is samples with scaling sum, which weights clients by their samples "
                "already; use scaling mean or weighting equal"
            )

    def _check_target(self) -> None:
        goal = self.goal
        if self.validation and self.target_kind == "residual":
            raise ConfigError(
                f"validation is {self.validation} with target_kind residual, which is measured on "
                "what the clients train on; use accuracy or loss"
            )
        if goal is None:
            require("hold", self.hold, self.hold == 0, "0 without a target")
            return
        if goal.hold and self.rounds <= goal.hold:
            raise ConfigError(
                f"rounds is {self.rounds}; a target counts once it is met {goal.hold} rounds in a "
                f"row, so there must be more than {goal.hold}"
            )
        is_followed = goal.kind == "accuracy" or self.validation > 0
        if goal.hold and not is_followed and self.eval_every > 1:
            raise ConfigError(
                f"eval_every is {self.eval_every} with hold {goal.hold}; a {goal.kind} that ends "
                "the run must be measured in every round"
            )

    @property
    def goal(self) -> Target | None:
        """When the model is good enough."""
        if self.target is None:
            return None
        require_choice("target_kind", self.target_kind, KINDS)
        kind = cast("Kind", self.target_kind)
        return Target(kind, self.target, self.hold, is_mean=self.validation > 0)

    @property
    def title(self) -> str:
        """What is learned by whom, in a few words.

        >>> from aqg.runs.config import resolve
        >>> resolve({})[0].title
        'softmax on digits, 10 clients, label split'
        """
        if self.problem is not None:
            code = Code.parse(self.problem)
            name = self.problem if code is None else code.short
            return f"{name}, {self.clients} clients"
        code = Code.parse(self.model)
        model = self.model if code is None else code.short
        return f"{model} on {self.data_name}, {self.clients} clients, {self.partition} split"

    @property
    def data_name(self) -> str:
        """The dataset's name, or that of the file it comes from."""
        code = None if self.problem is None else Code.parse(self.problem)
        return code.path.stem if code is not None else Path(self.dataset).name

    def dropout_schedule(self) -> Dropout:
        """Return who drops out when."""
        random = BernoulliDropout(self.dropout, self.seed)
        if not self.absences:
            return random
        for client, _, _ in self.absences:
            require("absent client", client, client < self.clients, f"below {self.clients}")
        return ScriptedDropout(tuple(Absence(*absence) for absence in self.absences), random)

    def training(self) -> Training:
        """Return what clients compute, who is sampled, how they count, and the server's step."""
        local = LocalTraining(self.batch_size, self.local_steps, self.local_epochs, self.local_rate)
        recipe = make_recipe(self.recipe, self.bits, self.max_staleness)
        recipe = recipe.for_updates(local.sees_all_samples)
        optimizer = make_optimizer(self.optimizer)
        return Training(
            local,
            optimizer,
            self.weighting,
            self.participation,
            resolve_downlink(self.downlink, recipe),
            resolve_step(self.step, recipe, local.sees_all_samples, optimizer),
        )


SETTINGS = tuple(field.name for field in fields(RunConfig))


def read_stored(settings: Mapping[str, Any]) -> RunConfig:
    """Read back a config that was stored whole; no file that it names is opened, no code is run."""
    unknown = sorted(set(settings) - set(SETTINGS))
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}; choose from {', '.join(SETTINGS)}")
    return RunConfig(**{name: typed(name, value) for name, value in settings.items()})


def averaging_step(settings: Mapping[str, Any], num_samples: int | None) -> float:
    """Return federated averaging's step along the clients' sum: ``η·K/M`` for ``K`` local steps.

    With unequal clients or participation, ``K`` is that of a client with the mean number of
    samples.
    """
    values = {
        name: typed(name, settings.get(name, getattr(RunConfig, name)))
        for name in ("batch_size", "local_steps", "local_epochs", "local_rate")
    }
    local = LocalTraining(*values.values())
    clients: int = max(1, typed("clients", settings["clients"]))
    num_steps = local.num_steps(max(1, round((num_samples or clients) / clients)))
    return local.rate * num_steps / clients


def typed(name: str, value: Any) -> Any:
    """Check a value's type, letting whole numbers stand for floats."""
    hint = _type_hints()[name]
    if hint is bool and isinstance(value, bool):
        return value
    if hint in (int, int | None) and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint in (float, float | None) and isinstance(value, int | float) and value is not True:
        return float(value)
    if hint in (str, str | None) and isinstance(value, str):
        return value
    if hint in (float | None, int | None, str | None) and value is None:
        return None
    if name == "files" and isinstance(value, list | tuple):
        pairs = tuple(tuple(pair) if isinstance(pair, list | tuple) else pair for pair in value)
        if all(isinstance(p, tuple) and [type(x) for x in p] == [str] * 2 for p in pairs):
            return pairs
        raise ConfigError(f"files is {value!r}; each must be [path, SHA-256]")
    if name == "plugins" and isinstance(value, list | tuple):
        return tuple(map(str, value))
    if name == "absences" and isinstance(value, list | tuple):
        rows = tuple(tuple(row) if isinstance(row, list | tuple) else row for row in value)
        if all(isinstance(row, tuple) and [type(x) for x in row] == [int] * 3 for row in rows):
            return rows
        raise ConfigError(f"absences is {value!r}; each must be [client, first round, last round]")
    wanted = {
        bool: "true or false",
        int: "a whole number",
        int | None: "a whole number",
        str: "a text",
        str | None: "a text",
        tuple[str, ...]: "a list of texts",
    }
    raise ConfigError(f"{name} is {value!r}; it must be {wanted.get(hint, 'a number')}")


@cache
def _type_hints() -> dict[str, Any]:
    return get_type_hints(RunConfig)


def require(name: str, value: object, holds: bool, bound: str) -> None:
    """Raise unless a setting's value ``holds`` what its bound says."""
    if not holds:
        raise ConfigError(f"{name} is {value}; it must be {bound}")


def require_choice(name: str, value: object, choices: Any, more: str = "") -> None:
    """Raise unless a setting's value is one of its choices."""
    if value not in choices:
        texts = ", ".join((*choices, more) if more else choices)
        raise ConfigError(f"unknown {name} {value!r}; choose from {texts}")
