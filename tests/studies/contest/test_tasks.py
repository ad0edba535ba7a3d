"""``aqg compare --swap-in`` as a user meets it, and the problems with natural clients."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from aqg.cli.app import run_app
from aqg.runs.setup import build_problem
from aqg.sim.problem import Problem
from aqg.studies.swap_in.plan import TRIALS
from aqg.studies.swap_in.tasks import SWAP_TASKS

FILES = {"compare.json", "trials.jsonl", "targets.json", "results.json", "tables.md"}


def need(name, data_dir):
    missing = SWAP_TASKS[name].missing_file(data_dir)
    if missing is not None:
        pytest.skip(f"needs {missing.name} in the data directory")


def test_a_comparison_from_its_start_to_its_tables(data_dir, tmp_path, capsys):
    need("heart", data_dir)
    directory, options = tmp_path / "c", ["--data-dir", str(data_dir), "--jobs", "1"]
    named = ["compare", "stc", "--swap-in", "--task", "heart", "--seeds", "1"]
    assert run_app([*named, *options, "--out", str(directory)]) == 0
    assert {path.name for path in directory.iterdir()} == FILES | {"frontier.png", "heart"}
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


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--swap-in", "--target", "0.3"], "--swap-in has tasks and targets of its own"),
        (["--swap-in", "--task", "softmax-iid"], "unknown task 'softmax-iid'"),
        (["--swap-in", "--seeds", "0"], "seeds is 0; it must be at least 1"),
        (["nothing", "--swap-in"], "unknown recipe 'nothing'"),
        (["--swap-in", "--quick", "--search"], "--quick leaves the search out"),
        (["--resume", "x", "--swap-in"], "it excludes --swap-in"),
        (["--swap-in", "--task", "cifar10", "--data-dir", "nowhere"], "task cifar10 is left out"),
    ],
)
def test_bad_input_is_one_line(arguments, reason, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_app(["compare", *arguments]) != 0
    said = capsys.readouterr().err
    assert reason in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_hospitals_hold_out_a_fifth(data_dir):
    need("heart", data_dir)
    problem = build_problem(SWAP_TASKS["heart"].config, data_dir)
    assert [len(client.labels) for client in problem.clients] == [194, 189, 79, 128]
    assert (len(problem.validation.labels), len(problem.test.labels)) == (148, 182)


def test_no_window_of_a_watch_overlaps_with_one_that_is_held_out(data_dir):
    need("watch", data_dir)
    problem = build_problem(SWAP_TASKS["watch"].config, data_dir)
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
        task = SWAP_TASKS[name]
        assert task.missing_file(tmp_path) is None
        file = task.config.problem.partition(".py:")[0]
        problem = f"{file}.py:cifar10:clients=3:images=300:norm={norm}"
        made = build_problem(replace(task.config, problem=problem, clients=3), tmp_path)
        sizes = [len(client.labels) for client in made.clients]
        assert sum(sizes) + len(made.validation.labels) == 300
        assert len(made.test.labels) == 100
        assert np.isfinite(made.validate(made.initial_params, made.validation, "accuracy"))
        if norm == "group":
            assert len(made.initial_params) == 355_658


def test_arms_are_clients_that_are_away_one_after_the_other(data_dir):
    need("unseen-arms", data_dir)
    config = SWAP_TASKS["unseen-arms"].config
    problem = build_problem(config, data_dir)
    watch = build_problem(SWAP_TASKS["watch"].config, data_dir)
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
        build_problem(SWAP_TASKS[name].config, data_dir) for name in ("shakespeare", "unseen-lstm")
    )
    assert (seen.num_clients, unseen.num_clients) == (60, 100)
    windows = {window.tobytes() for client in seen.clients for window in client.features}
    for client in unseen.clients:
        assert not any(window.tobytes() in windows for window in client.features)
    sizes = [sum(len(c.labels) for c in problem.clients) for problem in (seen, unseen)]
    assert sizes[1] / 100 < sizes[0] / 60  # the largest roles are those of the other task


def test_synthetic_clients_differ_in_size_and_labels():
    problem = build_problem(SWAP_TASKS["unseen-synthetic"].config)
    sizes = np.array([len(client.labels) for client in problem.clients])
    assert len(sizes) == 30
    assert sizes.max() > 10 * np.median(sizes) > 300
    common = [np.bincount(client.labels, minlength=10).argmax() for client in problem.clients]
    assert len(set(common)) > 4
    other = build_problem(replace(SWAP_TASKS["unseen-synthetic"].config, seed=1))
    assert [len(client.labels) for client in other.clients] != sizes.tolist()


def test_networks_of_the_tasks_that_are_set_aside_train_side_by_side():
    """The gradients of stacked clients, as on a GPU, are those of one after the other."""
    pytest.importorskip("torch")
    from aqg.studies.swap_in.nets import LongShortTermMemory, MotionRecurrence

    random = np.random.default_rng(0)
    motion = random.normal(size=(3, 4, 100, 6)).astype(np.float32)
    text = random.integers(0, 9, (3, 4, 12))
    cases = (
        (MotionRecurrence(), motion, random.integers(0, 7, (3, 4))),
        (LongShortTermMemory(9, 4, 8), text, text),
    )
    for module, features, labels in cases:
        clients = list(zip(features, labels, strict=True))
        problem = Problem.from_module(module, clients=clients, dtype="float32")
        objective, params = problem.objective, problem.initial_params
        _, stacked = objective.losses_and_gradients(params, features, labels)
        for m in range(3):
            _, alone = objective.losses_and_gradients(params, features[m], labels[m])
            np.testing.assert_allclose(stacked[m], alone, atol=1e-5)
        assert objective._vectorizes


def test_one_trial_without_the_command_line():
    code = """
import sys
for name in ("typer", "rich", "platformdirs", "matplotlib", "scipy"):
    sys.modules[name] = None
from aqg.studies.swap_in.headless import run_trial
from aqg.studies.compare.trial import SELF_SETTING, Setting
setting = Setting("fedavg", multiplier=SELF_SETTING)
outcome = run_trial("unseen-synthetic", "fedavg", setting, rounds=1)
assert outcome.curve.num_rounds == 1 and outcome.curve.total_bytes[1] > 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)
