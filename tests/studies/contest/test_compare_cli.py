"""``aqg compare`` as a user meets it."""

import json

import numpy as np
import pytest

from aqg.cli.app import run_app
from aqg.runs.files import locked
from aqg.studies.contest.plan import TRIALS, Comparison, read_outcomes
from aqg.studies.contest.tasks import TASKS

from tests.commands import refuse

FILES = {"compare.json", "trials.jsonl", "results.json", "tables.md", "frontier.png"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the directory of a small search for a fixed target, run in two processes."""
    folder = tmp_path_factory.mktemp("compare")
    random = np.random.default_rng(0)
    y = random.integers(0, 3, 90)
    x = random.standard_normal((90, 3)) + 3 * np.eye(3)[y]
    np.savez(folder / "own.npz", x_train=x, y_train=y, client=np.arange(90) % 3)
    task = ["--dataset", str(folder / "own.npz"), "--target", "0.6", "--set", "rounds=80"]
    arguments = ["compare", "onebit,qsgd", *task, "--set", "alpha=0.2", "--search", "--quick"]
    options = ["--seeds", "2", "--jobs", "2", "--out", str(folder / "c")]
    assert run_app([*arguments, *options]) == 0
    return folder / "c"


def test_files_and_settings(finished):
    (task,) = Comparison.open(finished).tasks
    assert (task.name, task.config.clients, task.regime) == ("own.npz:softmax", 3, "full-batch")
    assert {path.name for path in finished.iterdir()} == FILES | {"tuned.json", "own.npz_softmax"}
    tuned = json.loads((finished / "tuned.json").read_text())
    assert set(tuned["own.npz:softmax"]) == {"fedavg", "onebit", "qsgd"}
    cells = json.loads((finished / "results.json").read_text())["cells"]
    seeds = {cell["recipe"]: cell["num_seeds"] for cell in cells}
    assert seeds == {"fedavg": 2, "onebit": 2, "qsgd": 2}
    assert [cell["savings"]["value"] for cell in cells if cell["recipe"] == "fedavg"] == [1]
    assert not any(cell["is_partial"] for cell in cells)


def test_going_on_runs_what_is_named_and_repeats_what_is_told(finished, tmp_path, capsys):
    """One recipe has a seed to go, cut off in its line; one is forgotten; one is not named."""
    lines = (finished / TRIALS).read_text().splitlines(keepends=True)
    forgotten = [line for line in lines if '"recipe": "onebit"' in line]
    (lost,) = [line for line in lines if '"recipe": "qsgd", "seed": 1' in line]
    kept = [line for line in lines if line not in (*forgotten, lost)]
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
    assert f"runs, {len(kept)} finished before" in said
    assert (rest / TRIALS).read_text().startswith("".join(kept))
    assert set(read_outcomes(rest)) == set(read_outcomes(finished))
    assert (rest / "results.json").read_text() == (finished / "results.json").read_text()
    assert json.loads((rest / "compare.json").read_text()) == plan


def test_results_are_shown_again_without_a_run(finished, capsys):
    before = (finished / TRIALS).read_bytes()
    # Nothing in it is code, so it may go on without being named.
    assert run_app(["compare", "--resume", str(finished), "--jobs", "1"]) == 0
    assert "up to 0 runs" in capsys.readouterr().out
    assert run_app(["compare", "--from", str(finished)]) == 0
    shown = capsys.readouterr().out
    assert "own.npz:softmax, loss 0.6" in shown
    assert "onebit" in shown
    assert run_app(["compare", "--from", str(finished), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cells"]) == 3
    assert (finished / TRIALS).read_bytes() == before


@pytest.mark.soak
def test_a_comparison_from_its_start_to_its_tables(data_dir, tmp_path, capsys):
    if TASKS["heart"].missing(data_dir) is not None:
        pytest.skip("needs the files of heart in the data directory")
    directory, options = tmp_path / "c", ["--data-dir", str(data_dir), "--jobs", "1"]
    named = ["compare", "stc", "--task", "heart", "--seeds", "1"]
    assert run_app([*named, *options, "--out", str(directory)]) == 0
    assert {path.name for path in directory.iterdir()} == FILES | {"targets.json", "heart"}
    cells = json.loads((directory / "results.json").read_text())["cells"]
    found = {(cell["recipe"], cell["goal"]): cell for cell in cells}
    assert found["fedavg", "plateau"]["delay"]["value"] == 1
    costs = [found[recipe, "plateau"]["cost"]["value"] for recipe in ("fedavg", "stc")]
    assert found["stc", "plateau"]["savings"]["value"] == pytest.approx(costs[0] / costs[1])
    lines = (directory / TRIALS).read_text().splitlines()
    capsys.readouterr()

    (directory / TRIALS).write_text("".join(line + "\n" for line in lines[:-1]) + lines[-1][:40])
    assert run_app(["compare", "topk", "--resume", str(directory), *options]) == 0
    said = capsys.readouterr().out
    assert f"{len(lines) - 1} finished before" in said
    assert "topk" in said
    assert run_app(["compare", "--resume", str(directory), *options]) == 0
    assert len((directory / TRIALS).read_text().splitlines()) == len(lines) + 1
    repeated = ["compare", "topk", "--again", "topk", "--resume", str(directory)]
    assert run_app([*repeated, *options]) == 0  # named twice, and run once
    assert "Forgotten: 1 run" in capsys.readouterr().out
    assert run_app(["compare", "--from", str(directory), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["cells"]
    assert {cell["recipe"] for cell in shown} == {"fedavg", "stc", "topk"}

    lines = (directory / TRIALS).read_text().splitlines(keepends=True)
    longest = '"spec": "fedavg", "bits": 4, "multiplier": 8.0'
    (directory / TRIALS).write_text("".join(line for line in lines if longest not in line))
    assert run_app(["compare", "--from", str(directory)]) == 0
    assert "heart has no target yet" in capsys.readouterr().out


def test_one_command_at_a_time(finished, capsys):
    before = (finished / TRIALS).read_bytes()
    capsys.readouterr()
    with locked(finished):
        assert run_app(["compare", "topk", "--resume", str(finished), "--jobs", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is in use by another process; wait until it has ended" in line
    assert (finished / TRIALS).read_bytes() == before
    assert "topk" not in (finished / "compare.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zip"], "unknown recipe 'zip'"),
        (["--task", "cifar"], "unknown task 'cifar'; choose from all, averaging, digits-softmax"),
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
        (["--task", "cifar10", "--data-dir", "nowhere"], "task cifar10 is left out"),
    ],
)
def test_mistakes_are_explained_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    refuse(capsys, "compare", *arguments, message=message)
