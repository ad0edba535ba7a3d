"""The models of a run: where it starts from, and the files it leaves behind.

The best model is the one with the best test metric, the first of them where there are several; or,
without a test set, with the lowest training loss. Up to some fifty models of a run are measured,
the last among them. Ties go to the earlier one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.errors import ConfigError
from aqg.weights import check_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aqg.core.types import FloatArray
    from aqg.objectives.base import Objective
    from aqg.sim.problem import Problem


def start_from(problem: Problem, tensors: Mapping[str, Any], source: str) -> Problem:
    """Return the problem with these tensors as its starting point.

    Args:
        problem: whose model has the same names and shapes.
        tensors: by name.
        source: the file, for messages.

    """
    check_names(dict(problem.objective.layout), tensors, source)
    flat = [np.asarray(tensors[name]).reshape(-1) for name, _ in problem.objective.layout]
    params = np.concatenate(flat).astype(problem.dtype)
    for name, _ in problem.objective.layout:
        if not np.isfinite(np.asarray(tensors[name])).all():
            raise ConfigError(f"tensor {name!r} of {source!r} holds NaN or infinity")
    return replace(problem, initial_params=params)


def name_tensors(objective: Objective, params: FloatArray) -> dict[str, Any]:
    """Return the model's tensors by name."""
    tensors: dict[str, Any] = {}
    position = 0
    for name, shape in objective.layout:
        size = math.prod(shape)
        tensors[name] = params[position : position + size].reshape(shape)
        position += size
    return tensors
