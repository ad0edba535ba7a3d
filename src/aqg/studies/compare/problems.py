"""Make a task's problem for a seed: data dealt out, model, starting point, minimum."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from aqg.data import Dataset, load_dataset, parse_partition
from aqg.models import DataShape, make_module
from aqg.objectives import Objective, make_objective
from aqg.runs.config import RunConfig
from aqg.runs.setup import build_problem, find_minimum
from aqg.sim.problem import Problem, Samples

if TYPE_CHECKING:
    from pathlib import Path

    from aqg.studies.compare.tasks import Task

    Key = tuple[object, ...]

_STREAM = 0xC0DE
"""Keeps the choice of samples apart from other draws that use the same seed."""
_MOST_KEPT_BYTES = 2 << 30
"""Clients' samples that a process keeps for its next runs."""


class Workshop:
    """Makes problems, and keeps what the next one may need again.

    Tasks share data: all that differs between softmax and a network on the same split is the
    objective. A process that runs one after the other loads and deals out each split once.
    """

    def __init__(self, data_dir: Path | None = None) -> None:
        self._data_dir = data_dir
        self._datasets: dict[Key, Dataset] = {}
        self._clients: dict[Key, tuple[Samples, ...]] = {}

    def problem(self, task: Task, seed: int) -> Problem:
        """Return what a run of the task with this seed learns; the seed also splits the data."""
        if task.config is not None:
            return build_problem(replace(task.config, seed=seed), self._data_dir)
        dataset = self._dataset(task)
        objective = _make_objective(task, dataset)
        test = None
        if dataset.test_features is not None and dataset.test_labels is not None:
            test = Samples(dataset.test_features, dataset.test_labels)
        return Problem(
            objective=objective,
            clients=self._deal(task, seed, dataset),
            initial_params=objective.init_params(seed).astype(task.dtype),
            test=test,
        )

    def minimum(self, task: Task, seed: int) -> float | None:
        """Return ``f*``, computed once and cached; None where the target is no residual."""
        if task.target.kind != "residual":
            return None
        dataset = self._dataset(task)
        if task.partition == "iid" and len(dataset) % task.clients == 0:
            seed = 0  # shares of one size: the mean over clients is that over all samples
        config = RunConfig(
            recipe="gd",
            dataset=task.dataset,
            partition=task.partition,
            model=task.model,
            clients=task.clients,
            rounds=task.rounds,
            alpha=task.step_size,
            l2=task.l2,
            seed=seed,
        )
        return find_minimum(config, self.problem(task, seed))

    def _dataset(self, task: Task) -> Dataset:
        """Return the dataset in the task's precision, or the part of it that the task uses."""
        key = (task.dataset, task.samples, task.dtype)
        if key in self._datasets:
            return self._datasets[key]
        dataset = load_dataset(task.dataset, self._data_dir)
        chosen: slice | np.ndarray[tuple[int], np.dtype[np.int64]] = slice(None)
        if task.samples is not None:
            random = np.random.default_rng([_STREAM, task.samples])
            chosen = np.sort(random.permutation(len(dataset))[: task.samples])
        test = dataset.test_features
        self._datasets[key] = replace(
            dataset,
            features=dataset.features[chosen].astype(task.dtype, copy=False),
            labels=dataset.labels[chosen],
            test_features=None if test is None else test.astype(task.dtype, copy=False),
            sources=None if dataset.sources is None else dataset.sources[chosen],
        )
        return self._datasets[key]

    def _deal(self, task: Task, seed: int, dataset: Dataset) -> tuple[Samples, ...]:
        key = (task.dataset, task.samples, task.dtype, task.partition, task.clients, seed)
        if key not in self._clients:
            parts = parse_partition(task.partition).split(dataset, task.clients, seed)
            kept = sum(_size(clients) for clients in self._clients.values())
            while self._clients and kept + dataset.features.nbytes > _MOST_KEPT_BYTES:
                kept -= _size(self._clients.pop(next(iter(self._clients))))
            self._clients[key] = tuple(
                Samples(dataset.features[part], dataset.labels[part]) for part in parts
            )
        return self._clients[key]


def _size(clients: tuple[Samples, ...]) -> int:
    return sum(samples.features.nbytes for samples in clients)


def _make_objective(task: Task, dataset: Dataset) -> Objective:
    if task.model != "cnn":
        num_features = dataset.features.shape[1]
        return make_objective(task.model, num_features, dataset.num_classes, task.l2, "mean")
    module = make_module(task.model, DataShape.of(dataset), seed=0)
    return Objective.from_module(module, l2=task.l2, name="cnn", reset=True)
