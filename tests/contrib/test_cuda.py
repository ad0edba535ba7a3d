"""What the CUDA backend foresees: here with its recordings done eagerly.

A GPU does what it is told in order, and so does this; only no one waits. The same logic on a real
GPU is in `tests/sim/test_engine.py`, where there is one.
"""

import numpy as np
import pytest

from aqg.contrib import cuda
from aqg.core.recipes import make_recipe
from aqg.sim import engine
from aqg.sim.engine import FastSimulation

from tests.problems import assert_same, in_setting, settings, tiny_problem


class EagerRecording:
    """Computes when it is replayed, into the same outputs."""

    def __init__(self, compute):
        self._compute = compute
        self.outputs = compute()

    def replay(self):
        for output, result in zip(self.outputs, self._compute(), strict=True):
            output.copy_(result)


class InstantReport:
    """Comes at once; until it is waited for, no one may look."""

    def __init__(self, length):
        self.values = np.full(length, np.nan)

    def request(self, source):
        self._sent = source.numpy().copy()
        self.values[:] = np.nan

    def wait(self):
        self.values[:] = self._sent


@pytest.fixture
def simulate(monkeypatch):
    """Make a simulation on the CUDA backend and one on the plain backend; count the recordings."""
    counts = {"recorded": 0}

    class Backend(cuda.CudaBackend):
        def rows(self, table, indices):
            return super().rows(table, indices).copy()  # as those that come from a GPU are

        def _record(self, *arguments):
            counts["recorded"] += 1
            return super()._record(*arguments)

    def make(problem, recipe, *arguments, **options):
        expected = FastSimulation(problem, recipe, *arguments, device="torch:cpu", **options)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "make_backend", lambda problem, _: Backend(problem, "cpu"))
            found = FastSimulation(problem, recipe, *arguments, device="cuda", **options)
        return found, expected, counts

    monkeypatch.setattr(cuda, "Recording", EagerRecording)
    monkeypatch.setattr(cuda, "Report", InstantReport)
    return make


@pytest.mark.parametrize(
    ("recipe", "setting"), settings("paper", "dropouts", "momentum", "dog", "dog, condensed")
)
def test_equals_the_plain_backend_bit_for_bit(recipe, setting, simulate):
    (_, *others), options = in_setting(recipe, setting)
    problem = tiny_problem(num_clients=6)  # clients of one size, whose rounds are recorded
    found, expected, _ = simulate(problem, *others, **options)
    assert list(found.run_rounds(26)) == list(expected.run_rounds(26))
    assert np.array_equal(found.averaged, expected.averaged)
    assert_same(found, expected)


def test_a_round_is_recorded_once_and_going_back_to_a_state_forgets_what_was_foreseen(simulate):
    found, expected, counts = simulate(tiny_problem(num_clients=3), make_recipe("lean"), 0.05)
    state, records = expected.state(), []
    for _ in range(25):
        records.append(expected.run_round())
        assert found.run_round() == records[-1]
        assert np.array_equal(found.parameters, expected.parameters)
        assert found.loss() == expected.loss()
    assert counts["recorded"] == 1
    assert_same(found, expected)
    found.restore(state)
    assert list(found.run_rounds(25)) == records
    assert_same(found, expected)
