"""A deployment leaves its models on the server, with the module's own names."""

import numpy as np
import pytest
import torch
from torch import nn

import aqg
from aqg.flower import FlowerTask
from aqg.weights import read_notes

from tests.flower.federation import PROBLEM, Federation, samples_of
from tests.flower.federation import task_of as vector_task


def make_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def task_of(context):
    samples = samples_of(context)
    features = torch.tensor(samples.features, dtype=torch.float32)
    labels = torch.tensor(samples.labels)

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
        outputs = module(torch.tensor(PROBLEM.test.features, dtype=torch.float32))
    return float((outputs.argmax(1).numpy() == PROBLEM.test.labels).mean())


def federation(path, rounds, task=task_of):
    times = {"round_timeout": 5.0, "start_timeout": 5.0}
    return Federation(path, task, rounds=rounds, alpha=1 / 3, recipe="lean", **times)


def test_the_final_and_the_best_model_load_into_a_module(tmp_path):
    seen = []

    def evaluate(module):
        seen.append(accuracy(module))
        return seen[-1]

    final = federation(tmp_path, 6).run(make_network(), evaluate=evaluate)
    loaded = aqg.load_model(tmp_path / "run", make_network(), which="final")
    for name, value in final.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    best = aqg.load_model(tmp_path / "run", make_network()).eval()
    notes = read_notes(tmp_path / "run" / "best.safetensors")
    assert notes["measure"] == "test_accuracy"
    assert float(notes["value"]) == max(seen) == pytest.approx(accuracy(best))
    assert int(notes["rounds"]) == seen.index(max(seen))


def test_without_a_test_the_loss_decides(tmp_path):
    federation(tmp_path, 3).run(make_network())
    assert read_notes(tmp_path / "run" / "best.safetensors")["measure"] == "loss"


def test_a_vector_has_one_name(tmp_path):
    final = federation(tmp_path, 2, vector_task).run()
    saved = aqg.load_model(tmp_path / "run", which="final")
    assert list(saved) == ["parameters"]
    assert np.array_equal(saved["parameters"], final)
