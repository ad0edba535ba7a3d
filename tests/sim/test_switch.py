"""The default's switch, both ways: engines agree and resume, whatever else happens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from aqg.core.dropouts import BernoulliDropout
from aqg.core.optimizers import SGD, Adam, Momentum
from aqg.core.recipes import make_recipe
from aqg.core.stages import ErrorFeedback
from aqg.sim.engine import FastSimulation
from aqg.sim.local import LocalTraining
from aqg.sim.problem import Problem, Samples
from aqg.sim.reference import ReferenceSimulation
from aqg.sim.state import SimulationState
from aqg.sim.training import Training

from tests.sim.record_runs import Quadratic

NUM_PARAMS, NUM_CLIENTS, ROUNDS = 1500, 4, 120
AUTO = make_recipe("auto")
BASE = np.random.default_rng(5).standard_normal((NUM_CLIENTS, NUM_PARAMS))


@dataclasses.dataclass(frozen=True)
class Scripted(LocalTraining):
    """Each client's updates: one vector, then fresh noise, then nearly the first one again."""

    batch_size: int | None = 1
    calm_rounds: int = 30

    def update(self, objective, params, features, labels, key):
        _, client, number = key
        rng = np.random.default_rng([3, client, number])
        vector = BASE[client] * (1.0 - 0.001 * number)
        if self.calm_rounds < number <= 2 * self.calm_rounds:
            vector = rng.standard_normal(NUM_PARAMS)
        elif number > 2 * self.calm_rounds:
            vector = vector + 0.02 * rng.standard_normal(NUM_PARAMS)
        return np.asarray(1.0 / number), vector.astype(params.dtype)


def make(engine, recipe=AUTO, dtype="float64", dropout=None, **training):
    samples = Samples(np.zeros((2, NUM_PARAMS), dtype), np.zeros(2, np.int64))
    start = np.zeros(NUM_PARAMS, dtype)
    problem = Problem(Quadratic(NUM_PARAMS), (samples,) * NUM_CLIENTS, start)
    training = Training(**{"local": Scripted(), **training})
    return engine(problem, recipe, 0.01, dropout, 4, training=training)


def branches(simulation) -> list[int]:
    return simulation.state().clients.stages["noise"]["branch"].tolist()


def assert_same(one, other) -> None:
    expected = one.state().to_arrays()
    found = other.state().to_arrays()
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert np.array_equal(value, expected[key]), key


CASES = {
    "all": {},
    "sampled": {"participation": 0.5, "local": Scripted(calm_rounds=45)},
    "dropouts": {"dropout": BernoulliDropout(0.3, seed=1)},
    "momentum": {"optimizer": Momentum(0.5)},
    "adam": {"optimizer": Adam()},
    "everything": {
        "participation": 0.75,
        "dropout": BernoulliDropout(0.2, seed=1),
        "optimizer": Momentum(),
        "local": Scripted(calm_rounds=40),
    },
}


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float64") for case in CASES), ("everything", "float32")]
)
def test_engines_agree_and_resume_through_both_switches(case, dtype):
    settings = CASES[case]
    reference = make(ReferenceSimulation, dtype=dtype, **settings)
    fast = make(FastSimulation, dtype=dtype, **settings)
    resumed = []
    seen = []
    rounds = 4 * settings.get("local", Scripted()).calm_rounds
    for number in range(rounds):
        if number in (3 * rounds // 8, 3 * rounds // 4):  # amid the noise, and after it
            again = make(FastSimulation, dtype=dtype, **settings)
            again.restore(SimulationState.from_arrays(fast.state().to_arrays()))
            resumed.append(again)
        record = reference.run_round(evaluate=False)
        assert fast.run_round(evaluate=False) == record
        for again in resumed:
            assert again.run_round(evaluate=False) == record
        seen.append(set(branches(fast)))
    for simulation in (fast, *resumed):
        assert_same(reference, simulation)
    quarter = rounds // 4
    assert seen[quarter - 1] == {0}
    assert 0 not in seen[2 * quarter - 1]
    assert seen[-1] == {0}


def test_the_tolerance_forgets_with_the_mirror():
    """The energy that widens a client's tolerance is that of the mirror it has now."""
    fast = make(FastSimulation)
    for _ in range(ROUNDS):
        fast.run_round(evaluate=False)
        clients = fast.state().clients
        energy = clients.stages["wider_tolerance"]["energy"]
        assert energy == pytest.approx(np.sum(clients.link.mirror**2, axis=1), rel=1e-12)
    assert energy.all()


@pytest.mark.parametrize("optimizer", [SGD(), Adam()])
def test_a_recipe_with_error_feedback_of_its_own_can_have_the_switch(optimizer):
    onebit = make_recipe("onebit")
    recipe = dataclasses.replace(onebit, switch=AUTO.switch)
    assert onebit.stages == (ErrorFeedback(),)
    reference = make(ReferenceSimulation, recipe, optimizer=optimizer)
    fast = make(FastSimulation, recipe, optimizer=optimizer)
    widths = set()
    for _ in range(ROUNDS):
        record = reference.run_round(evaluate=False)
        assert fast.run_round(evaluate=False) == record
        widths.update(record.widths)
    assert_same(reference, fast)
    assert widths == {1, 2}


def test_torch_takes_the_same_ways():
    pytest.importorskip("torch")
    cpu, other = make(FastSimulation), None
    problem, training = cpu.problem, cpu.training
    other = FastSimulation(problem, AUTO, 0.01, None, 4, device="torch:cpu", training=training)
    other.backend.local_updates = lambda local, params, clients, keys: tuple(
        map(
            other.backend.put,
            cpu.backend.local_updates(local, other.backend.get(params), clients, keys),
        )
    )
    for _ in range(ROUNDS):
        assert other.run_round(evaluate=False) == cpu.run_round(evaluate=False)
        assert branches(other) == branches(cpu)
