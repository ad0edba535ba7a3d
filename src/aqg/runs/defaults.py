"""Defaults of a run: of its dataset, of its model, or of the problem that a function makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aqg.core.optimizers import Adam, make_optimizer
from aqg.data import DATASETS, is_dataset_file
from aqg.errors import ConfigError
from aqg.models import is_module
from aqg.runs.own import file_facts, problem_facts, problem_settings
from aqg.runs.run_config import NUM_SAMPLES, averaging_step, require_choice, typed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DATASET_DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"partition": "label", "model": "softmax", "clients": 10, "rounds": 500},
    "mnist": {"partition": "label", "model": "softmax", "clients": 10, "rounds": 4000},
    "heterogeneous": {"partition": "source", "model": "logistic", "clients": 18, "rounds": 500},
}
STEP_SIZES: dict[tuple[str, str], float] = {
    ("digits", "mean"): 0.1,
    ("digits", "sum"): 0.0007,
    ("mnist", "mean"): 0.02,
    ("mnist", "sum"): 3e-6,
    ("heterogeneous", "mean"): 0.008,
    ("heterogeneous", "sum"): 0.0015,
}
"""For the default number of clients."""
OWN = "custom"
"""Stands for dataset, partition and model where a function makes the whole problem."""
_OWN_ROUNDS = 100
_OWN_CLIENTS = 10
ADAM_STEP_SIZE = 0.01
"""Adam's steps have this length per coordinate, whatever the data and the number of clients."""


def dataset_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the defaults of a dataset by name or file, and of the model."""
    dataset = settings.get("dataset", "digits")
    if isinstance(dataset, str) and is_dataset_file(dataset):
        facts = file_facts(dataset)
        defaults: dict[str, Any] = {
            "partition": "iid" if facts.num_clients is None else "natural",
            "clients": _OWN_CLIENTS,
            "rounds": _OWN_ROUNDS,
            "dtype": "float32",
        }
        if settings.get("partition", defaults["partition"]) == "natural":
            defaults["clients"] = facts.num_clients or _OWN_CLIENTS
        if facts.has_classes:
            defaults["model"] = "softmax"
        elif "model" not in settings:
            raise ConfigError(
                f"the targets in {dataset!r} are not classes, so there is no model by default; "
                "name one with --model"
            )
    else:
        require_choice("dataset", dataset, DATASETS, "or FILE.npz")
        facts, defaults = None, DATASET_DEFAULTS[dataset]
    merged = {"dataset": dataset, **defaults, **settings}
    model = merged["model"]
    if isinstance(model, str) and is_module(model):
        merged = {"l2": 0.0, "dtype": "float32", **merged}
    if "alpha" not in merged:
        if facts is None and not is_module(typed("model", model)) and _is_exact(merged):
            step_size = _dataset_step_size(merged)
        else:
            num_samples = NUM_SAMPLES[dataset] if facts is None else facts.num_samples
            num_samples = typed("samples", merged.get("samples")) or num_samples
            step_size = averaging_step(merged, num_samples)
        merged["alpha"] = _default_step_size(merged, step_size)
    return merged


_OF_A_PROBLEM: dict[str, Any] = {
    "dataset": OWN,
    "partition": OWN,
    "model": OWN,
    "l2": 0.0,
    "scaling": "mean",
}


def problem_defaults(settings: Mapping[str, Any], data_dir: Path | None) -> dict[str, Any]:
    """Return the settings with the defaults of a problem that a function makes."""
    problem = settings["problem"]
    for name, value in _OF_A_PROBLEM.items():
        if settings.get(name, value) != value:
            raise ConfigError(
                f"{name} is {settings[name]} and problem {problem}, which makes the whole problem, "
                f"{name} included; give one of them"
            )
    merged = {"dtype": "float32", "rounds": _OWN_ROUNDS, **problem_settings(problem), **settings}
    merged |= _OF_A_PROBLEM
    require_choice("dtype", merged["dtype"], ("float32", "float64"))
    if "clients" not in merged or "alpha" not in merged:
        facts = problem_facts(problem, typed("dtype", merged["dtype"]), data_dir)
        merged.setdefault("clients", facts.num_clients)
        step_size = averaging_step(merged, facts.num_samples)
        merged.setdefault("alpha", _default_step_size(merged, step_size))
    return merged


def _is_exact(settings: Mapping[str, Any]) -> bool:
    """Tell whether clients send gradients on all their samples; a dataset's step is for these."""
    plain = {"batch_size": None, "local_steps": 1, "local_epochs": None}
    return all(settings.get(name, value) == value for name, value in plain.items())


def _default_step_size(settings: Mapping[str, Any], step_size: float) -> float:
    """Adapt the step size of plain gradient descent to the optimizer.

    With momentum a direction moves the model by ``α/(1-β)`` in all; the default keeps that as long
    as without. Where clients are sampled, their directions are old as well, and old directions
    with momentum oscillate: the step is shortened by the fraction sampled.
    """
    optimizer = make_optimizer(typed("optimizer", settings.get("optimizer", "sgd")))
    step_size = step_size * optimizer.fresh_share
    if isinstance(optimizer, Adam):
        step_size = ADAM_STEP_SIZE
    if optimizer.fresh_share < 1:
        step_size *= typed("participation", settings.get("participation", 1.0))
    return step_size


def _dataset_step_size(settings: Mapping[str, Any]) -> float:
    """Scale the dataset's step size to the number of clients, over whom mean losses are summed."""
    dataset, scaling = settings["dataset"], settings.get("scaling", "mean")
    require_choice("scaling", scaling, ("mean", "sum"))
    step_size = STEP_SIZES[dataset, scaling]
    clients: int = typed("clients", settings["clients"])
    if scaling == "sum" or clients < 1:
        return step_size
    default_clients: int = DATASET_DEFAULTS[dataset]["clients"]
    return step_size * default_clients / clients
