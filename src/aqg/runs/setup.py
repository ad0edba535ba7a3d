"""Build what a config describes: the problem, its validation set and its minimum.

The clients hold out the *validation set*, by which runs are tuned and stopped; the test set is then
looked at for reports only.
"""

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aqg.core.recipes import make_recipe
from aqg.core.types import FloatArray, IntArray
from aqg.data import Dataset, load_dataset, parse_partition
from aqg.data.partitions import format_partition_table, partition_table
from aqg.errors import AqgError, ConfigError
from aqg.models import DataShape, is_module, make_module
from aqg.objectives import Objective, make_objective
from aqg.objectives.base import Scaling
from aqg.runs.config import DATASET_FACTS, RunConfig, check_files, make_own_problem
from aqg.runs.cost import running_totals
from aqg.runs.directory import Line, finite_or_none
from aqg.sim.engine import FastSimulation
from aqg.sim.problem import Problem, Samples
from aqg.sim.reference import ReferenceSimulation
from aqg.spec import in_words
from aqg.start import settle
from aqg.weights import check_names, fill_module, read_tensors

_TRIED_SAMPLES = 8
_CHOSEN, _HELD_OUT, _MOVED = 0xC0DE, 0xFA1D, 0x756C70
"""Keep these random choices apart from others that are made with the same seed."""


def build_problem(config: RunConfig, data_dir: Path | None = None) -> Problem:
    return load_problem(config, data_dir)[0]


def load_problem(config: RunConfig, data_dir: Path | None = None) -> tuple[Problem, str]:
    """Return the problem, and as text what each client holds."""
    check_files(config)
    if config.problem is None:
        dataset = _chosen(load_dataset(config.dataset, data_dir), config.samples)
        parts = parse_partition(config.partition).split(dataset, config.clients, config.seed)
        problem, rows = make_problem(config, dataset, parts), partition_table(dataset, parts)
        if config.partition == "natural":
            rows = [row | {"name": dataset.client_names[m]} for m, row in enumerate(rows)]
    else:
        problem = make_own_problem(config.problem, config.seed, config.dtype, data_dir)
        if problem.num_clients != config.clients:
            raise ConfigError(
                f"clients is {config.clients}, and {config.problem} with seed {config.seed} makes "
                f"{problem.num_clients}; set clients to that"
            )
        rows = [{"client": m, "samples": len(s.labels)} for m, s in enumerate(problem.clients)]
    problem = _started(config, problem)
    if config.validation:
        problem = hold_out(problem, config.validation, config.seed)
    return problem, format_partition_table(rows) + "\n"


def _chosen(dataset: Dataset, num_samples: int | None) -> Dataset:
    """Return the dataset with so many of its training samples, drawn at random; all by default."""
    if num_samples is None:
        return dataset
    if num_samples > len(dataset):
        raise ConfigError(
            f"samples is {num_samples}; {dataset.name} has {len(dataset)}, so at most that"
        )
    random = np.random.default_rng([_CHOSEN, num_samples])
    chosen = np.sort(random.permutation(len(dataset))[:num_samples])
    columns = {
        name: getattr(dataset, name) for name in ("features", "labels", "sources", "clients")
    }
    return replace(dataset, **{k: v[chosen] for k, v in columns.items() if v is not None})


def make_problem(config: RunConfig, dataset: Dataset, parts: Sequence[IntArray]) -> Problem:
    def prepared(features: NDArray[Any], labels: NDArray[Any]) -> Samples:
        """Give samples the run's precision; token ids stay as they are.

        Models in closed form take rows of numbers, and modules samples in their own shape.
        """
        if not is_module(config.model):
            features = features.reshape(len(features), -1).astype(config.dtype, copy=False)
        given = (features, labels)
        kinds = (config.dtype if array.dtype.kind == "f" else array.dtype for array in given)
        return Samples(*(a.astype(kind, copy=False) for a, kind in zip(given, kinds, strict=True)))

    objective = _make_objective(config, dataset)
    features, labels = prepared(dataset.features, dataset.labels)
    clients = tuple(Samples(features[part], labels[part]) for part in parts)
    test = None
    if dataset.test_features is not None and dataset.test_labels is not None:
        test = prepared(dataset.test_features, dataset.test_labels)
    start = objective.init_params(config.seed).astype(np.dtype(config.dtype))
    return Problem(objective, clients, start, test)


def _make_objective(config: RunConfig, dataset: Dataset) -> Objective:
    scaling: Scaling = "sum" if config.scaling == "sum" else "mean"
    if is_module(config.model):
        # With reset, the parameters are drawn anew, in whatever way the module draws them.
        module_seed = 0 if config.reset else config.seed
        module = make_module(config.model, DataShape.of(dataset), module_seed)
        from aqg.models.nets import default_loss  # needs torch

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


def _started(config: RunConfig, problem: Problem) -> Problem:
    """Return the problem, starting from the model that the config names."""
    if config.perturbation:
        draws = itertools.count(config.perturbation * problem.num_clients)
        moved = (Samples(perturb(x, next(draws)), y) for x, y in problem.clients)
        problem = replace(problem, clients=tuple(moved))
    if config.init is not None:
        problem = start_from(problem, read_tensors(Path(config.init)), config.init)
    return send_start(problem, config.way_to_start, config.seed)


def send_start(problem: Problem, way: str, seed: int) -> Problem:
    """Return the problem with the model that clients have once the first one was sent to them."""
    started, message = settle(problem.initial_params, problem.objective.layout, way, seed=seed)
    return replace(problem, initial_params=started, start_bytes=len(message))


def start_from(problem: Problem, tensors: Mapping[str, Any], source: str) -> Problem:
    """Return the problem with these tensors as its starting point, frozen ones included."""
    objective: Any = problem.objective
    if getattr(objective, "model_layout", None) is not None:
        module = copy.deepcopy(objective.module)
        fill_module(module, tensors, source)
        started = objective.with_module(module)
        params = started.init_params(0).astype(problem.dtype)
        return replace(problem, objective=started, initial_params=params)
    check_names(dict(objective.layout), tensors, source)
    flat = [np.asarray(tensors[name], problem.dtype).reshape(-1) for name, _ in objective.layout]
    for (name, _), values in zip(objective.layout, flat, strict=True):
        if not np.isfinite(values).all():
            raise ConfigError(f"tensor {name!r} of {source!r} holds NaN or infinity")
    return replace(problem, initial_params=np.concatenate(flat))


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
        raise ConfigError(
            f"{objective.name} fails on {len(labels[some])} samples of shape {features.shape[1:]} "
            f"({features.dtype}) with targets of shape {labels.shape[1:]} ({labels.dtype}): "
            f"{in_words(error)}"
        ) from error


def check_target(config: RunConfig, problem: Problem, minimum: float | None) -> None:
    """Raise where a target that ends the run cannot be measured, or is met at the start."""
    goal = config.goal
    if goal is None or not goal.hold:
        return
    simulation = make_simulation(config, problem)
    if config.validation or goal.kind == "accuracy":
        start = follow_target(config, simulation)()
        if math.isnan(start):
            where = "validation" if config.validation else "test"
            found = ", ".join(simulation.problem.measure(simulation.averaged)) or "nothing"
            raise ConfigError(
                f"the target of {config.title} is its {goal.kind} on the {where} set, and on its "
                f"test set {found} is measured; ask for another one"
            )
    else:
        start = simulation.loss() - (minimum or 0.0)
    if goal.is_met(start):
        raise ConfigError(
            f"the target of {config.title}, {goal}, is met before the first round ({start:.4g}); "
            "ask for more"
        )


def find_minimum(
    config: RunConfig, problem: Problem, progress: Callable[[float], None] = lambda _: None
) -> float | None:
    """Return ``f*``, computed once and cached; None where the objective is not convex.

    ``progress`` is told from time to time which share of the way to it lies behind.
    """
    if not problem.objective.convex:
        if config.target is not None and config.target_kind == "residual":
            raise ConfigError(
                f"target is {config.target}, a residual against f*, but f* is unknown for "
                f"{config.model} with l2 {config.l2}; use logistic or softmax with l2 above 0"
            )
        return None
    from aqg.objectives.optimum import cached_optimum, find_optimum  # needs scipy

    def compute() -> Any:
        clients = problem.clients
        if config.weighting == "samples":  # weighted so, mean losses make that of all samples
            features, labels = zip(*clients, strict=True)
            clients = (Samples(np.concatenate(features), np.concatenate(labels)),)
        return find_optimum(problem.objective, clients, progress=progress)

    return cached_optimum(minimum_key(config), compute).value


def minimum_key(config: RunConfig) -> dict[str, Any]:
    """Return the settings that ``f*`` depends on, by name."""
    names = ("dataset", "partition", "model", "clients", "l2", "scaling", "seed")
    key = {name: getattr(config, name) for name in names}
    if config.partition in ("label", "source", "natural"):
        key["seed"] = 0  # these splits do not depend on it, so neither does their minimum
    facts = DATASET_FACTS.get(config.dataset)
    num_samples = config.samples or (facts.num_samples if facts else None)
    if num_samples is not None and num_samples % config.clients == 0 and config.partition == "iid":
        key["seed"] = 0  # dealt out evenly, samples make the same loss in whatever order
    for name in ("validation", "problem", "samples", "weighting"):
        if getattr(config, name) not in (0.0, None, "equal"):
            key[name] = getattr(config, name)
    if config.files:
        key["files"] = " ".join(digest for _, digest in config.files)
    return key


def make_simulation(config: RunConfig, problem: Problem) -> FastSimulation | ReferenceSimulation:
    recipe = make_recipe(config.recipe, config.bits, config.max_staleness)
    given = (problem, recipe, config.alpha, config.dropout_schedule(), config.seed)
    if config.engine == "reference":
        return ReferenceSimulation(*given, training=config.training())
    return FastSimulation(*given, device=config.device, training=config.training())


def perturb(features: FloatArray, draw: int) -> FloatArray:
    """Return features of which a third each are one unit in the last place higher, lower, the same.

    Zeros stay zeros, and draw 0 changes nothing.
    """
    if draw == 0:
        return features
    direction = np.random.default_rng([draw, _MOVED]).integers(-1, 2, features.shape)
    moved = np.nextafter(features, np.copysign(np.inf, direction)).astype(features.dtype)
    return np.where((direction == 0) | (features == 0), features, moved)


def hold_out(problem: Problem, share: float, seed: int) -> Problem:
    """Return the problem with a share of every client's samples, drawn at random, held out.

    A client with one sample keeps it. A problem that has a validation set stays as it is.
    """
    if problem.validation is not None:
        return problem
    kept, held_out = [], []
    for client, (features, labels) in enumerate(problem.clients):
        order = np.random.default_rng([_HELD_OUT, seed, client]).permutation(len(labels))
        count = min(len(labels) - 1, max(1, round(share * len(labels))))
        chosen, rest = np.sort(order[:count]), np.sort(order[count:])
        kept.append(Samples(features[rest], labels[rest]))
        held_out.append((features[chosen], labels[chosen]))
    features, labels = (np.concatenate(parts) for parts in zip(*held_out, strict=True))
    if not len(labels):
        raise ConfigError(f"validation is {share}; no client has 2 samples, to hold out one")
    return replace(problem, clients=tuple(kept), validation=Samples(features, labels))


def follow_target(
    config: RunConfig, simulation: FastSimulation | ReferenceSimulation
) -> Callable[[], float]:
    """Return what measures the model: on the validation set, or its accuracy on the test set.

    Samples stay on the simulation's device. A model that holds NaN or infinity has no accuracy or
    loss: NaN.
    """
    problem = simulation.problem
    samples, kind = problem.validation, config.target_kind
    if not config.validation:
        samples, kind = problem.test, "accuracy"
        if problem.metrics is not None or samples is None:
            return lambda: problem.measure(simulation.averaged).get("accuracy", math.nan)
    assert samples is not None, "a run with a validation share holds samples out"
    backend = getattr(simulation, "backend", None)
    put = (lambda array: array) if backend is None else backend.put
    placed = Samples(*map(put, samples))

    def measure() -> float:
        params = simulation.averaged
        if not np.isfinite(params).all():
            return math.nan
        return problem.validate(put(params), placed, kind)

    return measure


def curve(
    values: Sequence[float], lines: Sequence[Line], final_metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Return a run's curve for its summary: entry ``k`` of each list is after ``k`` rounds.

    ``values`` are what the run's target is about, ``bytes`` all that travelled, ``tests`` the test
    accuracies that were measured, as pairs of rounds and accuracy.
    """
    measured = enumerate([*(line.metrics for line in lines), final_metrics])
    tests = [[rounds, row["accuracy"]] for rounds, row in measured if "accuracy" in row]
    return {
        "values": [finite_or_none(float(f"{value:.6g}")) for value in values],
        "bytes": running_totals(line.record for line in lines),
        "tests": tests,
    }
