"""The orders of a round: to all who are asked, and again to those who lack part of the model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from aqg.flower import records

if TYPE_CHECKING:
    from flwr.app import Message

    from aqg.flower.exchange import Exchange
    from aqg.protocol.messages import Reply
    from aqg.protocol.mirrors import MirrorBook

    Payload = tuple[records.Payload | None, bytes]

_MOST_REPEATS = 2
"""How often a client that is lost is sent something else in one round."""


class Desk(Protocol):
    """Writes orders; `aqg.flower.coordinator.Coordinator` is one."""

    book: MirrorBook

    def payload(self) -> Payload:
        """Return what all orders of a round have in common."""

    def message(
        self, client: int, kind: str, payload: Payload, seconds: float, evaluate: bool = False
    ) -> Message:
        """Return an order to a client that is good for so many seconds."""


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
        self._payload = desk.payload()
        self._end = exchange.now() + seconds
        self._repeats: Counter[int] = Counter()

    def send(self, clients: list[int]) -> list[int]:
        """Send an order to each; return the nodes whose order was not taken."""
        seconds = self._end - self._exchange.now()
        messages = [
            self._desk.message(client, self._kind, self._payload, seconds, self._evaluate)
            for client in clients
        ]
        refused = self._exchange.send(messages)
        for client, message in zip(clients, messages, strict=True):
            if message.metadata.dst_node_id not in refused:
                self.downloads[client] += records.carried_bytes(message.content)
        return refused

    def is_sent_again(self, client: int, reply: Reply) -> bool:
        """Send a client that is lost what it lacks, if there is time; otherwise it is next time."""
        self._desk.book.note_holding(client, reply)
        if self._repeats[client] >= _MOST_REPEATS or self._exchange.now() >= self._end:
            return False
        self._repeats[client] += 1
        return not self.send([client])
