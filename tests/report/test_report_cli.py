"""``aqg report`` as a user meets it: the files it writes and the errors it explains."""

import base64
import csv
import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from aqg.cli.app import run_app
from aqg.report.runs import read_run
from aqg.report.write import pack
from aqg.runs.directory import CONFIG, ROUNDS

from tests.commands import change_rounds


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
    rows, points, clients = (
        list(csv.DictReader((tmp_path / "deep/csv" / f"{name}.csv").read_text().splitlines()))
        for name in ("summary", "curves", "clients")
    )
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["damaged"], "line 1: it has no checksum"),
        (["runs", "--out", "nowhere/report.html"], "directory 'nowhere' of --out does not exist"),
        (["runs", "--out", "empty"], "'empty' is a directory; name a file"),
        (["runs", "--png", "file"], "output directory 'file' cannot be made"),
    ],
)
def test_errors_take_one_line_and_leave_nothing(
    runs, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / CONFIG).write_text('recipe = "lean"\n')
    (tmp_path / "damaged" / ROUNDS).write_text("{\n")
    assert run_app(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("aqg: error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not list(Path(tmp_path).glob("*.html"))
