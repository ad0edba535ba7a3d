"""``aqg compare`` on a problem, data and a model of the user's own."""

import json
import shutil
from dataclasses import replace

import pytest

from aqg.cli.app import run_app
from aqg.errors import ConfigError
from aqg.runs.config import resolve
from aqg.runs.setup import build_problem, check_target
from aqg.runs.stopping import Target
from aqg.studies.contest.measure import FIXED
from aqg.studies.contest.plan import PLAN, TRIALS, Comparison, read_outcomes
from aqg.studies.contest.tasks import TASKS, in_order, make_own_task

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


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a problem, and a comparison on it that has finished."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(PROBLEM)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        options = ["--seeds", "2", "--jobs", "1", "--out", "c"]
        assert run_app(["compare", "onebit", *SPEC, *GOAL, *options]) == 0
    return folder


@pytest.fixture
def folder(home, tmp_path, monkeypatch):
    """Return a folder of the test's own with the problem, and go there."""
    shutil.copy(home / "mine.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def begun(home, monkeypatch, tmp_path):
    """Return a copy of the comparison without its last trial; the problem is where it was."""
    monkeypatch.chdir(home)
    copy = tmp_path / "copy"
    shutil.copytree(home / "c", copy)
    lines = (copy / TRIALS).read_text().splitlines(keepends=True)
    (copy / TRIALS).write_text("".join(lines[:-1]))
    return copy


def refused(capsys, *arguments, message):
    refuse(capsys, "compare", "--jobs", "1", *arguments, message=message)


def test_the_task_is_what_aqg_run_would_run(home):
    (task,) = Comparison.open(home / "c").tasks
    spec = {"problem": str(home / NAME), "recipe": "gd", "seed": 0, "target_kind": "accuracy"}
    (config,) = resolve(spec)
    ends = {"target": 0.8, "hold": 3, "step": "fixed", "downlink": task.config.downlink}
    assert task.config == replace(config, **ends)  # up to what a trial sets
    assert (task.name, task.config.clients, task.config.rounds) == (NAME, 5, 40)
    assert (task.config.participation, task.dropout) == (0.75, 0.1)
    assert task.goal.target == Target("accuracy", 0.8, 3)
    assert task.regime == "local"


def test_every_trial_has_an_outcome_and_every_recipe_a_cell(home):
    outcomes = read_outcomes(home / "c")
    pairs = {(trial.recipe, trial.seed) for trial in outcomes}
    assert pairs == {(recipe, seed) for recipe in ("fedavg", "onebit") for seed in (0, 1)}
    assert {outcome.ending for outcome in outcomes.values()} == {"reached"}
    cells = json.loads((home / "c/results.json").read_text())["cells"]
    found = {(cell["recipe"], cell["goal"], cell["num_reached"]) for cell in cells}
    assert found == {("fedavg", FIXED, 2), ("onebit", FIXED, 2)}


def test_a_report_shows_the_runs(home, tmp_path, capsys):
    page = tmp_path / "report.html"
    assert run_app(["report", str(home / "c"), "--out", str(page)]) == 0
    assert "4 runs in" in capsys.readouterr().out
    assert "onebit" in page.read_text()


def test_going_on(begun, home, capsys):
    assert len(read_outcomes(begun)) == 3
    message = "which the command line does not name; add --allow-code"
    refused(capsys, "--resume", begun, message=message)
    arguments = ["--resume", str(begun), "fedavg", "--again", "onebit", *SPEC, "--jobs", "1"]
    assert run_app(["compare", *arguments]) == 0
    said = capsys.readouterr().out
    assert "Forgotten: 1 runs of onebit" in said
    assert "up to 2 runs, 2 finished before" in said
    assert (begun / "results.json").read_text() == (home / "c/results.json").read_text()
    assert json.loads((begun / PLAN).read_text()) == json.loads((home / "c" / PLAN).read_text())


def test_what_was_begun_stays_as_it_is(begun, capsys):
    resume = ("--resume", begun, *SPEC)
    refused(capsys, *resume, "--target-accuracy", "0.9", message="has target accuracy 80.0%, not")
    refused(capsys, *resume, "--set", "rounds=50", message="has rounds 40, not 50; drop the option")
    other = ("--resume", begun, "--problem", "mine.py:problem")
    refused(capsys, *other, message="task mine.py:problem has no target")
    assert run_app(["compare", "--resume", str(begun), "--task", NAME]) == 2
    assert "add --allow-code" in capsys.readouterr().err


def test_a_changed_file_is_refused(begun, home, capsys):
    plan = json.loads((begun / PLAN).read_text())
    ((path, digest),) = plan["own"][0]["files"]
    assert path == str(home / "mine.py")
    (begun / PLAN).write_text((begun / PLAN).read_text().replace(digest, digest[::-1]))
    message = "mine.py' is not the file that this run began with"
    refused(capsys, "--resume", begun, "--allow-code", message=message)
    refused(capsys, "--resume", begun, *SPEC, message=message)
    # The table needs no code, and no file but those of the directory.
    assert run_app(["compare", "--from", str(begun)]) == 0
    assert NAME in capsys.readouterr().out


def test_an_accuracy_must_be_measured(folder):
    task = make_own_task({"problem": "mine.py:problem:test=False"}, Target("accuracy", 0.8))
    with pytest.raises(ConfigError, match=r"on its test set nothing is measured; ask for"):
        check_target(task.config, build_problem(task.config), None)


def test_tasks_stay_in_order(folder):
    own = make_own_task({"problem": "mine.py:problem"}, Target("loss", 0.3))
    softmax, local = TASKS["digits-softmax"], TASKS["digits-local"]
    assert in_order((own, local, softmax, own)) == (softmax, local, own)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
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
)  # fmt: skip
def test_mistakes_are_one_line_and_leave_nothing(arguments, message, folder, capsys):
    refused(capsys, "gd", *arguments, message=message)
