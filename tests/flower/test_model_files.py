"""A deployment leaves its models on the server, with the module's own names."""

import numpy as np
import pytest
import torch
from torch import nn

import aqg
from aqg.flower import FlowerTask, make_client_app, make_server_app
from aqg.weights import read_notes

from tests.flower.memory_grid import MemoryGrid, server_context
from tests.problems import tiny_problem

PROBLEM = tiny_problem(num_clients=3, dtype="float32")


def make_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def task_of(context):
    samples = PROBLEM.clients[int(context.node_config["partition-id"])]
    features, labels = (torch.tensor(part) for part in samples)

    def train(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module.train()
        for _ in range(3):
            loss = nn.functional.cross_entropy(module(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    return FlowerTask.from_training(make_network(), train, len(labels))


def accuracy(module):
    assert PROBLEM.test is not None
    with torch.no_grad():
        outputs = module(torch.tensor(PROBLEM.test.features))
    return float((outputs.argmax(1).numpy() == PROBLEM.test.labels).mean())


def run(path, rounds, start=make_network, task=task_of, **options):
    config = {
        "num-clients": 3,
        "num-server-rounds": rounds,
        "alpha": 1 / 3,
        "recipe": "lean",
        "trust-partition-id": True,
        "round-timeout": 5.0,
        "start-timeout": 5.0,
        "run-dir": str(path / "run"),
        "client-state-dir": str(path / "nodes"),
    }
    nodes = {11 + 7 * index: {"partition-id": index} for index in range(3)}
    finals = []
    app = make_server_app(start(), on_finish=finals.append, **options)
    app(MemoryGrid(make_client_app(task), nodes, config), server_context(config))
    return finals


def test_the_final_and_the_best_model_load_into_a_module(tmp_path):
    seen = []

    def evaluate(module):
        seen.append(accuracy(module))
        return seen[-1]

    (final,) = run(tmp_path, 6, evaluate=evaluate)
    loaded = aqg.load_model(tmp_path / "run", make_network(), which="final")
    for name, value in final.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    best = aqg.load_model(tmp_path / "run", make_network()).eval()
    notes = read_notes(tmp_path / "run" / "best.safetensors")
    assert notes["measure"] == "test_accuracy"
    assert float(notes["value"]) == max(seen) == pytest.approx(accuracy(best))
    assert int(notes["rounds"]) == seen.index(max(seen))


def test_without_a_test_the_loss_decides(tmp_path):
    run(tmp_path, 3)
    assert read_notes(tmp_path / "run" / "best.safetensors")["measure"] == "loss"


def test_a_vector_has_one_name(tmp_path):
    def task(context):
        samples = PROBLEM.clients[int(context.node_config["partition-id"])]
        return FlowerTask.from_objective(PROBLEM.objective, samples.features, samples.labels)

    (final,) = run(tmp_path, 2, start=lambda: PROBLEM.initial_params, task=task)
    saved = aqg.load_model(tmp_path / "run", which="final")
    assert list(saved) == ["parameters"]
    assert np.array_equal(saved["parameters"], final)
