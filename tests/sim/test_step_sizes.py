"""Steps that set themselves, in training."""

from dataclasses import replace

import pytest

from aqg.core.downlink import Condensed
from aqg.core.recipes import make_recipe
from aqg.core.step_sizes import DistanceOverGradients, Fixed
from aqg.sim.engine import FastSimulation
from aqg.sim.training import Training

from tests.problems import LOCAL, NATURAL, soak, tiny_problem


@pytest.mark.parametrize("scale", [0.0, 1e3, *map(soak, (1e-2, 1.0))])
def test_any_starting_norm_is_trained_from(scale):
    """At zero, near it, and a thousand times off."""
    problem = tiny_problem(num_clients=6, unequal=True)
    problem = replace(problem, initial_params=scale * problem.initial_params)
    losses = []
    for rule in (DistanceOverGradients(), Fixed()):
        training = Training(LOCAL, downlink=Condensed(), step=rule)
        recipe = make_recipe("stc:keep=0.1")
        fast = FastSimulation(problem, recipe, NATURAL, seed=4, training=training)
        first = fast.loss()
        for _ in range(60):
            fast.run_round(evaluate=False)
        losses.append(fast.loss())
        assert losses[-1] < first
    found, fixed = losses
    assert found < 1.05 * fixed
