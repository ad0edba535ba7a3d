"""The drop-in used and broken: what nodes say, what strategies make, and one line of the two."""

import copy
import logging

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg

from aqg.flower import Buffered, Compressed, aqg_mod
from aqg.flower.compressed import checks_of

from tests.flower.small_app import (
    NUM_CLIENTS,
    app_answering,
    app_of,
    distance,
    everyone,
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


def with_two_metrics(content):
    content["more"] = MetricRecord({"num-examples": 3})


def with_more_arrays(content):
    content["more"] = ArrayRecord({"x": Array(np.array([np.inf]))})


BAD = [
    (with_array("bn.running_mean", np.nan), "'bn.running_mean' holds NaN"),
    (with_array("bn.running_mean", np.inf), "'bn.running_mean' holds"),
    (with_array("layer.frozen", np.nan), "'layer.frozen' holds NaN"),
    (with_array("layer.weight", np.nan), "'layer.weight' holds NaN"),
    (with_more_arrays, "'x' of its record 'more' holds NaN"),
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
    (with_two_metrics, "2 MetricRecords; it must have one"),
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
    replies = {
        str(n): RecordDict({"metrics": MetricRecord({"num-examples": 1, "losses": [0.5] * n})})
        for n in (1, 2, 3)
    }
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
        received.extend(
            np.isfinite(array.numpy()).all() for array in message.content["arrays"].values()
        )
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


def test_only_the_servers_line(caplog):
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


def test_only_the_clients_line(caplog):
    caplog.set_level(logging.WARNING)
    result = run(FedAvg(**everyone()), make_grid(), rounds=8)
    assert distance(result.arrays) < 0.01
    lines = [line for line in caplog.messages if "nothing is compressed" in line]
    assert len(lines) == NUM_CLIENTS  # each node has a log of its own
    assert "Compressed(...)" in lines[0]


# The end of a run.


def test_nodes_forget_a_run_that_ended_well(tmp_path):
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


def test_nodes_that_remember_in_the_context_are_not_asked(monkeypatch):
    monkeypatch.setenv("AQG_STATE_DIR", "context")
    grid = make_grid()
    run(Compressed(FedAvg(**unevaluated())), grid, rounds=3)
    assert set(grid.rounds.values()) == {3}
