"""Rounds that do not wait for everyone: ``strategy = Buffered(FedAvg(...), size=3)``.

Nodes that are at work go on; what they send counts in the round in which it comes, moved from the
model that they began with to that of the round: ``now + (reply - began) / √(1 + age)``, where the
age is in rounds that have ended since (FedBuff). Replies of age 0 are passed on as they are.

It stands on the grid's public interface, so that a grid that compresses can be below.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from flwr.app import ArrayRecord

from aqg.core.server import age_weight
from aqg.core.types import is_whole
from aqg.errors import ConfigError
from aqg.flower.arrays import is_readable, record_of, values_of
from aqg.flower.private import replies_to
from aqg.flower.wrappers import OuterGrid, OuterStrategy, require_strategy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from flwr.app import Message
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Result, Strategy

    from aqg.channel.tensors import Tensor, Values

    Pairs = Iterator[tuple[str, Tensor]]

_logger = logging.getLogger("flwr.aqg")


class Buffered(OuterStrategy):
    """Runs another strategy in rounds that end after a number of replies.

    Of evaluation messages, those to nodes that are still training are left out.

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
        self.strategy, self.size = strategy, int(size)

    def start(self, grid: Grid, *arguments: Any, **options: Any) -> Result:
        _logger.info("Buffered: rounds end after %d replies", self.size)
        buffered = BufferedGrid(grid, self.size)
        result = self.strategy.start(buffered, *arguments, **options)
        buffered.finish()
        return result


class _Begun(NamedTuple):
    """A message on its way, and the round in which it was sent."""

    message: Message
    round: int


class BufferedGrid(OuterGrid):
    """Ends rounds of training after ``size`` replies, on another grid."""

    def __init__(self, grid: Grid, size: int) -> None:
        super().__init__(grid)
        self._size, self._round = size, 0
        self._begun: dict[str, _Begun] = {}

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages to nodes that are not at work; of training, return what comes first."""
        messages = list(messages)
        busy = {begun.message.metadata.dst_node_id for begun in self._begun.values()}
        idle = [message for message in messages if message.metadata.dst_node_id not in busy]
        if not any(_trains(message) for message in messages):
            return self.inner.send_and_receive(idle, timeout=timeout)
        self._round += 1
        pushed = set(self.inner.push_messages(idle))
        for message in idle:
            if message.metadata.message_id in pushed:
                self._begun[message.metadata.message_id] = _Begun(message, self._round)
        models = {message.metadata.dst_node_id: message for message in messages}
        replies = self._wait(models, timeout)
        text = "Buffered: round %d ends with %d replies; %d nodes are at work"
        _logger.info(text, self._round, len(replies), len(self._begun))
        return replies

    def finish(self) -> None:
        """Log whose replies come too late for the run."""
        for begun in self._begun.values():
            text = "Buffered: node %d, at work since round %d, is late"
            _logger.info(text, begun.message.metadata.dst_node_id, begun.round)

    def _wait(self, models: Mapping[int, Message], timeout: float | None) -> list[Message]:
        """Return replies once enough are there, or all, or the time is over."""
        replies: list[Message] = []
        num_valid = 0
        for found in replies_to(self.inner.pull_messages, set(self._begun), timeout):
            for reply in found:
                begun = self._begun.pop(reply.metadata.reply_to_message_id, None)
                if begun is None:
                    continue
                if not reply.has_error():
                    num_valid += 1
                    self._bring_up_to_date(reply, begun, models)
                replies.append(reply)
            if num_valid >= self._size:
                break
        return replies

    def _bring_up_to_date(
        self, reply: Message, begun: _Begun, models: Mapping[int, Message]
    ) -> None:
        """Let a late reply be one to this round's model."""
        age, node = self._round - begun.round, begun.message.metadata.dst_node_id
        if not age:
            return
        weight = age_weight(age)
        now = models.get(node) or next(iter(models.values()))
        for name, record in reply.content.array_records.items():
            old, new = (sent.content.get(name) for sent in (begun.message, now))
            if not isinstance(old, ArrayRecord) or not isinstance(new, ArrayRecord):
                continue  # no model of the server's
            if all(map(is_readable, (record, old, new))) and _shapes(record) == _shapes(old):
                moved = _moved(values_of(record), values_of(old), values_of(new), weight)
                reply.content[name] = record_of(moved)
                continue
            _logger.warning("Buffered: %r of node %d is late, and taken as it is", name, node)
        _logger.info(
            "Buffered: node %d began in round %d; its update is relative to the model it had then, "
            "and counts %.2f in round %d",
            node,
            begun.round,
            weight,
            self._round,
        )


def _trains(message: Message) -> bool:
    return message.metadata.message_type.partition(".")[0] == "train"


def _shapes(record: ArrayRecord) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in record.items()}


def _moved(reply: Values, began: Values, now: Values, weight: float) -> Pairs:
    """Yield ``now + weight·(reply - began)``; whole numbers, which count, are not scaled."""
    for name, tensor in reply.items():
        change = tensor - began[name]
        if tensor.dtype.kind == "f":
            change *= tensor.dtype.type(weight)
        yield name, now[name] + change
