"""Compile the kernels ahead of the first real call."""

from typing import Any

import numpy as np

from aqg.core.grids import Grid, affine
from aqg.core.kernels import add_levels, measure, move_mirror, quantize
from aqg.core.recipes import make_recipe
from aqg.core.types import FloatArray
from aqg.objectives import make_objective
from aqg.sim.engine import FastSimulation
from aqg.sim.problem import Problem, Samples
from aqg.sim.reference import ReferenceSimulation
from aqg.wire import warm_up as warm_up_wire


def warm_up() -> None:
    """Run every compiled loop once on tiny input, for both precisions.

    The first call after an install compiles for some seconds; numba keeps the result on disk, and
    later calls load it.
    """
    dtypes: tuple[type[np.floating[Any]], ...] = (np.float32, np.float64)
    for dtype in dtypes:
        vector: FloatArray = np.array([1.0, -0.5, 0.0], dtype)
        for grid in Grid:
            measure(vector, grid, max_width=2)
            for width in (4, 12):
                levels = quantize(vector, grid, width, step=1.0)
                values = np.zeros(np.iinfo(levels.dtype).max + 1, dtype)
                add_levels(vector, levels, values)
                move_mirror(vector.copy(), levels, *affine(grid, width, 1.0), np.zeros(3), 1.0)
        logistic = make_objective("logistic", 3, 2, l2=0.0, scaling="mean")
        samples = zip(np.ones((2, 4, 3), dtype), np.zeros((2, 4), np.int64), strict=True)
        clients = tuple(Samples(*pair) for pair in samples)
        problem = Problem(logistic, clients, vector)
        for simulation in (FastSimulation, ReferenceSimulation):
            simulation(problem, make_recipe("lean"), step_size=0.1).run_round()
    warm_up_wire()
