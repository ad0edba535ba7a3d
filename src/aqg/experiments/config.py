"""Settings of a run: defaults, checks, TOML in and out.

Settings come from four places, the later winning: the dataset's defaults, a TOML file,
``--set key=value``, and the command line's own flags.
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from aqg.core.dropouts import Absence, BernoulliDropout, Dropout, ScriptedDropout
from aqg.core.optimizers import Adam, make_optimizer
from aqg.core.recipes import make_recipe
from aqg.data import DATASETS, parse_partition
from aqg.errors import ConfigError
from aqg.sim.local import LocalTraining
from aqg.sim.training import Training

if TYPE_CHECKING:
    from collections.abc import Mapping

DATASET_DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"partition": "label", "model": "softmax", "clients": 10, "rounds": 500},
    "mnist": {"partition": "label", "model": "softmax", "clients": 10, "rounds": 4000},
    "heterogeneous": {"partition": "source", "model": "logistic", "clients": 18, "rounds": 500},
}
STEP_SIZES: dict[tuple[str, str], float] = {
    ("digits", "mean"): 0.1,
    ("digits", "sum"): 0.0007,
    ("mnist", "mean"): 0.02,
    ("mnist", "sum"): 3e-6,
    ("heterogeneous", "mean"): 0.008,
    ("heterogeneous", "sum"): 0.0015,
}
"""For the default number of clients."""
ADAM_STEP_SIZE = 0.01
"""Adam's steps have this length per coordinate, whatever the data and the number of clients."""


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

    def __post_init__(self) -> None:
        _require_choice("dataset", self.dataset, DATASETS)
        _require_choice("scaling", self.scaling, ("mean", "sum"))
        _require_choice("dtype", self.dtype, ("float32", "float64"))
        _require_choice("engine", self.engine, ("fast", "reference"))
        if self.engine == "reference" and self.device != "cpu":
            raise ConfigError(f"device is {self.device!r}; the reference engine runs on cpu only")
        for name in ("clients", "rounds", "max_staleness", "eval_every"):
            _require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        _require("alpha", self.alpha, math.isfinite(self.alpha) and self.alpha > 0, "above 0")
        _require("l2", self.l2, math.isfinite(self.l2) and self.l2 >= 0, "at least 0")
        _require("dropout", self.dropout, 0 <= self.dropout < 1, "at least 0 and below 1")
        _require("seed", self.seed, self.seed >= 0, "at least 0")
        if self.target is not None:
            _require("target", self.target, 0 < self.target < math.inf, "above 0")
        make_recipe(self.recipe, self.bits, self.max_staleness)
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

    def dropout_schedule(self) -> Dropout:
        """Return who is away when."""
        random = BernoulliDropout(self.dropout, self.seed)
        if not self.absences:
            return random
        for client, _, _ in self.absences:
            _require("absent client", client, client < self.clients, f"below {self.clients}")
        return ScriptedDropout(tuple(Absence(*absence) for absence in self.absences), random)

    def training(self) -> Training:
        """Return what clients compute, who is asked, how they count, and the server's step."""
        local = LocalTraining(self.batch_size, self.local_steps, self.local_epochs, self.local_rate)
        return Training(local, make_optimizer(self.optimizer), self.weighting, self.participation)


SETTINGS = tuple(field.name for field in fields(RunConfig))


def resolve(settings: Mapping[str, Any]) -> tuple[RunConfig, ...]:
    """Fill in defaults and check everything; one config per recipe named.

    >>> [config.recipe for config in resolve({"recipe": "lean,gd"})]
    ['lean', 'gd']
    >>> resolve({"rounds": -5})
    Traceback (most recent call last):
    aqg.errors.ConfigError: rounds is -5; it must be at least 1
    """
    unknown = sorted(set(settings) - set(SETTINGS))
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}; choose from {', '.join(SETTINGS)}")
    dataset = settings.get("dataset", "digits")
    _require_choice("dataset", dataset, DATASETS)
    merged: dict[str, Any] = {"dataset": dataset, **DATASET_DEFAULTS[dataset], **settings}
    merged.setdefault("recipe", "auto,gd,laq")
    merged.setdefault("alpha", _default_step_size(merged))
    recipes = merged.pop("recipe")
    names = recipes.split(",") if isinstance(recipes, str) else list(recipes)
    names = [name.strip() for name in names]
    if len(set(names)) < len(names):
        raise ConfigError(f"a recipe is named twice in {','.join(names)}")
    typed = {name: _typed(name, value) for name, value in merged.items()}
    load_plugins(typed.get("plugins", ()))
    return tuple(RunConfig(recipe=_typed("recipe", name), **typed) for name in names)


def _default_step_size(settings: Mapping[str, Any]) -> float:
    """Return the step size for the dataset and the optimizer.

    With momentum a direction moves the model by ``α/(1-β)`` in all; the default keeps that as long
    as without. Where clients are sampled, their directions are old as well, and old directions
    with momentum oscillate: the step is shortened by the fraction sampled.
    """
    optimizer = make_optimizer(_typed("optimizer", settings.get("optimizer", "sgd")))
    step_size = _dataset_step_size(settings) * optimizer.fresh_share
    if isinstance(optimizer, Adam):
        step_size = ADAM_STEP_SIZE
    if optimizer.fresh_share < 1:
        step_size *= _typed("participation", settings.get("participation", 1.0))
    return step_size


def _dataset_step_size(settings: Mapping[str, Any]) -> float:
    """Scale the dataset's step size to the number of clients, over whom mean losses are summed."""
    dataset, scaling = settings["dataset"], settings.get("scaling", "mean")
    _require_choice("scaling", scaling, ("mean", "sum"))
    step_size = STEP_SIZES[dataset, scaling]
    clients: int = _typed("clients", settings["clients"])
    if scaling == "sum" or clients < 1:
        return step_size
    default_clients: int = DATASET_DEFAULTS[dataset]["clients"]
    return step_size * default_clients / clients


def load_plugins(paths: tuple[str, ...]) -> None:
    """Run Python files that register recipes."""
    import importlib.util

    for path in paths:
        spec = importlib.util.spec_from_file_location("aqg_plugin", path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"plugin {path!r} is not a Python file")
        try:
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"plugin {path!r} cannot be loaded: {error}") from error


def read_settings(path: Path) -> dict[str, Any]:
    """Read settings from a TOML file."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} is not valid TOML: {error}") from None


def parse_assignment(text: str) -> tuple[str, Any]:
    """Parse ``key=value`` with the value in TOML notation, or as a bare word.

    >>> parse_assignment("alpha=0.1"), parse_assignment("model=mlp:200")
    (('alpha', 0.1), ('model', 'mlp:200'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{text!r} is not of the form key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    return key.strip(), parsed


def to_toml(configs: tuple[RunConfig, ...]) -> str:
    """Write configs that differ only in the recipe as one TOML text that `resolve` reads back."""
    settings = {k: v for k, v in asdict(configs[0]).items() if v is not None and v != ()}
    if len(configs) > 1:
        settings["recipe"] = [config.recipe for config in configs]
    # Texts, numbers and lists of them are written alike in JSON and TOML.
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


def _typed(name: str, value: Any) -> Any:
    """Check a value's type, letting whole numbers stand for floats."""
    hint = _type_hints()[name]
    if hint in (int, int | None) and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint in (float, float | None) and isinstance(value, int | float) and value is not True:
        return float(value)
    if hint is str and isinstance(value, str):
        return value
    if hint in (float | None, int | None) and value is None:
        return None
    if name == "plugins" and isinstance(value, list | tuple):
        return tuple(str(Path(item).resolve()) for item in value)
    if name == "absences" and isinstance(value, list | tuple):
        rows = tuple(tuple(row) if isinstance(row, list | tuple) else row for row in value)
        if all(isinstance(row, tuple) and [type(x) for x in row] == [int] * 3 for row in rows):
            return rows
        raise ConfigError(f"absences is {value!r}; each must be [client, first round, last round]")
    wanted = {
        int: "a whole number",
        int | None: "a whole number",
        str: "a text",
        tuple[str, ...]: "a list of texts",
    }
    raise ConfigError(f"{name} is {value!r}; it must be {wanted.get(hint, 'a number')}")


@cache
def _type_hints() -> dict[str, Any]:
    return get_type_hints(RunConfig)


def _require(name: str, value: object, holds: bool, bound: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value}; it must be {bound}")


def _require_choice(name: str, value: object, choices: Any) -> None:
    if value not in choices:
        raise ConfigError(f"unknown {name} {value!r}; choose from {', '.join(choices)}")
