"""The server's line: ``strategy = Compressed(FedAvg(...))``; and `Buffered`, for late clients.

The strategy inside works on another grid than Flower's; it is not changed, and need not be one of
Flower's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import Result, Strategy

from aqg.channel.settings import make_settings
from aqg.channel.tensors import Tensor, Values
from aqg.core.server import age_weight
from aqg.core.types import is_whole
from aqg.errors import ConfigError, MessageError
from aqg.flower.envelope import is_readable, logger, record_of, values_of
from aqg.flower.grid import Checks, CompressedGrid, Counts
from aqg.flower.private import OuterGrid, kind_of, replies_to

_CLIENTS_CLIP = (
    strategies.DifferentialPrivacyClientSideFixedClipping,
    strategies.DifferentialPrivacyClientSideAdaptiveClipping,
)
_ADAPTIVE_NOISE = 0.1
_MOST_EXAMPLES = 1e12
"""A node that says it has more examples is refused."""
_MOST_TIMES = 1e6
"""Likewise one that says it has so many times the examples of all others together."""
_AVERAGING = (
    strategies.FedAvg,
    strategies.FedAvgM,
    strategies.FedAdam,
    strategies.FedAdagrad,
    strategies.FedYogi,
    strategies.FedProx,
)
_MEANS = {kind.aggregate_train for kind in _AVERAGING}
"""How models are aggregated by their mean."""


class OuterStrategy(Strategy):
    """Runs another strategy, ``self.strategy``, on a grid of its own."""

    strategy: Strategy

    def __getattr__(self, name: str) -> Any:
        if name == "strategy":  # while a copy is made of this object
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what only the strategy has on the strategy."""
        inner = self.__dict__.get("strategy")
        if inner is not None and name not in self.__dict__ and hasattr(inner, name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def configure_train(self, *arguments: Any, **options: Any) -> Any:  # noqa: ARG002
        name = type(self).__name__
        raise ConfigError(
            f"{name} must be the outermost strategy: write {name}(Other(FedAvg())), not "
            f"Other({name}(FedAvg()))"
        )

    aggregate_train = configure_evaluate = aggregate_evaluate = configure_train

    def summary(self) -> None:
        self.strategy.summary()


class Compressed(OuterStrategy):
    """Runs another strategy with messages compressed in both directions.

    Clients need the mod: ``ClientApp(mods=[aqg_mod])``. It must be the outermost wrapper, around
    those for differential privacy, and the mod the first in the list.

    Args:
        strategy: does what it always does.
        recipe: the compressor, one of ``aqg recipes``; by default see `own_recipe`.
        bits: the most bits per parameter of recipes that have such a limit.
        max_staleness: after how many skips in a row a client sends something all the same.
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
        compressed = CompressedGrid(grid, self.settings, checks_of(self.strategy))
        self.counts = compressed.counts
        if arguments and isinstance(arguments[0], ArrayRecord):
            arguments = (compressed.prepare(arguments[0]), *arguments[1:])
        elif isinstance(initial := options.get("initial_arrays"), ArrayRecord):
            options["initial_arrays"] = compressed.prepare(initial)
        logger.info("Compressed: recipe %s, both directions", self.settings.recipe)
        result = self.strategy.start(compressed, *arguments, **options)
        compressed.finish()
        if isinstance(result, Result):
            result.traffic = compressed.counts  # type: ignore[attr-defined]
        return result

    def _clipping_norm(self) -> float | None:
        """Return the norm to which clients have clipped: what is decoded must not be longer."""
        strategy = unbuffered(self.strategy)
        return float(strategy.clipping_norm) if isinstance(strategy, _CLIENTS_CLIP) else None


def unbuffered(strategy: Strategy) -> Strategy:
    return strategy.strategy if isinstance(strategy, Buffered) else strategy


def own_recipe(strategy: Strategy) -> str:
    """Return the recipe that suits a strategy: ``auto`` where it averages, and else ``lean``.

    A class that aggregates in a way of its own may look at single replies, as medians do: each of
    them must then be near the node's model. Where a step is divided by the root of past squares,
    noise makes coordinates that hardly move as fast as all others: it must be a tenth of what is
    good where the mean itself is the step.
    """
    strategy = unbuffered(strategy)
    if type(strategy).aggregate_train not in _MEANS:
        return "lean"
    adapts = (strategies.FedAdagrad, strategies.FedAdam, strategies.FedYogi)
    return f"auto:noise={_ADAPTIVE_NOISE}" if isinstance(strategy, adapts) else "auto"


def checks_of(strategy: Strategy) -> Checks:
    """Return the checks of replies: more where the strategy takes one kind of them only.

    That is FedAvg, all of Flower's that are made from it, and wrappers around one.
    """
    inner: object = strategy
    while not isinstance(inner, strategies.FedAvg):
        inner = getattr(inner, "strategy", None)
        if not isinstance(inner, Strategy):
            return Checks()
    return AverageChecks(inner)


class AverageChecks(Checks):
    """Refuses replies that Flower's FedAvg, and what is made from it, could not use.

    They end the run where a reply has more than one record of a kind, where replies have other
    metrics or arrays than the rest, or others of another size, and where all weights are zero; and
    a single node that says it has a million times the examples of all others would be the model.
    """

    def __init__(self, strategy: strategies.FedAvg) -> None:
        self._key = strategy.weighted_by_key  # the metric that says how many examples a node has
        functions = strategy.train_metrics_aggr_fn, strategy.evaluate_metrics_aggr_fn
        # of which kind of record means are taken: they must have one size
        self._are_averaged = {
            "array": type(strategy).aggregate_train in _MEANS,
            "metric": all(f.__module__.startswith("flwr.") for f in functions),
        }

    def check(self, content: RecordDict, is_train: bool) -> None:
        metrics, arrays = list(content.metric_records.values()), content.array_records
        if len(metrics) != 1:
            raise MessageError(f"its reply has {len(metrics)} MetricRecords; it must have one")
        if is_train and len(arrays) != 1:
            raise MessageError(f"its reply has {len(arrays)} ArrayRecords; it must have one")
        key = self._key
        weight: Any = metrics[0].get(key)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise MessageError(f"its metric {key!r} is {weight!r}; it must be a number")
        if not 0 <= weight <= _MOST_EXAMPLES:
            raise MessageError(f"its metric {key!r} is {weight}; 0 to {_MOST_EXAMPLES:g} is taken")

    def compare(self, contents: Mapping[str, RecordDict]) -> dict[str, str]:
        key, reasons, weights = self._key, dict[str, str](), dict[str, float]()
        held = {answers: self._forms(content) for answers, content in contents.items()}
        most = Counter(held.values()).most_common(1)[0][0] if held else frozenset()
        for answers, content in contents.items():
            if held[answers] != most:
                odd = min(held[answers] ^ most)
                reasons[answers] = f"its reply differs from most others in {odd}"
            else:
                [metrics] = content.metric_records.values()
                weights[answers] = float(metrics[key])  # type: ignore[arg-type]
        total = sum(weights.values())
        for answers, weight in weights.items():
            if not total:
                reasons[answers] = f"its metric {key!r} is 0, as that of all others"
            elif len(weights) > 1 and weight > _MOST_TIMES * (total - weight):
                others = f"all others together have {total - weight:g}"
                reasons[answers] = f"its metric {key!r} is {weight:g}; {others}"
        return reasons

    def _forms(self, content: RecordDict) -> frozenset[str]:
        """Return what is in a reply, with the size of what is averaged."""
        kinds: Any = {"array": content.array_records, "metric": content.metric_records}
        return frozenset(
            f"{kind} {key!r}{_size_of(value) if self._are_averaged[kind] else ''} of {name!r}"
            for kind, records in kinds.items()
            for name, record in records.items()
            for key, value in record.items()
        )


def _size_of(value: object) -> str:
    if isinstance(value, Array):
        return f" {tuple(value.shape)}"
    return f" ({len(value)} numbers)" if isinstance(value, list) else ""


class Buffered(OuterStrategy):
    """Runs another strategy in rounds that end after a number of replies.

    Nodes that are at work go on; what they send counts in the round in which it comes, moved from
    the model that they began with to that of the round: ``now + (reply - began) / √(1 + age)``,
    where the age is in rounds that have ended since (FedBuff). Replies of age 0 are passed on as
    they are. Of evaluation messages, those to nodes that are still training are left out.

    Args:
        strategy: does what it always does. `Compressed` goes around this one, not into it.
        size: ``B``, the replies after which a round ends; errors do not count.
    """

    def __init__(self, strategy: Strategy, *, size: int) -> None:
        require_strategy(strategy)
        for name in {"Compressed", "AQG"} & {kind.__name__ for kind in type(strategy).__mro__}:
            raise ConfigError(
                f"Buffered does not go around {name}, which makes a grid of its own: write "
                "Compressed(Buffered(FedAvg(), size=...))"
            )
        if not is_whole(size) or size < 1:
            raise ConfigError(f"size is {size!r}; it must be a whole number above 0")
        self.size = int(size)
        self.strategy = strategy  # what is set from here on may be the strategy's own

    def start(self, grid: Grid, *arguments: Any, **options: Any) -> Result:
        logger.info("Buffered: rounds end after %d replies", self.size)
        buffered = BufferedGrid(grid, self.size)
        result = self.strategy.start(buffered, *arguments, **options)
        buffered.finish()
        return result


class BufferedGrid(OuterGrid):
    """Ends rounds of training after ``size`` replies, on another grid."""

    def __init__(self, grid: Grid, size: int) -> None:
        super().__init__(grid)
        self._size, self._round = size, 0
        self._begun: dict[str, tuple[Message, int]] = {}  # what is on its way, since which round

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages to nodes that are not at work; of training, return what comes first."""
        messages = list(messages)
        busy = {begun.metadata.dst_node_id for begun, _ in self._begun.values()}
        idle = [message for message in messages if message.metadata.dst_node_id not in busy]
        if not any(kind_of(message) == "train" for message in messages):
            return self.inner.send_and_receive(idle, timeout=timeout)
        self._round += 1
        pushed = set(self.inner.push_messages(idle))
        begun = {message.metadata.message_id: (message, self._round) for message in idle}
        self._begun |= {name: each for name, each in begun.items() if name in pushed}
        models = {message.metadata.dst_node_id: message for message in messages}
        replies = self._wait(models, timeout)
        text = "Buffered: round %d ends with %d replies; %d nodes are at work"
        logger.info(text, self._round, len(replies), len(self._begun))
        return replies

    def finish(self) -> None:
        """Log whose replies come too late for the run."""
        for begun, number in self._begun.values():
            text = "Buffered: node %d, at work since round %d, is late"
            logger.info(text, begun.metadata.dst_node_id, number)

    def _wait(self, models: Mapping[int, Message], timeout: float | None) -> list[Message]:
        """Return replies once enough are there, or all, or the time is over."""
        replies, answered = list[Message](), dict[str, Message]()
        num_valid = 0
        for found in replies_to(self.inner.pull_messages, set(self._begun), timeout):
            for reply in found:
                identifier = reply.metadata.reply_to_message_id
                begun = self._begun.pop(identifier, None)
                if begun is None:
                    continue
                answered[identifier] = begun[0]
                if not reply.has_error():
                    num_valid += 1
                    self._bring_up_to_date(reply, *begun, models)
                replies.append(reply)
            if num_valid >= self._size:
                break
        if isinstance(self.inner, CompressedGrid):
            return self.inner.compared(replies, answered)
        return replies

    def _bring_up_to_date(
        self, reply: Message, begun: Message, number: int, models: Mapping[int, Message]
    ) -> None:
        """Let a late reply be one to this round's model."""
        age, node = self._round - number, begun.metadata.dst_node_id
        if not age:
            return
        weight = age_weight(age)
        now = models.get(node) or next(iter(models.values()))
        for name, record in reply.content.array_records.items():
            old, new = (sent.content.get(name) for sent in (begun, now))
            if not isinstance(old, ArrayRecord) or not isinstance(new, ArrayRecord):
                continue  # no model of the server's
            if all(map(is_readable, (record, old, new))) and _shapes(record) == _shapes(old):
                moved = _moved(values_of(record), values_of(old), values_of(new), weight)
                reply.content[name] = record_of(moved)
                continue
            logger.warning("Buffered: %r of node %d is late, and taken as it is", name, node)
        logger.info(
            "Buffered: node %d began in round %d; its update is relative to the model it had then, "
            "and counts %.2f in round %d",
            *(node, number, weight, self._round),
        )


def _shapes(record: ArrayRecord) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in record.items()}


def _moved(
    reply: Values, began: Values, now: Values, weight: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``now + weight·(reply - began)``; whole numbers, which count, are not scaled."""
    for name, tensor in reply.items():
        change = tensor - began[name]
        if tensor.dtype.kind == "f":
            change *= tensor.dtype.type(weight)
        yield name, now[name] + change


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
