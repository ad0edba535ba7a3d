"""Tasks by name, and ``aqg compare`` as a user meets it, on a problem and data of one's own."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from aqg.cli.app import run_app
from aqg.data import DATASETS
from aqg.errors import ConfigError, DataError
from aqg.runs.config import resolve
from aqg.runs.files import locked
from aqg.runs.setup import build_problem, check_target
from aqg.runs.stopping import Target
from aqg.sim.problem import Problem
from aqg.studies.contest.measure import FIXED
from aqg.studies.contest.plan import PLAN, TRIALS, Comparison, read_outcomes
from aqg.studies.contest.tasks import (
    QUICK_TASKS,
    TASKS,
    available,
    check_code_and_files,
    in_order,
    make_own_task,
    parse_tasks,
    select_tasks,
)

from tests.commands import refuse

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


def test_own_data_are_a_task_without_code_and_an_accuracy_must_be_measured(tmp_path, folder):
    file = tmp_path / "own.npz"
    np.savez(file, x_train=np.eye(6), y_train=np.arange(6) % 3, client=np.arange(6) % 3)
    task = make_own_task({"dataset": str(file)}, Target("loss", 0.6))
    assert (task.name, task.config.clients, task.regime) == ("own.npz:softmax", 3, "full-batch")
    check_code_and_files([task], {}, allowed=False, where="here")
    softmax, local = TASKS["digits-softmax"], TASKS["digits-local"]
    assert in_order((task, local, softmax, task)) == (softmax, local, task)

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


def need(name, data_dir):
    missing = TASKS[name].missing(data_dir)
    if missing is not None:
        pytest.skip(missing)


def test_tasks_by_name():
    names = [task.name for task in parse_tasks("mlp-iid, digits-local")]
    assert names == ["mlp-iid", "digits-local"]
    all_of_them, averaging = (parse_tasks(text) for text in ("all", "averaging"))
    hold_outs = {name for name, task in TASKS.items() if task.is_hold_out}
    assert hold_outs == {f"unseen-{name}" for name in ("synthetic", "arms", "many", "vit", "lstm")}
    assert {task.name for task in all_of_them} == set(TASKS) - hold_outs
    assert {t.name for t in averaging} == {t.name for t in all_of_them if t.goal.target is None}
    assert {"hold-out-cnn", "hold-out-plays"} < {task.name for task in averaging}  # tuning data now
    assert {task.goal.name for task in parse_tasks(None)} == {"target", "plateau"}


def test_tasks_whose_files_are_missing_are_left_out_and_examples_are_in_a_checkout(tmp_path):
    kept, lines = available(parse_tasks("all"), tmp_path)
    assert "cifar10" not in {task.name for task in kept}
    assert any("task cifar10 is left out:" in line and "cifar10.npz" in line for line in lines)
    with pytest.raises(DataError, match="task heart is left out"):
        available(select_tasks(["heart"]), tmp_path)

    task = TASKS["heart"]
    away = task.config.problem.replace("examples", "lib/examples")  # as beside site-packages
    packaged = replace(task, config=replace(task.config, problem=away))
    with pytest.raises(DataError, match=r"problem, examples/heart\.py, is in .* from a checkout"):
        available([packaged], tmp_path)


def test_every_task_has_a_goal_that_its_runs_can_measure():
    for name, task in TASKS.items():
        assert task.name == name
        assert task.config.problem is not None or task.config.dataset in DATASETS
        target = task.goal.target
        if target is None:
            assert task.regime == "local"
            assert task.config.validation > 0
        else:
            assert target.hold == (3 if target.kind == "accuracy" else 20)
            assert task.config.validation > 0 or task.regime == "full-batch"


@pytest.mark.parametrize(
    ("name", "changes"),
    [*((name, {}) for name in QUICK_TASKS), ("digits-local", {"model": "cnn", "reset": True})],
)
def test_a_seed_makes_the_split_and_the_start(name, changes):
    config = replace(TASKS[name].config, **changes)
    first, again, other = (build_problem(replace(config, seed=seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.initial_params, again.initial_params)
    assert not np.array_equal(first.initial_params, other.initial_params)


def test_part_of_the_samples():
    config = TASKS["digits-softmax"].config
    problem = build_problem(replace(config, samples=200, partition="iid"))
    assert sum(len(samples.labels) for samples in problem.clients) == 200
    with pytest.raises(ConfigError, match="samples is 9999; digits has "):
        build_problem(replace(config, samples=9999))


def test_hospitals_hold_out_a_fifth(data_dir):
    need("heart", data_dir)
    problem = build_problem(TASKS["heart"].config, data_dir)
    assert [len(client.labels) for client in problem.clients] == [194, 189, 79, 128]
    assert (len(problem.validation.labels), len(problem.test.labels)) == (148, 182)


def test_no_window_of_a_watch_overlaps_with_one_that_is_held_out(data_dir):
    need("watch", data_dir)
    problem = build_problem(TASKS["watch"].config, data_dir)
    assert problem.num_clients == 8
    # The second half of a window is the first half of the next.
    trained = {w[50:].tobytes() for client in problem.clients for w in client.features}
    assert not any(window[:50].tobytes() in trained for window in problem.validation.features)
    assert len(problem.validation.labels) > 600


def test_cifar10_from_its_file(tmp_path):
    random = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 600), ("test", 200)):
        arrays[f"x_{part}"] = random.integers(0, 256, (count, 32, 32, 3), np.uint8)
        arrays[f"y_{part}"] = np.arange(count) % 10
    np.savez(tmp_path / "cifar10.npz", **arrays)
    for name, norm in (("cifar10", "group"), ("cifar10-batchnorm", "batch")):
        task = TASKS[name]
        assert task.missing(tmp_path) is None
        file = task.config.problem.partition(".py:")[0]
        problem = f"{file}.py:problem:clients=3:images=300:norm={norm}"
        made = build_problem(replace(task.config, problem=problem, clients=3), tmp_path)
        sizes = [len(client.labels) for client in made.clients]
        assert sum(sizes) + len(made.validation.labels) == 300
        assert len(made.test.labels) == 100
        assert np.isfinite(made.validate(made.initial_params, made.validation, "accuracy"))
        if norm == "group":
            assert len(made.initial_params) == 355_658


def test_arms_are_clients_that_are_away_one_after_the_other(data_dir):
    need("unseen-arms", data_dir)
    config = TASKS["unseen-arms"].config
    problem = build_problem(config, data_dir)
    watch = build_problem(TASKS["watch"].config, data_dir)
    sizes = [len(client.labels) for client in problem.clients]
    both = [sum(sizes[k : k + 2]) for k in range(0, 16, 2)]
    assert both == [len(client.labels) for client in watch.clients]
    schedule = config.dropout_schedule()
    away = np.array([schedule.dropped(k, 16) for k in range(1, 101)])
    assert (away.sum(axis=0) == 15).all()
    assert away.sum(axis=1).max() <= 4


def test_unseen_roles_are_not_those_of_the_other_task(data_dir):
    need("unseen-lstm", data_dir)
    seen, unseen = (
        build_problem(TASKS[name].config, data_dir) for name in ("shakespeare", "unseen-lstm")
    )
    assert (seen.num_clients, unseen.num_clients) == (60, 100)
    windows = {window.tobytes() for client in seen.clients for window in client.features}
    for client in unseen.clients:
        assert not any(window.tobytes() in windows for window in client.features)
    sizes = [sum(len(c.labels) for c in problem.clients) for problem in (seen, unseen)]
    assert sizes[1] / 100 < sizes[0] / 60  # the largest roles are those of the other task


def test_synthetic_clients_differ_in_size_and_labels():
    problem = build_problem(TASKS["unseen-synthetic"].config)
    sizes = np.array([len(client.labels) for client in problem.clients])
    assert len(sizes) == 30
    assert sizes.max() > 10 * np.median(sizes) > 300
    common = [np.bincount(client.labels, minlength=10).argmax() for client in problem.clients]
    assert len(set(common)) > 4
    other = build_problem(replace(TASKS["unseen-synthetic"].config, seed=1))
    assert [len(client.labels) for client in other.clients] != sizes.tolist()


def test_networks_of_the_tasks_that_are_set_aside_train_side_by_side():
    """The gradients of stacked clients, as on a GPU, are those of one after the other."""
    from benchmarks.unseen import LongShortTermMemory, MotionRecurrence

    random = np.random.default_rng(0)
    motion = random.normal(size=(3, 4, 100, 6)).astype(np.float32)
    text = random.integers(0, 9, (3, 4, 12))
    cases = [(MotionRecurrence(), motion, random.integers(0, 7, (3, 4)))]
    cases += [(LongShortTermMemory(9, 4, 8), text, text)]
    for module, features, labels in cases:
        clients = list(zip(features, labels, strict=True))
        problem = Problem.from_module(module, clients=clients, dtype="float32")
        objective, params = problem.objective, problem.initial_params
        _, stacked = objective.losses_and_gradients(params, features, labels)
        for m in range(3):
            _, alone = objective.losses_and_gradients(params, features[m], labels[m])
            np.testing.assert_allclose(stacked[m], alone, atol=1e-5)
        assert objective._vectorizes
