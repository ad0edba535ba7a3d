"""Coarse messages: what they leave out, which strategies get them, and that training goes on."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg

from aqg.core.quantizers import Request
from aqg.errors import ConfigError
from aqg.flower import Compressed, aqg_mod
from aqg.flower.dropin.coarse import Coarse, recipe_of
from aqg.wire import decode, encode

from tests.flower.memory_grid import MemoryGrid

SIZE = 12_000
"""More than a small model, whose messages are finer."""
NODES = {"min_train_nodes": 3, "min_available_nodes": 3, "fraction_evaluate": 0.0}


@pytest.fixture(autouse=True)
def _own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("AQG_STATE_DIR", str(tmp_path / "state"))


def quantize(vector, width=4.0):
    square = float(np.vdot(vector.astype(np.float64), vector))
    return Coarse(width).quantize(vector, Request(8, squared_norm=square))


def test_few_coordinates_hold_much_of_an_update():
    rng = np.random.default_rng(0)
    vector = (rng.standard_normal(100_000) * np.exp(1.5 * rng.standard_normal(100_000))).astype(
        "f4"
    )
    upload = quantize(vector)
    values = upload.values(np.float32)
    assert np.count_nonzero(values) < 0.02 * len(vector)
    assert np.square(vector - values).sum() < 0.5 * np.square(vector).sum()
    frame = encode(upload)
    assert len(frame) < 2500
    assert decode(frame, len(vector)) == upload


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-30, 1.0, 1e30])
def test_of_any_size(scale):
    vector = (scale * np.random.default_rng(1).standard_normal(5000)).astype(np.float32)
    values = quantize(vector, 1.0).values(np.float32)
    assert np.isfinite(values).all()
    square = np.square(vector.astype(np.float64)).sum()
    assert np.square(vector.astype(np.float64) - values).sum() <= max(0.2 * square, 5000 * 1e-76)


def test_a_coordinate_beyond_the_grid_is_cut():
    vector = np.full(10_000_000, 1e-6, np.float32)
    vector[3] = 1.0  # 3,000 times the root mean square
    values = quantize(vector, 1.0).values(np.float32)
    assert 0 < values[3] < 1
    assert not values[4:].any()


def test_only_strategies_that_average_get_them():
    class Own(FedAvg):
        def aggregate_train(self, server_round, replies):
            return super().aggregate_train(server_round, replies)

    class Renamed(FedAvg):
        pass

    privacy = flower.DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 1.0, 3)
    averaging = [FedAvg(), Renamed(), flower.FedAvgM(), flower.FedAdam(), flower.FedProx()]
    others = [Own(), flower.FedMedian(), flower.Krum(), flower.FedTrimmedAvg(), privacy]
    assert {Compressed(s).settings.recipe for s in averaging} == {"coarse"}
    assert {Compressed(s).settings.downlink.name for s in averaging} == {"coarse"}
    assert {Compressed(s).settings.recipe for s in others} == {"lean"}
    assert {Compressed(s).settings.downlink.name for s in others} == {"condensed"}
    chosen = Compressed(FedAvg(), recipe="auto", downlink="coarse:width=3").settings
    assert (chosen.recipe, chosen.downlink.width) == ("auto", 3.0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"recipe": "coarse:width=-1"}, "width is -1.0; it must be at least 0"),
        ({"recipe": "coarse:error=1"}, "no option 'error'; it has: width"),
        ({"recipe": "coarse:width=wide"}, "'wide', not a number"),
        ({"downlink": "coarse:width=nan"}, "width is nan"),
        ({"downlink": "exact"}, "here it is 'condensed' or 'coarse'"),
    ],
)
def test_settings_that_cannot_be(options, reason):
    with pytest.raises(ConfigError, match=reason):
        Compressed(FedAvg(), **options)


def test_the_recipe_is_known_by_its_settings():
    assert repr(recipe_of("coarse", 4, 100)) != repr(recipe_of("coarse:width=3", 4, 100))


def train(targets, pace, noise, rounds, wrap=lambda strategy: strategy):
    """Run FedAvg on nodes that go part of the way to their targets; return model and strategy."""
    app = ClientApp(mods=[aqg_mod])

    @app.train()
    def train_model(message, context):
        number = int(context.node_config["partition-id"])
        model = message.content["arrays"]["w"].numpy()
        rng = np.random.default_rng([number, message.content["config"]["server-round"]])
        way = targets[number] - model + noise * rng.standard_normal(SIZE)
        trained = (model + pace * way).astype(np.float32)
        metrics = MetricRecord({"num-examples": 1})
        content = {"arrays": ArrayRecord({"w": Array(trained)}), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    class Grid(MemoryGrid):
        def send_and_receive(self, messages, *, timeout=None):
            return self.pull_messages(set(self.push_messages(messages)))

    grid = Grid(app, {100 + m: {"partition-id": m} for m in range(3)})
    strategy = wrap(FedAvg(**NODES))
    first = ArrayRecord({"w": Array(np.zeros(SIZE, np.float32))})
    return strategy.start(grid, first, num_rounds=rounds).arrays["w"].numpy(), strategy


def test_noisy_training_goes_as_far_as_without():
    rng = np.random.default_rng(2)
    target = rng.standard_normal(SIZE) * np.exp(1.5 * rng.standard_normal(SIZE))
    stock, _ = train([target] * 3, 0.1, 1.0, 30)
    model, strategy = train([target] * 3, 0.1, 1.0, 30, Compressed)
    start, reached, goal = (np.linalg.norm(target - m) for m in (0, model, stock))
    assert goal < 0.1 * start
    assert reached < 0.15 * start
    traffic = strategy.counts.train
    assert traffic.up < traffic.plain_up / 20
    assert traffic.down - 3 * 4 * SIZE < traffic.plain_down / 20


def test_updates_that_repeat_themselves_do_not_overshoot():
    rng = np.random.default_rng(3)
    targets = rng.standard_normal((3, SIZE))
    model, strategy = train(targets, 0.3, 0.0, 30, Compressed)
    optimum = targets.mean(axis=0)
    assert np.linalg.norm(model - optimum) < 0.1 * np.linalg.norm(optimum)
    assert not strategy.counts.refused
