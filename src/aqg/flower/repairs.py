"""Two repairs of Flower's SuperNode, and the command that runs a SuperNode with them.

When a run is stopped in the moment in which a node confirms one of its orders, Flower's SuperNode
lets go of the order, but not of the ClientApp that works on it. The reply is left over and is sent
in the place of the next one, and so on: from then on every reply leaves only when the next order
arrives, after its own round is over, until somebody restarts the node.

When a ClientApp ends without a reply, or before it has handed over all of one that it announced,
the SuperNode waits for it for ever.

``python -m aqg.flower.repairs`` takes the arguments of ``flower-supernode`` and runs it repaired.
Like `aqg.flower.tuning`, this touches private parts of Flower, only in versions in which it was
tried and only where they look as expected.
"""

from __future__ import annotations

import inspect
import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from flwr import __version__
from flwr.common.constant import Status, SubStatus

from aqg.flower.commands import find_command
from aqg.flower.tuning import TRIED

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOP = "flwr.supernode.start_client_internal"
_PULL, _PUSH = "_pull_and_store_message", "_push_messages"
_PARTS = {_PULL: {"state", "object_store", "receive"}, _PUSH: {"state", "object_store"}}
"""Flower's functions, and their arguments that the repairs use."""
_REPAIRED = "_repaired_by_aqg"
_UNFINISHED = (Status.PENDING, Status.STARTING, Status.RUNNING)

_log = logging.getLogger("aqg.flower")


def repair_node() -> bool:
    """Repair the SuperNode that this process, or one forked from it, runs; return whether it is."""
    loop = import_module(_LOOP)
    if hasattr(loop, _REPAIRED):
        return True
    found = {name: getattr(loop, name, None) for name in _PARTS}
    if not __version__.startswith(TRIED) or not all(
        _parameters(found[name]) >= parts for name, parts in _PARTS.items()
    ):
        _log.warning("flwr %s is untried: its SuperNode runs as it is", __version__)
        return False
    setattr(loop, _PULL, _repaired_pull(found[_PULL]))
    setattr(loop, _PUSH, _repaired_push(found[_PUSH]))
    setattr(loop, _REPAIRED, True)
    return True


def _parameters(function: object) -> set[str]:
    return set(inspect.signature(function).parameters) if callable(function) else set()


def _repaired_pull(pull: Any) -> Callable[..., int | None]:
    """Return Flower's function that receives an order, so that it leaves nothing behind."""

    def pull_alone(**parts: Any) -> int | None:
        state, receive = parts["state"], parts["receive"]
        before: set[int] = set()

        def receive_alone() -> Any:
            found = receive()
            if found is not None:
                _forget_replies(state, parts["object_store"])
                before.update(_unfinished(state))
            return found

        run: int | None = pull(**{**parts, "receive": receive_alone})
        if run is None:
            for task in _unfinished(state) - before:  # its token ends: it cannot reply any more
                state.finish_task(task, SubStatus.FAILED, "the order was not received as a whole")
                _forget_replies(state, parts["object_store"])
        return run

    return pull_alone


def _repaired_push(push: Any) -> Callable[..., None]:
    """Return Flower's function that waits for a reply and sends it, so that it always ends."""

    def push_if_any(**parts: Any) -> None:
        state, store = parts["state"], parts["object_store"]
        parts = {**parts, "state": _LivingState(state), "object_store": _LivingStore(state, store)}
        try:
            push(**parts)
        except _NoReplyError:
            _log.error("a ClientApp ended without a reply")
            state.delete_messages()

    return push_if_any


class _NoReplyError(Exception):
    """No ClientApp is left that could reply."""


class _LivingState:
    """Flower's state of a node; no reply is expected once all ClientApps have ended."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def get_messages_legacy(self, **filters: Any) -> Any:
        """Return messages; raise where none is there or will come."""
        has_ended = not _unfinished(self._state)  # asked first: the reply comes before the end
        found = self._state.get_messages_legacy(**filters)
        if has_ended and not found:
            raise _NoReplyError
        return found


class _LivingStore:
    """Flower's object store; no object is expected once all ClientApps have ended."""

    def __init__(self, state: Any, store: Any) -> None:
        self._state = state
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, object_id: str) -> bytes | None:
        """Return an object, empty where it is still to come; raise where it will not."""
        has_ended = not _unfinished(self._state)
        content: bytes | None = self._store.get(object_id)
        if has_ended and content == b"":
            raise ConnectionError("the ClientApp ended before it had handed over its reply")
        return content


def _unfinished(state: Any) -> set[int]:
    return {task.task_id for task in state.get_tasks(statuses=_UNFINISHED)}


def _forget_replies(state: Any, object_store: Any) -> None:
    """Delete replies that nobody waits for: one order is answered before the next is received."""
    for message in state.get_messages_legacy(is_reply=True):
        metadata = message.metadata
        state.delete_messages(message_ids=[metadata.message_id, metadata.reply_to_message_id])
        object_store.delete(metadata.message_id)


def main() -> None:
    """Run ``flower-supernode``, repaired."""
    repair_node()
    find_command("flower-supernode")()


if __name__ == "__main__":
    main()
