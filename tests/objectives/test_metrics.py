"""Metrics: the numbers of the textbooks, silence otherwise, and the way into records and tables."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from aqg.cli.display import result_table
from aqg.errors import ConfigError
from aqg.objectives import Objective
from aqg.objectives.metrics import (
    METRICS,
    DoesNotApply,
    Metric,
    default_metrics,
    make_metrics,
    measure,
)
from aqg.report.curves import curves_csv, result_of, summary_csv
from aqg.report.pictures import draw_comparison
from aqg.report.runs import compare, read_run
from aqg.runs.config import resolve
from aqg.runs.directory import Line, read_lines
from aqg.runs.loop import create_run, run
from aqg.sim.problem import Problem, Samples
from aqg.sim.record import RoundRecord

RANDOM = np.random.default_rng(0)


def value(name, outputs, targets):
    return measure([METRICS[name]], [(outputs, targets)], required=True)[name]


def test_accuracy_of_classes_sequences_labels_and_logits():
    scores, labels = RANDOM.normal(size=(40, 3)), RANDOM.integers(0, 3, 40)
    expected = np.mean(scores.argmax(1) == labels)
    assert value("accuracy", scores, labels) == expected
    assert value("accuracy", torch.from_numpy(scores), torch.from_numpy(labels)) == expected
    assert value("accuracy", scores.argmax(1), labels) == expected
    tokens = RANDOM.normal(size=(4, 5, 7))
    wanted = RANDOM.integers(0, 7, (4, 5))
    by_token = np.mean(tokens.argmax(-1) == wanted)
    assert value("accuracy", tokens, wanted) == by_token
    assert value("accuracy", np.moveaxis(tokens, -1, 1), wanted) == by_token
    logits = np.array([[-1.0], [2.0], [3.0]])
    assert value("accuracy", logits, np.array([0, 1, 0])) == pytest.approx(2 / 3)
    several = np.array([[1.0, -1.0], [-2.0, 2.0]])
    assert value("accuracy", several, np.array([[1.0, 1.0], [0.0, 1.0]])) == 0.75
    half = torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16)
    assert value("accuracy", half, torch.tensor([1])) == 1
    # Targets that do not count are left out.
    scores = np.eye(3)[[0, 1, 2, 0]]
    labels = np.array([0, 1, -100, 2])
    assert value("accuracy", scores, labels) == pytest.approx(2 / 3)
    mean = torch.nn.functional.cross_entropy(torch.from_numpy(scores), torch.from_numpy(labels))
    assert value("perplexity", scores, labels) == pytest.approx(math.exp(mean), rel=1e-12)


def test_errors_of_numbers():
    outputs, targets = RANDOM.normal(size=(30, 2)), RANDOM.normal(size=(30, 2))
    assert value("mse", outputs, targets) == pytest.approx(np.mean((outputs - targets) ** 2))
    residual = ((targets - outputs) ** 2).sum(0)
    total = ((targets - targets.mean(0)) ** 2).sum(0)
    assert value("r2", outputs, targets) == pytest.approx(np.mean(1 - residual / total))
    assert value("r2", targets, targets) == 1


@pytest.mark.parametrize("name", METRICS)
def test_batches_give_what_the_whole_gives(name):
    outputs = RANDOM.normal(size=(30, 4))
    targets = RANDOM.normal(size=(30, 4)) if name in ("mse", "r2") else RANDOM.integers(0, 4, 30)
    parts = [(outputs[i : i + 7], targets[i : i + 7]) for i in range(0, 30, 7)]
    whole = value(name, outputs, targets)
    assert measure([METRICS[name]], parts, required=True)[name] == pytest.approx(whole, rel=1e-12)


def test_what_makes_no_sense_is_left_out_unless_asked_for_and_failures_are_named():
    with pytest.raises(DoesNotApply, match=r"outputs have shape \(5, 1\) and targets \(5,\)"):
        value("mse", np.zeros((5, 1)), np.zeros(5))
    with pytest.raises(DoesNotApply, match="either axis 1 or the last may count classes"):
        value("accuracy", np.zeros((2, 3, 3)), np.zeros((2, 3), int))
    outputs, numbers = RANDOM.normal(size=8), RANDOM.normal(size=8)
    assert measure([METRICS["accuracy"]], [(outputs, numbers)], required=False) == {}
    with pytest.raises(DoesNotApply, match="stands for a label 0 or 1; a target is"):
        value("accuracy", outputs, numbers)
    with pytest.raises(DoesNotApply, match="accuracy needs classes; the targets are float64"):
        value("accuracy", np.zeros((8, 3)), numbers)
    with pytest.raises(DoesNotApply, match="perplexity needs classes"):
        value("perplexity", np.zeros((8, 3)), numbers)
    with pytest.raises(DoesNotApply, match="constant"):
        value("r2", outputs, np.ones(8))

    broken = Metric("broken", whole=lambda o, t: 1 / 0)
    with pytest.raises(ConfigError, match="metric 'broken' failed: ZeroDivisionError"):
        measure([broken], [(np.zeros(2), np.zeros(2))], required=False)
    text = Metric("text", whole=lambda o, t: "good")
    with pytest.raises(ConfigError, match="metric 'text' returned a str, not a number"):
        measure([text], [(np.zeros(2), np.zeros(2))], required=False)
    with pytest.raises(ConfigError, match="needs one of whole= and sums="):
        Metric("nothing")


def test_several_outputs():
    logits, labels = RANDOM.normal(size=(6, 3)), RANDOM.integers(0, 3, 6)
    expected = value("accuracy", logits, labels)
    tensor = torch.from_numpy(logits)
    assert value("accuracy", {"hidden": tensor, "logits": tensor}, labels) == expected
    assert value("accuracy", (tensor, torch.zeros(6)), labels) == expected
    found = measure(default_metrics(labels), [({"boxes": tensor}, labels)], required=False)
    assert found == {}

    def boxes(outputs, targets):
        return float(outputs["boxes"].sum()) + len(targets)

    parts = [({"boxes": tensor[:4]}, labels[:4]), ({"boxes": tensor[4:]}, labels[4:])]
    found = measure(make_metrics(boxes), parts, required=True)["boxes"]
    assert found == pytest.approx(float(tensor.sum()) + 6)


def largest_error(outputs, targets):
    return float((outputs - targets).abs().max())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the directory and the result of a regression with batch normalization."""
    random = np.random.default_rng(0)
    clients = []
    for size in (24, 30, 36):
        features = random.normal(size=(size, 3))
        clients.append(Samples(features, features @ np.ones((3, 1))))
    torch.manual_seed(0)
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    objective = Objective.from_module(module, nn.functional.mse_loss)
    start, metrics = objective.init_params(0), ["mse", "r2", largest_error]
    problem = Problem(objective, tuple(clients), start, clients[0], metrics=metrics)
    settings = {"recipe": "lean", "clients": 3, "rounds": 12, "alpha": 0.1, "batch_size": 8}
    (config,) = resolve({**settings, "dataset": "digits", "partition": "iid"})
    directory = tmp_path_factory.mktemp("run") / "lean"
    create_run(directory, config)
    return directory, run(config, problem, None, directory)


def test_every_metric_is_in_records_tables_pictures_and_reports(finished):
    directory, result = finished
    rows = [json.loads(text) for text in (directory / "rounds.jsonl").read_text().splitlines()]
    assert all({"test_mse", "test_r2", "test_largest_error"} <= set(row) for row in rows)
    assert not any("test_accuracy" in row for row in rows)
    assert rows[-1]["test_mse"] < rows[0]["test_mse"]
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["test_mse"] == result["test_mse"]
    assert summary["test_accuracy"] is None
    assert summary["metrics"]["r2"] == {"higher_is_better": True, "percent": False}
    total = sum(row["statistics_upload_bytes"] for row in rows)  # of batch normalization
    assert summary["statistics_upload_bytes"] == total > 0
    assert [line.metrics["mse"] for line in read_lines(directory)] == [r["test_mse"] for r in rows]

    table = result_table([result]).to_terminal()
    cells = {column.header: list(column.cells) for column in table.columns}
    assert {"test mse", "test largest error"} < set(cells)
    assert "test acc" not in cells
    assert cells["test r2"] == [f"{result['test_r2']:.4g}"]

    found = read_run(directory, "lean")
    assert set(found.metrics) == {"mse", "r2", "largest_error"}
    assert "test_mse" not in found.extras
    assert result_of(found)["metrics"]["mse"] == result["test_mse"]
    assert curves_csv([found]).splitlines()[0].endswith("residual,mse,r2,largest_error")
    assert "largest_error" in summary_csv([found]).splitlines()[0]
    assert draw_comparison(compare([found]), "regression").startswith(b"\x89PNG")


def test_a_metric_beyond_all_numbers_is_none():
    row = {"round": 1, "loss": 0.5, "widths": [1, 0], "upload_bytes": 9}
    row |= {"download_bytes": 4, "test_accuracy": 0.75}
    line = Line.of(row)
    assert line == Line(RoundRecord(1, 0.5, (1, 0), 9, download_bytes=4), {"accuracy": 0.75})
    unbounded = Line(line.record, {"perplexity": float("inf")})
    assert json.loads(unbounded.to_json())["test_perplexity"] is None
