"""Settings of a deployment: Flower's flat run-config in, checked values out.

The table of them is `aqg.settings.FlowerSettings`.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aqg.core.downlink import AUTO, make_downlink, resolve_downlink
from aqg.core.optimizers import make_optimizer
from aqg.core.recipe import Recipe, kind_of_updates, require_memory
from aqg.core.recipes import make_recipe
from aqg.core.step_sizes import AUTO as AUTO_STEP
from aqg.core.step_sizes import Fixed, StepRule, make_step, resolve_step
from aqg.errors import ConfigError
from aqg.settings import FlowerSettings, check_bounds, table, typed
from aqg.sim.training import Training

_logger = logging.getLogger("flwr.aqg")

_LIKELY_MISSPELLED = 0.9
KEYS = {name: row.key or name.replace("_", "-") for name, row in table(FlowerSettings).items()}
"""How a run-config calls each setting."""


@dataclass(frozen=True, kw_only=True)
class Settings(FlowerSettings):
    """What a run-config can set."""

    def __post_init__(self) -> None:
        check_bounds(self, KEYS)
        if 0 < self.max_share < 1 / self.num_clients:
            raise ConfigError(
                f"max-share is {self.max_share}; it must be at least {1 / self.num_clients:.3g}, "
                "a fair share"
            )
        if self.min_clients > self.num_clients:
            raise ConfigError(
                f"min-clients is {self.min_clients}; it must be at most {self.num_clients}, the "
                "number of clients"
            )
        if self.recipe:
            recipe = make_recipe(self.recipe, self.bits, self.max_staleness)
            recipe = recipe.for_updates(self.updates)
            resolve_downlink(self.downlink, recipe)
            require_memory(self.memory, recipe)
        elif self.downlink != AUTO:
            make_downlink(self.downlink)
        if self.step != AUTO_STEP:
            make_step(self.step)
        num_sampled = self.training().num_sampled(self.num_clients)
        if num_sampled < self.min_clients:
            raise ConfigError(
                f"min-clients is {self.min_clients}, but with fraction-train {self.participation} "
                f"only {num_sampled} of {self.num_clients} clients are sampled in a round"
            )
        if self.tensorboard and not self.run_dir:
            raise ConfigError("tensorboard is true, but run-dir is empty; name a directory")

    @property
    def terms(self) -> dict[str, Any]:
        """What a run that goes on must have kept as it was, beside recipe, model and seed."""
        names = "num_clients", "alpha", "optimizer", "weighting", "participation", "dropout"
        terms = {KEYS[name]: getattr(self, name) for name in (*names, "memory")}
        return terms if self.weighting == "equal" else terms | {"max-share": self.largest_share}

    @property
    def step_size(self) -> float:
        return self.alpha or 1.0 / self.num_clients

    @property
    def needed_clients(self) -> int:
        """The fewest valid replies with which the model takes a step."""
        return self.min_clients or 1

    @property
    def updates(self) -> str:
        return kind_of_updates(self.exact, self.participation, self.memory == "none")

    def make_step(self, recipe: Recipe) -> StepRule:
        if self.step == AUTO_STEP and self.alpha:
            return Fixed()
        return resolve_step(self.step, recipe, self.exact, make_optimizer(self.optimizer))

    def training(self) -> Training:
        return Training(
            optimizer=make_optimizer(self.optimizer),
            weighting=self.weighting,
            participation=self.participation,
        )

    @property
    def largest_share(self) -> float:
        return self.max_share or min(1.0, max(0.5, 1.8 / self.num_clients))


def read_settings(
    run_config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Settings:
    """Read the settings of a run; keys that are not ours belong to the user's own app.

    >>> settings = read_settings({"num-clients": 3, "num-server-rounds": 5, "batch-size": 32})
    >>> settings.num_clients, settings.recipe, settings.step_size
    (3, 'auto', 0.3333333333333333)
    >>> read_settings({"num-clients": 3, "num-server-rounds": "five"})
    Traceback (most recent call last):
    aqg.errors.ConfigError: num-server-rounds is 'five'; it must be a whole number
    """
    merged = {**(defaults or {}), **run_config}
    names = {key: name for name, key in KEYS.items()}
    chosen: dict[str, Any] = {}
    for key, value in merged.items():
        if key in names:
            chosen[names[key]] = typed(FlowerSettings, names[key], value, key)
        else:
            close = difflib.get_close_matches(key, names, n=1, cutoff=_LIKELY_MISSPELLED)
            if close:
                _logger.warning("run-config has %r, which is ignored; %r is meant?", key, close[0])
    for name in ("num_clients", "rounds"):
        if name not in chosen:
            raise ConfigError(
                f"run-config has no {KEYS[name]}; add it under [tool.flwr.app.config]"
            )
    return Settings(**chosen)
