"""Compile the kernels ahead of the first real call."""

from typing import Any

import numpy as np

from aqg.core.recipes import make_recipe
from aqg.objectives import make_objective
from aqg.sim.engine import FastSimulation
from aqg.sim.problem import Problem, Samples
from aqg.sim.reference import ReferenceSimulation
from aqg.wire import warm_up as warm_up_wire


def warm_up() -> None:
    """Run every compiled loop once on tiny input, for both precisions and for wide levels.

    The first call after an install compiles for some seconds; numba keeps the result on disk, and
    later calls load it.
    """
    dtypes: tuple[type[np.floating[Any]], ...] = (np.float32, np.float64)
    for dtype in dtypes:
        logistic = make_objective("logistic", 3, 2, l2=0.0, scaling="mean")
        samples = zip(np.ones((2, 4, 3), dtype), np.zeros((2, 4), np.int64), strict=True)
        clients = tuple(Samples(*pair) for pair in samples)
        problem = Problem(logistic, clients, np.array([1.0, -0.5, 0.0], dtype))
        for bits in (4, 12):
            for simulation in (FastSimulation, ReferenceSimulation):
                simulation(problem, make_recipe("lean", bits), step_size=0.1).run_round()
    warm_up_wire()
