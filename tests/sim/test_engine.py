"""The fast engine against the reference: the same uploads, widths, bytes and models."""

from __future__ import annotations

import numpy as np
import pytest

from aqg.core.dropouts import Absence, BernoulliDropout, ScriptedDropout
from aqg.core.recipes import RECIPES, make_recipe
from aqg.sim.engine import FastSimulation
from aqg.sim.reference import ReferenceSimulation

from tests.problems import tiny_problem

DROPOUTS = {
    "none": None,
    "random": BernoulliDropout(0.4, seed=8),
    "scripted": ScriptedDropout((Absence(1, 5, 25), Absence(3, 15, 40))),
}


@pytest.mark.parametrize(
    ("dropout", "unequal"),
    [("none", False), ("random", True), ("scripted", True)],
)
@pytest.mark.parametrize("name", RECIPES)
def test_equals_the_reference_bit_for_bit(name, dropout, unequal):
    problem = tiny_problem(num_clients=6, unequal=unequal)
    recipe = make_recipe(name, max_staleness=15)
    arguments = (problem, recipe, 0.1, DROPOUTS[dropout], 4)
    reference = ReferenceSimulation(*arguments)
    # Two clients per block, so that a round takes several.
    fast = FastSimulation(*arguments, block_bytes=2 * problem.initial_params.nbytes)
    for _ in range(50):
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
    run_both("torch:cpu", name, 60, 1e-9)


@pytest.mark.parametrize("name", RECIPES)
def test_cuda_takes_the_same_decisions(name):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    run_both("cuda", name, 60, 1e-9)
