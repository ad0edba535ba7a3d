"""Flower's own functions, and what is changed about how long they wait."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    pull_objects,
)
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import http_grid
from flwr.supernode import start_client_internal as loop
from flwr.supernode.nodestate import NodeStateFactory

from aqg.flower.private import bounded_pulls

from tests.lab.repairs import repair_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flwr.proto.message_pb2 import ObjectTree

LINK, NODE = 1, 3
RUNNING = ["pending", "starting", "running"]


class Node:
    """A SuperNode between two orders, with the link's and the ClientApp's part in our hands."""

    def __init__(self) -> None:
        factory = NodeStateFactory(ObjectStoreFactory())
        self.state: Any = factory.state()
        self.store = factory.objectstore_factory.store()
        self.state.set_node_id(NODE)
        self.confirm: Callable[[], None] = lambda: None

    def receive(self, run: int) -> int | None:
        """Let the node receive an order of a run, and return what Flower's function does."""
        order = make_order(run)
        objects = {name: part.deflate() for name, part in get_all_nested_objects(order).items()}
        self.state.store_run(Run.create_empty(run))
        self.state.set_run_series_context(0, Context(run, NODE, {}, RecordDict(), {}))
        self.order = order
        return loop._pull_and_store_message(
            state=self.state,
            object_store=self.store,
            node_config={},
            receive=lambda: (remove_content_from_message(order), get_object_tree(order)),
            get_run=Run.create_empty,
            get_fab=lambda *_: pytest.fail("the run is known"),
            pull_object=lambda _, name: objects[name],
            confirm_message_received=lambda *_: self.confirm(),
            trusted_entities=None,
        )

    def reply(self, whole: bool = True) -> None:
        """Answer as the ClientApp does: fetch the order, announce a reply, hand it over."""
        run = self.order.metadata.run_id
        assert self.state.get_messages_legacy(run_ids=[run], is_reply=False)
        reply = Message(RecordDict(), reply_to=self.order)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        if whole:
            loop._insert_message(reply, self.state, self.store)
        else:
            self.state.store_message(reply)
            self.store.preregister(run, get_object_tree(reply))

    def end(self) -> None:
        """End all ClientApps."""
        for task in self.state.get_tasks(statuses=RUNNING):
            assert self.state.finish_task(task.task_id, "failed", "")

    def send(self) -> list[int]:
        """Let the node wait for a reply and send it; return the runs of those announced."""
        announced = []

        def announce(reply: Message, tree: ObjectTree, seconds: float) -> tuple[set[str], str]:
            announced.append(reply.metadata.run_id)
            return {part.object_id for part in iterate_object_tree(tree)}, "session"

        loop._push_messages(
            state=self.state, object_store=self.store, send=announce, push_object=lambda *_: None
        )
        return announced

    @property
    def running(self) -> list[int]:
        """Runs that a ClientApp still works for."""
        tasks = self.state.get_tasks(statuses=RUNNING)
        return [task.run_id for task in tasks]

    @property
    def answered(self) -> list[int]:
        """Runs of the replies that would leave now."""
        return [m.metadata.run_id for m in self.state.get_messages_legacy(is_reply=True)]


def make_order(run: int) -> Message:
    content = RecordDict({"order": ConfigRecord({"run": run})})
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = run, 1, LINK
    order = Message(content, dst_node_id=NODE, message_type="train", ttl=60)
    order.metadata.__dict__["_message_id"] = order.object_id
    return order


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    for name in ("_pull_and_store_message", "_push_messages"):
        monkeypatch.setattr(loop, name, getattr(loop, name))
    assert repair_node()
    yield Node()
    del loop._repaired_by_aqg  # type: ignore[attr-defined]


def test_an_order_of_a_stopped_run_leaves_nothing_behind(node: Node) -> None:
    def stopped() -> None:
        node.reply()
        raise RunNotRunningException

    node.confirm = stopped
    assert node.receive(run=1) is None
    assert not node.running, "its ClientApp could still reply"
    assert not node.answered


def test_a_reply_left_behind_does_not_take_the_next_ones_place(node: Node) -> None:
    assert node.receive(run=1) == 1
    node.reply()
    assert node.receive(run=2) == 2
    node.reply()
    assert node.answered == [2]


def test_an_order_that_is_received_is_answered(node: Node) -> None:
    assert node.receive(run=1) == 1
    assert node.running == [1]
    node.reply()
    assert node.answered == [1]


def test_a_client_app_that_ends_without_a_reply_is_not_waited_for(node: Node) -> None:
    assert node.receive(run=1) == 1
    node.end()
    assert node.send() == []
    assert node.receive(run=2) == 2
    node.reply()
    node.end()
    assert node.send() == [2]


def test_a_client_app_that_ends_within_its_reply_is_not_waited_for(node: Node) -> None:
    assert node.receive(run=1) == 1
    node.reply(whole=False)
    node.end()
    assert node.send() == [1]
    assert not node.answered


def test_the_repair_is_made_once(node: Node) -> None:
    repaired = loop._pull_and_store_message
    assert repair_node()
    assert loop._pull_and_store_message is repaired


def test_an_unknown_flower_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def unlike(state: object) -> None:
        """Another version's function."""

    monkeypatch.setattr(loop, "_pull_and_store_message", unlike)
    assert not repair_node()
    assert loop._pull_and_store_message is unlike


def test_a_reply_that_is_never_sent_ends_with_the_time_for_it() -> None:
    def unavailable(name: str) -> bytes:
        raise ObjectUnavailableError(name)

    started = time.monotonic()
    with bounded_pulls(0.4):
        for _ in range(5):
            with pytest.raises(ObjectPullError, match="timeout"):
                http_grid.pull_objects(["a", "b"], unavailable)
    assert 0.4 <= time.monotonic() - started < 5, "five replies share the time of one"
    with bounded_pulls(60.0):
        assert http_grid.pull_objects(["a"], lambda _: b"content") == {"a": b"content"}
    assert http_grid.pull_objects is pull_objects
