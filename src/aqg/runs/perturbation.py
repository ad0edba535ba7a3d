"""Data moved by one unit in the last place: what another machine's rounding could do to a run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from aqg.sim.problem import Samples

if TYPE_CHECKING:
    from aqg.core.types import FloatArray
    from aqg.sim.problem import Problem

_SEED_STREAM = 0x756C70  # keeps these draws apart from others made with the same seed


def perturb(features: FloatArray, draw: int) -> FloatArray:
    """Return features of which a third each are one unit in the last place higher, lower, the same.

    Zeros stay zeros, and draw 0 changes nothing.

    >>> features = np.array([1.0, 0.0, -2.5])
    >>> bool(np.all(perturb(features, 0) == features)), float(perturb(features, 1)[1])
    (True, 0.0)
    >>> float(np.abs(perturb(np.full(100, 1.5), 1) / 1.5 - 1).max()) <= 2**-52
    True
    """
    if draw == 0:
        return features
    direction = np.random.default_rng([draw, _SEED_STREAM]).integers(-1, 2, features.shape)
    moved = np.nextafter(features, np.copysign(np.inf, direction)).astype(features.dtype)
    perturbed: FloatArray = np.where((direction == 0) | (features == 0), features, moved)
    return perturbed


def perturb_problem(problem: Problem, draw: int) -> Problem:
    """Return the problem with every client's features perturbed."""
    if draw == 0:
        return problem
    clients = tuple(
        Samples(perturb(samples.features, draw * problem.num_clients + m), samples.labels)
        for m, samples in enumerate(problem.clients)
    )
    return replace(problem, clients=clients)
