"""All settings, written once: what is called how, holds what, and is what by default.

The fields of `RunSettings` are the keys of a run's TOML file, the options of ``aqg run`` and the
arguments of `aqg.runs.config.RunConfig`; those of `FlowerSettings` the keys of Flower's run-config.
``docs/reference/configuration.md`` is made of both. Whichever way a value comes, it is checked
here, and an error names the setting, the value and the bound.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from aqg.errors import ConfigError

PROBLEM = "What to learn"
ALGORITHM = "How to learn it"
TRAINING = "Practical federated training"
LATE = "Late clients, in simulated time"
TARGET = "When to stop, and what to measure"
SERVER = "Clients, rounds and files of a deployment"


@dataclass(frozen=True)
class Bound:
    """An interval; ``open_low`` and ``open_high`` leave its ends out."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high or self.high == math.inf else value <= self.high
        return above and below

    def __str__(self) -> str:
        """Write what a value must be.

        >>> str(Bound(0, 1, open_low=True)), str(Bound(1, 16)), str(Bound(0))
        ('above 0 and at most 1', 'in 1..16', 'at least 0')
        """
        low = f"{'above' if self.open_low else 'at least'} {self.low:g}"
        if self.high == math.inf:
            return low
        if not (self.open_low or self.open_high):
            return f"in {self.low:g}..{self.high:g}"
        return f"{low} and {'below' if self.open_high else 'at most'} {self.high:g}"


POSITIVE = Bound(0, open_low=True)
FROM_0, FROM_1 = Bound(0), Bound(1)
BELOW_1 = Bound(0, 1, open_high=True)
SHARE = Bound(0, 1, open_low=True)


@dataclass(frozen=True)
class Setting:
    """What is to be known of a setting beside its name, type and default."""

    help: str  # what it is, in a sentence or two
    group: str = ""  # under which heading the help of a command has it; without, it has no option
    bound: Bound | tuple[str, ...] | None = None  # of numbers; or the texts to choose from
    metavar: str | None = None  # for the value; by default its type, or the choices
    shown: str = ""  # the default in words, where it depends on other settings
    key: str = ""  # where it has another name: in Flower's run-config, or of an option

    def check(self, name: str, value: Any) -> None:
        if value is None or self.bound is None:
            return
        if not isinstance(self.bound, Bound):
            require_choice(name, value, self.bound)
        elif value not in self.bound:
            raise ConfigError(f"{name} is {value}; it must be {self.bound}")


def setting(default: Any, *about: Any, **more: Any) -> Any:
    """Return a field of a table below, with a `Setting`; ``...`` stands for no default."""
    value = dataclasses.MISSING if default is ... else default
    return dataclasses.field(default=value, metadata={"setting": Setting(*about, **more)})


# fmt: off
@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    recipe: str = setting("auto",
        "The compressor, see `aqg recipes`; of `aqg run` one or more, as in lean,laq,gd.",
        ALGORITHM, shown="`auto,gd,laq`")
    bits: int = setting(4, "b_max, the most bits per parameter.", ALGORITHM, Bound(1, 16))
    max_staleness: int = setting(100,
        "Force an upload after this many skipped rounds.", ALGORITHM, FROM_1)
    seed: int = setting(0, "Makes a run repeatable.", ALGORITHM, FROM_0)
    dropout: float = setting(0.0,
        "Probability that a client drops out of a round; in a deployment, the rate that "
        "aqg-augmented amplifies against.", ALGORITHM, BELOW_1)
    participation: float = setting(1.0,
        "Fraction of clients sampled in a round, above 0 to 1.", TRAINING, SHARE,
        key="fraction-train")
    optimizer: str = setting("sgd",
        "How the server takes its step.", TRAINING, metavar="sgd|momentum|adam")
    downlink: str = setting("auto",
        "How clients receive the model: whole, or what changed of it.", TRAINING,
        metavar="auto|full|exact|condensed")
    memory: str = setting("model",
        "What clients hold between rounds: the model, and what their recipe keeps; or nothing, "
        "like phones that appear once.", TRAINING, ("model", "none"))
    eval_every: int = setting(1, "Compute the loss in every so many rounds.", TARGET, FROM_1)


@dataclass(frozen=True, kw_only=True)
class RunSettings(CommonSettings):
    dataset: str = setting(...,
        "See `aqg datasets`; or a file with x_train, y_train, x_test, y_test and, if clients are "
        "given, client.", PROBLEM, metavar="NAME|FILE.npz", shown="`digits`")
    partition: str = setting(...,
        "How samples are split among clients.", PROBLEM,
        metavar="iid|label|source|source:shuffled|natural|dirichlet:A|shards:K",
        shown="the dataset's")
    model: str = setting(...,
        "What is trained: logistic, softmax, mlp:H; cnn, resnet8, transformer; or a function that "
        "returns a torch module.", PROBLEM, metavar="NAME|FILE.py:FUNCTION", shown="the dataset's")
    problem: str | None = setting(None,
        "A function that makes clients, model and all; in place of dataset and model.", PROBLEM,
        metavar="FILE.py:FUNCTION")
    init: str | None = setting(None,
        "Start from this model: safetensors, or a saved state_dict.", PROBLEM, metavar="FILE")
    start: str = setting("auto",
        "How clients get the first model: fresh tensors drawn from the seed, known by its digest, "
        "rounded, or exact.", PROBLEM, ("auto", "seed", "digest", "rounded", "exact"),
        shown="`seed`; with `init`, `exact`")
    clients: int = setting(..., "How many clients.", PROBLEM, FROM_1, shown="the dataset's")
    samples: int | None = setting(None, "Use so many training samples only.", PROBLEM, FROM_1)
    l2: float = setting(0.01, "Weight of the regularizer.", PROBLEM, FROM_0)
    scaling: str = setting("mean",
        "A client's loss is the mean or the sum over its samples.", PROBLEM, ("mean", "sum"))
    dtype: str = setting("float64",
        "Precision; float32 for torch modules and files.", PROBLEM, ("float32", "float64"))
    rounds: int = setting(..., "How many rounds.", ALGORITHM, FROM_1, shown="the dataset's")
    alpha: float = setting(...,
        "Step size.", ALGORITHM, POSITIVE,
        shown="the dataset's; federated averaging's with local steps or batches")
    step: str = setting("fixed",
        "How long steps are: found where updates are noisy, unless --alpha is given.", ALGORITHM,
        metavar="auto|fixed|dog", shown="`auto`, or `fixed` with `alpha`")
    engine: str = setting("fast",
        "The fast engine, or the plain one it is tested against.", ALGORITHM, ("fast", "reference"))
    device: str = setting("cpu", "Where to compute.", ALGORITHM, metavar="cpu|cuda")
    batch_size: int | None = setting(None,
        "Samples per gradient; all of a client's by default.", TRAINING, FROM_1)
    local_steps: int = setting(1, "Steps a client takes in a round.", TRAINING, FROM_1)
    local_epochs: int | None = setting(None,
        "Passes over its samples instead, in a round.", TRAINING, FROM_1)
    local_rate: float = setting(0.1, "Step size of local steps.", TRAINING, POSITIVE)
    weighting: str = setting("equal",
        "Clients count alike, or by their number of samples.", TRAINING, ("equal", "samples"))
    speeds: str | None = setting(None,
        "How long clients train in a round, in simulated seconds; without it, time is not "
        "simulated.", LATE, metavar="equal|lognormal:sigma=1|stragglers:share=0.2:times=10")
    buffer_size: int | None = setting(None,
        "End a round after so many replies; later ones count in the round in which they come, with "
        "a weight for their age. By default a round waits for all.", LATE, FROM_1)
    outages: str | None = setting(None,
        "What holds replies up, with which probability and for how long on average.", LATE,
        metavar="random:chance=0.05:seconds=20")
    link_mbit: float = setting(0.0,
        "Each client's link in either direction, in megabits per simulated second; 0: transfers "
        "take no time.", LATE, FROM_0)
    target: float | None = setting(None,
        "Report the cost until the loss stays within this of its minimum.", TARGET, POSITIVE)
    target_kind: str = setting("residual",
        "What the target is: the loss above its minimum, the loss itself, or the test accuracy.",
        TARGET, ("residual", "loss", "accuracy"))
    hold: int = setting(0,
        "End the run once the target is met for so many rounds in a row; 0: never.", TARGET, FROM_0)
    validation: float = setting(0.0,
        "Share of its samples that every client holds out for targets.", TARGET, BELOW_1)
    absences: tuple[tuple[int, int, int], ...] = setting((),
        "Scripted dropouts: lists of client, first and last round away.")
    plugins: tuple[str, ...] = setting((), "Python files that register recipes.")
    perturbation: int = setting(0,
        "Change the last bit of the data at random; 0: leave it.", bound=FROM_0)
    reset: bool = setting(False,
        "Let a torch module draw its first parameters again from the seed.")
    files: tuple[tuple[str, str], ...] = setting((),
        "SHA-256 of the files that the settings name; noted by the run itself.")


@dataclass(frozen=True, kw_only=True)
class FlowerSettings(CommonSettings):
    """Of a deployment with Flower, where texts may be empty for none, and numbers 0."""

    num_clients: int = setting(...,
        "How many clients the federation has, connected or not.", SERVER, FROM_1)
    start: str = setting("auto",
        "How clients get the first model: drawn from the seed, known by its digest, rounded, or "
        "exact. `auto` is `seed` where all layers look freshly initialized, else `exact`.", SERVER,
        ("auto", "seed", "digest", "rounded", "exact"))
    rounds: int = setting(...,
        "How many rounds in all, those before a restart included; 3 of `AQG`, and `num_rounds` of "
        "`start` comes first.", SERVER, FROM_1, key="num-server-rounds")
    alpha: float = setting(0.0,
        "The server's step size; 0 stands for 1/M, which with updates of local training is "
        "federated averaging.", ALGORITHM, FROM_0)
    step: str = setting("auto",
        "How long steps are: `fixed` is `alpha` in every round, `dog` finds it from the steps. "
        "`auto` is `fixed` where `alpha` is given, with `exact`, momentum and Adam, and otherwise "
        "the recipe's own.", ALGORITHM)
    exact: bool = setting(False,
        "Clients send gradients on all of their samples, without noise: `auto` then sends what "
        "changed, and steps are `alpha`.", ALGORITHM)
    weighting: str = setting("samples",
        "Clients count by their number of samples, as in Flower's FedAvg, or alike.", TRAINING,
        ("equal", "samples"))
    max_share: float = setting(0.0,
        "With weighting by `samples`, the largest share of all weights that one client can have: "
        "it says itself how many samples it has. 0 stands for 0.9 of two clients, 0.6 of three and "
        "0.5 of more.", TRAINING, Bound(0, 1))
    min_clients: int = setting(0,
        "With fewer valid replies the model takes no step; 0 stands for 1.", SERVER, FROM_0)
    round_timeout: float = setting(60.0,
        "Seconds until a round goes on without those who have not answered; `timeout` of `start`.",
        SERVER, POSITIVE)
    start_timeout: float = setting(120.0,
        "Seconds to wait for all clients before the first round, and for `min-clients` before any "
        "other.", SERVER, POSITIVE)
    max_failed_rounds: int = setting(10,
        "The run stops after so many rounds in a row without a step.", SERVER, FROM_0)
    run_dir: str = setting("",
        "Where the run is written, and resumed from; empty: nowhere.", SERVER)
    checkpoint_every: int = setting(1, "Rounds from one checkpoint to the next.", SERVER, FROM_1)
    trust_partition_id: bool = setting(False,
        "Know clients by the partition id that they claim: for demonstrations and simulations, "
        "where nodes are not authenticated.", SERVER)
    client_eval_every: int = setting(0,
        "Rounds from one evaluation by the clients' `evaluate` handlers to the next, in messages "
        "of their own; 0: of the final model only.", TARGET, FROM_0)
    metrics_every: int = setting(0,
        "Rounds from one call of the server's `evaluate` to the next, beginning before the first "
        "round; 0 stands for 50 calls, evenly over the run, or for every round with `evaluate_fn`. "
        "It is called once more after the last round.", TARGET, FROM_0)
    max_seconds: float = setting(0.0,
        "The run ends after the round in which the server has run so long; 0: never.", TARGET,
        FROM_0)
    max_bytes: int = setting(0,
        "The run ends after so many bytes up and down, as they are counted; 0: never.", TARGET,
        FROM_0)
    patience: int = setting(0,
        "The run ends when `monitor` has not improved so many times in a row that it was measured; "
        "0: never.", TARGET, FROM_0)
    monitor: str = setting("",
        "A metric of `evaluate`, `train_NAME` or `eval_NAME` of the clients; `-name` for one that "
        "is better the smaller it is. Empty stands for the loss.", TARGET)
    tensorboard: bool = setting(False, "Write TensorBoard events into the run directory.", SERVER)
    mlflow: str = setting("",
        "Log to MLflow's store at this URI, such as `sqlite:///mlflow.db` (`pip install "
        "'aqg[mlflow]'`); empty: do not.", SERVER)
# fmt: on


def table(kind: Any) -> dict[str, Setting]:
    fields = dataclasses.fields(kind)
    return {each.name: each.metadata["setting"] for each in fields if each.metadata}


@functools.cache
def types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def check_bounds(settings: Any, keys: Mapping[str, str] | None = None) -> None:
    """Raise at the first setting that is out of its bound; ``keys`` are names to show."""
    for name, row in table(type(settings)).items():
        row.check((keys or {}).get(name, name), getattr(settings, name))


_IN_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    tuple[str, ...]: "a list of texts",
    tuple[tuple[int, int, int], ...]: "a list of [client, first round, last round]",
    tuple[tuple[str, str], ...]: "a list of [path, SHA-256]",
}


def typed(kind: Any, name: str, value: Any, shown: str = "") -> Any:
    """Return a value as its setting has it: whole numbers stand for floats, and lists for tuples.

    >>> typed(RunSettings, "alpha", 1), typed(RunSettings, "absences", [[0, 2, 5]])
    (1.0, ((0, 2, 5),))
    """
    made: Any = kind  # for mypy, an instance of a dataclass has no hash, nor has its class
    hint = types(made)[name]
    if isinstance(hint, UnionType):
        if value is None:
            return None
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    converted, fits = _convert(value, hint)
    if not fits:
        raise ConfigError(f"{shown or name} is {value!r}; it must be {_IN_WORDS[hint]}")
    return converted


def _convert(value: Any, hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) is not tuple:
        if hint is float and type(value) is int:
            return float(value), True
        return value, type(value) is hint
    if not isinstance(value, list | tuple):
        return value, False
    hints = get_args(hint)
    if hints[-1] is ...:
        hints = (hints[0],) * len(value)
    parts = [_convert(*pair) for pair in zip(value, hints, strict=False)]
    fit = len(hints) == len(value) and all(fits for _, fits in parts)
    return tuple(part for part, _ in parts), fit


def require_choice(name: str, value: object, choices: Any, more: str = "") -> None:
    """Raise unless a setting's value is one of its choices."""
    if value not in choices:
        texts = ", ".join((*choices, more) if more else choices)
        raise ConfigError(f"unknown {name} {value!r}; choose from {texts}")
