"""A ResNet with batch normalization ends where plain federated averaging does."""

import copy
import json
from functools import cache

import numpy as np
import pytest
import torch

from aqg.flower import FlowerTask, make_client_app, make_server_app

from tests.flower import resnet
from tests.flower.memory_grid import MemoryGrid, server_context

ROUNDS = 10
TWO_POINTS = 0.02
THREE_POINTS = 0.03


@cache
def federated_averaging():
    """Return the accuracy of plain federated averaging, of parameters and statistics alike."""
    clients, _ = resnet.load()
    sizes = np.array([len(labels) for _, labels in clients])
    net = resnet.make_net()
    for _ in range(ROUNDS):
        states = []
        for client in range(resnet.NUM_CLIENTS):
            local = copy.deepcopy(net)
            resnet.train(local, client)
            states.append(local.state_dict())
        weights = torch.tensor(sizes / sizes.sum())
        mean = {
            name: sum(w * state[name] for w, state in zip(weights, states, strict=True))
            for name in states[0]
        }
        net.load_state_dict(mean)
    return resnet.accuracy(net)


def make_task(context):
    """Return the training on a node's share, in a loop as apps have it."""
    client = int(context.node_config["partition-id"])
    num_samples = len(resnet.load()[0][client][1])
    net = resnet.make_net()
    return FlowerTask.from_training(net, lambda net: resnet.train(net, client), num_samples)


@pytest.mark.soak
def test_in_flower(tmp_path):
    config = {
        "num-clients": resnet.NUM_CLIENTS,
        "num-server-rounds": ROUNDS,
        "run-dir": str(tmp_path / "run"),
    }
    config |= {"recipe": "auto", "step": "fixed", "trust-partition-id": True, "alpha": 0.0}
    config |= {"client-state-dir": str(tmp_path / "state")}
    nodes = {11 + client: {"partition-id": client} for client in range(resnet.NUM_CLIENTS)}
    server = make_server_app(resnet.make_net(), evaluate=resnet.accuracy)
    server(MemoryGrid(make_client_app(make_task), nodes, config), server_context(config))
    text = (tmp_path / "run" / "rounds.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert all(np.isfinite(row["test_accuracy"]) for row in rows)
    assert not any(row.get("incidents") for row in rows)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.9
    assert summary["test_accuracy"] >= federated_averaging() - THREE_POINTS  # after ten rounds


@cache
def simulated(recipe):
    """Return the accuracy of the same net in the simulator, on minibatches."""
    simulation = resnet.make_simulation(recipe, resnet.make_net())
    records = [simulation.run_round(evaluate=False) for _ in range(resnet.SIMULATED_ROUNDS)]
    assert not any(record.faults for record in records)
    buffers = simulation.statistics.buffers()
    for spec in simulation.problem.objective.model_layout.statistics:
        if spec.name.endswith("running_var"):
            assert (buffers.values[spec.place] > 0).all(), spec.name
    return resnet.simulated_accuracy(simulation)


@pytest.mark.soak
def test_in_the_simulator():
    accuracies = {recipe: simulated(recipe) for recipe in ("gd", "auto", "lean", "eden", "qsgd")}
    assert accuracies["gd"] > 0.9
    assert min(accuracies.values()) >= accuracies["gd"] - TWO_POINTS, accuracies
