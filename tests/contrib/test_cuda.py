"""What the CUDA backend foresees: here with its recordings done eagerly.

A GPU does what it is told in order, and so does this; only no one waits. The same logic on a real
GPU is in `tests/sim/test_engine.py`, where there is one.
"""

import numpy as np
import pytest

from aqg.core.optimizers import Momentum
from aqg.core.recipes import make_recipe
from aqg.runs.config import resolve
from aqg.sim import engine
from aqg.sim.engine import FastSimulation
from aqg.sim.training import Dropout, Training

from tests.problems import assert_same, some_recipes, tiny_problem

torch = pytest.importorskip("torch")
from aqg.contrib import cuda  # noqa: E402


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


AWAY = Dropout(0.05, seed=8, absences=((1, 3, 12), (3, 15, 22)))


@pytest.mark.parametrize(("name", "dropout"), some_recipes(None, AWAY))
def test_equals_the_plain_backend_bit_for_bit(name, dropout, simulate):
    problem = tiny_problem(num_clients=6)
    recipe = make_recipe(name, max_staleness=8)
    found, expected, _ = simulate(problem, recipe, 0.1, dropout, 4)
    assert list(found.run_rounds(26)) == list(expected.run_rounds(26))
    assert_same(found, expected)


def test_a_round_is_recorded_once(simulate):
    found, expected, counts = simulate(tiny_problem(num_clients=3), make_recipe("lean"), 0.05)
    for _ in range(25):
        assert found.run_round() == expected.run_round()
        assert np.array_equal(found.parameters, expected.parameters)
        assert found.loss() == expected.loss()
    assert counts["recorded"] == 1
    assert_same(found, expected)


def test_steps_that_set_themselves_and_means(simulate):
    training = Training(step=resolve({"step": "dog", "recipe": "lean"})[0].training().step)
    problem, recipe = tiny_problem(num_clients=3), make_recipe("lean")
    found, expected, _ = simulate(problem, recipe, 0.05, training=training)
    assert list(found.run_rounds(25)) == list(expected.run_rounds(25))
    assert np.array_equal(found.averaged, expected.averaged)
    assert_same(found, expected)


def test_going_back_to_a_state_forgets_what_was_foreseen(simulate):
    found, expected, _ = simulate(tiny_problem(num_clients=3), make_recipe("lean"), 0.05)
    state = expected.state()
    records = list(expected.run_rounds(25))
    list(found.run_rounds(18))
    found.restore(state)
    assert list(found.run_rounds(25)) == records
    assert_same(found, expected)


@pytest.mark.parametrize("rate", [0.0, 0.02])
def test_momentum_and_amplified_sums(rate, simulate):
    training = Training(optimizer=Momentum(0.5))
    recipe = make_recipe("aqg-augmented" if rate else "lean")
    dropout = Dropout(rate, seed=3) if rate else None
    problem = tiny_problem(num_clients=4)
    found, expected, _ = simulate(problem, recipe, 0.02, dropout, training=training)
    assert list(found.run_rounds(30)) == list(expected.run_rounds(30))
    assert_same(found, expected)
