"""A simulation before its first round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aqg.sim.state import SimulationState

if TYPE_CHECKING:
    from aqg.core.optimizers import ServerOptimizer
    from aqg.core.recipe import Recipe
    from aqg.sim.problem import Problem


def initial_state(problem: Problem, recipe: Recipe, optimizer: ServerOptimizer) -> SimulationState:
    """Return what server and clients start from: nothing sent, nothing remembered."""
    num_clients, num_params = problem.num_clients, len(problem.initial_params)
    num_mirrored = num_params if recipe.memory.keeps_mirror else 0
    num_residual = num_params if recipe.keeps_residual else 0
    num_averaged = num_params if recipe.keeps_average else 0
    optimizer_state = optimizer.init(num_params)
    return SimulationState(
        round=1,
        parameters=problem.initial_params,
        total=np.zeros(num_params),
        history=(),
        mirrors=np.zeros((num_clients, num_mirrored), problem.dtype),
        directions=np.zeros((num_clients, num_mirrored), np.int8),
        residuals=np.zeros((num_clients, num_residual), problem.dtype),
        averages=np.zeros((num_clients, num_averaged), problem.dtype),
        notes=np.tile(recipe.initial_notes(num_params), (num_clients, 1)),
        stored_errors=np.zeros((num_clients, recipe.quantizer.num_errors)),
        silent_rounds=np.zeros(num_clients, np.int64),
        momentum=optimizer_state.momentum,
        variance=optimizer_state.variance,
    )
