"""Settings of a deployment: Flower's flat run-config in, checked values out."""

from __future__ import annotations

import difflib
import logging
import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np

from aqg.core.downlink import AUTO, make_downlink, resolve_downlink
from aqg.core.optimizers import make_optimizer
from aqg.core.recipes import make_recipe
from aqg.core.step_sizes import AUTO as AUTO_STEP
from aqg.core.step_sizes import DistanceOverGradients, Fixed, make_step, resolve_step
from aqg.errors import ConfigError
from aqg.sim.training import Training

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aqg.core.downlink import Downlink
    from aqg.core.recipe import Recipe
    from aqg.core.step_sizes import StepRule
    from aqg.core.types import Float64Array

_logger = logging.getLogger("flwr.aqg")

MOST_SAMPLES = 2**53
"""Whole numbers up to here are exact as floats."""
_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_LIKELY_MISSPELLED = 0.9


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run-config can set; in TOML every name is written with hyphens.

    Attributes:
        num_clients: ``M``: how many clients the federation has, away or not.
        rounds: how many rounds to run in all, those before a restart included.
        recipe: name and options of the recipe.
        bits: ``b_max``.
        max_staleness: an upload is forced after this many silent rounds.
        alpha: ``α``, the server's step size; 0 stands for ``1/M``, which with pseudo-gradients
            ``θ - θ_local`` is federated averaging.
        step: how long steps are: ``fixed`` (``alpha`` in every round), ``dog`` (found from the
            steps), with options; ``auto`` is ``fixed`` where ``alpha`` is
            given, and otherwise what suits the recipe.
        seed: makes every random draw of the run.
        optimizer: of the server: ``sgd``, ``momentum`` or ``adam``, with options.
        weighting: by the clients' number of ``samples``, as federated averaging does, or
            ``equal``.
        max_share: with weighting by ``samples``, the largest share of all weights that one client
            can have; 0 stands for 0.9 among two clients, 0.6 among three and 0.5 among more.
        exact: whether clients send gradients on all of their samples, without noise: ``auto`` then
            sends what changed, and takes steps of ``alpha``.
        participation: the fraction of clients asked in a round.
        dropout: ``p``, the rate of absence that Augmented AQG amplifies against.
        downlink: how clients receive the model: ``full``, ``exact`` or ``condensed``, with options;
            ``auto`` chooses by recipe.
        min_clients: the model takes no step in a round with fewer valid replies; 0 stands for 1.
        round_timeout: seconds until a round ends without those who have not answered.
        start_timeout: seconds to wait for all clients before the first round, and for
            ``min_clients`` before any other.
        max_failed_rounds: the run stops after so many rounds in a row without a step.
        eval_every: rounds from one measured loss to the next.
        client_eval_every: rounds from one evaluation by the clients' own handlers to the next, in
            messages of their own; 0: at the end only.
        metrics_every: rounds from one call of the server's ``evaluate`` to the next; 0 stands for
            50 calls, evenly over the run.
        max_seconds: the run ends after the round in which the server has run so long; 0: never.
        max_bytes: the run ends after so many bytes up and down, as they are counted; 0: never.
        patience: the run ends when what ``monitor`` names has not improved so many times in a
            row that it was measured; 0: never.
        monitor: a metric of ``evaluate``, ``train_NAME`` or ``eval_NAME`` for one of the clients',
            or ``loss``; ``-name`` for a metric of one's own that is better the smaller it is. Empty
            stands for the loss.
        run_dir: where the run is written and resumed from; empty: nowhere.
        checkpoint_every: rounds from one checkpoint to the next.
        trust_partition_id: know clients by the ``partition-id`` that their nodes claim, for
            demonstrations and simulations where nodes are not authenticated.
        tensorboard: write TensorBoard events into the run directory.
        mlflow: tracking URI of MLflow, such as ``sqlite:///mlflow.db``; empty: do not use it.

    """

    num_clients: int
    rounds: int
    recipe: str = "auto"
    bits: int = 4
    max_staleness: int = 100
    alpha: float = 0.0
    step: str = AUTO_STEP
    seed: int = 0
    optimizer: str = "sgd"
    weighting: str = "samples"
    max_share: float = 0.0
    exact: bool = False
    participation: float = 1.0
    dropout: float = 0.0
    downlink: str = AUTO
    min_clients: int = 0
    round_timeout: float = 60.0
    start_timeout: float = 120.0
    max_failed_rounds: int = 10
    eval_every: int = 1
    client_eval_every: int = 0
    metrics_every: int = 0
    max_seconds: float = 0.0
    max_bytes: int = 0
    patience: int = 0
    monitor: str = ""
    run_dir: str = ""
    checkpoint_every: int = 1
    trust_partition_id: bool = False
    tensorboard: bool = False
    mlflow: str = ""

    def __post_init__(self) -> None:
        for name in ("num_clients", "rounds", "eval_every", "checkpoint_every"):
            _require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        _require("max_failed_rounds", self.max_failed_rounds, self.max_failed_rounds >= 0, "0 up")
        for name in ("client_eval_every", "metrics_every", "max_seconds", "max_bytes", "patience"):
            _require(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        for name in ("round_timeout", "start_timeout"):
            value = getattr(self, name)
            _require(name, value, 0 < value < math.inf, "above 0")
        _require("alpha", self.alpha, 0 <= self.alpha < math.inf, "above 0, or 0 for 1/num-clients")
        _require("seed", self.seed, self.seed >= 0, "at least 0")
        _require("dropout", self.dropout, 0 <= self.dropout < 1, "at least 0 and below 1")
        fair = 1 / self.num_clients
        is_share = self.max_share == 0 or fair <= self.max_share <= 1
        _require("max_share", self.max_share, is_share, f"{fair:.3g}, a fair share, to 1")
        bound = f"0 to {self.num_clients}, the number of clients"
        _require("min_clients", self.min_clients, 0 <= self.min_clients <= self.num_clients, bound)
        if self.recipe:
            self.make_downlink(self.make_recipe())
        elif self.downlink != AUTO:
            make_downlink(self.downlink)
        if self.step != AUTO_STEP:
            make_step(self.step)
        self.training()
        if 0 < self.training().num_sampled(self.num_clients) < self.min_clients:
            raise ConfigError(
                f"min-clients is {self.min_clients}, but with participation "
                f"{self.participation} only {self.training().num_sampled(self.num_clients)} of "
                f"{self.num_clients} clients are asked in a round"
            )
        if self.tensorboard and not self.run_dir:
            raise ConfigError("tensorboard is true, but run-dir is empty; name a directory")

    @property
    def terms(self) -> dict[str, Any]:
        """What a run that goes on must have kept as it was, beside recipe, model and seed."""
        names = ("num_clients", "alpha", "optimizer", "weighting", "participation", "dropout")
        terms = {name.replace("_", "-"): getattr(self, name) for name in names}
        return terms if self.weighting == "equal" else terms | {"max-share": self.largest_share}

    @property
    def step_size(self) -> float:
        """``α``."""
        return self.alpha or 1.0 / self.num_clients

    @property
    def needed_clients(self) -> int:
        """The fewest valid replies with which the model takes a step."""
        return self.min_clients or 1

    def make_recipe(self) -> Recipe:
        """Return the recipe that is named."""
        recipe = make_recipe(self.recipe, self.bits, self.max_staleness)
        return recipe.for_updates(self.exact)

    def make_downlink(self, recipe: Recipe) -> Downlink:
        """Return the downlink that is named, or the one that suits the recipe."""
        return resolve_downlink(self.downlink, recipe)

    def make_step(self, recipe: Recipe) -> StepRule:
        """Return the rule for the length of steps."""
        if self.step == AUTO_STEP and self.alpha:
            return Fixed()
        return resolve_step(self.step, recipe, self.exact, make_optimizer(self.optimizer))

    def training(self) -> Training:
        """Return who is asked, how clients count, and the server's step."""
        return Training(
            optimizer=make_optimizer(self.optimizer),
            weighting=self.weighting,
            participation=self.participation,
        )

    def client_weights(self, num_samples: Float64Array) -> Float64Array:
        """Return ``w_m`` of mean 1, for clients with so many samples, 0 where not known yet."""
        if self.weighting == "equal":
            return np.ones(self.num_clients)
        if not (num_samples > 0).any():
            raise ConfigError(
                "weighting is samples, but no client has said how many it has; wait longer with "
                "start-timeout, or use weighting equal"
            )
        counted = cap_shares(num_samples, self.largest_share)
        weights: Float64Array = counted / counted.mean()
        return weights

    @property
    def largest_share(self) -> float:
        """The largest share of the weights that one client can have."""
        return self.max_share or min(1.0, max(0.5, 1.8 / self.num_clients))


def describe_step(rule: StepRule) -> str:
    """Return the setting that makes a rule for the length of steps.

    >>> describe_step(make_step("dog:first=0.1"))
    'dog:average=8:first=0.1:widest=8'
    """
    options = asdict(rule) if isinstance(rule, Fixed | DistanceOverGradients) else {}
    if isinstance(rule, Fixed) and not rule.average:
        options = {}
    return ":".join([rule.name, *(f"{name}={float(value):g}" for name, value in options.items())])


def cap_shares(amounts: Float64Array, share: float) -> Float64Array:
    """Lower the largest amounts until none is more than a share of all.

    Nothing is lowered for the sake of amounts of zero alone: somebody must have something.

    >>> cap_shares(np.array([10.0, 1e15, 30.0]), 0.6).tolist()
    [10.0, 60.0, 30.0]
    >>> cap_shares(np.array([10.0, 20.0, 30.0]), 0.6).tolist()
    [10.0, 20.0, 30.0]
    """
    descending = np.sort(amounts)[::-1]
    cap = descending[-1]
    for count, largest in enumerate(descending):  # so many are lowered
        free, rest = 1 - count * share, descending[count:].sum()
        if free <= 0 or rest <= 0:
            cap = descending[count - 1]
            break
        cap = share * rest / free
        if largest <= cap:
            break
    capped: Float64Array = np.minimum(amounts, cap)
    return capped


def read_settings(
    run_config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Settings:
    """Read the settings of a run; keys that are not ours belong to the user's own app.

    >>> settings = read_settings({"num-clients": 3, "rounds": 5, "batch-size": 32})
    >>> settings.num_clients, settings.recipe, settings.step_size
    (3, 'auto', 0.3333333333333333)
    >>> read_settings({"num-clients": 3, "rounds": "five"})
    Traceback (most recent call last):
    aqg.errors.ConfigError: rounds is 'five'; it must be a whole number
    """
    merged = {**(defaults or {}), **run_config}
    types = get_type_hints(Settings)
    names = {field.name.replace("_", "-"): field.name for field in fields(Settings)}
    chosen: dict[str, Any] = {}
    for key, value in merged.items():
        if key in names:
            chosen[names[key]] = _typed(key, value, types[names[key]])
        else:
            close = difflib.get_close_matches(key, names, n=1, cutoff=_LIKELY_MISSPELLED)
            if close:
                _logger.warning("run-config has %r, which is ignored; %r is meant?", key, close[0])
    for key in ("num-clients", "rounds"):
        if names[key] not in chosen:
            raise ConfigError(f"run-config has no {key}; add it under [tool.flwr.app.config]")
    return Settings(**chosen)


def _typed(key: str, value: Any, wanted: type) -> Any:
    """Check a value's type, letting whole numbers stand for floats."""
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise ConfigError(f"{key} is {value!r}; it must be {_KINDS[wanted]}")
    return value


def _require(name: str, value: object, holds: bool, bound: str) -> None:
    if not holds:
        raise ConfigError(f"{name.replace('_', '-')} is {value}; it must be {bound}")
