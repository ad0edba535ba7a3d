"""The fast engine against the reference: the same uploads, widths, bytes and models."""

from __future__ import annotations

import numpy as np
import pytest

from aqg.core.dropouts import Absence, BernoulliDropout, ScriptedDropout
from aqg.core.recipes import RECIPES, make_recipe
from aqg.sim.engine import FastSimulation
from aqg.sim.reference import ReferenceSimulation

from tests.problems import tiny_problem

AWAY = (Absence(1, 3, 14), Absence(3, 8, 19))


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_equals_the_reference_bit_for_bit(name, loses):
    problem = tiny_problem(num_clients=6, unequal=loses)
    dropout = ScriptedDropout(AWAY, BernoulliDropout(0.3, seed=8)) if loses else None
    arguments = (problem, make_recipe(name, max_staleness=8), 0.1, dropout, 4)
    reference = ReferenceSimulation(*arguments)
    # Two clients per block, so that a round takes several.
    fast = FastSimulation(*arguments, block_bytes=2 * problem.initial_params.nbytes)
    for _ in range(24):
        assert fast.run_round() == reference.run_round()
    assert fast.loss() == reference.loss()
    expected = reference.state().to_arrays()
    for key, value in fast.state().to_arrays().items():
        assert np.array_equal(value, expected[key]), key


def run_both(device, name, rounds, tolerance):
    problem = tiny_problem(num_clients=6, unequal=True)
    recipe = make_recipe(name)
    arguments = (problem, recipe, 0.05, BernoulliDropout(0.3, seed=1), 4)
    cpu = FastSimulation(*arguments)
    other = FastSimulation(*arguments, device=device)
    for _ in range(rounds):
        assert other.run_round().widths == cpu.run_round().widths
    assert other.parameters == pytest.approx(cpu.parameters, rel=tolerance, abs=tolerance)
    other.restore(cpu.state())
    assert np.array_equal(other.state().clients.track.position, cpu.state().clients.track.position)


@pytest.mark.parametrize("name", RECIPES)
def test_torch_backend_takes_the_same_decisions(name):
    """The code that runs on a GPU, here on torch's CPU device."""
    pytest.importorskip("torch")
    run_both("torch:cpu", name, 25, 1e-9)


@pytest.mark.parametrize("name", RECIPES)
def test_cuda_takes_the_same_decisions(name):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    run_both("cuda", name, 60, 1e-9)
