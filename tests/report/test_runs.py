"""From run directories to arrays, groups, curves and pages, whatever state the runs are in."""

import base64
import csv
import gzip
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aqg.cli.app import run_app
from aqg.core.recipes import RECIPES
from aqg.errors import RunError
from aqg.report.curves import (
    Band,
    Points,
    bin_edges,
    combine,
    count_widths,
    extra_points,
    result_of,
    run_points,
    thin,
    thin_indices,
    watch_clients,
)
from aqg.report.frontier import of_runs, of_studies
from aqg.report.runs import COLORS, assign_colors, compare, find_runs, read_run, read_runs
from aqg.report.write import facts, headline, pack, title, write_report
from aqg.runs.directory import CONFIG, ROUNDS, SUMMARY
from aqg.studies.sweep import GRID

from tests.commands import change_rounds, refuse


def test_a_run_comes_back_as_written(make_run, tmp_path):
    """A round reports the model that it starts from."""
    run = read_run(make_run(tmp_path / "run", rounds=6, fault="lost"), "run")
    assert run.recipe == "lean"
    assert run.widths.shape == (6, 10)
    assert run.uploads.sum() == run.summary["uploads"] == (run.widths > 0).sum()
    assert run.bits.sum() == run.summary["bits_per_param"]
    assert run.minimum == pytest.approx(0.25)
    assert [(fault.round, fault.client, fault.text) for fault in run.faults] == [(3, 1, "lost")]
    assert run.extras == {}
    loss = run_points(run, "rounds", "loss")
    np.testing.assert_array_equal(loss.x, np.arange(7))
    np.testing.assert_array_equal(loss.y, [*run.losses, run.summary["final_loss"]])
    for name in ("upload_bytes", "total_bytes"):
        spent = run_points(run, name, "loss")
        assert (spent.x[0], spent.x[-1]) == (0, run.summary[name])
    residual = run_points(run, "uploads", "residual")
    assert residual.y[-1] == pytest.approx(run.summary["residual"])
    np.testing.assert_array_equal(run_points(run, "rounds", "accuracy").x, [0, 5, 6])
    assert len(extra_points(run, "latency").x) == 0


def test_an_unfinished_run_is_read_as_far_as_it_came(make_run, tmp_path):
    """It learns the minimum from a neighbor with the same problem."""
    make_run(tmp_path / "both" / "lean")
    directory = make_run(tmp_path / "both" / "gd", recipe="gd", finished=False)
    make_run(tmp_path / "both" / "other", recipe="gd", finished=False, l2=0.5)
    minima = {run.name: run.minimum for run in read_runs([tmp_path / "both"])}
    assert minima["both/gd"] == minima["both/lean"] == pytest.approx(0.25)
    assert minima["both/other"] is None
    with (directory / ROUNDS).open("a") as file:
        file.write('{"round": 41, "lo')
    run = read_run(directory, "run")
    assert (len(run.rounds), run.summary, run.minimum) == (40, None, None)
    (directory / ROUNDS).unlink()  # it has not begun
    (run,) = read_runs([directory])
    assert len(run.rounds) == 0
    assert run.widths.shape == (0, 0)


def test_other_numbers_are_kept_and_other_things_ignored(make_run, tmp_path):
    """Clients that join later were away before."""
    directory = make_run(tmp_path / "run", rounds=4)

    def change(row):
        row |= {"latency": 0.5 * row["round"], "node": {"id": 3}, "widths": [4] * row["round"]}
        if row["round"] == 2:
            row["resyncs"] = 1
            told = {"client": 7, "node": 1, "kind": "resync", "text": "began from zero"}
            row["incidents"] = [told, told | {"kind": "fault", "text": "told above"}]

    change_rounds(directory, change)
    run = read_run(directory, "run")
    assert set(run.extras) == {"latency", "resyncs"}
    np.testing.assert_array_equal(run.extras["latency"], [0.5, 1, 1.5, 2])
    np.testing.assert_array_equal(run.extras["resyncs"], [np.nan, 1, np.nan, np.nan])
    assert [(f.client, f.text) for f in run.faults] == [(7, "resync: began from zero")]
    assert run.widths.tolist()[1:3] == [[4, 4, -1, -1], [4, 4, 4, -1]]


def test_directories_of_runs(make_run, tmp_path):
    """In natural order or in that of their config; another program's config is none."""
    for seed in (0, 9, 10):
        make_run(tmp_path / "sweep" / f"seed-{seed}", seed=seed, rounds=2)
    for recipe in ("gd", "laq", "lean"):
        make_run(tmp_path / "batch" / recipe, recipe=recipe, rounds=2)
    (tmp_path / "batch" / CONFIG).write_text('recipe = ["lean", "gd", "laq"]\n')
    (tmp_path / "flower").mkdir()
    (tmp_path / "flower" / CONFIG).write_text('[superlink]\ndefault = "local"\n')
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


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_line, "line 3: it has no checksum"),
        (lambda run: change_rounds(run, lambda row: row.pop("upload_bytes")), "'upload_bytes' is"),
        (lambda run: (run / ROUNDS).write_text((run / ROUNDS).read_text() * 2), "must rise"),
        (lambda run: (run / SUMMARY).write_text("[]"), "it has no checksum"),
        (lambda run: (run / CONFIG).write_bytes(b"\xff"), "not valid TOML"),
        (lambda run: (run / CONFIG).unlink(), "is not a run directory: it has no config.toml"),
    ],
)
def test_damage_is_named_in_one_line(make_run, tmp_path, damage, message):
    directory = make_run(tmp_path / "run", rounds=5)
    damage(directory)
    with pytest.raises(RunError, match=message) as caught:
        read_runs([directory])
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)


@pytest.fixture(scope="module")
def comparison(make_run, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for recipe, decay in (("lean", 0.08), ("gd", 0.05)):
        for dropout in (0.0, 0.5):
            for seed in (0, 1, 10):
                name = root / f"{recipe}-{dropout}-{seed}"
                make_run(name, recipe, seed, decay=decay, dropout=dropout)
    return compare(read_runs([root]))


def test_groups_labels_looks_and_the_headline(comparison):
    """Runs that differ in the seed only are one group; a label names what differs, no more."""
    assert [[run.seed for run in group.runs] for group in comparison.groups] == [[0, 1, 10]] * 4
    assert comparison.recipes == ("gd", "lean")
    assert comparison.telling == ("dropout",)
    looks = {group.label: (group.color, group.dash) for group in comparison.groups}
    assert list(looks) == [f"{recipe} · dropout {p}" for recipe in ("gd", "lean") for p in (0, 0.5)]
    assert len(set(looks.values())) == 4
    assert looks["gd · dropout 0"][0] == looks["gd · dropout 0.5"][0]
    assert looks["gd · dropout 0"][1] == looks["lean · dropout 0"][1]
    assert title(comparison) == "gd and lean on digits"
    assert facts(comparison)[:3] == ["12 runs", "softmax", "10 clients"]
    assert "40 rounds" in facts(comparison)
    costs = {
        group.label: sorted(result_of(run)["target_total_bytes"] for run in group.runs)[1]
        for group in comparison.groups
    }  # equal settings are compared
    saving = min(costs[f"gd · dropout {p}"] / costs[f"lean · dropout {p}"] for p in ("0", "0.5"))
    sentence = headline(comparison)
    assert sentence.startswith("lean came within 0.5 of the minimum after ")
    assert f" up and down, {saving:.3g} " in sentence
    assert sentence.endswith("than gd.")


def test_settings_that_change_together_count_once(make_run, tmp_path):
    make_run(tmp_path / "a", dataset="digits")
    assert headline(compare(read_runs([tmp_path]))) is None  # nobody to compare it with
    make_run(tmp_path / "b", dataset="mnist", rounds=2)
    comparison = compare(read_runs([tmp_path]))
    assert comparison.telling == ("dataset",)
    assert title(comparison) == "lean on digits and mnist"
    config = tmp_path / "b" / CONFIG  # a deployment need not say what it trains
    config.write_text('recipe = "lean"\ndataset = "custom"\nmodel = "custom"\nclients = 10\n')
    comparison = compare(read_runs([tmp_path / "b"]))
    assert title(comparison) == "lean"
    assert facts(comparison) == ["1 run", "10 clients", "2 rounds"]


def test_colors_differ_until_all_are_taken():
    names = list(RECIPES)
    some = assign_colors(names[: len(COLORS)])
    assert len(set(some.values())) == len(some)
    many = assign_colors([f"own-{i}" for i in range(40)])
    assert set(many.values()) == set(range(len(COLORS)))
    assert assign_colors(["own", "gd", "lean"])["gd"] == assign_colors(["gd"])["gd"]


def points(x, y, ended=True):
    return Points(np.array(x, float), np.array(y, float), ended)


@pytest.mark.parametrize(
    ("curves", "x", "median", "low", "high"),
    [
        # One run is its own median.
        ([points([0, 1, 3], [5, 4, 2])], [0, 1, 3], *[[5, 4, 2]] * 3),
        # Runs are compared at the same cost.
        (
            [points([0, 2], [4, 0]), points([0, 1, 2], [4, 4, 4]), points([0, 2], [8, 8])],
            *([0, 1, 2], [4, 4, 4], [4, 2, 0], [8, 8, 8]),
        ),
        # One that has ended keeps its value; the curve ends at the median cost.
        (
            [points([0, 1], [9, 1]), points([0, 3], [9, 3]), points([0, 8], [9, 1])],
            *([0, 1, 3], [9, 7, 3], [9, 1, 1], [9, 8, 6]),
        ),
        # One that has not ended counts as far as it came.
        (
            [points([0, 1], [9, 1], ended=False), points([0, 2], [5, 5], ended=False)],
            *([0, 1, 2], [7, 3, 5], [5, 1, 5], [9, 5, 5]),
        ),
        # Rounds that cost nothing leave their last value; a run without points is as none.
        (
            [points([], []), points([0, 1, 1, 1, 2], [9, 8, 7, 6, 5])],
            *([0, 1, 2], *[[9, 6, 5]] * 3),
        ),
    ],
)
def test_the_curve_of_a_group(curves, x, median, low, high):
    band = combine(curves)
    lines = band.x, band.median, band.low, band.high
    for found, expected in zip(lines, (x, median, low, high), strict=True):
        np.testing.assert_array_equal(found, expected)


heights = hnp.arrays(np.float64, st.integers(1, 400), elements=st.floats(-1e6, 1e6))


@given(heights, st.integers(8, 100), st.floats(0.1, 1000))
def test_thinning_keeps_ends_and_extremes_and_covers_the_band(y, limit, scale):
    x = np.arange(len(y)) * scale
    kept = thin_indices(x, y, limit)
    assert (kept[0], kept[-1]) == (0, len(y) - 1)
    assert (np.diff(kept) > 0).all()
    assert (y[kept].min(), y[kept].max()) == (y.min(), y.max())
    assert len(kept) <= max(limit + 6, 8)
    band = thin(Band(x, y, y - 1, y + 1), limit)
    assert (len(band.x) == len(y)) >= (len(y) <= limit)  # a short curve stays as it is
    assert (band.low.min(), band.high.max()) == (y.min() - 1, y.max() + 1)
    assert (band.low <= band.median).all()
    assert (band.median <= band.high).all()


sizes = st.tuples(st.integers(0, 50), st.integers(1, 12))
widths_of_runs = hnp.arrays(np.int16, sizes, elements=st.integers(-1, 4))


@given(st.integers(0, 1000), st.integers(1, 100))
def test_bins_are_whole_and_nearly_equal(length, max_bins):
    edges = bin_edges(length, max_bins)
    assert (edges[0], edges[-1], len(edges) - 1) == (0, length, min(length, max_bins))
    assert np.ptp(np.diff(edges)) <= 1 if length else len(edges) == 1


@given(widths_of_runs, st.integers(1, 20), st.integers(1, 5))
def test_every_upload_is_counted_once_and_in_its_clients_row(widths, max_bins, max_rows):
    histogram = count_widths(widths, max_bins)
    assert set(histogram.widths) == set(widths[widths > 0].tolist())
    for width, counts in zip(histogram.widths, histogram.counts, strict=True):
        assert counts.sum() == (widths == width).sum()
    activity = watch_clients(widths, max_bins, max_rows)
    assert activity.uploads.shape == (len(activity.clients) - 1, len(activity.edges) - 1)
    for row, part in enumerate(np.split(widths, activity.clients[1:-1], axis=1)):
        assert activity.uploads[row].sum() == (part > 0).sum()
        assert activity.bits[row].sum() == part[part > 0].sum()
        assert activity.away[row].sum() == (part == -1).sum()


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


def test_packed_arrays_come_back():
    document = {"a": np.array([0.5, np.inf, 1e300]), "b": [np.array([[300, 1], [2, 3]])]}
    back = unpack(pack(document))
    np.testing.assert_array_equal(back["a"], [0.5, np.nan, 1e300])
    assert back["b"][0].tolist() == [300, 1, 2, 3]


@pytest.fixture
def runs(make_run, tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / "runs" / f"lean-{seed}", seed=seed, fault="lost")
    make_run(tmp_path / "runs" / "gd", "gd")
    return tmp_path / "runs"


def unpack(text):
    """Read what `pack` wrote, as the page does."""
    return json.loads(
        gzip.decompress(base64.b64decode(text)),
        object_hook=lambda row: np.array(row["$"], float) if "$" in row else row,
    )


def data_of(page):
    return unpack(re.search(r'id="data">([^<]*)<', page)[1])


def test_page_pictures_and_tables(runs, tmp_path, capsys):
    out = tmp_path / "report.html"
    arguments = ["report", str(runs), "--out", str(out)]
    arguments += ["--png", str(tmp_path / "png"), "--csv", str(tmp_path / "deep" / "csv")]
    assert run_app(arguments) == 0
    assert "3 runs" in capsys.readouterr().out
    page = out.read_text()
    assert "default-src 'none'" in page  # one file with everything in it
    assert not re.search(r"(src|href)=|@import|url\(", re.sub(r"url\(#", "", page))
    data = data_of(page)
    assert [group["label"] for group in data["groups"]] == ["gd", "lean"]
    assert [len(group["runs"]) for group in data["groups"]] == [1, 2]
    lean = data["groups"][1]
    assert lean["results"]["faults"] == [1, 1, 1]
    for name in ("total_bytes", "upload_bytes"):
        curve = lean["curves"]["residual"][name]
        assert (curve["low"] <= curve["y"]).all()
        assert (curve["y"] <= curve["high"]).all()
        assert curve["x"][-1] == lean["results"][name][0]
    assert data["runs"][0]["activity"]["away"].sum() > 0
    for name in ("loss", "accuracy", "perplexity", "widths", "clients"):
        content = (tmp_path / "png" / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 5000
    places = (tmp_path / "deep/csv" / f"{n}.csv" for n in ("summary", "curves", "clients"))
    rows, points, clients = (list(csv.DictReader(p.read_text().splitlines())) for p in places)
    found = [(row["recipe"], row["seed"], row["result_rounds"]) for row in rows]
    assert found == [("gd", "0", "40"), ("lean", "0", "40"), ("lean", "1", "40")]
    assert (len(points), len(clients)) == (3 * 41, 3 * 10)
    last = points[40]
    assert int(last["round"]) == 40
    for name in ("upload_bytes", "download_bytes", "total_bytes"):
        total = int(rows[0][name])
        assert int(last[name]) == sum(int(row[name]) for row in clients[:10]) == total
    assert float(last["residual"]) == pytest.approx(float(rows[0]["residual"]))


def test_what_each_client_sent_and_received_is_on_the_page(make_run, tmp_path):
    page = tmp_path / "r.html"
    for name, clients, rows in (("run", 10, 10), ("many", 600, 200)):
        run = make_run(tmp_path / name, rounds=3, clients=clients, partition="iid")
        summary = json.loads((run / "summary.json").read_text())
        assert run_app(["report", str(run), "--out", str(page)]) == 0
        (shown,) = data_of(page.read_text())["runs"]
        for way in ("upload", "download"):  # of many clients several in a row: the page stays small
            means = np.reshape(summary[f"client_{way}_bytes"], (rows, -1)).mean(axis=1)
            np.testing.assert_allclose(shown["clients"][way], means, rtol=1e-6)
        edges = shown["activity"]["clients"]
        assert (len(edges), edges[-1]) == (rows + 1, clients)


def test_a_deployment_has_the_bytes_of_its_clients_round_by_round(make_run, tmp_path):
    run = make_run(tmp_path / "run", rounds=4, finished=False)
    down = {"client_download_bytes": list(range(10))}
    change_rounds(run, lambda row: row.update(down, client_upload_bytes=[row["round"]] * 10))
    found = read_run(run, "run")
    assert found.client_upload_bytes.tolist() == [10] * 10
    assert found.client_download_bytes.tolist() == [4 * client for client in range(10)]
    assert not any(name.startswith("client_") for name in found.extras)


@pytest.mark.soak
def test_runs_in_every_state_are_shown(make_run, tmp_path):
    make_run(tmp_path / "begun", rounds=10, finished=False)
    waiting = make_run(tmp_path / "waiting", recipe="gd", rounds=10, finished=False)
    (waiting / ROUNDS).unlink()
    strange = make_run(tmp_path / "strange", recipe="laq", rounds=10)
    (strange / CONFIG).write_text('recipe = "<b>own</b>"\nnested = { a = 1 }\nwhen = 2026-01-01\n')
    out = tmp_path / "report.html"
    arguments = ["report", str(tmp_path), "--out", str(out)]
    arguments += ["--png", str(tmp_path / "png"), "--csv", str(tmp_path / "csv")]
    assert run_app(arguments) == 0
    page = out.read_text()
    assert "<b>own</b>" not in page
    assert "&lt;b&gt;own&lt;/b&gt;" in page
    states = {group["label"]: group["state"] for group in data_of(page)["groups"]}
    assert sorted(states.values()) == ["", "not finished", "not finished"]


def test_errors_take_one_line_and_leave_nothing(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / CONFIG).write_text('recipe = "lean"\n')
    (tmp_path / "damaged" / ROUNDS).write_text("{\n")
    for arguments, message in {
        "damaged": "line 1: it has no checksum",
        "runs --out nowhere/report.html": "directory 'nowhere' of --out does not exist",
        "runs --out empty": "'empty' is a directory; name a file",
        "runs --png file": "output directory 'file' cannot be made",
    }.items():
        refuse(capsys, "report", *arguments.split(), message=message)
