"""The server's line: ``strategy = Compressed(FedAvg(...))``.

The strategy inside works on a grid that compresses; it is not changed, and need not be one of
Flower's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import Result, Strategy

from aqg.channel.settings import make_settings
from aqg.errors import ConfigError
from aqg.flower.grid import CompressedGrid, Counts
from aqg.flower.late import Buffered
from aqg.flower.wrappers import OuterStrategy, require_strategy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flwr.app import Message
    from flwr.serverapp import Grid

_logger = logging.getLogger("flwr.aqg")

_CLIENTS_CLIP = (
    strategies.DifferentialPrivacyClientSideFixedClipping,
    strategies.DifferentialPrivacyClientSideAdaptiveClipping,
)
_ADAPTIVE_NOISE = 0.1
_AVERAGING = (
    strategies.FedAvg,
    strategies.FedAvgM,
    strategies.FedAdam,
    strategies.FedAdagrad,
    strategies.FedYogi,
    strategies.FedProx,
)


class Compressed(OuterStrategy):
    """Runs another strategy with messages compressed in both directions.

    Clients need the mod: ``ClientApp(mods=[aqg_mod])``. It must be the outermost wrapper, around
    those for differential privacy, and the mod the first in the list.

    Args:
        strategy: does what it always does.
        recipe: the compressor, one of ``aqg recipes``. By default ``auto`` for those of Flower's
            strategies that average replies, with a tenth of its noise where they divide by the
            root of past squares (FedAdagrad, FedAdam, FedYogi), and ``lean`` for all others: with
            it every reply is near the client's model, as strategies expect that look at single
            replies.
        bits: the most bits per parameter of recipes that have such a limit.
        max_staleness: after how many silent rounds a client sends something all the same.
        include: patterns for the names of tensors to compress, such as ``"*.lora_*"``.
        exclude: patterns for the names of tensors that travel as they are.
        downlink: how clients' copy of the model follows the server's: ``"condensed"`` with
            options, see `aqg.core.downlink.Condensed`. By default the recipe's own.
        seed: of recipes that draw, and of a first model that is drawn.
        start: how the first model travels: ``"exact"``; ``"seed"``, drawn on both sides;
            ``"rounded"`` to 8 bits; ``"digest"``, where nodes have it
            (``make_mod(start=...)``). By default ``"seed"`` where all of its layers look freshly
            initialized, else ``"exact"``. The strategy starts from what nodes receive.
        memory: what nodes hold between rounds: the ``"model"`` and what the recipe keeps, or
            ``"none"`` of it, neither on disk nor in their context.

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
        start: str = "auto",
        memory: str = "model",
    ) -> None:
        require_strategy(strategy)
        self.counts = Counts()
        self._is_running = False
        self.settings = make_settings(
            own_recipe(strategy) if recipe is None else recipe,
            bits=bits,
            max_staleness=max_staleness,
            include=include,
            exclude=exclude,
            downlink=downlink,
            seed=seed,
            clip=self._clipping_norm,
            start=start,
            memory=memory,
        )
        self.strategy = strategy  # what is set from here on may be the strategy's own

    def start(self, grid: Grid, *arguments: Any, **options: Any) -> Result:
        compressed = CompressedGrid(grid, self.settings, weighted_by(self.strategy))
        self.counts = compressed.counts
        self._is_running = True
        if arguments and isinstance(arguments[0], ArrayRecord):
            arguments = (compressed.prepare(arguments[0]), *arguments[1:])
        elif isinstance(initial := options.get("initial_arrays"), ArrayRecord):
            options["initial_arrays"] = compressed.prepare(initial)
        _logger.info("Compressed: recipe %s, both directions", self.settings.recipe)
        try:
            result = self.strategy.start(compressed, *arguments, **options)
        finally:
            self._is_running = False
        compressed.finish()
        if isinstance(result, Result):
            result.traffic = compressed.counts  # type: ignore[attr-defined]
        return result

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what only the strategy has on the strategy."""
        inner = self.__dict__.get("strategy")
        is_inner = inner is not None and name not in self.__dict__ and hasattr(inner, name)
        object.__setattr__(inner if is_inner else self, name, value)

    def configure_train(self, *arguments: Any, **options: Any) -> Iterable[Message]:
        if not self._is_running:
            raise ConfigError(
                "Compressed must be the outermost strategy: write Compressed(Other(FedAvg())), "
                "not Other(Compressed(FedAvg()))"
            )
        return super().configure_train(*arguments, **options)

    def _clipping_norm(self) -> float | None:
        """Return the norm to which clients have clipped: what is decoded must not be longer."""
        strategy = self.strategy
        if isinstance(strategy, Buffered):
            strategy = strategy.strategy
        return float(strategy.clipping_norm) if isinstance(strategy, _CLIENTS_CLIP) else None


def own_recipe(strategy: Strategy) -> str:
    """Return the recipe that suits a strategy.

    A class that aggregates in a way of its own may look at single replies, as medians do: each of
    them must then be near the node's model. Where a step is divided by the root of past squares,
    noise makes coordinates that hardly move as fast as all others: it must be less than where the
    mean itself is the step.
    """
    if isinstance(strategy, Buffered):
        strategy = strategy.strategy
    if type(strategy).aggregate_train not in {kind.aggregate_train for kind in _AVERAGING}:
        return "lean"
    adapts = (strategies.FedAdagrad, strategies.FedAdam, strategies.FedYogi)
    return f"auto:noise={_ADAPTIVE_NOISE}" if isinstance(strategy, adapts) else "auto"


def weighted_by(strategy: Strategy) -> str | None:
    """Return the metric that a strategy weights replies by, where it takes one kind of them only.

    That is FedAvg, all of Flower's that are made from it, and wrappers around one.
    """
    while not isinstance(strategy, strategies.FedAvg):
        inner = getattr(strategy, "strategy", None)
        if not isinstance(inner, Strategy):
            return None
        strategy = inner
    return strategy.weighted_by_key
