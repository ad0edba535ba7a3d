"""Messages out, replies back: a loop over Flower's grid that waits no longer than it must."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import httpx

from aqg.flower.private import bounded_pulls, pause_after

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from flwr.app import Message
    from flwr.serverapp import Grid

_LATE_SECONDS = 600.0
"""For how long replies that came too late are still fetched, and thrown away."""


class Sent(NamedTuple):
    """A message on its way.

    Attributes:
        node: to which it went; replies are taken to be from there, whatever they say.
        kind: what it is: ``train``, ``evaluate`` or ``hello``.
        at: when it was sent, in seconds of the clock.

    """

    node: int
    kind: str
    at: float


class Arrival(NamedTuple):
    """What came back for a message.

    Attributes:
        sent: the message it answers.
        reply: the answer; None where it could not be read.
        is_late: whether its round was over.
        seconds: from sending to now.
        problem: why the answer could not be read.

    """

    sent: Sent
    reply: Message | None
    is_late: bool
    seconds: float
    problem: str = ""


class Exchange:
    """Pushes messages and collects their replies.

    A reply counts only if it answers a message of ours that is still open; it is credited to the
    node that the message was sent to. A second reply to the same message finds it closed.
    """

    def __init__(
        self,
        grid: Grid,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._grid = grid
        self.now = clock
        self._pause = pause
        self._open: dict[str, Sent] = {}
        self._late: dict[str, Sent] = {}

    def online(self) -> set[int]:
        """Return the nodes that are connected."""
        return set(self._grid.get_node_ids())

    def send(self, messages: Sequence[Message], kind: str = "") -> list[int]:
        """Push messages; return the nodes whose message was not taken.

        Their ``kind`` is Flower's type of message, unless another is given.
        """
        if not messages:
            return []
        taken = set(self._grid.push_messages(messages))
        now = self.now()
        refused = []
        for message in messages:
            metadata = message.metadata
            if metadata.message_id in taken:  # what the grid returns may be shorter than the list
                sent = Sent(metadata.dst_node_id, kind or metadata.message_type, now)
                self._open[metadata.message_id] = sent
            else:
                refused.append(metadata.dst_node_id)
        return refused

    def collect(self, seconds: float, kind: str) -> Iterator[Arrival]:
        """Yield replies until all messages of ``kind`` are answered, or the time is over.

        The last look is taken when the time is over: what came in while a node held up the one
        before it is not lost.
        """
        started = self.now()
        waited = 0.0
        while True:
            is_last = waited >= seconds
            yield from self.poll(max(0.0, seconds - waited))
            if is_last or not self._waits_for(kind):
                return
            waited = self.now() - started
            if waited < seconds:
                self.rest(waited, seconds)
                waited = self.now() - started

    def rest(self, waited: float, seconds: float) -> None:
        """Pause before the next poll: the longer, the longer one has ``waited`` already."""
        self._pause(pause_after(waited, seconds))

    def close(self, kind: str) -> list[int]:
        """Give up on what is still open; return the nodes. What comes for it now is late."""
        closed = {name: sent for name, sent in self._open.items() if sent.kind == kind}
        for name in closed:
            del self._open[name]
        self._late.update(closed)
        oldest = self.now() - _LATE_SECONDS
        self._late = {name: sent for name, sent in self._late.items() if sent.at > oldest}
        return [sent.node for sent in closed.values()]

    def _waits_for(self, kind: str) -> bool:
        return any(sent.kind == kind for sent in self._open.values())

    def poll(self, seconds: float) -> Iterator[Arrival]:
        """Yield what has come since the last time; wait at most ``seconds`` for unfinished replies.

        A reply that is not whole by then comes as an error. Nobody waits for late ones.
        """
        with bounded_pulls(0.0):
            pulled = list(self._pull([*self._late]))
        with bounded_pulls(seconds):
            pulled += self._pull([*self._open])
        for identifier, reply, problem in pulled:
            is_late = identifier in self._late
            sent = (self._late if is_late else self._open).pop(identifier, None)
            if sent is not None:
                yield Arrival(sent, reply, is_late, self.now() - sent.at, problem)

    def _pull(self, identifiers: list[str]) -> Iterator[tuple[str, Message | None, str]]:
        """Fetch what has come; what Flower cannot read must not stop the rest."""
        if not identifiers:
            return
        try:
            replies = list(self._grid.pull_messages(identifiers))
        except (httpx.HTTPError, ConnectionError):
            raise
        except Exception as error:
            if len(identifiers) == 1:
                yield identifiers[0], None, f"unreadable: {type(error).__name__}: {error}"[:200]
                return
            for identifier in identifiers:
                yield from self._pull([identifier])
            return
        for reply in replies:
            yield reply.metadata.reply_to_message_id, reply, ""
