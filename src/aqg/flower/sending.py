"""The orders of a round: to all who are asked, and again to those who lack part of the model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from flwr.app import Message

    from aqg.flower.envelope import Payload
    from aqg.flower.exchange import Exchange
    from aqg.protocol.book import MirrorBook
    from aqg.protocol.messages import Reply

_MOST_REPEATS = 2
"""How often a client that is lost is sent something else in one round."""


class Desk(Protocol):
    """Writes orders; `aqg.flower.coordinator.Coordinator` is one."""

    book: MirrorBook

    def whole_model(self) -> Payload | None:
        """Return the model, where it travels whole: all orders of a round have it in common."""

    def message(
        self,
        client: int,
        kind: str,
        model: Payload | None,
        seconds: float,
        evaluate: bool = False,
    ) -> tuple[Message, int]:
        """Return an order to a client that is good for so many seconds, and the bytes in it."""


class Sending:
    """The orders of a round: sent to all, and again to those who lack something.

    Attributes:
        downloads: the bytes that went out, by client.

    """

    def __init__(
        self,
        desk: Desk,
        exchange: Exchange,
        kind: str,
        evaluate: bool,
        seconds: float,
    ) -> None:
        self.downloads: Counter[int] = Counter()
        self._desk = desk
        self._exchange = exchange
        self._kind = kind
        self._evaluate = evaluate
        self._model = desk.whole_model()
        self._end = exchange.now() + seconds
        self._repeats: Counter[int] = Counter()

    def send(self, clients: list[int]) -> list[int]:
        """Send an order to each; return the nodes whose order was not taken."""
        seconds = self._end - self._exchange.now()
        orders = [
            self._desk.message(client, self._kind, self._model, seconds, self._evaluate)
            for client in clients
        ]
        refused = self._exchange.send([message for message, _ in orders])
        for client, (message, num_bytes) in zip(clients, orders, strict=True):
            if message.metadata.dst_node_id not in refused:
                self.downloads[client] += num_bytes
        return refused

    def is_sent_again(self, client: int, reply: Reply) -> bool:
        """Send a client that is lost what it lacks, if there is time; otherwise it is next time."""
        self._desk.book.note_holding(client, reply)
        if self._repeats[client] >= _MOST_REPEATS or self._exchange.now() >= self._end:
            return False
        self._repeats[client] += 1
        return not self.send([client])
