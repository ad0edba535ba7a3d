"""Configs: one run's settings, complete and checked, and where they come from.

Settings come from four places, the later winning: the defaults of the dataset, the model or the
problem's own file; a TOML file; ``--set key=value``; and the command line's own flags. The table of
all settings is `aqg.settings`.
"""

import functools
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from aqg.core.downlink import resolve_downlink
from aqg.core.optimizers import Adam, make_optimizer
from aqg.core.recipe import Recipe
from aqg.core.recipes import make_recipe
from aqg.core.step_sizes import resolve_step
from aqg.data import DATASETS, data_directory, parse_partition
from aqg.data.datasets import Facts, is_dataset_file, peek
from aqg.errors import ConfigError
from aqg.models import is_module
from aqg.runs.directory import read_toml
from aqg.runs.stopping import Kind, Target
from aqg.settings import RunSettings, check_bounds, require_choice, table, typed
from aqg.sim.problem import Problem
from aqg.sim.training import Dropout, LocalTraining, Training, check_late, make_late
from aqg.spec import Code, file_digest, load_file, seeded

SETTINGS = tuple(table(RunSettings))
_LOCAL = ("batch_size", "local_steps", "local_epochs", "local_rate")
"""The settings of `LocalTraining`, in its order."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(RunSettings):
    """Everything that determines one run of one recipe."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.problem is None and not is_dataset_file(self.dataset):
            require_choice("dataset", self.dataset, DATASETS)
        if self.engine == "reference" and self.device != "cpu":
            raise ConfigError(f"device is {self.device!r}; the reference engine runs on cpu only")
        self._check_target()
        make_recipe(self.recipe, self.bits, self.max_staleness)
        if self.problem is None:
            parse_partition(self.partition)
        self.dropout_schedule()
        training = self.training()
        check_late(training.late, self._made_recipe(), training.num_sampled(self.clients))
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
            if self.hold:
                raise ConfigError(f"hold is {self.hold}; it must be 0 without a target")
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
        if self.target is None:
            return None
        kind = cast("Kind", self.target_kind)
        return Target(kind, self.target, self.hold, is_mean=self.validation > 0)

    @property
    def way_to_start(self) -> str:
        """How the first model travels (`aqg.start`); one from a file stays as it is."""
        if self.start != "auto":
            return self.start
        return "seed" if self.init is None else "exact"

    @property
    def title(self) -> str:
        """What is learned by whom, in a few words."""
        learned = self.problem or self.model
        code = Code.parse(learned)
        learned = learned if code is None else code.short
        if self.problem is not None:
            return f"{learned}, {self.clients} clients"
        return f"{learned} on {self.data_name}, {self.clients} clients, {self.partition} split"

    @property
    def data_name(self) -> str:
        """The dataset's name, or that of the file it comes from."""
        code = None if self.problem is None else Code.parse(self.problem)
        return code.path.stem if code is not None else Path(self.dataset).name

    def dropout_schedule(self) -> Dropout:
        for client, _, _ in self.absences:
            if client >= self.clients:
                raise ConfigError(f"absent client is {client}; it must be below {self.clients}")
        return Dropout(self.dropout, self.seed, self.absences)

    def training(self) -> Training:
        """Return what clients compute, who is sampled, how they count, and the server's step."""
        plain, recipe = self._plain_training(), self._made_recipe()
        step = resolve_step(self.step, recipe, plain.local.sees_all_samples, plain.optimizer)
        return replace(plain, downlink=resolve_downlink(self.downlink, recipe), step=step)

    def _plain_training(self) -> Training:
        """Return what does not depend on the recipe."""
        return Training(
            LocalTraining(*(getattr(self, name) for name in _LOCAL)),
            make_optimizer(self.optimizer),
            self.weighting,
            self.participation,
            late=make_late(self.speeds, self.buffer_size, self.outages, self.link_mbit),
            memory=self.memory,
        )

    def _made_recipe(self) -> Recipe:
        recipe = make_recipe(self.recipe, self.bits, self.max_staleness)
        return recipe.for_updates(self._plain_training().updates)


def _check_names(settings: Mapping[str, Any]) -> None:
    unknown = sorted(set(settings) - set(SETTINGS))
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}; choose from {', '.join(SETTINGS)}")


def read_stored(settings: Mapping[str, Any]) -> RunConfig:
    """Read back a config that was stored whole; no file that it names is opened, no code is run."""
    _check_names(settings)
    return RunConfig(**{name: typed(RunSettings, name, v) for name, v in settings.items()})


class DatasetFacts(NamedTuple):
    """What is set by default for a dataset that has a name; steps are for so many clients."""

    num_samples: int
    partition: str
    model: str
    clients: int
    rounds: int
    step_sizes: dict[str, float]  # by scaling, for gradients on all samples

    @property
    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("partition", "model", "clients", "rounds")}


DATASET_FACTS = {
    "digits": DatasetFacts(1442, "label", "softmax", 10, 500, {"mean": 0.1, "sum": 0.0007}),
    "mnist": DatasetFacts(60_000, "label", "softmax", 10, 4000, {"mean": 0.02, "sum": 3e-6}),
    "heterogeneous": DatasetFacts(
        2314, "source", "logistic", 18, 500, {"mean": 0.008, "sum": 0.0015}
    ),
}
OWN = "custom"
"""Stands for dataset, partition and model where a function makes the whole problem."""
_OWN_ROUNDS = 100
_OWN_CLIENTS = 10
ADAM_STEP_SIZE = 0.01
"""Adam's steps have this length per coordinate, whatever the data and the number of clients."""
_OF_EXACT_GRADIENTS = {"batch_size": None, "local_steps": 1, "local_epochs": None}
"""With these, clients send gradients on all their samples; a dataset's step is for them."""


@functools.lru_cache(maxsize=8)
def _peek(dataset: str, digest: str) -> Facts:  # noqa: ARG001  (tells versions apart)
    return peek(Path(dataset))


def dataset_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the defaults of a dataset by name or file, and of the model."""
    dataset = settings.get("dataset", "digits")
    defaults: dict[str, Any]
    step_sizes: dict[str, float]
    if is_dataset_file(dataset):
        facts = _peek(dataset, file_digest(Path(dataset)))
        num_samples, step_sizes = facts.num_samples, {}
        split = "iid" if facts.num_clients is None else "natural"
        defaults = {"partition": split, "clients": _OWN_CLIENTS, "rounds": _OWN_ROUNDS}
        defaults["dtype"] = "float32"
        if settings.get("partition", split) == "natural":
            defaults["clients"] = facts.num_clients or _OWN_CLIENTS
        if facts.has_classes:
            defaults["model"] = "softmax"
        elif "model" not in settings:
            raise ConfigError(
                f"the targets in {dataset!r} are not classes, so there is no model by default; "
                "name one with --model"
            )
    else:
        require_choice("dataset", dataset, DATASETS, "or FILE.npz")
        num_samples, *_, step_sizes = known = DATASET_FACTS[dataset]
        defaults = known.settings
    merged = {"dataset": dataset, **defaults, **settings}
    if is_module(merged["model"]):
        merged = {"l2": 0.0, "dtype": "float32", **merged}
    if "alpha" not in merged:
        is_exact = all(merged.get(name, v) == v for name, v in _OF_EXACT_GRADIENTS.items())
        if step_sizes and is_exact and not is_module(merged["model"]):
            scaling = merged.get("scaling", "mean")
            require_choice("scaling", scaling, step_sizes)
            step_size = step_sizes[scaling]
            if scaling == "mean":  # over the clients, mean losses are summed
                step_size = step_size * defaults["clients"] / max(1, merged["clients"])
        else:
            step_size = averaging_step(merged, merged.get("samples") or num_samples)
        merged["alpha"] = _of_optimizer(merged, step_size)
    return merged


_OF_A_PROBLEM: dict[str, Any] = dict.fromkeys(("dataset", "partition", "model"), OWN)
_OF_A_PROBLEM |= {"l2": 0.0, "scaling": "mean"}


def problem_defaults(settings: Mapping[str, Any], data_dir: Path | None) -> dict[str, Any]:
    """Return the settings with the defaults of a problem that a function makes."""
    problem = settings["problem"]
    for name, value in _OF_A_PROBLEM.items():
        if settings.get(name, value) != value:
            raise ConfigError(
                f"{name} is {settings[name]} and problem {problem}, which makes the whole problem, "
                f"{name} included; give one of them"
            )
    merged = {"dtype": "float32", "rounds": _OWN_ROUNDS, **problem_settings(problem), **settings}
    merged |= _OF_A_PROBLEM
    require_choice("dtype", merged["dtype"], ("float32", "float64"))
    if "clients" not in merged or "alpha" not in merged:
        made = make_own_problem(problem, 0, merged["dtype"], data_dir)
        merged.setdefault("clients", made.num_clients)
        step_size = averaging_step(merged, sum(len(client.labels) for client in made.clients))
        merged.setdefault("alpha", _of_optimizer(merged, step_size))
    return merged


def averaging_step(settings: Mapping[str, Any], num_samples: int) -> float:
    """Return ``η·K/M``, where a client with the mean number of samples takes ``K`` local steps."""
    local = LocalTraining(*(settings.get(name, getattr(RunConfig, name)) for name in _LOCAL))
    clients = max(1, settings["clients"])
    return local.rate * local.num_steps(max(1, round(num_samples / clients))) / clients


def _of_optimizer(settings: Mapping[str, Any], step_size: float) -> float:
    """Adapt the step size of plain gradient descent to the optimizer.

    With momentum a direction moves the model by ``α/(1-β)`` in all; the default keeps that as long
    as without. Where clients are sampled, their directions are old as well, and old directions
    with momentum oscillate: the step is shortened by the fraction sampled.
    """
    optimizer = make_optimizer(settings.get("optimizer", "sgd"))
    step_size = ADAM_STEP_SIZE if isinstance(optimizer, Adam) else step_size * optimizer.fresh_share
    shortened = settings.get("participation", 1.0) if optimizer.fresh_share < 1 else 1.0
    return step_size * shortened


def resolve(settings: Mapping[str, Any], data_dir: Path | None = None) -> tuple[RunConfig, ...]:
    """Fill in defaults and check everything; one config per recipe named.

    Where a function makes the problem, it is called (with ``data_dir``) if a default depends on
    what it makes.
    """
    _check_names(settings)
    settings = {name: located(name, value) for name, value in _all_typed(settings).items()}
    is_own = settings.get("problem") is not None
    merged = problem_defaults(settings, data_dir) if is_own else dataset_defaults(settings)
    names = merged.pop("recipe", ["auto", "gd", "laq"])
    if len(set(names)) < len(names):
        raise ConfigError(f"a recipe is named twice in {','.join(names)}")
    merged["files"] = _noted_files(merged)
    load_plugins(merged.get("plugins", ()))
    return tuple(RunConfig(recipe=name, **merged) for name in names)


def _all_typed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as the table has them, but several recipes may be named."""
    found = {name: typed(RunSettings, name, v) for name, v in settings.items() if name != "recipe"}
    if "recipe" in settings:
        given = settings["recipe"]
        names = given.split(",") if isinstance(given, str) else given
        if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
            raise ConfigError(f"recipe is {given!r}; it must be a text or a list of texts")
        found["recipe"] = [name.strip() for name in names if name.strip()] or [""]
    return found


def names_step(settings: Mapping[str, Any]) -> bool:
    """Tell whether settings, or the problem that they name, say how long steps are."""
    problem = located("problem", settings.get("problem"))
    own = problem_settings(problem) if isinstance(problem, str) else {}
    return bool({"alpha", "step"} & {*settings, *own})


def _file_of(name: str, value: Any) -> Code | Path | None:
    """Return the file that a setting names, or the function in one."""
    if not isinstance(value, str):
        return None
    if name in ("problem", "model"):
        return Code.required(name, value) if name == "problem" else Code.parse(value)
    is_file = name == "init" or (name == "dataset" and is_dataset_file(value))
    return Path(value) if is_file else None


def located(name: str, value: Any) -> Any:
    """Make the files that a setting names absolute, so that a run can go on from anywhere."""
    if name == "plugins" and isinstance(value, list | tuple):
        return tuple(str(Path(item).expanduser().resolve()) for item in value)
    found = _file_of(name, value)
    if isinstance(found, Code):
        return str(found.located())
    return value if found is None else str(found.expanduser().resolve())


def refuse_unnamed_code(
    settings: Mapping[str, Any], named: Mapping[str, Any], *, allowed: bool, where: str
) -> None:
    """Refuse settings in a file that would run code which the command line does not name."""
    for name in ("model", "problem", "plugins"):
        value = settings.get(name)
        if allowed or not value or located(name, named.get(name)) == located(name, value):
            continue
        if name != "model" or (isinstance(value, str) and Code.parse(value) is not None):
            shown = value[0] if isinstance(value, list | tuple) else value
            raise ConfigError(
                f"{where} would run {name} {shown!r}, which the command line does not name; "
                "add --allow-code if you trust it"
            )


def guard_file(
    file: Path,
    named: Mapping[str, Any],
    *,
    allowed: bool,
    overrides: Mapping[str, Any] | None = None,
) -> None:
    """Refuse a file like that, if it is there, with some of its settings overridden."""
    if file.is_file():  # what is missing is reported where it is read
        settings = {**read_toml(file), **(overrides or {})}
        refuse_unnamed_code(settings, named, allowed=allowed, where=repr(str(file)))


def check_files(config: RunConfig) -> None:
    _digests(dict(config.files), [path for path, _ in config.files])


def _noted_files(settings: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the digest of every file that shapes the problem; one that has changed is refused."""
    named = [_file_of(name, settings.get(name)) for name in ("dataset", "model", "problem", "init")]
    paths = [str(file.path if isinstance(file, Code) else file) for file in named if file]
    return _digests(dict(settings.get("files", ())), paths)


def _digests(before: Mapping[str, str], paths: Iterable[str]) -> tuple[tuple[str, str], ...]:
    now = {path: file_digest(Path(path)) for path in paths}
    for path, digest in now.items():
        if before.get(path, digest) != digest:
            raise ConfigError(
                f"{path!r} is not the file that this run began with (SHA-256 {before[path][:12]} "
                f"then, {digest[:12]} now); put that one back, or start a new run"
            )
    return tuple(now.items())


def load_plugins(paths: tuple[str, ...]) -> None:
    for path in paths:
        load_file(Path(path))


def parse_assignment(text: str) -> tuple[str, Any]:
    """Parse ``key=value`` with the value in TOML notation, or as a bare word."""
    key, equals, value = map(str.strip, text.partition("="))
    if not equals or not key:
        raise ConfigError(f"{text!r} is not of the form key=value")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def named_settings(assignments: Iterable[str] | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the command line names: assignments, and flags, which win."""
    return dict(map(parse_assignment, assignments or ())) | dict(flags)


def refuse_changes(
    directory: Path, before: Mapping[str, Any], after: Mapping[str, Any], what: str, advice: str
) -> None:
    for key in dict.fromkeys((*before, *after)):
        if before.get(key) != after.get(key):
            raise ConfigError(
                f"cannot resume {str(directory)!r} with {key} {after.get(key, 'missing')}: "
                f"the {what} has {key} {before.get(key, 'missing')}; {advice}"
            )


def to_toml(configs: tuple[RunConfig, ...]) -> str:
    """Write configs that differ only in the recipe as one TOML text that `resolve` reads back."""
    settings = {k: v for k, v in asdict(configs[0]).items() if v is not None and v != ()}
    if len(configs) > 1:
        settings["recipe"] = [config.recipe for config in configs]
    # Texts, numbers and lists of them are written alike in JSON and TOML.
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


_NOT_DEFAULTS = frozenset(
    ("problem", "dataset", "partition", "model", "l2", "scaling", "files", "init", "plugins")
)


def problem_settings(spec: str) -> dict[str, Any]:
    code = Code.required("problem", spec)
    settings = getattr(load_file(code.path), "SETTINGS", {})
    if not isinstance(settings, dict):
        raise ConfigError(f"SETTINGS in {str(code.path)!r} is {settings!r}; it must be a dict")
    for name in settings:
        if name in _NOT_DEFAULTS:
            raise ConfigError(
                f"SETTINGS in {str(code.path)!r} holds {name!r}, which cannot be set there"
            )
    _check_names(settings)
    return _all_typed(settings)


def make_own_problem(spec: str, seed: int, dtype: str, data_dir: Path | None) -> Problem:
    """Call the function and check what it made; the last problem is kept."""
    code = Code.required("problem", spec)
    return _make(code, file_digest(code.path), seed, dtype, data_directory(data_dir))


@functools.lru_cache(maxsize=1)
def _make(code: Code, digest: str, seed: int, dtype: str, data_dir: Path) -> Problem:  # noqa: ARG001
    with seeded(seed):
        problem = code.call(seed=seed, data_dir=data_dir, dtype=dtype)
    if not isinstance(problem, Problem):
        raise ConfigError(
            f"{code} returned {type(problem).__name__}; it must return an aqg.sim.problem.Problem"
        )
    if not problem.clients:
        raise ConfigError(f"{code} returned a problem with 0 clients; at least 1 is needed")
    if str(problem.dtype) != dtype:
        raise ConfigError(
            f"{code} returned a problem in {problem.dtype}, and dtype is {dtype}; set dtype to "
            f"{problem.dtype}, or let the function take dtype and use it"
        )
    return problem
