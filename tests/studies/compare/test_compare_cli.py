"""``aqg compare`` as a user meets it."""

from __future__ import annotations

import json

import pytest

from aqg.cli.app import run_app
from aqg.studies.compare.plan import TRIALS, read_outcomes

FILES = {"compare.json", "trials.jsonl", "results.json", "tables.md", "comparison.png"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the directory of a small search, run in two processes."""
    directory = tmp_path_factory.mktemp("compare") / "c"
    arguments = ["compare", "onebit,qsgd", "--task", "digits-local", "--search", "--quick"]
    assert run_app([*arguments, "--seeds", "2", "--jobs", "2", "--out", str(directory)]) == 0
    return directory


def test_files_and_settings(finished):
    assert {path.name for path in finished.iterdir()} == FILES | {"tuned.json", "digits-local"}
    tuned = json.loads((finished / "tuned.json").read_text())
    assert set(tuned["digits-local"]) == {"onebit", "qsgd"}
    cells = {
        cell["recipe"]: cell
        for cell in json.loads((finished / "results.json").read_text())["cells"]
    }
    assert cells["onebit"]["num_seeds"] == cells["qsgd"]["num_reached"] == 2
    assert min(cell["ratio"] for cell in cells.values()) == 1
    assert not any(cell["is_partial"] for cell in cells.values())


def test_going_on_runs_what_is_named_and_repeats_what_is_told(finished, tmp_path, capsys):
    """One recipe has a seed to go, cut off in its line; one is forgotten; one is not named."""
    lines = (finished / TRIALS).read_text().splitlines(keepends=True)
    forgotten = [line for line in lines if '"recipe": "onebit"' in line]
    kept = [line for line in lines if '"recipe": "qsgd", "seed": 0' in line]
    (lost,) = set(lines) - {*forgotten, *kept}
    rest = tmp_path / "c"
    rest.mkdir()
    plan = json.loads((finished / "compare.json").read_text())
    plan["recipes"].append("gd")
    (rest / "compare.json").write_text(json.dumps(plan))
    (rest / TRIALS).write_text("".join(kept + forgotten) + lost[:30])
    arguments = ["compare", "qsgd", "--resume", str(rest), "--again", "onebit", "--jobs", "1"]
    assert run_app(arguments) == 0
    said = capsys.readouterr().out
    assert f"Forgotten: {len(forgotten)} runs of onebit" in said
    assert f"Recipes: 2, tasks: 1, up to 4 runs, {len(kept)} finished before" in said
    assert f"[{len(lines) - len(kept)}/{len(lines) - len(kept)}, " in said
    assert (rest / TRIALS).read_text().startswith("".join(kept))
    assert set(read_outcomes(rest)) == set(read_outcomes(finished))
    assert (rest / "results.json").read_text() == (finished / "results.json").read_text()
    assert json.loads((rest / "compare.json").read_text()) == plan


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
    from aqg.studies.compare.results import main

    document = tmp_path / "page.md"
    document.write_text("Before.\n<!-- table: comparison-local -->\nold\n<!-- end -->\nAfter.\n")
    main([str(document), str(finished)])
    text = document.read_text()
    assert "| `onebit` |" in text
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
        (["--again", "auto"], "--again auto needs --resume"),
    ],
)
def test_mistakes_are_explained_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_app(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("aqg: error: ")
    assert message in error
    assert error.count("\n") == 1
