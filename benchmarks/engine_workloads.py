"""The workloads of ``engine.py``: shapes, synthetic data, and the problem made of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from aqg.objectives import make_objective
from aqg.sim.problem import Problem, Samples

L2 = 0.01


class Workload(NamedTuple):
    """Shapes, and how many rounds make a window."""

    num_clients: int
    num_samples: int
    num_features: int
    model: str
    dtype: str
    window: int
    repetitions: int

    @property
    def num_classes(self) -> int:
        return 2 if self.model == "logistic" else 10

    @property
    def step_size(self) -> float:
        return 0.1 / self.num_clients


WORKLOADS = {
    "W1": Workload(10, 6000, 784, "mlp:200", "float32", window=1, repetitions=6),
    "W2": Workload(1000, 60, 784, "mlp:200", "float32", window=1, repetitions=6),
    "W3": Workload(18, 128, 34, "logistic", "float64", window=500, repetitions=10),
    "W4": Workload(10, 6000, 784, "softmax", "float32", window=5, repetitions=6),
}


class Data(NamedTuple):
    """Features ``(M, n, f)`` and labels ``(M, n)`` of all clients."""

    features: np.ndarray
    labels: np.ndarray


def make_data(workload: Workload, seed: int = 0) -> Data:
    random = np.random.default_rng(seed)
    shape = (workload.num_clients, workload.num_samples)
    labels = random.integers(0, workload.num_classes, shape)
    centers = random.standard_normal((workload.num_classes, workload.num_features), np.float32)
    features = random.standard_normal((*shape, workload.num_features), np.float32)
    features *= 0.3
    for client, client_labels in enumerate(labels):
        features[client] += 0.1 * centers[client_labels]
    return Data(features.astype(workload.dtype, copy=False), labels)


def make_problem(workload: Workload, data: Data) -> Problem:
    objective = make_objective(
        workload.model, workload.num_features, workload.num_classes, L2, "mean"
    )
    clients = tuple(Samples(*samples) for samples in zip(*data, strict=True))
    return Problem(objective, clients, objective.init_params(0).astype(workload.dtype))
