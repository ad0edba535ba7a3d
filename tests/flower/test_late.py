"""Loops of users' own over the grid, who is who, and rounds that end before all replies came."""

import logging
import re
import time
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    pull_objects,
)
from flwr.superlink.grid import http_grid

import aqg.flower
from aqg.channel.settings import Settings
from aqg.core.server import age_weight
from aqg.errors import ConfigError
from aqg.flower import AQG, Buffered, Compressed, aqg_mod
from aqg.flower.compressed import own_recipe
from aqg.flower.grid import CompressedGrid
from aqg.flower.private import bounded_pulls
from aqg.flower.roster import Roster

from tests.flower.memory_grid import MemoryGrid
from tests.flower.small_app import (
    NUM_CLIENTS,
    distance,
    everyone,
    first_arrays,
    make_app,
    unevaluated,
)
from tests.flower.test_dropin_faults import changed_in, with_metric


class SlowGrid(MemoryGrid):
    """Replies of each node are there after some looks for them; each look counts for all."""

    def __init__(self, app, looks, **options):
        super().__init__(app, {100 + m: {"partition-id": m} for m in range(len(looks))}, **options)
        self.looks = {100 + m: count for m, count in enumerate(looks)}
        self.due = {}
        self.now = 0
        self.sent = []

    def push_messages(self, messages):
        messages = list(messages)
        identifiers = list(super().push_messages(messages))
        for message, identifier in zip(messages, identifiers, strict=True):
            node = message.metadata.dst_node_id
            self.sent.append((node, message.metadata.message_type))
            is_slow = message.metadata.message_type == "train"
            self.due[identifier] = self.now + (self.looks[node] if is_slow else 0)
        return identifiers

    def pull_messages(self, message_ids):
        self.now += 1
        return super().pull_messages({i for i in message_ids if self.due[i] <= self.now})

    def send_and_receive(self, messages, *, timeout=None):
        wanted = set(self.push_messages(messages))
        return list(super().pull_messages(wanted))


def own_loop(grid, rounds, size):
    """An asynchronous server as a user writes it: it knows nothing of compression."""
    model, begun, counted = first_arrays(), {}, []
    for number in range(1, rounds + 1):
        config = ConfigRecord({"server-round": number, "lr": 0.1})
        content = RecordDict({"arrays": model, "config": config})
        busy = {node for node, _ in begun.values()}
        messages = [Message(content, n, "train") for n in grid.get_node_ids() if n not in busy]
        for message, identifier in zip(messages, list(grid.push_messages(messages)), strict=True):
            begun[identifier] = message.metadata.dst_node_id, model
        replies = []
        while len(replies) < min(size, len(begun)):
            replies += grid.pull_messages(list(begun))
        values = {name: array.numpy().astype(np.float64) for name, array in model.items()}
        for reply in replies:
            node, old = begun.pop(reply.metadata.reply_to_message_id)
            assert not reply.has_error(), reply.error
            assert reply.metadata.src_node_id == node
            counted.append((number, node))
            for name in values:
                change = reply.content["arrays"][name].numpy() - old[name].numpy()
                values[name] = values[name] + change / len(replies)
        types = {name: array.numpy().dtype for name, array in model.items()}
        model = ArrayRecord({n: Array(np.asarray(v, types[n])) for n, v in values.items()})
    return model, counted


@pytest.mark.parametrize("recipe", ["lean", "auto", "stc:keep=0.2"])
def test_loops_over_push_and_pull_run_through_the_wrapped_grid(recipe):
    looks = (1, 1, 3, 5)
    plain, counted = own_loop(SlowGrid(make_app([]), looks), 30, 2)
    grid = CompressedGrid(SlowGrid(make_app([aqg_mod]), looks), Settings(recipe=recipe))
    model, own_counted = own_loop(grid, 30, 2)
    assert own_counted == counted
    assert not grid.counts.refused
    assert not grid.counts.lost
    assert len({node for _, node in counted}) == NUM_CLIENTS
    start = np.abs(plain["layer.weight"].numpy()).max()
    assert distance(model, plain["layer.weight"].numpy()) < 0.4 * start
    traffic = grid.counts.train
    assert traffic.up < 0.5 * traffic.plain_up
    assert traffic.down < 0.5 * traffic.plain_down


def run(strategy, grid, rounds, **options):
    return strategy.start(grid, first_arrays(), num_rounds=rounds, **options)


def test_rounds_that_wait_for_all_are_as_before():
    plain = run(FedAvg(**unevaluated()), SlowGrid(make_app([]), (1,) * 4), 6)
    buffered = run(
        Buffered(FedAvg(**unevaluated()), size=4), SlowGrid(make_app([]), (1, 2, 3, 4)), 6
    )
    for name, array in plain.arrays.items():
        assert array.numpy() == pytest.approx(buffered.arrays[name].numpy(), rel=1e-5, abs=1e-6), (
            name
        )


def test_a_late_update_is_that_of_the_model_its_node_had(caplog):
    """One node replies in round 3 to the model of round 1."""
    caplog.set_level(logging.INFO, "flwr.aqg")
    shown = []

    class Seeing(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            self.models = [*getattr(self, "models", []), arrays]
            return super().configure_train(server_round, arrays, config, grid)

        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            shown.append({r.metadata.src_node_id: r.content["arrays"] for r in replies})
            return super().aggregate_train(server_round, replies)

    grid = SlowGrid(make_app([]), (1, 1, 1, 3))
    inner = Seeing(**unevaluated())
    run(Buffered(inner, size=3), grid, 3)
    assert [sorted(replies) for replies in shown] == [
        [100, 101, 102],
        [100, 101, 102],
        [100, 101, 102, 103],
    ]
    assert [node for node, _ in grid.sent].count(103) == 1
    name = "layer.weight"
    first, third = (inner.models[k][name].numpy() for k in (0, 2))
    trained = make_app([])
    content = RecordDict({"arrays": inner.models[0], "config": ConfigRecord({"server-round": 1})})
    message = Message(content, 103, "train")
    message.metadata.__dict__["_message_id"] = "again"
    reply = trained(message, grid.context_of(103))
    update = reply.content["arrays"][name].numpy() - first
    expected = third + age_weight(2) * update
    assert shown[2][103][name].numpy() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    counter = "bn.num_batches_tracked"
    assert shown[2][103][counter].numpy() == inner.models[2][counter].numpy() + 2
    assert "round 1 ends with 3 replies; 1 nodes are at work" in caplog.text
    assert "node 103 began in round 1; its update is relative to the model" in caplog.text
    assert "counts 0.58 in round 3" in caplog.text


@pytest.mark.parametrize(("strategy", "recipe"), [(FedAvg, "auto"), (flower.FedAvgM, "lean")])
def test_it_works_compressed(strategy, recipe):
    options = {"server_momentum": 0.5} if strategy is flower.FedAvgM else {}
    looks = (1, 1, 2, 4)
    config = ConfigRecord({"lr": 0.1})
    inner = Buffered(strategy(**unevaluated(**options)), size=2)
    plain = run(inner, SlowGrid(make_app([]), looks), 30, train_config=config)
    outer = Compressed(Buffered(strategy(**unevaluated(**options)), size=2), recipe=recipe)
    result = run(outer, SlowGrid(make_app([aqg_mod]), looks), 30, train_config=config)
    assert not outer.counts.refused
    traffic = outer.counts.train
    assert traffic.up < 0.5 * traffic.plain_up
    away = np.abs(plain.arrays["layer.weight"].numpy()).max()
    assert distance(result.arrays, plain.arrays["layer.weight"].numpy()) < 0.4 * away
    averaged, own = (r.arrays["bn.running_mean"].numpy() for r in (plain, result))
    assert np.ptp(averaged) == 0
    assert 0.5 < averaged[0] < 1.5  # nodes have 1/3 to 4/3, and late ones count by their change
    assert own == pytest.approx(averaged, rel=0.01)  # in half precision


def test_replies_are_compared_in_every_round():
    """FedAvg ends with an error where one has other metrics; many examples would be the model."""
    odd = (
        changed_in({2}, with_metric("loss", None)),
        changed_in({4}, with_metric("num-examples", 10**9)),
    )
    strategy = Compressed(Buffered(FedAvg(**unevaluated()), size=4))
    result = run(strategy, SlowGrid(make_app([aqg_mod, *odd]), (1,) * 4), 6)
    assert strategy.counts.refused == {101: 2}
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3, 4, 5, 6]


def test_the_default_recipe_is_that_of_the_strategy_inside():
    for inner in (FedAvg(), flower.FedAdam(), flower.FedMedian(), flower.Krum()):
        assert own_recipe(Buffered(inner, size=2)) == own_recipe(inner)
    clipped = flower.DifferentialPrivacyClientSideFixedClipping(FedAvg(), 0.1, 2.0, NUM_CLIENTS)
    assert Compressed(Buffered(clipped, size=2)).settings.clip() == 2.0


def test_errors_and_time_end_a_round(caplog):
    caplog.set_level(logging.INFO, "flwr.aqg")
    app = make_app([])

    def failing(message, context):
        if context.node_config["partition-id"] == 1:
            raise RuntimeError("no memory")
        return app(message, context)

    grid = SlowGrid(failing, (1, 1, 10**9, 1))
    result = run(Buffered(FedAvg(**unevaluated()), size=3), grid, 2, timeout=0.2)
    assert np.isfinite(result.arrays["layer.weight"].numpy()).all()
    assert [node for node, _ in grid.sent].count(102) == 1
    assert [node for node, _ in grid.sent].count(101) == 2
    assert "node 102, at work since round 1, is late" in caplog.text


def test_nodes_at_work_are_not_evaluated():
    grid = SlowGrid(make_app([]), (1, 1, 1, 10**9))
    strategy = Buffered(FedAvg(**everyone()), size=2)
    result = run(strategy, grid, 2)
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2]
    assert (103, "evaluate") not in grid.sent
    assert grid.sent.count((100, "evaluate")) == 2


def test_what_cannot_be_buffered():
    for inner in (Compressed(FedAvg()), AQG(NUM_CLIENTS)):
        with pytest.raises(ConfigError, match=r"around (AQG|Compressed), .* Compressed\(Buffered"):
            Buffered(inner, size=2)
    with pytest.raises(ConfigError, match="size is 0; it must be a whole number above 0"):
        Buffered(FedAvg(), size=0)
    with pytest.raises(ConfigError, match="strategy is a str; it must be a Strategy"):
        Buffered("FedAvg", size=2)


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
    # They survive a restart of the server.
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
