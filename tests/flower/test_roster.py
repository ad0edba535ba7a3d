"""Who is who, and how messages are waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from aqg.flower.exchange import Exchange
from flwr.app import ConfigRecord, Message, RecordDict

from aqg.flower.roster import Roster

from tests.flower.memory_grid import MemoryGrid

if TYPE_CHECKING:
    from collections.abc import Iterable


def test_nodes_take_indices_in_order_and_keep_them() -> None:
    roster = Roster(3, trust_partition_id=False)
    roster.update({30, 10, 20})
    assert roster.nodes == [10, 20, 30]
    roster.update({30, 10, 5})
    assert roster.nodes == [10, 5, 30]  # 20 has gone; the newcomer takes its place
    roster.update({30, 10, 5, 20})
    assert roster.nodes == [10, 5, 30]
    assert roster.client_of(20) is None
    assert roster.take_refusals() == [(20, "all 3 clients are there already")]
    assert roster.take_refusals() == []
    roster.update({30, 10, 20})
    assert roster.nodes == [10, 20, 30]


def test_indices_survive_a_restart_of_the_server() -> None:
    roster = Roster(3, False, nodes=[30, 0, 20])
    roster.update({30, 10, 20})
    assert roster.nodes == [30, 10, 20]


def test_a_partition_belongs_to_one_node_that_is_there_and_answers() -> None:
    roster = Roster(2, trust_partition_id=True)
    roster.update({1, 2, 3})
    assert roster.strangers() == [1, 2, 3]
    assert roster.present == []
    roster.introduce(1, partition=0, num_samples=5)
    roster.introduce(2, partition=0, num_samples=6)
    roster.introduce(3, partition=2, num_samples=7)
    assert roster.nodes == [1, 0]
    assert roster.num_samples.tolist() == [5, 0]
    refusals = dict(roster.take_refusals())
    assert refusals[2] == "node 2 reports partition 0, which is node 1"
    assert refusals[3] == "node 3 reports partition 2; 0 to 1 are expected"
    roster.update({1, 2, 3})
    assert roster.take_refusals() == []

    roster.heard(1, answered=False)  # listed still, but dead
    roster.update({1, 2, 3})
    assert roster.nodes == [2, 0]
    assert roster.num_samples.tolist() == [6, 0]
    assert roster.client_of(1) is None


class Clock:
    """Time that passes only in pauses."""

    def __init__(self) -> None:
        self.time = 0.0
        self.pauses: list[float] = []

    def now(self) -> float:
        return self.time

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds


class SlowGrid(MemoryGrid):
    """Answers when its clock says so."""

    clock: Clock
    ready_at = 0.0

    def call(self, node: int, message: Message) -> Message:
        return Message(message.content, reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return super().pull_messages(message_ids) if self.clock.time >= self.ready_at else []


def exchange_of(ready_at: float, node_configs: dict[int, dict[str, Any]]) -> Exchange:
    grid = SlowGrid(None, node_configs)  # type: ignore[arg-type]  # it answers by itself
    grid.clock, grid.ready_at = Clock(), ready_at
    return Exchange(grid, grid.clock.now, grid.clock.pause)


def message_to(node: int) -> Message:
    return Message(RecordDict({"x": ConfigRecord({"y": 1})}), node, "train", ttl=9.0)


@pytest.mark.parametrize("ready_at", [0.0, 0.01, 0.5, 20.0])
def test_waiting_adds_little_to_the_time_that_passes_anyway(ready_at: float) -> None:
    exchange = exchange_of(ready_at, {5: {}})
    exchange.send([message_to(5)])
    (arrival,) = exchange.collect(60.0, "train")
    assert arrival.sent.node == 5
    assert ready_at <= arrival.seconds <= ready_at * 1.05 + 0.003


def test_the_deadline_ends_a_round_and_what_comes_then_is_late() -> None:
    exchange = exchange_of(7.0, {5: {}, 6: {}})
    exchange.send([message_to(5)])
    assert list(exchange.collect(5.0, "train")) == []
    assert exchange.now() == 5.0
    assert exchange.close("train") == [5]
    exchange.send([message_to(6)])
    arrivals = list(exchange.collect(5.0, "train"))
    assert [(a.sent.node, a.is_late) for a in arrivals] == [(5, True), (6, False)]


def test_a_message_that_cannot_be_read_does_not_stop_the_others() -> None:
    class Broken(MemoryGrid):
        def call(self, node: int, message: Message) -> Message:
            return Message(message.content, reply_to=message)

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            if "message-2" in list(message_ids):
                raise ValueError("truncated")
            return super().pull_messages(message_ids)

    exchange = Exchange(Broken(None, {5: {}, 6: {}, 7: {}}))  # type: ignore[arg-type]
    exchange.send([message_to(node) for node in (5, 6, 7)])
    arrivals = list(exchange.collect(5.0, "train"))
    assert [(a.sent.node, a.problem) for a in arrivals] == [
        (5, ""),
        (6, "unreadable: ValueError: truncated"),
        (7, ""),
    ]
