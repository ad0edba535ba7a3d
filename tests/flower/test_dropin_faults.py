"""The drop-in used and broken: what nodes say, what strategies make, users' loops, late replies."""

import copy
import logging
import re
import time
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
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
from aqg.flower import Buffered, Compressed, aqg_mod
from aqg.flower.compressed import checks_of, own_recipe
from aqg.flower.grid import CompressedGrid
from aqg.flower.private import bounded_pulls
from aqg.flower.rounds import Roster

from tests.flower.memory_grid import MemoryGrid
from tests.flower.small_app import (
    NUM_CLIENTS,
    app_answering,
    app_of,
    distance,
    everyone,
    first_arrays,
    make_app,
    unevaluated,
)
from tests.flower.test_dropin import make_grid, run

ODD = 101
"""The node that misbehaves, client 1."""


def changed_in(rounds, change, kind="train", nodes=(ODD,)):
    """Return a mod that changes what client 1's handler, or others, answer in some rounds."""

    def mod(message, context, call_next):
        reply = call_next(message, context)
        number = int(message.content["config"]["server-round"])
        is_due = context.node_id in nodes and number in rounds
        if is_due and message.metadata.message_type == kind:
            change(reply.content)
        return reply

    return mod


def with_array(name, value):
    def change(content):
        arrays = content["arrays"]
        tensor = arrays[name].numpy().copy()
        tensor.reshape(-1)[0] = value
        content["arrays"] = ArrayRecord({**arrays, name: Array(tensor)})

    return change


def with_metric(name, value):
    """Return what changes a metric, or takes it away where it is to be None."""

    def change(content):
        metrics = {**content["metrics"], name: value}
        content["metrics"] = MetricRecord({n: v for n, v in metrics.items() if v is not None})

    return change


def with_one_row(content):
    """NumPy would add it to every row."""
    row = Array(np.zeros(10, np.float32))
    content["arrays"] = ArrayRecord({**content["arrays"], "layer.weight": row})


INFINITE = Array(np.array([np.inf]))
BAD = [
    (with_array("bn.running_mean", np.nan), "'bn.running_mean' holds NaN"),
    (with_array("bn.running_mean", np.inf), "'bn.running_mean' holds"),
    (with_array("layer.frozen", np.nan), "'layer.frozen' holds NaN"),
    (with_array("layer.weight", np.nan), "'layer.weight' holds NaN"),
    (lambda content: content.update(more=ArrayRecord({"x": INFINITE})), "'x' of its record"),
    (with_metric("loss", np.nan), "'loss' of its record 'metrics' is nan"),
    (with_metric("num-examples", np.nan), "'num-examples' of its record"),
    (with_metric("num-examples", 10**15), "1000000000000000"),
    (with_metric("num-examples", -5), "is -5"),
    (with_metric("num-examples", [10, 20]), "must be a number"),
    (with_metric("num-examples", None), "is None; it must be a number"),
    (with_metric("loss", None), "differs from most others in metric 'loss'"),
    (with_metric("more", 1.0), "differs from most others in metric 'more'"),
    (with_metric("loss", [0.5, 0.5]), "differs from most others in metric 'loss'"),
    (with_one_row, "differs from most others in array 'layer.weight' (10,)"),
    (lambda content: content.update(more=MetricRecord({"num-examples": 3})), "2 MetricRecords"),
    (with_metric("num-examples", 10**9), "others together have 80"),
]


def test_what_a_node_says_is_refused_before_it_weighs(caplog):
    """One fault in every other round: refused by name; the others go on, and so may the node."""

    def fail(_content):
        raise RuntimeError("no memory left")

    mods = [changed_in({1 + 2 * place}, change) for place, (change, _) in enumerate(BAD)]
    mods.append(changed_in({3}, fail, nodes={100}))  # an error of Flower's own
    strategy = Compressed(FedAvg(**unevaluated()), recipe="lean")
    result = run(strategy, make_grid(make_app([aqg_mod, *mods])), rounds=2 * len(BAD) + 8)
    assert strategy.counts.refused == {ODD: len(BAD)}
    said = [line for line in caplog.messages if f"node {ODD}" in line]
    for _, text in BAD:
        assert any(text in line for line in said), (text, said)
    assert distance(result.arrays) < 0.1
    assert np.isfinite(result.arrays["bn.running_mean"].numpy()).all()


def test_evaluation_is_checked_as_well():
    strategy, bad = Compressed(FedAvg(**everyone())), {2: np.inf, 3: None}
    mods = [changed_in({n}, with_metric("distance", v), "evaluate") for n, v in bad.items()]
    result = run(strategy, make_grid(make_app([aqg_mod, *mods])), rounds=4)
    assert strategy.counts.refused == {ODD: 2}
    assert all(np.isfinite(result.evaluate_metrics_clientapp[n]["distance"]) for n in bad)


def test_lists_may_differ_in_length_where_they_are_not_averaged():
    lists = {str(n): {"num-examples": 1, "losses": [0.5] * n} for n in (1, 2, 3)}
    replies = {n: RecordDict({"metrics": MetricRecord(own)}) for n, own in lists.items()}
    own = FedAvg(train_metrics_aggr_fn=lambda records, key: MetricRecord({"n": len(records)}))
    assert not checks_of(own).compare(replies)
    assert len(checks_of(FedAvg()).compare(replies)) == 2


def test_nobody_has_examples(caplog):
    """FedAvg divides by their sum."""

    mod = changed_in({2}, with_metric("num-examples", 0), nodes=range(100, 104))
    strategy = Compressed(FedAvg(**unevaluated()), recipe="lean")
    result = run(strategy, make_grid(make_app([aqg_mod, mod])), rounds=18)
    assert sum(strategy.counts.refused.values()) == NUM_CLIENTS
    assert distance(result.arrays) < 0.1


def test_a_strategy_that_makes_nan(caplog):
    """Clients go on from the last model of numbers, and so does the strategy."""

    class Overflowing(FedAvg):
        def aggregate_train(self, server_round, replies):
            arrays, metrics = super().aggregate_train(server_round, replies)
            if server_round in (3, 4):
                bad = arrays["layer.weight"].numpy() * np.nan
                arrays = ArrayRecord({**arrays, "layer.weight": Array(bad)})
            return arrays, metrics

    received = []

    def look(message, context, call_next):
        arrays = message.content["arrays"].values()
        received.extend(np.isfinite(array.numpy()).all() for array in arrays)
        return call_next(message, context)

    strategy = Compressed(Overflowing(**unevaluated()), recipe="lean")
    result = run(strategy, make_grid(make_app([aqg_mod, look])), rounds=16)
    assert all(received)
    assert len(received) == 16 * NUM_CLIENTS * 4
    assert any("is not sent: tensor 'layer.weight' holds NaN" in m for m in caplog.messages)
    assert distance(result.arrays) < 0.1


def test_a_mask_with_infinity_is_no_fault():
    def train(values, number, node):
        assert np.isneginf(values["mask"]).any()
        return values | {"w": values["w"] + 0.5 * (1 - values["w"])}

    mask = np.triu(np.full((5, 5), -np.inf, np.float32), 1)
    first = ArrayRecord({"w": Array(np.zeros(300, np.float32)), "mask": Array(mask)})
    strategy = Compressed(FedAvg(**unevaluated()), recipe="lean")
    result = strategy.start(make_grid(app_of(train)), first, num_rounds=8)
    assert not strategy.counts.refused
    assert np.abs(result.arrays["w"].numpy() - 1).max() < 0.05


# Apps that compression is not made for.


@pytest.mark.parametrize("wrap", [lambda inner: inner, lambda inner: Buffered(inner, size=2)])
def test_attributes_of_the_strategy(wrap):
    class Custom(FedAvg):
        size = "large"

        def set_save_path_and_run_dir(self, path, run_dir):
            self.save_path, self.run_dir = path, run_dir

    inner = Custom(**everyone())
    strategy = Compressed(wrap(inner))
    strategy.set_save_path_and_run_dir("there", "run")
    assert (strategy.save_path, inner.run_dir) == ("there", "run")
    strategy.fraction_evaluate = 0.25
    assert inner.fraction_evaluate == strategy.fraction_evaluate == 0.25
    strategy.set_save_path_and_run_dir = lambda path, run_dir: path + run_dir
    assert inner.set_save_path_and_run_dir("a", "b") == "ab"
    assert inner.size == "large"
    assert copy.deepcopy(strategy).fraction_evaluate == 0.25
    with pytest.raises(AttributeError, match="no_such"):
        _ = strategy.no_such


def test_a_model_of_bytes_runs_as_before(caplog):
    """Trees that grow, as XGBoost's, in an array of bytes."""

    def grow(message, context):
        (trees,) = message.content["arrays"].numpy_ndarrays or [np.zeros(0, np.uint8)]
        grown = np.append(trees, np.uint8(context.node_id % 256))
        return {"arrays": ArrayRecord([grown]), "metrics": MetricRecord({"num-examples": 1})}

    def train(strategy, mods):
        grid, first = make_grid(app_answering(grow, mods), 2), ArrayRecord([np.zeros(0, np.uint8)])
        return strategy.start(grid, first, num_rounds=5).arrays

    options = {"min_available_nodes": 2, "fraction_evaluate": 0.0}
    stock = train(flower.FedXgbCyclic(**options), [])
    caplog.clear()
    strategy = Compressed(flower.FedXgbCyclic(**options))
    arrays = train(strategy, [aqg_mod])
    assert [list(a.numpy()) for a in arrays.values()] == [list(a.numpy()) for a in stock.values()]
    warnings = [r for r in caplog.records if "sent as it is" in r.message]
    assert len(warnings) == 1
    assert not strategy.counts.refused
    assert strategy.counts.train.up == strategy.counts.train.plain_up


def test_a_model_that_changes_its_shape(caplog):
    """It is compressed anew from there."""

    class Growing(FedAvg):
        def aggregate_train(self, server_round, replies):
            arrays, metrics = super().aggregate_train(server_round, replies)
            if server_round == 4:
                grown = np.append(arrays["w"].numpy(), np.zeros(3000, np.float32))
                arrays = ArrayRecord({"w": Array(grown)})
            return arrays, metrics

    app = app_of(lambda values, *_: {"w": values["w"] + 0.5 * (1 - values["w"])})
    strategy = Compressed(Growing(**unevaluated()), recipe="lean")
    first = ArrayRecord({"w": Array(np.zeros(3000, np.float32))})
    result = strategy.start(make_grid(app), first, num_rounds=14)
    assert result.arrays["w"].numpy().shape == (6000,)
    assert np.abs(result.arrays["w"].numpy() - 1).max() < 0.05
    assert sum("other tensors or shapes" in line for line in caplog.messages) == 1
    traffic = strategy.counts.train
    assert traffic.up < traffic.plain_up / 50
    assert traffic.down < NUM_CLIENTS * (12_000 + 24_000) * 1.2  # two whole models for each node


# One line of the two.


def test_one_line_of_the_two(caplog):
    """Whole models are taken as they are, with one warning, and sent as they are."""
    strategy = Compressed(FedAvg(**everyone()))
    result = run(strategy, make_grid(make_app([])), rounds=12)
    stock = run(FedAvg(**everyone()), make_grid(make_app([])), rounds=12)
    off = result.arrays["layer.weight"].numpy() - stock.arrays["layer.weight"].numpy()
    assert np.abs(off).max() < 1e-6
    assert not strategy.counts.refused
    warnings = [r for r in caplog.records if "without the mod" in r.message]
    assert len(warnings) == 1
    assert "ClientApp(mods=[aqg_mod])" in warnings[0].message
    assert result.evaluate_metrics_clientapp.keys() == stock.evaluate_metrics_clientapp.keys()
    # Only the clients' line.
    caplog.set_level(logging.WARNING)
    result = run(FedAvg(**everyone()), make_grid(), rounds=8)
    assert distance(result.arrays) < 0.01
    lines = [line for line in caplog.messages if "nothing is compressed" in line]
    assert len(lines) == NUM_CLIENTS  # each node has a log of its own
    assert "Compressed(...)" in lines[0]


@pytest.mark.parametrize("plain_nodes", [{102}, {100, 101, 103}])
def test_nodes_can_be_moved_one_by_one(plain_nodes, caplog):
    with_nan = changed_in({3}, with_array("layer.weight", np.nan), nodes=plain_nodes)
    plain_app, app = make_app([with_nan]), make_app([aqg_mod])

    def either(message, context):
        return (plain_app if context.node_id in plain_nodes else app)(message, context)

    strategy = Compressed(FedAvg(**everyone()), recipe="lean")
    result = run(strategy, make_grid(either), rounds=14)
    assert strategy.counts.refused == dict.fromkeys(plain_nodes, 1)  # their models with NaN
    assert sum("without the mod" in line for line in caplog.messages) == 1
    assert distance(result.arrays) < 0.1
    for node, counts in strategy.counts.nodes.items():
        assert (counts.train.up > counts.train.plain_up / 2) == (node in plain_nodes)


# The end of a run.


def test_nodes_forget_a_run_that_ended_well_unless_it_is_in_the_context(tmp_path, monkeypatch):
    def notes():
        return sorted((tmp_path / "state").glob("node-*/*/state.json"))

    class Failing(FedAvg):
        def aggregate_train(self, server_round, replies):
            if server_round == 3:
                raise RuntimeError("no space left")
            return super().aggregate_train(server_round, replies)

    with pytest.raises(RuntimeError):
        run(Compressed(Failing(**unevaluated()), recipe="lean"), rounds=5)
    left = notes()
    assert len(left) >= NUM_CLIENTS
    run(Compressed(FedAvg(**unevaluated()), recipe="lean"), rounds=3)
    assert notes() == left
    monkeypatch.setenv("AQG_STATE_DIR", "context")
    grid = make_grid()
    run(Compressed(FedAvg(**unevaluated())), grid, rounds=3)
    assert set(grid.rounds.values()) == {3}


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


def test_rounds_that_wait_for_all_are_as_before():
    plain = run(FedAvg(**unevaluated()), SlowGrid(make_app([]), (1,) * 4), 6)
    late = run(Buffered(FedAvg(**unevaluated()), size=4), SlowGrid(make_app([]), (1, 2, 3, 4)), 6)
    for name, array in plain.arrays.items():
        assert array.numpy() == pytest.approx(late.arrays[name].numpy(), rel=1e-5, abs=1e-6), name


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
    others = [100, 101, 102]
    assert [sorted(replies) for replies in shown] == [others, others, [*others, 103]]
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
    odd = [changed_in({2}, with_metric("loss", None))]
    odd += [changed_in({4}, with_metric("num-examples", 10**9))]
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
