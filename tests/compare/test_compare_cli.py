"""``aqg compare`` as a user meets it."""

from __future__ import annotations

import json

import pytest

from aqg.cli.app import run_app
from aqg.compare.ledger import TRIALS, Ledger

FILES = {"compare.json", "trials.jsonl", "results.json", "tables.md", "comparison.png"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the directory of a small search, run in two processes."""
    directory = tmp_path_factory.mktemp("compare") / "c"
    arguments = ["compare", "lean,gd", "--task", "digits-local", "--search", "--quick"]
    assert run_app([*arguments, "--seeds", "2", "--jobs", "2", "--out", str(directory)]) == 0
    return directory


def test_files_and_settings(finished):
    assert {path.name for path in finished.iterdir()} == FILES | {"tuned.json"}
    tuned = json.loads((finished / "tuned.json").read_text())
    assert set(tuned["digits-local"]) == {"lean", "gd"}
    cells = {
        cell["recipe"]: cell
        for cell in json.loads((finished / "results.json").read_text())["cells"]
    }
    assert cells["lean"]["num_seeds"] == cells["gd"]["num_reached"] == 2
    assert cells["lean"]["ratio"] == 1
    assert cells["gd"]["ratio"] > 10


def test_going_on_repeats_nothing_and_ends_the_same(finished, tmp_path, capsys):
    lines = (finished / TRIALS).read_text().splitlines(keepends=True)
    rest = tmp_path / "c"
    rest.mkdir()
    (rest / "compare.json").write_bytes((finished / "compare.json").read_bytes())
    lost = [line for line in lines if '"seed": 1' in line]
    assert len(lost) == 2
    kept = [line for line in lines if line not in lost]
    (rest / TRIALS).write_text("".join(kept) + lost[0][:30])
    assert run_app(["compare", "--resume", str(rest), "--jobs", "1"]) == 0
    assert f"{len(kept)} finished before" in capsys.readouterr().out
    assert (rest / TRIALS).read_text().startswith("".join(kept))
    assert (rest / "results.json").read_text() == (finished / "results.json").read_text()
    assert len(Ledger(rest).outcomes()) == len(lines)


def test_results_are_shown_again_without_a_run(finished, capsys):
    before = (finished / TRIALS).read_bytes()
    assert run_app(["compare", "--from", str(finished)]) == 0
    shown = capsys.readouterr().out
    assert "digits-local" in shown
    assert "×1.00" in shown
    assert run_app(["compare", "--from", str(finished), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cells"]) == 2
    assert (finished / TRIALS).read_bytes() == before


def test_a_document_gets_the_tables(finished, tmp_path):
    from aqg.compare.results import main

    document = tmp_path / "page.md"
    document.write_text("Before.\n<!-- table: comparison-local -->\nold\n<!-- end -->\nAfter.\n")
    main([str(document), str(finished)])
    text = document.read_text()
    assert "| `lean` |" in text
    assert "old" not in text
    assert text.endswith("<!-- end -->\nAfter.\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zip"], "unknown recipe 'zip'"),
        (["--task", "cifar"], "unknown task 'cifar'; choose from all, digits-softmax"),
        (["--seeds", "0"], "seeds is 0; it must be at least 1"),
        (["--jobs", "0"], "jobs is 0; it must be at least 1"),
        (["--device", "abacus"], "abacus"),
        (["--tuned", "none.json"], "none.json' cannot be read"),
        (["--resume", "nowhere"], "'nowhere' is not a comparison's directory"),
        (["--resume", "nowhere", "--search"], "it excludes --search"),
        (["--from", "nowhere", "--out", "x"], "--from runs nothing"),
    ],
)
def test_mistakes_are_explained_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_app(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("aqg: error: ")
    assert message in error
    assert error.count("\n") == 1
