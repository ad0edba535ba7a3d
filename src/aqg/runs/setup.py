"""Build what a config describes: the problem and, where it is convex, its minimum."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.core.recipes import make_recipe
from aqg.data import format_partition_table, load_dataset, parse_partition, partition_table
from aqg.errors import AqgError, ConfigError
from aqg.models import DataShape, is_module, make_module
from aqg.objectives import Objective, make_objective
from aqg.runs.config import check_files
from aqg.runs.models import start_from
from aqg.runs.own import make_own_problem
from aqg.runs.perturbation import perturb_problem
from aqg.runs.validation import Validator, hold_out
from aqg.sim.engine import FastSimulation
from aqg.sim.problem import Problem, Samples
from aqg.sim.reference import ReferenceSimulation
from aqg.weights import read_tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aqg.data import Dataset, PartitionRow
    from aqg.objectives.base import Scaling
    from aqg.objectives.optimum import Optimum
    from aqg.runs.config import RunConfig

_TRIED_SAMPLES = 8
_NUM_SAMPLES = {"mnist": 60_000}
_STREAM = 0xC0DE
"""Keeps the choice of samples apart from other random numbers of the same seed."""


def build_problem(config: RunConfig, data_dir: Path | None = None) -> Problem:
    """Load the data, split it among the clients, and make the objective."""
    return load_problem(config, data_dir)[0]


def load_problem(config: RunConfig, data_dir: Path | None = None) -> tuple[Problem, str]:
    """Return the problem, and a table of what every client holds."""
    check_files(config)
    if config.problem is None:
        dataset = _chosen(load_dataset(config.dataset, data_dir), config.samples)
        problem = _held_out(config, make_problem(config, dataset))
        return problem, describe_clients(config, dataset)
    problem = make_own_problem(config.problem, config.seed, config.dtype, data_dir)
    if problem.num_clients != config.clients:
        raise ConfigError(
            f"clients is {config.clients}, and {config.problem} with seed {config.seed} makes "
            f"{problem.num_clients}; set clients to that"
        )
    rows: list[PartitionRow] = [
        {"client": client, "samples": len(samples.labels), "labels": []}
        for client, samples in enumerate(problem.clients)
    ]
    return _held_out(config, _started(config, problem)), _table(rows)


def _held_out(config: RunConfig, problem: Problem) -> Problem:
    return hold_out(problem, config.validation, config.seed) if config.validation else problem


def _chosen(dataset: Dataset, num_samples: int | None) -> Dataset:
    """Return the dataset with so many of its training samples, drawn at random; all by default."""
    if num_samples is None:
        return dataset
    if num_samples > len(dataset):
        raise ConfigError(
            f"samples is {num_samples}; {dataset.name} has {len(dataset)}, so at most that"
        )
    random = np.random.default_rng([_STREAM, num_samples])
    chosen = np.sort(random.permutation(len(dataset))[:num_samples])
    return replace(
        dataset,
        features=dataset.features[chosen],
        labels=dataset.labels[chosen],
        sources=None if dataset.sources is None else dataset.sources[chosen],
    )


def make_problem(config: RunConfig, dataset: Dataset) -> Problem:
    """Split ``dataset`` among the clients and make the objective."""
    dtype = np.dtype(config.dtype)
    objective = _make_objective(config, dataset)
    parts = parse_partition(config.partition).split(dataset, config.clients, config.seed)
    features = _prepare(config, dataset.features)
    labels = _prepare_labels(config, dataset.labels)
    test = None
    if dataset.test_features is not None and dataset.test_labels is not None:
        test = Samples(
            _prepare(config, dataset.test_features), _prepare_labels(config, dataset.test_labels)
        )
    problem = Problem(
        objective=objective,
        clients=tuple(Samples(features[part], labels[part]) for part in parts),
        initial_params=objective.init_params(config.seed).astype(dtype),
        test=test,
    )
    return _started(config, problem)


def _make_objective(config: RunConfig, dataset: Dataset) -> Objective:
    """Make the objective that the model's name or function stands for."""
    scaling: Scaling = "sum" if config.scaling == "sum" else "mean"
    if is_module(config.model):
        # With reset, the parameters are drawn anew, in whatever way the module draws them.
        module_seed = 0 if config.reset else config.seed
        module = make_module(config.model, DataShape.of(dataset), module_seed)
        from aqg.models.losses import default_loss  # needs torch

        loss = default_loss(dataset.labels)
        return Objective.from_module(
            module, loss, l2=config.l2, scaling=scaling, name=config.model, reset=config.reset
        )
    if not dataset.num_classes:
        raise ConfigError(
            f"model {config.model!r} needs one class per sample, and dataset {dataset.name!r} has "
            f"{dataset.labels.dtype} targets of shape {dataset.labels.shape}; use a torch module"
        )
    return make_objective(
        config.model, dataset.num_features, dataset.num_classes, config.l2, scaling
    )


def _prepare(config: RunConfig, features: NDArray[Any]) -> NDArray[Any]:
    """Give samples the run's precision; modules see them in their own shape, and token ids as such.

    Models in closed form take rows of numbers.
    """
    if not is_module(config.model):
        features = features.reshape(len(features), -1)
    elif features.dtype.kind != "f":
        return features
    return features.astype(config.dtype, copy=False)


def _prepare_labels(config: RunConfig, labels: NDArray[Any]) -> NDArray[Any]:
    return labels.astype(config.dtype, copy=False) if labels.dtype.kind == "f" else labels


def _started(config: RunConfig, problem: Problem) -> Problem:
    """Return the problem, starting from the model that the config names."""
    problem = perturb_problem(problem, config.perturbation)
    if config.init is None:
        return problem
    return start_from(problem, read_tensors(Path(config.init)), config.init)


def try_out(config: RunConfig, problem: Problem) -> None:
    """Let the model take one step and be measured once, so that a run that cannot go fails now.

    What is wrong with a user's module or loss shows when it is called, not when it is made.
    """
    simulation = make_simulation(config, problem)
    objective = simulation.problem.objective
    if not hasattr(objective, "model_layout"):
        return
    local = replace(config.training().local, steps=1, epochs=None)
    features, labels = simulation.problem.clients[0]
    some = slice(local.batch_size or _TRIED_SAMPLES)
    params = simulation.parameters
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come again in the run, if it can go
            local.update(objective, params, features[some], labels[some], (config.seed, 0, 0))
            simulation.problem.measure(params)
    except AqgError:
        raise
    except Exception as error:  # the user's own code
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"{objective.name} fails on {len(labels[some])} samples of shape {features.shape[1:]} "
            f"({features.dtype}) with targets of shape {labels.shape[1:]} ({labels.dtype}): {text}"
        ) from error


def check_target(config: RunConfig, problem: Problem, minimum: float | None) -> None:
    """Raise where a target that ends the run cannot be measured, or is met at the start."""
    goal = config.goal
    if goal is None or not goal.hold:
        return
    simulation = make_simulation(config, problem)
    if config.validation:
        start = Validator(simulation, goal.kind)()
        if math.isnan(start):
            raise ConfigError(f"{config.title} has no {goal.kind} on its validation set")
    elif goal.kind == "accuracy":
        measured = simulation.problem.measure(simulation.averaged)
        if "accuracy" not in measured:
            found = f"only {', '.join(measured)}" if measured else "nothing"
            raise ConfigError(
                f"the target of {config.title} is an accuracy, and on its test set {found} is "
                "measured; ask for a loss"
            )
        start = measured["accuracy"]
    else:
        start = simulation.loss() - (minimum or 0.0)
    if goal.is_met(start):
        raise ConfigError(
            f"the target of {config.title}, {goal}, is met before the first round ({start:.4g}); "
            "ask for more"
        )


def describe_clients(config: RunConfig, dataset: Dataset) -> str:
    """Return a table of what every client holds, as text."""
    parts = parse_partition(config.partition).split(dataset, config.clients, config.seed)
    rows = partition_table(dataset, parts)
    if config.partition == "natural":
        rows = [{**row, "name": dataset.client_names[m]} for m, row in enumerate(rows)]
    return _table(rows)


def _table(rows: list[PartitionRow]) -> str:
    return format_partition_table(rows, max_rows=len(rows)).rstrip() + "\n"


def find_minimum(config: RunConfig, problem: Problem) -> float | None:
    """Return ``f*``, computed once and cached; None where the objective is not convex."""
    if not problem.objective.convex:
        if config.target is not None and config.target_kind == "residual":
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
    if config.partition in ("label", "source", "natural"):
        key["seed"] = 0  # these splits do not depend on it, so neither does their minimum
    num_samples = config.samples or _NUM_SAMPLES.get(config.dataset)
    if num_samples is not None and num_samples % config.clients == 0 and config.partition == "iid":
        key["seed"] = 0  # dealt out evenly, samples make the same loss in whatever order
    if config.validation:
        key["validation"] = config.validation
    if config.weighting == "samples":
        key["weighting"] = config.weighting
    if config.problem is not None:
        key["problem"] = config.problem
    if config.samples is not None:
        key["samples"] = config.samples
    if config.files:
        key["files"] = " ".join(digest for _, digest in config.files)
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
