"""The server's line: ``strategy = Compressed(FedAvg(...))``.

The strategy inside works on a grid that compresses; it is not changed, and need not be one of
Flower's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import Strategy

from aqg.core.downlink import Condensed, make_downlink
from aqg.core.recipes import make_recipe
from aqg.errors import ConfigError
from aqg.flower.dropin.channel import Settings
from aqg.flower.dropin.grid import CompressedGrid, Counts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Result

    from aqg.core.recipe import Recipe

_logger = logging.getLogger("flwr.aqg")

_CLIENTS_CLIP = (
    strategies.DifferentialPrivacyClientSideFixedClipping,
    strategies.DifferentialPrivacyClientSideAdaptiveClipping,
)
_AVERAGING = (
    strategies.FedAvg,
    strategies.FedAvgM,
    strategies.FedAdam,
    strategies.FedAdagrad,
    strategies.FedYogi,
    strategies.FedProx,
)


class Compressed(Strategy):
    """Runs another strategy with messages compressed in both directions.

    Clients need the mod: ``ClientApp(mods=[aqg_mod])``. It must be the outermost wrapper, around
    those for differential privacy, and the mod the first in the list.

    Args:
        strategy: does what it always does.
        recipe: the compressor, one of ``aqg recipes``. By default ``auto`` for those of Flower's
            strategies that average replies, and ``lean`` for all others: with it every reply is
            near the client's model, as strategies expect that look at single replies.
        bits: the most bits per parameter of recipes that have such a limit.
        max_staleness: after how many silent rounds a client sends something all the same.
        include: patterns for the names of tensors to compress, such as ``"*.lora_*"``.
        exclude: patterns for the names of tensors that travel as they are.
        downlink: how clients' copy of the model follows the server's: ``"condensed"`` with
            options, see `aqg.core.downlink.Condensed`. By default the recipe's own.
        seed: of recipes that draw.

    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        recipe: str | None = None,
        bits: int = 4,
        max_staleness: int = 100,
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        downlink: str | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise ConfigError(f"strategy is a {type(strategy).__name__}; it must be a Strategy")
        self.strategy = strategy
        if recipe is None:
            recipe = "auto" if averages(strategy) else "lean"
        made = make_recipe(recipe, bits, max_staleness)
        self.settings = Settings(
            recipe=recipe,
            bits=bits,
            max_staleness=max_staleness,
            seed=seed,
            include=_patterns(include),
            exclude=_patterns(exclude),
            downlink=_condensed(downlink or _own(made)),
            clip=self._clipping_norm,
        )
        self.counts = Counts()
        self._is_running = False

    def start(self, grid: Grid, *arguments: Any, **options: Any) -> Result:
        """Run the strategy, as `flwr.serverapp.strategy.Strategy.start` does."""
        compressed = CompressedGrid(grid, self.settings)
        self.counts = compressed.counts
        self._is_running = True
        _logger.info("Compressed: recipe %s, both directions", self.settings.recipe)
        try:
            return self.strategy.start(compressed, *arguments, **options)
        finally:
            self._is_running = False

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the strategy."""
        self._require_running()
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Ask the strategy."""
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the strategy."""
        self._require_running()
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Ask the strategy."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log what the strategy is set to."""
        self.strategy.summary()

    def _require_running(self) -> None:
        if not self._is_running:
            raise ConfigError(
                "Compressed must be the outermost strategy: write Compressed(Other(FedAvg())), "
                "not Other(Compressed(FedAvg()))"
            )

    def _clipping_norm(self) -> float | None:
        """Return the norm to which clients have clipped: what is decoded must not be longer."""
        if not isinstance(self.strategy, _CLIENTS_CLIP):
            return None
        return float(self.strategy.clipping_norm)


def averages(strategy: Strategy) -> bool:
    """Tell whether a strategy makes the model from the mean of the replies, as Flower's own do.

    A class that aggregates in a way of its own may look at single replies, as medians do: each of
    them must then be near the node's model.
    """
    return type(strategy).aggregate_train in {kind.aggregate_train for kind in _AVERAGING}


def _own(recipe: Recipe) -> str:
    """Return the recipe's downlink; one that sends whole models has none that fits here."""
    return "condensed" if recipe.downlink == "full" else recipe.downlink


def _condensed(spec: str) -> Condensed:
    downlink = make_downlink(spec)
    if isinstance(downlink, Condensed):
        return downlink
    raise ConfigError(f"downlink is {spec!r}; here it is 'condensed', with options")


def _patterns(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
