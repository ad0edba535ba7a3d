"""Metrics from a problem to records, tables, pictures and reports."""

import json

import numpy as np
import pytest

from aqg.cli.display import result_table
from aqg.objectives import Objective
from aqg.report.curves import curves_csv, result_of, summary_csv
from aqg.report.pictures import draw_comparison
from aqg.report.runs import compare, read_run
from aqg.runs.config import resolve
from aqg.runs.directory import Line, read_lines
from aqg.runs.loop import create_run, run
from aqg.sim.problem import Problem, Samples
from aqg.sim.record import RoundRecord

torch = pytest.importorskip("torch")
nn = torch.nn


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
    problem = Problem(
        objective,
        tuple(clients),
        objective.init_params(0),
        clients[0],
        metrics=["mse", "r2", largest_error],
    )
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
