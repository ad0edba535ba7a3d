"""Tasks as configs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aqg.data import DATASETS, parse_partition
from aqg.errors import ConfigError
from aqg.runs.setup import build_problem
from aqg.studies.compare.tasks import QUICK_TASKS, TASKS, parse_tasks, select_tasks

DIGITS = [TASKS[name] for name in QUICK_TASKS]


@pytest.mark.parametrize("task", DIGITS, ids=QUICK_TASKS)
def test_a_seed_makes_the_split_and_the_start(task):
    first, again, other = (build_problem(replace(task.config, seed=seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.initial_params, again.initial_params)
    assert not np.array_equal(first.initial_params, other.initial_params)


def test_part_of_the_samples():
    problem = build_problem(replace(DIGITS[0].config, samples=200, partition="iid"))
    assert sum(len(samples.labels) for samples in problem.clients) == 200
    with pytest.raises(ConfigError, match="samples is 9999; digits has "):
        build_problem(replace(DIGITS[0].config, samples=9999))


def test_the_cnn_learns_images_of_other_sizes():
    pytest.importorskip("torch")
    config = replace(DIGITS[1].config, model="cnn", dtype="float32", reset=True)
    problem, other = (build_problem(replace(config, seed=seed)) for seed in (0, 1))
    _, gradient = problem.objective.losses_and_gradients(
        problem.initial_params, *problem.clients[0]
    )
    assert np.isfinite(gradient).all()
    assert gradient.any()
    assert not np.array_equal(problem.initial_params, other.initial_params)


def test_every_task_names_things_that_exist():
    for name, task in TASKS.items():
        assert task.name == name
        assert task.config.dataset in DATASETS
        parse_partition(task.config.partition)
        assert task.is_local == (task.target.kind == "accuracy")
        assert task.target.hold == (3 if task.is_local else 20)
    assert {name for name, task in TASKS.items() if task.is_late} == {
        "cnn-dirichlet",
        "cnn-iid",
        "sampled-iid",
    }


def test_tasks_by_name():
    assert [task.name for task in parse_tasks("mlp-iid, digits-local")] == [
        "digits-local",
        "mlp-iid",
    ]
    assert len(parse_tasks("all")) == len(TASKS)
    with pytest.raises(ConfigError, match="unknown task 'cifar'; choose from all, digits"):
        select_tasks(["cifar"])


def test_tasks_in_words():
    assert TASKS["sampled-dirichlet"].describe() == (
        "mlp:200 on mnist, 100 clients, dirichlet:0.3, 5 local steps of 64, 10% sampled"
    )
    assert TASKS["cnn-dirichlet"].describe().endswith("1 local epoch, batches of 64")
    assert TASKS["softmax-label-dropout"].describe().endswith("label, dropout 0.5")
