"""What a user can choose of the compression, whatever the framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from aqg.core.downlink import AUTO, Condensed, make_downlink
from aqg.core.recipe import SAMPLED, Recipe, require_memory
from aqg.core.recipes import RECIPES, make_recipe
from aqg.errors import ConfigError
from aqg.start import require_way


@dataclass(frozen=True)
class Settings:
    """What a user can choose."""

    recipe: str = "lean"  # name and options of the compressor
    bits: int = 4  # its ``b_max``
    max_staleness: int = 100  # after how many skips in a row a client sends all the same
    seed: int = 0  # of recipes that draw
    # patterns for names of tensors to compress; all where there are none
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()  # patterns for names of tensors that travel as they are
    downlink: Condensed = field(default_factory=Condensed)  # how the public copy follows the model
    # returns the largest norm of an update, where the strategy relies on one
    clip: Callable[[], float | None] = lambda: None
    # a recipe that is used in place of the named one; clients must have an equal one
    own: Recipe | None = None
    # their kind, by which the recipe chooses: see `aqg.core.recipe.kind_of_updates`
    updates: str = SAMPLED
    start: str = "exact"  # how the first model travels (`aqg.channel.tensors`)
    # what clients hold between rounds, the ``"model"`` and what the recipe keeps, or ``"none"``
    # of it
    memory: str = "model"

    @property
    def forgets(self) -> bool:
        return self.memory == "none"

    def make_recipe(self) -> Recipe:
        """Return the compressor, after checking that clients hold what it needs."""
        made = self.own or make_recipe(self.recipe, self.bits, self.max_staleness)
        made = made.for_updates(self.updates)
        require_memory(self.memory, made)
        return made


def make_settings(
    recipe: str,
    *,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    downlink: str | None = None,
    **others: Any,
) -> Settings:
    """Return settings as users write them; ``downlink`` is by default the recipe's own.

    >>> make_settings("auto", exclude="head.*").downlink.ratio
    0.5
    """
    if recipe.partition(":")[0] not in RECIPES:
        known = ", ".join(sorted(set(RECIPES) - {"auto", "lean"}))
        raise ConfigError(
            f"unknown recipe {recipe!r}; the defaults are auto, for strategies that average, and "
            f"lean, for all others; there are also {known}"
        )
    for name, given in (("include", include), ("exclude", exclude)):
        others[name] = (given,) if isinstance(given, str) else tuple(given)
    settings = Settings(recipe, **others)
    if settings.start != AUTO:
        require_way(settings.start)
    own = settings.make_recipe().downlink
    if own == "full":  # one that sends whole models has none that fits here
        own = Condensed.name
    return replace(settings, downlink=_condensed(downlink or own))


def _condensed(spec: str) -> Condensed:
    if spec.partition(":")[0] != Condensed.name:
        known = ", ".join(f"{f.name}={f.default}" for f in fields(Condensed))
        raise ConfigError(
            f"downlink is {spec!r}; here it is {Condensed.name!r}, alone or with options, as in "
            f"'condensed:ratio=0.5'; they are, with their defaults, {known}"
        )
    downlink = make_downlink(spec)
    assert isinstance(downlink, Condensed)
    return downlink
