"""Who is who, and how messages are waited for."""

import re
import time
from pathlib import Path

import numpy as np
import pytest
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    pull_objects,
)
from flwr.superlink.grid import http_grid

import aqg.flower
from aqg.flower.private import bounded_pulls
from aqg.flower.rounds import Roster


def test_nodes_take_indices_in_order_and_keep_them():
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


def test_indices_survive_a_restart_of_the_server():
    roster = Roster(3, trust_partition_id=False)
    roster.restore([30, 0, 20], np.array([5.0, 0.0, 7.0]))
    assert roster.num_samples.tolist() == [5, 0, 7]
    roster.update({30, 10, 20})
    assert roster.nodes == [30, 10, 20]


def test_a_partition_belongs_to_one_node_that_is_there_and_answers():
    roster = Roster(2, trust_partition_id=True)
    roster.update({1, 2, 3})
    assert roster.present == []
    roster.introduce(1, partition=0)
    roster.introduce(2, partition=0)
    roster.introduce(3, partition=2)
    assert roster.nodes == [1, 0]
    roster.num_samples[0] = 5
    refusals = dict(roster.take_refusals())
    assert refusals[2] == "node 2 reports partition 0, which is node 1"
    assert refusals[3] == "node 3 reports partition 2; 0 to 1 are expected"
    roster.update({1, 2, 3})
    assert roster.take_refusals() == []

    roster.note_answer(1, answered=False)  # listed still, but dead
    roster.update({1, 2, 3})
    assert roster.nodes == [2, 0]
    assert roster.num_samples.tolist() == [0, 0]  # another node's samples are not this one's
    assert roster.client_of(1) is None


def test_a_reply_that_is_never_sent_ends_with_the_time_for_it():
    def unavailable(name):
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


def test_nothing_imports_what_only_newer_versions_of_flower_bring():
    for file in Path(aqg.flower.__file__).parent.glob("*.py"):
        assert not re.search(r"^\s*(import|from) httpx", file.read_text(), re.MULTILINE), file
