"""``aqg compare`` as a user meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from aqg.cli.app import run_app
from aqg.runs.directory import CHECKPOINT, ROUNDS, read_lines
from aqg.runs.files import locked
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


def test_one_command_at_a_time(finished, capsys):
    before = (finished / TRIALS).read_bytes()
    with locked(finished):
        assert run_app(["compare", "gd", "--resume", str(finished), "--jobs", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is in use by another process; wait until it has ended" in line
    assert (finished / TRIALS).read_bytes() == before
    assert '"gd"' not in (finished / "compare.json").read_text()


def test_a_trial_that_was_interrupted_goes_on(tmp_path):
    """Ctrl-C in the middle of a trial saves it, and the results are those of one go."""
    arguments = ["compare", "stc", "--task", "digits-softmax", "--seeds", "1", "--jobs", "1"]
    command = [sys.executable, "-m", "aqg", *arguments, "--out", "cut"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=-1, stderr=-1, text=True, start_new_session=True
    )
    trial = tmp_path / "cut" / "digits-softmax" / "stc" / "stc-seed-0"
    try:
        deadline = time.monotonic() + 120
        while not (trial / ROUNDS).exists():
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "stopped with 0 runs finished; go on with: aqg compare --resume cut" in errors
    assert (trial / CHECKPOINT).exists()
    num_rounds = len(read_lines(trial))
    assert run_app(["compare", "--resume", str(tmp_path / "cut"), "--jobs", "1"]) == 0
    assert run_app([*arguments, "--out", str(tmp_path / "whole")]) == 0
    for name in ("results.json", "tables.md"):
        assert (tmp_path / "cut" / name).read_text() == (tmp_path / "whole" / name).read_text()
    whole = tmp_path / "whole" / trial.relative_to(tmp_path / "cut")
    assert (trial / ROUNDS).read_bytes() == (whole / ROUNDS).read_bytes()
    assert 0 < num_rounds < len(read_lines(whole))
    assert not (trial / CHECKPOINT).exists()


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
        (["--from", "nowhere", "--out", "x"], "it excludes --out"),
        (["--from", "nowhere", "--task", "digits-local"], "it excludes --task"),
        (["stc", "--from", "nowhere"], "it excludes recipes"),
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
