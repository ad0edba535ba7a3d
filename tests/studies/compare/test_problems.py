"""Tasks as problems."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aqg.data import DATASETS, parse_partition
from aqg.errors import ConfigError
from aqg.studies.compare.problems import Workshop
from aqg.studies.compare.tasks import QUICK_TASKS, TASKS, parse_tasks, select_tasks

DIGITS = [TASKS[name] for name in QUICK_TASKS]


@pytest.mark.parametrize("task", DIGITS, ids=QUICK_TASKS)
def test_a_seed_makes_the_split_and_the_start(task):
    workshop = Workshop()
    first, again, other = (workshop.problem(task, seed) for seed in (0, 0, 1))
    assert first.num_clients == task.clients
    assert first.dtype == task.dtype
    np.testing.assert_array_equal(first.initial_params, again.initial_params)
    assert not np.array_equal(first.initial_params, other.initial_params)


def test_part_of_the_samples():
    task = replace(DIGITS[0], samples=200, partition="iid")
    problem = Workshop().problem(task, 0)
    assert sum(len(samples.labels) for samples in problem.clients) == 200


def test_minima_only_where_they_are_asked_for():
    softmax, local = DIGITS
    assert Workshop().minimum(local, 0) is None
    assert 0 < Workshop().minimum(softmax, 0) < 1


def test_the_cnn_learns_images_of_other_sizes():
    pytest.importorskip("torch")
    task = replace(DIGITS[1], model="cnn", dtype="float32")
    problem = Workshop().problem(task, 0)
    _, gradient = problem.objective.losses_and_gradients(
        problem.initial_params, *problem.clients[0]
    )
    assert np.isfinite(gradient).all()
    assert gradient.any()


def test_every_task_names_things_that_exist():
    for name, task in TASKS.items():
        assert task.name == name
        assert task.dataset in DATASETS
        parse_partition(task.partition)
        assert task.is_local == (task.target.kind == "accuracy")
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
