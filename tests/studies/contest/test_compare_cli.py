"""``aqg compare`` as a user meets it, on a problem and data of the user's own."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from aqg.cli.app import run_app
from aqg.errors import ConfigError
from aqg.runs.config import resolve
from aqg.runs.files import locked
from aqg.runs.setup import build_problem, check_target
from aqg.runs.stopping import Target
from aqg.studies.contest.measure import FIXED
from aqg.studies.contest.plan import PLAN, TRIALS, Comparison, read_outcomes
from aqg.studies.contest.tasks import TASKS, check_code_and_files, in_order, make_own_task

from tests.commands import refuse

pytest.importorskip("torch")

PROBLEM = """
import numpy as np
from torch import nn
from aqg.sim.problem import Problem

SETTINGS = {"rounds": 40, "recipe": "laq", "batch_size": 8, "local_steps": 2, "seed": 5,
            "participation": 0.75, "dropout": 0.1, "local_rate": 0.2}

def problem(seed, dtype, clients=4, test=True):
    random = np.random.default_rng(seed)
    y = random.integers(0, 2, (clients + 1, 20))
    x = random.standard_normal((clients + 1, 20, 3)) + 2 * y[..., None]
    own = list(zip(x[1:], y[1:]))
    test = (x[0], y[0]) if test else None
    return Problem.from_module(nn.Linear(3, 2), own, test=test, dtype=dtype)
"""
NAME = "mine.py:problem:clients=5"
SPEC = ("--problem", NAME)
GOAL = ("--target-accuracy", "0.8")
FILES = {"compare.json", "trials.jsonl", "results.json", "tables.md", "frontier.png"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a problem, and a small search on it, run in two processes."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(PROBLEM)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        options = ["--search", "--quick", "--seeds", "2", "--jobs", "2", "--out", "c"]
        assert run_app(["compare", "onebit,signsgd", *SPEC, *GOAL, *options]) == 0
    return folder


@pytest.fixture
def folder(home, tmp_path, monkeypatch):
    """Return a folder of the test's own with the problem, and go there."""
    shutil.copy(home / "mine.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def begun(home, monkeypatch, tmp_path):
    """Return a copy of the comparison; the problem is where it was."""
    monkeypatch.chdir(home)
    shutil.copytree(home / "c", tmp_path / "copy")
    return tmp_path / "copy"


def refused(capsys, *arguments, message):
    refuse(capsys, "compare", "--jobs", "1", *arguments, message=message)


def test_the_task_is_what_aqg_run_would_run_and_every_recipe_has_a_cell(home):
    (task,) = Comparison.open(home / "c").tasks
    spec = {"problem": str(home / NAME), "recipe": "gd", "seed": 0, "target_kind": "accuracy"}
    (config,) = resolve(spec)
    ends = {"target": 0.8, "hold": 3, "step": "fixed", "downlink": task.config.downlink}
    assert task.config == replace(config, **ends)  # up to what a trial sets
    assert (task.name, task.config.clients, task.config.rounds) == (NAME, 5, 40)
    assert (task.config.participation, task.config.dropout) == (0.75, 0.1)
    assert (task.goal.target, task.regime) == (Target("accuracy", 0.8, 3), "local")
    assert {path.name for path in (home / "c").iterdir()} > FILES | {"tuned.json"}
    recipes = {"fedavg", "onebit", "signsgd"}
    tuned = json.loads((home / "c" / "tuned.json").read_text())
    assert set(tuned[NAME]) <= recipes
    cells = json.loads((home / "c" / "results.json").read_text())["cells"]
    assert {(c["recipe"], c["goal"], c["num_seeds"]) for c in cells} == {
        (recipe, FIXED, 2) for recipe in recipes
    }
    assert [cell["savings"]["value"] for cell in cells if cell["recipe"] == "fedavg"] == [1]
    assert not any(cell["is_partial"] for cell in cells)


def test_going_on_runs_what_is_named_and_repeats_what_is_told(begun, home, capsys):
    """One recipe has a seed to go, cut off in its line; one is forgotten; one is not named."""
    message = "which the command line does not name; add --allow-code"
    refused(capsys, "--resume", begun, message=message)
    refused(capsys, "--resume", begun, "--task", NAME, message=message)
    lines = (begun / TRIALS).read_text().splitlines(keepends=True)
    forgotten = [line for line in lines if '"recipe": "onebit"' in line]
    (lost,) = [line for line in lines if '"recipe": "signsgd", "seed": 1' in line]
    kept = [line for line in lines if line not in (*forgotten, lost)]
    plan = json.loads((begun / PLAN).read_text())
    plan["recipes"].insert(2, "gd")  # where the order of the search has it
    (begun / PLAN).write_text(json.dumps(plan))
    (begun / TRIALS).write_text("".join(kept + forgotten) + lost[:30])
    for path in begun.glob("*/*/*"):  # no run is there to be taken up
        shutil.rmtree(path)
    arguments = ["signsgd", "--resume", str(begun), "--again", "onebit", "--jobs", "1", *SPEC]
    assert run_app(["compare", *arguments]) == 0
    said = capsys.readouterr().out
    assert f"Forgotten: {len(forgotten)} runs of onebit" in said
    assert f"runs, {len(kept)} finished before" in said
    assert (begun / TRIALS).read_text().startswith("".join(kept))
    assert set(read_outcomes(begun)) == set(read_outcomes(home / "c"))
    assert (begun / "results.json").read_text() == (home / "c" / "results.json").read_text()
    assert json.loads((begun / PLAN).read_text()) == plan


def test_results_are_shown_again_without_a_run(home, tmp_path, capsys):
    directory, page = str(home / "c"), tmp_path / "report.html"
    before = (home / "c" / TRIALS).read_bytes()
    assert run_app(["compare", "--resume", directory, "--jobs", "1", "--allow-code"]) == 0
    assert "up to 0 runs" in capsys.readouterr().out
    assert run_app(["compare", "--from", directory]) == 0
    shown = capsys.readouterr().out
    assert f"{NAME}, accuracy 80.0%" in shown
    assert "onebit" in shown
    assert run_app(["compare", "--from", directory, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cells"]) == 3
    assert run_app(["report", directory, "--out", str(page)]) == 0
    assert "onebit" in page.read_text()
    assert (home / "c" / TRIALS).read_bytes() == before


def test_what_was_begun_stays_as_it_is(begun, home, capsys):
    resume = ("--resume", begun, *SPEC)
    refused(capsys, *resume, "--target-accuracy", "0.9", message="has target accuracy 80.0%, not")
    refused(capsys, *resume, "--set", "rounds=50", message="has rounds 40, not 50; drop the option")
    other = ("--resume", begun, "--problem", "mine.py:problem")
    refused(capsys, *other, message="task mine.py:problem has no target")
    with locked(begun):
        message = "is in use by another process; wait until it has ended"
        refused(capsys, "topk", *resume, message=message)
    plan = (begun / PLAN).read_text()
    ((path, digest),) = json.loads(plan)["own"][0]["files"]
    assert path == str(home / "mine.py")
    (begun / PLAN).write_text(plan.replace(digest, digest[::-1]))
    message = "mine.py' is not the file that this run began with"
    refused(capsys, "--resume", begun, "--allow-code", message=message)
    refused(capsys, *resume, message=message)
    # The table needs no code, and no file but those of the directory.
    assert run_app(["compare", "--from", str(begun)]) == 0


@pytest.mark.soak
def test_federated_averagings_plateau_from_its_start_to_its_tables(data_dir, tmp_path, capsys):
    if TASKS["heart"].missing(data_dir) is not None:
        pytest.skip("needs the files of heart in the data directory")
    directory, options = tmp_path / "c", ["--data-dir", str(data_dir), "--jobs", "1"]
    named = ["compare", "stc", "--task", "heart", "--seeds", "1"]
    assert run_app([*named, *options, "--out", str(directory)]) == 0
    assert {path.name for path in directory.iterdir()} == FILES | {"targets.json", "heart"}
    assert run_app(["compare", "topk", "--resume", str(directory), *options]) == 0
    cells = json.loads((directory / "results.json").read_text())["cells"]
    found = {(cell["recipe"], cell["goal"]): cell for cell in cells}
    assert {recipe for recipe, _ in found} == {"fedavg", "stc", "topk"}
    assert found["fedavg", "plateau"]["delay"]["value"] == 1
    costs = [found[recipe, "plateau"]["cost"]["value"] for recipe in ("fedavg", "stc")]
    assert found["stc", "plateau"]["savings"]["value"] == pytest.approx(costs[0] / costs[1])
    lines = (directory / TRIALS).read_text().splitlines(keepends=True)
    longest = '"spec": "fedavg", "bits": 4, "multiplier": 8.0'
    (directory / TRIALS).write_text("".join(line for line in lines if longest not in line))
    assert run_app(["compare", "--from", str(directory)]) == 0
    assert "heart has no target yet" in capsys.readouterr().out


def test_data_of_ones_own_are_a_task_without_code(tmp_path):
    file = tmp_path / "own.npz"
    np.savez(file, x_train=np.eye(6), y_train=np.arange(6) % 3, client=np.arange(6) % 3)
    task = make_own_task({"dataset": str(file)}, Target("loss", 0.6))
    assert (task.name, task.config.clients, task.regime) == ("own.npz:softmax", 3, "full-batch")
    check_code_and_files([task], {}, allowed=False, where="here")
    softmax, local = TASKS["digits-softmax"], TASKS["digits-local"]
    assert in_order((task, local, softmax, task)) == (softmax, local, task)


def test_an_accuracy_must_be_measured(folder):
    task = make_own_task({"problem": "mine.py:problem:test=False"}, Target("accuracy", 0.8))
    with pytest.raises(ConfigError, match=r"on its test set nothing is measured; ask for"):
        check_target(task.config, build_problem(task.config), None)


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
        (SPEC, f"task {NAME} has no target; give --target LOSS or --target-accuracy SHARE"),
        ((*SPEC, *GOAL, "--target", "0.5"), "exclude each other"),
        ((*SPEC, "--target", "-1"), "target loss is -1.0; it must be above 0"),
        ((*SPEC, "--target", "nan"), "target loss is nan; it must be above 0"),
        ((*SPEC, "--target-accuracy", "80"), "target accuracy is 80.0; it must be above 0 and at"),
        (GOAL, "a target (accuracy 80.0%) is for a task of your own"),
        ((*SPEC, *GOAL, "--set", "seed=3"), "seed cannot be set for a task"),
        ((*SPEC, *GOAL, "--set", "target=3"), "use --target or --target-accuracy"),
        ((*SPEC, *GOAL, "--set", "rounds=3"), "rounds is 3; a target counts once it is met 3"),
        ((*SPEC, *GOAL, "--set", "round=3"), "unknown setting 'round'"),
        ((*SPEC, *GOAL, "--dataset", "digits"), "give one of them"),
        (("--problem", "mine.py:nothing", *GOAL), "has no function 'nothing'"),
        ((*SPEC, "--target", "5"), "loss 5, is met before the first round ("),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(arguments, message, folder, capsys):
    refuse(capsys, "compare", *arguments, message=message)
