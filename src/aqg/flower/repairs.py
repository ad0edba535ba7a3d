"""A repair of Flower's SuperNode, and the command that runs a SuperNode with it.

When a run is stopped in the moment in which a node confirms one of its orders, Flower's SuperNode
lets go of the order, but not of the ClientApp that works on it. The reply is left over and is sent
in the place of the next one, and so on: from then on every reply leaves only when the next order
arrives, after its own round is over, until somebody restarts the node.

``python -m aqg.flower.repairs`` takes the arguments of ``flower-supernode`` and runs it repaired.
Like `aqg.flower.tuning`, this touches private parts of Flower, only in versions in which it was
tried and only where they look as expected.
"""

from __future__ import annotations

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
_PULL = "_pull_and_store_message"
_PARTS = {"state", "object_store", "receive"}
"""Arguments of Flower's function that the repair uses."""
_UNFINISHED = (Status.PENDING, Status.STARTING, Status.RUNNING)

_log = logging.getLogger("aqg.flower")


def repair_node() -> bool:
    """Repair the SuperNode that this process, or one forked from it, runs; return whether it is."""
    loop = import_module(_LOOP)
    pull = getattr(loop, _PULL, None)
    names = set(getattr(getattr(pull, "__code__", None), "co_varnames", ()))
    if getattr(pull, "is_repaired", False):
        return True
    if not __version__.startswith(TRIED) or not names >= _PARTS:
        _log.warning("flwr %s is untried: its SuperNode runs as it is", __version__)
        return False
    setattr(loop, _PULL, _repaired(pull))
    return True


def _repaired(pull: Any) -> Callable[..., int | None]:
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

    pull_alone.is_repaired = True  # type: ignore[attr-defined]
    return pull_alone


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
