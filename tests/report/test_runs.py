"""Reading run directories: every state a run can be in, and every kind of damage."""

from __future__ import annotations

import json

import numpy as np
import pytest

from aqg.errors import RunError
from aqg.report.runs import find_runs, read_run, read_runs
from aqg.runs.directory import CONFIG, ROUNDS, SUMMARY
from aqg.studies.sweep import GRID


def change_lines(directory, change):
    file = directory / ROUNDS
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        change(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_comes_back_as_written(make_run, tmp_path):
    run = read_run(make_run(tmp_path / "run", rounds=30, fault="lost"), "run")
    assert run.recipe == "lean"
    assert run.widths.shape == (30, 10)
    assert run.uploads.sum() == run.summary["uploads"] == (run.widths > 0).sum()
    assert run.bits.sum() == run.summary["bits_per_param"]
    assert run.upload_bytes.sum() == run.summary["upload_bytes"]
    assert run.minimum == pytest.approx(0.25)
    assert [(fault.round, fault.client, fault.text) for fault in run.faults] == [(3, 1, "lost")]
    assert run.extras == {}


def test_an_unfinished_run_is_read_as_far_as_it_came(make_run, tmp_path):
    directory = make_run(tmp_path / "run", finished=False)
    with (directory / ROUNDS).open("a") as file:
        file.write('{"round": 41, "lo')
    run = read_run(directory, "run")
    assert len(run.rounds) == 40
    assert run.summary is None
    assert run.minimum is None


def test_an_unfinished_run_learns_the_minimum_from_its_neighbor(make_run, tmp_path):
    make_run(tmp_path / "both" / "lean")
    make_run(tmp_path / "both" / "gd", recipe="gd", finished=False)
    make_run(tmp_path / "both" / "other", recipe="gd", finished=False, l2=0.5)
    minima = {run.name: run.minimum for run in read_runs([tmp_path / "both"])}
    assert minima["both/gd"] == minima["both/lean"] == pytest.approx(0.25)
    assert minima["both/other"] is None


def test_a_run_that_has_not_begun(make_run, tmp_path):
    directory = make_run(tmp_path / "run", finished=False)
    (directory / ROUNDS).unlink()
    (run,) = read_runs([directory])
    assert len(run.rounds) == 0
    assert run.widths.shape == (0, 0)


def test_other_numbers_are_kept_and_other_things_ignored(make_run, tmp_path):
    directory = make_run(tmp_path / "run", rounds=4)

    def change(row):
        row["latency"] = 0.5 * row["round"]
        row["node"] = {"id": 3}
        if row["round"] == 2:
            row["resyncs"] = 1
            row["incidents"] = [
                {"client": 7, "node": 1, "kind": "resync", "text": "began from zero"},
                {"client": 7, "node": 1, "kind": "fault", "text": "told above"},
            ]

    change_lines(directory, change)
    run = read_run(directory, "run")
    assert set(run.extras) == {"latency", "resyncs"}
    np.testing.assert_array_equal(run.extras["latency"], [0.5, 1, 1.5, 2])
    np.testing.assert_array_equal(run.extras["resyncs"], [np.nan, 1, np.nan, np.nan])
    assert [(f.client, f.text) for f in run.faults] == [(7, "resync: began from zero")]


def test_clients_that_join_later_were_away_before(make_run, tmp_path):
    directory = make_run(tmp_path / "run", rounds=3)

    def change(row):
        row["widths"] = [4] * row["round"]

    change_lines(directory, change)
    assert read_run(directory, "run").widths.tolist() == [[4, -1, -1], [4, 4, -1], [4, 4, 4]]


def test_directories_of_runs(make_run, tmp_path):
    for seed in (0, 9, 10):
        make_run(tmp_path / "sweep" / f"seed-{seed}", seed=seed, rounds=2)
    (tmp_path / "batch").mkdir()
    (tmp_path / "batch" / CONFIG).write_text('recipe = ["lean", "gd", "laq"]\n')
    for recipe in ("gd", "laq", "lean"):
        make_run(tmp_path / "batch" / recipe, recipe=recipe, rounds=2)
    assert [path.name for path in find_runs(tmp_path / "sweep")] == ["seed-0", "seed-9", "seed-10"]
    assert [path.name for path in find_runs(tmp_path / "batch")] == ["lean", "gd", "laq"]
    grid = '[grid]\nrecipe = ["lean", "gd"]\nseed = [9, 0, 10]\n'
    (tmp_path / "sweep" / GRID).write_text(grid)
    assert [path.name for path in find_runs(tmp_path / "sweep")] == ["seed-9", "seed-0", "seed-10"]
    assert len(find_runs(tmp_path)) == 6
    mixed = [tmp_path / "sweep", tmp_path / "batch" / "gd", tmp_path / "batch"]
    assert len(read_runs(mixed)) == 6  # a run named twice is one


def damage_line(directory):
    lines = (directory / ROUNDS).read_text().splitlines()
    lines[2] = lines[2][:20]
    (directory / ROUNDS).write_text("\n".join(lines) + "\n")


def drop_key(directory):
    change_lines(directory, lambda row: row.pop("upload_bytes"))


def repeat_rounds(directory):
    file = directory / ROUNDS
    file.write_text(file.read_text() * 2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_line, "line 3 is not valid JSON"),
        (drop_key, "'upload_bytes' is missing"),
        (repeat_rounds, "round numbers must rise"),
        (lambda run: (run / ROUNDS).write_text("3\n"), "line 1 is not a JSON object"),
        (lambda run: (run / SUMMARY).write_text("{"), "delete it and resume"),
        (lambda run: (run / SUMMARY).write_text("[]"), "not a JSON object"),
        (lambda run: (run / CONFIG).write_text("recipe = ["), "not valid TOML"),
        (lambda run: (run / CONFIG).write_bytes(b"\xff"), "not valid TOML"),
        (lambda run: (run / CONFIG).unlink(), "is not a run directory: it has no config.toml"),
    ],
    ids=[
        "cut line",
        "lost key",
        "rounds twice",
        "no object",
        "cut summary",
        "summary list",
        "cut config",
        "no text",
        "no config",
    ],
)
def test_damage_is_named_in_one_line(make_run, tmp_path, damage, message):
    directory = make_run(tmp_path / "run", rounds=5)
    damage(directory)
    with pytest.raises(RunError, match=message) as caught:
        read_runs([directory])
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)


def test_no_run_directory(tmp_path):
    with pytest.raises(RunError, match="does not exist"):
        find_runs(tmp_path / "nothing")
    with pytest.raises(RunError, match="is not a run directory and holds none"):
        find_runs(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is not a directory"):
        find_runs(tmp_path / "file")


def test_another_programs_config_is_no_run(make_run, tmp_path):
    make_run(tmp_path / "auto", rounds=2)
    (tmp_path / "flower").mkdir()
    (tmp_path / "flower" / CONFIG).write_text('[superlink]\ndefault = "local"\n')
    assert find_runs(tmp_path) == [tmp_path / "auto"]
