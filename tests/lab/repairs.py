"""Flower's processes as the tests run them: shorter waits and two repairs.

Waits and repairs are switched on only in versions of Flower in which they were tried, and only
where the parts look as expected. Without them, rounds take some seconds longer, and a node can get
stuck as follows.

When a run is stopped in the moment in which a node confirms one of its orders, Flower's SuperNode
lets go of the order, but not of the ClientApp that works on it. The reply is left over and is sent
in the place of the next one, and so on: from then on every reply leaves only when the next order
arrives, after its own round is over, until somebody restarts the node. And when a ClientApp ends
without a reply, or before it has handed over all of one that it announced, the SuperNode waits for
it for ever. `repair_node` repairs both.
"""

import inspect
import logging
import os
import time
from importlib import import_module
from types import SimpleNamespace

from flwr import __version__
from flwr.common.constant import Status, SubStatus

SWITCH = "AQG_FLOWER_QUICK"
"""The environment variable that asks for shorter waits: ``"1"``."""
LEASE = "AQG_FLOWER_LEASE_SECONDS"
"""The environment variable for how long a silent node counts as online (Flower: 60 s)."""

TRIED = ("1.41.", "1.42.")
"""Versions of Flower whose private parts are known."""
_LOOP = "flwr.supernode.start_client_internal"
_PULL, _PUSH = "_pull_and_store_message", "_push_messages"
_PARTS = {_PULL: {"state", "object_store", "receive"}, _PUSH: {"state", "object_store"}}
"""Flower's functions, and their arguments that the repairs use."""
_REPAIRED = "_repaired_by_aqg"
_UNFINISHED = (Status.PENDING, Status.STARTING, Status.RUNNING)
_LOCAL_SECONDS = 0.05
"""Between two looks into the node's own memory."""
_REMOTE_SECONDS = 0.2
"""Between two questions to the SuperLink, which costs it CPU and the line some 700 bytes."""
_BEATS_PER_LEASE = 2
_CALL_SECONDS = 5.0
"""Flower subtracts this from the time between two heartbeats."""

_log = logging.getLogger("aqg.flower")


def apply_tuning():
    """Shorten Flower's waits in this process, as far as the environment asks for it."""
    quick, lease = os.environ.get(SWITCH) == "1", os.environ.get(LEASE)
    if not (quick or lease):
        return
    if not __version__.startswith(TRIED):
        _log.warning("flwr %s is untried: its waits stay as they are", __version__)
        return
    if quick:
        _poll_often()
    if lease:
        _shorten_lease(float(lease))


def _poll_often():
    """Cap the SuperNode's sleeps of 0.5 and 3 s, and the back-off of 1 s for missing objects."""
    node = import_module("flwr.supernode.start_client_internal")
    if getattr(node, "time", None) is time:
        node.time = SimpleNamespace(
            sleep=lambda seconds: time.sleep(_REMOTE_SECONDS if seconds > 1 else _LOCAL_SECONDS),
            time=time.time,
            monotonic=time.monotonic,
        )
    utilities = import_module("flwr.supercore.inflatable.inflatable_utils")
    for name in ("pull_objects", "pull_and_inflate_object_from_tree"):
        defaults = getattr(getattr(utilities, name, None), "__kwdefaults__", None)
        if defaults and "initial_backoff" in defaults:
            defaults["initial_backoff"] = _LOCAL_SECONDS


def _shorten_lease(seconds):
    """Let a node announce, and the SuperLink accept, a shorter interval between heartbeats."""
    interval = seconds / _BEATS_PER_LEASE
    changes = {
        "flwr.superlink.servicer.fleet.fleet_handlers": ("HEARTBEAT_MIN_INTERVAL", 0.5),
        "flwr.supernode.fleet_http_connection": ("HEARTBEAT_DEFAULT_INTERVAL", interval),
        "flwr.supercore.heartbeat": ("HEARTBEAT_DEFAULT_INTERVAL", interval + _CALL_SECONDS),
    }
    for module_name, (name, value) in changes.items():
        module = import_module(module_name)
        if hasattr(module, name):
            setattr(module, name, value)


def repair_node():
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


def _parameters(function):
    return set(inspect.signature(function).parameters) if callable(function) else set()


def _repaired_pull(pull):
    """Return Flower's function that receives an order, so that it leaves nothing behind."""

    def pull_alone(**parts):
        state, receive = parts["state"], parts["receive"]
        before = set()

        def receive_alone():
            found = receive()
            if found is not None:
                _forget_replies(state, parts["object_store"])
                before.update(_unfinished(state))
            return found

        run = pull(**{**parts, "receive": receive_alone})
        if run is None:
            for task in _unfinished(state) - before:  # its token ends: it cannot reply any more
                state.finish_task(task, SubStatus.FAILED, "the order was not received as a whole")
                _forget_replies(state, parts["object_store"])
        return run

    return pull_alone


def _repaired_push(push):
    """Return Flower's function that waits for a reply and sends it, so that it always ends.

    Once all ClientApps have ended, no reply is expected, nor any part of one.
    """

    def push_if_any(**parts):
        state, store = parts["state"], parts["object_store"]

        def get_messages(**filters):
            has_ended = not _unfinished(state)  # asked first: the reply comes before the end
            found = state.get_messages_legacy(**filters)
            if has_ended and not found:
                raise _NoReplyError
            return found

        def get_object(object_id):
            has_ended = not _unfinished(state)
            content = store.get(object_id)
            if has_ended and content == b"":  # it is still to come
                raise ConnectionError("the ClientApp ended before it had handed over its reply")
            return content

        parts["state"] = _Instead(state, get_messages_legacy=get_messages)
        parts["object_store"] = _Instead(store, get=get_object)
        try:
            push(**parts)
        except _NoReplyError:
            _log.error("a ClientApp ended without a reply")
            state.delete_messages()

    return push_if_any


class _NoReplyError(Exception):
    """No ClientApp is left that could reply."""


class _Instead:
    """Stands before an object of Flower, with some methods of its own."""

    def __init__(self, behind, **methods):
        vars(self).update(methods, _behind=behind)

    def __getattr__(self, name):
        return getattr(self._behind, name)


def _unfinished(state):
    return {task.task_id for task in state.get_tasks(statuses=_UNFINISHED)}


def _forget_replies(state, object_store):
    """Delete replies that nobody waits for: one order is answered before the next is received."""
    for message in state.get_messages_legacy(is_reply=True):
        metadata = message.metadata
        state.delete_messages(message_ids=[metadata.message_id, metadata.reply_to_message_id])
        object_store.delete(metadata.message_id)
