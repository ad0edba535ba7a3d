"""The examples with data of their own: each is one command, here on a tenth of the data."""

import json
from pathlib import Path

import numpy as np
import pytest

from aqg.cli.app import run_app
from aqg.runs.directory import ROUNDS, SUMMARY
from aqg.spec import Code

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = {
    "heart": "heart/processed.va.data",
    "watch": "watch/watch_windows.npz",
    "shakespeare": "shakespeare/roles.json.gz",
    "lora": "shakespeare/roles.json.gz",
    "cifar10": "cifar10.npz",
}


def spec(name, **options):
    rest = "".join(f":{key}={value}" for key, value in options.items())
    return f"{EXAMPLES / name}.py:problem{rest}"


def need(name, data_dir):
    if not (data_dir / FILES[name]).exists():
        pytest.skip(f"needs {FILES[name]} in the data directory; see examples/{name}.py")


@pytest.mark.parametrize(
    "name", ["heart", *(pytest.param(n, marks=pytest.mark.soak) for n in FILES if n != "heart")]
)
def test_an_example_is_one_command(name, data_dir, tmp_path):
    need(name, data_dir)
    problem = spec(name, fraction=0.1)
    options = ["--data-dir", str(data_dir), "--rounds", "3", "--recipe", "gd"]
    assert run_app(["run", "--problem", problem, *options, "--out", str(tmp_path / "out")]) == 0
    run = tmp_path / "out/gd"
    lines = [json.loads(line) for line in (run / ROUNDS).read_text().splitlines()]
    summary = json.loads((run / SUMMARY).read_text())
    assert summary["final_loss"] < lines[0]["loss"]
    assert (run / "best.safetensors").exists()


def make(name, data_dir, **options):
    need(name, data_dir)
    code = Code.parse(spec(name, **options))
    return code.call(data_dir=data_dir, seed=0, dtype="float32")


def test_the_watch_is_tested_on_other_persons(data_dir):
    problem = make("watch", data_dir)
    with np.load(data_dir / FILES["watch"]) as data:
        sizes = np.bincount(data["subject"])
    assert [len(client.labels) for client in problem.clients] == sizes[1:9].tolist()
    assert len(problem.test.labels) == sizes[9:].sum()


def test_shakespeare_has_a_client_per_role(data_dir):
    problem = make("shakespeare", data_dir, fraction=0.1)
    assert problem.num_clients == 4
    for samples in (*problem.clients, problem.test):
        # The target at each place is the next input.
        assert np.array_equal(samples.features[0, 1:], samples.labels[0, :-1])
    assert [metric.name for metric in problem.metrics] == ["accuracy", "perplexity"]


@pytest.mark.soak
def test_lora_sends_its_thin_matrices_alone(data_dir):
    problem = make("lora", data_dir, fraction=0.01)
    names = [spec.name for spec in problem.objective.model_layout.parameters]
    assert len(names) == 8
    assert all("lora_" in name for name in names)
    total = sum(p.numel() for p in problem.objective.module.parameters())
    assert problem.objective.num_params < total / 20
