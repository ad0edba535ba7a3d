"""Flower's processes as the tests run them: shorter waits and two repairs.

Without them, rounds take some seconds longer, and a node can get stuck as follows. When a run is
stopped in the moment in which a node confirms one of its orders, Flower's SuperNode lets go of the
order, but not of the ClientApp that works on it. The reply is left over and is sent in the place of
the next one, and so on: from then on every reply leaves only when the next order arrives, after its
own round is over, until somebody restarts the node. And when a ClientApp ends without a reply, or
before it has handed over all of one that it announced, the SuperNode waits for it for ever.
"""

import logging
import os
import time
from types import SimpleNamespace

import flwr.supercore.heartbeat as server_heartbeat
import flwr.supernode.start_client_internal as node
from flwr.common.constant import Status, SubStatus
from flwr.supercore.inflatable import inflatable_utils
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.supernode import fleet_http_connection as node_heartbeat

from tests.lab.processes import LEASE, SWITCH

_UNFINISHED = (Status.PENDING, Status.STARTING, Status.RUNNING)
_LOCAL_SECONDS = 0.05
"""Between two looks into the node's own memory."""
_REMOTE_SECONDS = 0.2
"""Between two questions to the SuperLink, which costs it CPU and the line some 700 bytes."""
_BEATS_PER_LEASE = 2
_CALL_SECONDS = 5.0
"""Flower subtracts this from the time between two heartbeats."""

_log = logging.getLogger("aqg.flower")
_pull, _push = node._pull_and_store_message, node._push_messages


def apply_repairs():
    """Repair this process and those forked from it, and shorten its waits where it is asked to."""
    node._pull_and_store_message, node._push_messages = _pull_alone, _push_if_any
    if os.environ.get(SWITCH) == "1":  # in place of sleeps of 0.5 and 3 s, and a back-off of 1 s
        node.time = SimpleNamespace(
            sleep=lambda seconds: time.sleep(_REMOTE_SECONDS if seconds > 1 else _LOCAL_SECONDS),
            time=time.time,
            monotonic=time.monotonic,
        )
        for name in ("pull_objects", "pull_and_inflate_object_from_tree"):
            defaults = getattr(inflatable_utils, name).__kwdefaults__
            defaults["initial_backoff"] = _LOCAL_SECONDS
    if lease := os.environ.get(LEASE):
        interval = float(lease) / _BEATS_PER_LEASE
        fleet_handlers.HEARTBEAT_MIN_INTERVAL = 0.5
        node_heartbeat.HEARTBEAT_DEFAULT_INTERVAL = interval
        server_heartbeat.HEARTBEAT_DEFAULT_INTERVAL = interval + _CALL_SECONDS


def _pull_alone(**parts):
    """Receive an order as Flower does, but leave nothing behind."""
    state, receive = parts["state"], parts["receive"]
    before = set()

    def receive_alone():
        found = receive()
        if found is not None:
            _forget_replies(state, parts["object_store"])
            before.update(_unfinished(state))
        return found

    run = _pull(**{**parts, "receive": receive_alone})
    if run is None:
        for task in _unfinished(state) - before:  # its token ends: it cannot reply any more
            state.finish_task(task, SubStatus.FAILED, "the order was not received as a whole")
            _forget_replies(state, parts["object_store"])
    return run


def _push_if_any(**parts):
    """Wait for a reply and send it as Flower does, but end where no ClientApp is left to reply."""
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
        _push(**parts)
    except _NoReplyError:
        _log.error("a ClientApp ended without a reply")
        state.delete_messages()


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
