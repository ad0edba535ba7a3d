"""Cost and delay: levels, points, and what was measured elsewhere."""

import json

import pytest

from aqg.errors import RunError
from aqg.report.frontier import of_runs, of_studies
from aqg.report.runs import compare, read_runs
from aqg.report.write import write_report
from aqg.runs.directory import ROUNDS


def panels_of(*directories):
    return of_runs(compare(read_runs(directories)))


def test_points_are_where_the_level_is_reached_first(make_run, tmp_path):
    for recipe, decay in (("lean", 0.05), ("gd", 0.1), ("laq", 0.15)):
        for seed in (0, 1):
            make_run(tmp_path / f"{recipe}-{seed}", recipe, seed, decay=decay)
    loss, accuracy, perplexity = panels_of(tmp_path)
    assert loss.goal == "loss is within 0.5 of its minimum"
    assert accuracy.goal == "test accuracy is at least 89.0%"  # 90% at the end, less a point
    assert perplexity.goal.startswith("test perplexity is at most ")
    points = {point.recipe: point for point in loss.points}
    assert points["laq"].x[0] < points["gd"].x[0] < points["lean"].x[0]
    # Held to the file: bytes of both directions in all rounds before the level was reached.
    rows = [json.loads(line) for line in (tmp_path / "gd-0" / ROUNDS).read_text().splitlines()]
    reached = next(row["round"] for row in rows if row["loss"] - 0.25 <= 0.5)
    spent = sum(r["upload_bytes"] + r["download_bytes"] for r in rows if r["round"] < reached)
    assert points["gd"].x[1] <= reached - 1 <= points["gd"].x[2]
    assert spent in points["gd"].y[1:]
    assert all(point.is_reached_by_all for point in loss.points)


def test_who_does_not_get_there_is_named(make_run, tmp_path):
    for recipe, decay in (("lean", 0.1), ("gd", 0.1), ("laq", 0.001)):
        make_run(tmp_path / recipe, recipe, decay=decay)
    loss = panels_of(tmp_path)[0]
    assert [point.recipe for point in loss.points] == ["gd", "lean"]
    assert loss.never == ("laq",)


def test_problems_are_not_mixed_and_one_recipe_is_no_comparison(make_run, tmp_path):
    make_run(tmp_path / "alone", "lean")
    assert panels_of(tmp_path) == []
    make_run(tmp_path / "elsewhere", "gd", partition="iid")
    assert panels_of(tmp_path) == []
    make_run(tmp_path / "beside", "gd")
    panels = panels_of(tmp_path)
    assert {panel.title for panel in panels} == {"digits, label"}
    assert {point.recipe for panel in panels for point in panel.points} == {"lean", "gd"}


@pytest.fixture
def study(tmp_path):
    """Return a directory with what a swap-in comparison found, without its runs."""
    mean = {"value": 2.0, "low": 1.0, "high": 4.0}
    cell = {"task": "t", "goal": "plateau", "num_seeds": 5, "num_reached": 5, "same_as": None}
    cells = [
        cell | {"recipe": "fedavg", "cost": mean, "delay": mean},
        cell | {"recipe": "stc", "cost": mean, "delay": mean, "num_reached": 3},
        cell | {"recipe": "qsgd", "cost": None, "delay": None, "num_reached": 0},
        cell | {"recipe": "eden", "cost": mean, "delay": mean, "same_as": "stc"},
        cell | {"recipe": "stc", "cost": mean, "delay": mean, "goal": "90%"},
    ]
    (tmp_path / "results.json").write_text(json.dumps({"cells": cells}))
    return tmp_path


def test_a_study_has_a_panel_for_each_task_and_a_page_without_runs(study):
    found = of_studies([study])
    assert list(found) == [study]
    [panel] = found[study]
    reached = [(point.recipe, point.is_reached_by_all) for point in panel.points]
    assert reached == [("fedavg", True), ("stc", False)]
    assert panel.points[0].x == [2.0, 1.0, 4.0]
    assert panel.points[1].x == [2.0, 2.0, 2.0]  # an interval of three runs says nothing
    assert panel.never == ("qsgd",)
    assert write_report([study], study / "report.html") == ([study / "report.html"], 0)
    assert "in the place of federated averaging" in (study / "report.html").read_text()


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "cannot be read as JSON"), ('{"cells": [{"goal": "plateau", "delay": 1}]}', "'task'")],
)
def test_a_damaged_study_is_named(content, said, tmp_path):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(RunError, match=said):
        write_report([tmp_path], tmp_path / "report.html")
