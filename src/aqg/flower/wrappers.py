"""What goes around a strategy of Flower's or a grid, and is otherwise as that one is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flwr.serverapp import Grid
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import Strategy

from aqg.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flwr.app import ArrayRecord, Message, MetricRecord
    from flwr.supercore.run import Run


class OuterStrategy(Strategy):
    """Asks another strategy, ``self.strategy``, for everything."""

    strategy: Strategy

    def __getattr__(self, name: str) -> Any:
        if name == "strategy":  # while a copy is made of this object
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def configure_train(self, *arguments: Any, **options: Any) -> Iterable[Message]:
        return self.strategy.configure_train(*arguments, **options)

    def aggregate_train(
        self, *arguments: Any, **options: Any
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self.strategy.aggregate_train(*arguments, **options)

    def configure_evaluate(self, *arguments: Any, **options: Any) -> Iterable[Message]:
        return self.strategy.configure_evaluate(*arguments, **options)

    def aggregate_evaluate(self, *arguments: Any, **options: Any) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(*arguments, **options)

    def summary(self) -> None:
        self.strategy.summary()


class OuterGrid(Grid):
    """Hands everything to another grid, ``self.inner``."""

    def __init__(self, inner: Grid) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def set_run(self, run: Run) -> None:
        self.inner.set_run(run)

    @property
    def run(self) -> Run:
        return self.inner.run

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        return self.inner.create_message(*arguments, **options)

    def get_node_ids(self) -> Iterable[int]:
        return self.inner.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        return self.inner.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.inner.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.inner.pull_messages(message_ids)


def require_strategy(strategy: object) -> None:
    if isinstance(strategy, Strategy):
        return
    name = type(strategy).__name__
    for kind in type(strategy).__mro__:
        if kind.__module__.startswith("flwr.server.strategy"):
            new = kind.__name__ if hasattr(strategies, kind.__name__) else "FedAvg"
            raise ConfigError(
                f"strategy is a {name} of flwr.server.strategy, Flower's legacy API; use "
                f"flwr.serverapp.strategy.{new}"
            )
    raise ConfigError(
        f"strategy is a {name}; it must be a Strategy of flwr.serverapp.strategy, such as FedAvg"
    )
