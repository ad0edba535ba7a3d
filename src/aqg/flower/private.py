"""Flower's grids: one around another, waiting for replies, and all that touches private parts.

Those are how long Flower waits for content, and names of messages. The wait is bounded only where
Flower's functions look as expected; elsewhere a node that dies while it sends its reply can hold up
a round for three minutes. Names of messages are set in any version.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

_FIRST_PAUSE_SECONDS = 0.05
_PULL_CAP_SECONDS = 0.5
"""The longest pause between two questions for an object that a node is still sending."""

_FOREVER = 1e9
_SHORTEST_PAUSE = 0.01
_LONGEST_PAUSE = 0.25
_PAUSE_SHARE = 0.08
"""Pauses between polls are this share of the time waited so far: they add no more than that."""


def pauses(seconds: float) -> Iterator[float]:
    """Yield the seconds waited so far, at longer and longer intervals, until the time is over."""
    started, waited = time.monotonic(), 0.0
    while True:
        yield waited
        waited = time.monotonic() - started
        if waited >= seconds:
            return
        pause = min(max(waited * _PAUSE_SHARE, _SHORTEST_PAUSE), _LONGEST_PAUSE)
        time.sleep(min(pause, seconds - waited))


def replies_to(
    pull: Callable[[set[str]], Iterable[Message]], identifiers: set[str], seconds: float | None
) -> Iterator[list[Message]]:
    """Yield the replies that ``pull`` finds, until all are there or the time is over."""
    end = _FOREVER if seconds is None else seconds
    for waited in pauses(end) if identifiers else ():
        with bounded_pulls(max(0.0, end - waited)):
            found = list(pull(identifiers))
        identifiers = identifiers - {reply.metadata.reply_to_message_id for reply in found}
        yield found
        if not identifiers:
            return


@contextmanager
def bounded_pulls(seconds: float) -> Iterator[None]:
    """Let Flower wait no longer than this, in all, for replies that nodes do not finish sending.

    A reply is announced before its content is sent. Where a node dies in between, Flower waits for
    the content for three minutes, and every other reply waits behind it.
    """
    grid = sys.modules.get("flwr.superlink.grid.http_grid")
    pull: Any = getattr(grid, "pull_objects", None)
    known = getattr(pull, "__kwdefaults__", None) or {}
    if grid is None or not {"max_time", "initial_backoff", "backoff_cap"} <= set(known):
        yield
        return
    end = time.monotonic() + seconds

    def pull_in_time(*arguments: Any, **options: Any) -> Any:
        options["max_time"] = max(0.0, end - time.monotonic())
        options["initial_backoff"] = _FIRST_PAUSE_SECONDS
        options["backoff_cap"] = _PULL_CAP_SECONDS
        return pull(*arguments, **options)

    grid.pull_objects = pull_in_time  # type: ignore[attr-defined]
    try:
        yield
    finally:
        grid.pull_objects = pull  # type: ignore[attr-defined]


def kind_of(message: Message) -> str:
    return message.metadata.message_type.partition(".")[0]


def name_message(message: Message, identifier: str) -> None:
    """Give a message the identifier of the one that was sent in its place."""
    message.metadata.__dict__["_message_id"] = identifier


def answer_to(reply: Message, identifier: str) -> None:
    """Let a reply answer another message than the one that was sent last."""
    reply.metadata.__dict__["_reply_to_message_id"] = identifier


def _passed_on(name: str) -> Any:
    def call(self: OuterGrid, *arguments: Any, **options: Any) -> Any:
        return getattr(self.inner, name)(*arguments, **options)

    return call


class OuterGrid(Grid):
    """Hands everything to another grid, ``self.inner``."""

    def __init__(self, inner: Grid) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def run(self) -> Any:
        return self.inner.run

    set_run, create_message = _passed_on("set_run"), _passed_on("create_message")
    get_node_ids, get_nodes = _passed_on("get_node_ids"), _passed_on("get_nodes")
    push_messages, pull_messages = _passed_on("push_messages"), _passed_on("pull_messages")
