"""From run directories to tables, pictures and documents: small runs and the stored results."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from aqg.cli.app import run_app
from aqg.cli.reproduce import run_plan, show_results
from aqg.errors import ConfigError, RunError
from aqg.experiments.summary import Cost
from aqg.reproduce.execute import adopt_devices, keep_results, still_to_do
from aqg.reproduce.figures import all_figures
from aqg.reproduce.markdown import refresh, to_markdown
from aqg.reproduce.outcomes import (
    CURVES,
    META,
    RESIDUALS,
    RUNS,
    Outcome,
    Results,
    read_results,
)
from aqg.reproduce.plan import FULL, QUICK, make_plan
from aqg.reproduce.tables import all_tables

ROOT = Path(__file__).parents[2]
STORED = ROOT / "results"


@pytest.fixture(scope="module")
def stored():
    return read_results(STORED)


def test_the_documents_tables_are_those_of_the_data(stored):
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert text.count("<!-- table: ") == len(all_tables(stored))
    assert refresh(text, all_tables(stored)) == text


def test_the_documents_pictures_exist_and_are_small():
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    names = [part.split(")")[0] for part in text.split("](images/")[1:]]
    assert len(names) >= 9
    for name in names:
        assert 0 < (ROOT / "docs" / "images" / name).stat().st_size < 150_000


def test_the_stored_results_are_complete_and_small(stored):
    planned = {p.run.name for p in make_plan(FULL)}
    assert {outcome.name for outcome in stored.outcomes} == planned
    assert set(stored.curves) == planned
    assert sum(file.stat().st_size for file in STORED.iterdir()) < 3_000_000


def test_the_stored_results_say_what_the_documents_say(stored):
    def bits(recipe, partition, residual=1e-6):
        runs = stored.select(section="softmax", partition=partition, recipe=recipe)
        reached = [o.reached[residual].bits_per_param for o in runs if residual in o.reached]
        return sum(reached) / len(reached)

    assert bits("aqg-2", "iid") < 0.75 * bits("laq", "iid")  # the paper: 0.66
    assert bits("lean", "iid") < bits("aqg-2", "iid")
    assert bits("aqg-2", "label", 1e-3) < 0.75 * bits("laq", "label", 1e-3)
    for recipe in ("laq", "aqg-2"):  # 784-200-10
        assert all(o.ran_away for o in stored.select(section="network", recipe=recipe))
    assert not any(o.ran_away for o in stored.select(recipe="lean", section="dropouts"))
    augmented = stored.select(section="dropouts", recipe="aqg-augmented", dropout=0.9)
    assert all(o.ran_away for o in augmented)


SMALL = replace(QUICK, readings=(("sum", 0.002),), logistic_rounds=25)


def test_small_runs_go_all_the_way(tmp_path, data_dir):
    plan = make_plan(SMALL, sections=("logistic",))
    console = Console(file=io.StringIO(), width=200)
    assert run_plan(console, plan, tmp_path, 2, data_dir) == 0
    results = keep_results(plan, SMALL, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *(RUNS, CURVES, META, "tables.md", "figures", "runs")
    }
    pictures = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert pictures == ["figure-1-logistic-iid.png", "figure-3-logistic-noniid.png"]
    (qgd,) = results.select(recipe="qgd", partition="iid")
    assert (qgd.total.uploads, qgd.total.bits_per_param) == (18 * 25, 18 * 25 * 4)
    (gd,) = results.select(recipe="gd", partition="iid")
    assert gd.minimum == qgd.minimum == pytest.approx(70.34135772)
    assert set(gd.reached) == {r for r in RESIDUALS if r >= gd.residual}

    read = read_results(tmp_path)
    assert read.outcomes == results.outcomes
    assert read.select(recipe="lean") == results.select(recipe="lean")

    assert run_plan(console, plan, tmp_path, 2, data_dir) == 0
    show_results(console, read)
    shown = console.file.getvalue()
    assert "12 runs, 0 finished before" in shown
    assert "12 runs, 12 finished before" in shown
    assert "Table 1: the paper / ours (ratio)" in shown
    assert "Shortened: " in shown
    assert "3933 / " in shown

    elsewhere = make_plan(SMALL, "cuda", ("logistic",))
    assert still_to_do(adopt_devices(elsewhere, tmp_path), tmp_path) == []
    config = tmp_path / "runs" / plan[0].run.name / "config.toml"
    config.write_text(config.read_text().replace("bits = 4", "bits = 5"))
    with pytest.raises(ConfigError, match="the run has bits 5"):
        still_to_do(plan, tmp_path)


def test_unfinished_runs_are_left_out(tmp_path):
    (tmp_path / "runs").mkdir()
    results = keep_results(make_plan(QUICK), QUICK, tmp_path)
    assert results.outcomes == ()
    assert all_tables(read_results(tmp_path)) == []


def make_results(**changes):
    settings = {
        "name": "a",
        "section": "softmax",
        "recipe": "laq",
        "partition": "label",
        "scaling": "mean",
        "alpha": 0.02,
        "dropout": 0.0,
        "seed": 0,
        "minimum": 0.5,
        "start_loss": 2.5,
        "final_loss": 0.6,
        "peak_loss": 14.0,
        "test_accuracy": 0.9,
        "total": Cost(4000, 900, 3600, 500_000),
        "reached": {0.1: Cost(100, 90, 360, 50_000)},
    }
    outcome = Outcome(**{**settings, **changes})
    about = json.loads(json.dumps({**vars(FULL), "notes": []}))
    return outcome, Results((outcome,), {}, about)


def test_a_run_that_does_not_arrive_is_shown_as_such():
    outcome, results = make_results()
    results = Results((outcome,), {"a": read_results(STORED).curves[_any_name()]}, results.about)
    tables = {table.name: to_markdown(table) for table in all_tables(results)}
    assert "| 2219 / - | 921 / - |" in tables["table1"]
    assert "does not come within 1e-06" in tables["differences"]


def _any_name():
    return next(iter(read_results(STORED).curves))


def test_ended_above_its_start():
    assert make_results(final_loss=math.inf)[0].ran_away
    assert make_results(final_loss=3.0)[0].ran_away
    assert not make_results()[0].ran_away


def test_pictures(stored):
    chosen = tuple(
        o for o in stored.outcomes if o.section == "network" or (o.dropout, o.seed) == (0.9, 0)
    )
    pictures = all_figures(Results(chosen, stored.curves, stored.about))
    names = ["figure-6-dropouts-iid", "figure-6-dropouts-noniid", "network-784-200-10"]
    assert sorted(pictures) == names
    assert all(picture.startswith(b"\x89PNG") for picture in pictures.values())


def test_errors_are_one_line(tmp_path, capsys):
    with pytest.raises(RunError, match="holds no results"):
        read_results(tmp_path)
    (tmp_path / META).write_text("{}")
    (tmp_path / RUNS).write_text("name\nx\n")
    (tmp_path / CURVES).write_text("name\n")
    with pytest.raises(RunError, match="damaged"):
        read_results(tmp_path)
    with pytest.raises(RunError, match="asks for table 'nothing'"):
        refresh("<!-- table: nothing -->\n<!-- end -->", [])
    assert run_app(["reproduce", "--from", "x", "--quick"]) == 2
    assert run_app(["reproduce", "--only", "x"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "choose from table1" in errors[1]


def test_missing_data_is_explained(tmp_path, capsys):
    broken = tmp_path / "data"
    (broken / "lag" / "data9").mkdir(parents=True)
    (broken / "lag" / "data9" / "data.txt").write_text("not the data")
    out = tmp_path / "out"
    arguments = ["reproduce", "--quick", "--only", "logistic", "--jobs", "1", "--out", str(out)]
    assert run_app([*arguments, "--data-dir", str(broken)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "is damaged" in error
    assert not out.exists()
