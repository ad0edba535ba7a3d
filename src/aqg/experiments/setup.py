"""Build what a config describes: the problem and, where it is convex, its minimum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.core.recipes import make_recipe
from aqg.data import format_partition_table, load_dataset, parse_partition, partition_table
from aqg.errors import ConfigError
from aqg.objectives import make_objective
from aqg.sim.engine import FastSimulation
from aqg.sim.problem import Problem, Samples
from aqg.sim.reference import ReferenceSimulation

if TYPE_CHECKING:
    from pathlib import Path

    from aqg.data import Dataset
    from aqg.experiments.config import RunConfig
    from aqg.objectives.optimum import Optimum


def build_problem(config: RunConfig, data_dir: Path | None = None) -> Problem:
    """Load the data, split it among the clients, and make the objective."""
    return make_problem(config, load_dataset(config.dataset, data_dir))


def make_problem(config: RunConfig, dataset: Dataset) -> Problem:
    """Split ``dataset`` among the clients and make the objective."""
    dtype = np.dtype(config.dtype)
    objective = make_objective(
        config.model,
        dataset.features.shape[1],
        dataset.num_classes,
        config.l2,
        "sum" if config.scaling == "sum" else "mean",
    )
    parts = parse_partition(config.partition).split(dataset, config.clients, config.seed)
    features = dataset.features.astype(dtype, copy=False)
    test = None
    if dataset.test_features is not None and dataset.test_labels is not None:
        test = Samples(dataset.test_features.astype(dtype, copy=False), dataset.test_labels)
    return Problem(
        objective=objective,
        clients=tuple(Samples(features[part], dataset.labels[part]) for part in parts),
        initial_params=objective.init_params(config.seed).astype(dtype),
        test=test,
    )


def describe_clients(config: RunConfig, dataset: Dataset) -> str:
    """Return a table of what every client holds, as text."""
    parts = parse_partition(config.partition).split(dataset, config.clients, config.seed)
    table = format_partition_table(partition_table(dataset, parts), max_rows=config.clients)
    return table.rstrip() + "\n"


def find_minimum(config: RunConfig, problem: Problem) -> float | None:
    """Return ``f*``, computed once and cached; None where the objective is not convex."""
    if not problem.objective.convex:
        if config.target is not None:
            raise ConfigError(
                f"target is {config.target}, a residual against f*, but f* is unknown for "
                f"{config.model} with l2 {config.l2}; use logistic or softmax with l2 above 0"
            )
        return None
    from aqg.objectives.optimum import cached_optimum, find_optimum  # needs scipy

    def compute() -> Optimum:
        clients = [(c.features.astype(np.float64, copy=False), c.labels) for c in problem.clients]
        if config.weighting == "samples":  # weighted so, mean losses make that of all samples
            features, labels = zip(*clients, strict=True)
            clients = [(np.concatenate(features), np.concatenate(labels))]
        return find_optimum(problem.objective, clients)

    return cached_optimum(minimum_key(config), compute).value


def minimum_key(config: RunConfig) -> dict[str, Any]:
    """Return the settings that ``f*`` depends on, by name."""
    names = ("dataset", "partition", "model", "clients", "l2", "scaling", "seed")
    key = {name: getattr(config, name) for name in names}
    if config.partition in ("label", "source"):
        key["seed"] = 0  # these splits do not depend on it, so neither does their minimum
    if config.weighting == "samples":
        key["weighting"] = config.weighting
    return key


def make_simulation(config: RunConfig, problem: Problem) -> FastSimulation | ReferenceSimulation:
    """Return the simulation of one run, at its first round."""
    recipe = make_recipe(config.recipe, config.bits, config.max_staleness)
    dropout = config.dropout_schedule()
    if config.engine == "reference":
        return ReferenceSimulation(
            problem, recipe, config.alpha, dropout, config.seed, training=config.training()
        )
    return FastSimulation(
        problem,
        recipe,
        config.alpha,
        dropout,
        config.seed,
        device=config.device,
        training=config.training(),
    )
