"""The orders of a round: to all who are asked, and again to those who lack part of the model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr.app import Message

    from aqg.flower.desk import Desk
    from aqg.flower.exchange import Exchange
    from aqg.flower.records import Answer

_MOST_REPEATS = 2
"""How often a client that is lost is sent something else in one round."""


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

    def write(self, clients: list[int]) -> list[Message]:
        """Return an order for each, to be sent by somebody else."""
        seconds = self._end - self._exchange.now()
        messages = []
        for client in clients:
            message, num_bytes = self._desk.message(
                client, self._kind, self._model, seconds, self._evaluate
            )
            self.downloads[client] += num_bytes
            messages.append(message)
        return messages

    def send(self, clients: list[int]) -> list[int]:
        """Send an order to each; return the nodes whose order was not taken."""
        before = self.downloads.copy()
        messages = self.write(clients)
        refused = self._exchange.send(messages)
        for client, message in zip(clients, messages, strict=True):
            if message.metadata.dst_node_id in refused:
                del self.downloads[client]
                if client in before:
                    self.downloads[client] = before[client]
        return refused

    def is_sent_again(self, client: int, answer: Answer) -> bool:
        """Send a client that is lost what it lacks, if there is time; otherwise it is next time."""
        self.note_lost(client, answer)
        if self._repeats[client] >= _MOST_REPEATS or self._exchange.now() >= self._end:
            return False
        self._repeats[client] += 1
        return not self.send([client])

    def note_lost(self, client: int, answer: Answer) -> None:
        """Take note of what a client that is lost holds, and whether it needs the start."""
        self._desk.book.note_holding(client, answer.reply)
        if answer.wants_start:
            self._desk.unequipped.add(client)
