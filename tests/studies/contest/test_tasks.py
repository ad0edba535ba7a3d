"""Tasks by name, and the problems with natural clients."""

from dataclasses import replace

import numpy as np
import pytest

from aqg.data import DATASETS
from aqg.errors import ConfigError, DataError
from aqg.runs.setup import build_problem
from aqg.sim.problem import Problem
from aqg.studies.contest.tasks import QUICK_TASKS, TASKS, available, parse_tasks, select_tasks


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


def test_tasks_whose_files_are_missing_are_left_out(tmp_path):
    kept, lines = available(parse_tasks("all"), tmp_path)
    assert "cifar10" not in {task.name for task in kept}
    assert any("task cifar10 is left out:" in line and "cifar10.npz" in line for line in lines)
    with pytest.raises(DataError, match="task heart is left out"):
        available(select_tasks(["heart"]), tmp_path)


def test_who_has_the_package_alone_is_told_to_get_a_checkout(tmp_path):
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
    pytest.importorskip("torch")
    from benchmarks.unseen import LongShortTermMemory, MotionRecurrence

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
