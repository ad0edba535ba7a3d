"""Steps that set themselves, in both simulators: the same models, bytes and resumed runs."""

from dataclasses import replace

import numpy as np
import pytest

from aqg.core.downlink import make_downlink
from aqg.core.optimizers import make_optimizer
from aqg.core.recipes import make_recipe
from aqg.core.step_sizes import DistanceOverGradients, Fixed
from aqg.errors import RunError
from aqg.sim.engine import FastSimulation
from aqg.sim.reference import ReferenceSimulation
from aqg.sim.state import SimulationState
from aqg.sim.training import Dropout, LocalTraining, Training

from tests.problems import assert_same, crossed, soak, tiny_problem

LOCAL = LocalTraining(batch_size=4, steps=3, rate=0.05)
NATURAL = 0.05 * 3 / 6
SETTINGS = {
    "all take part": ({}, 0.0),
    "sampled, momentum": (
        {"participation": 0.5, "optimizer": make_optimizer("momentum:beta=0.5")},
        0.0,
    ),
    "dropouts, adam, by samples": (
        {"optimizer": make_optimizer("adam"), "weighting": "samples"},
        0.3,
    ),
}
ROUNDS = 25


def simulations(setting, downlink, recipe="auto", scale=1.0):
    problem = tiny_problem(num_clients=6, unequal=True)
    problem = replace(problem, initial_params=scale * problem.initial_params)
    options, dropout = SETTINGS[setting]
    training = Training(
        local=LOCAL, downlink=make_downlink(downlink), step=DistanceOverGradients(), **options
    )
    arguments = (problem, make_recipe(recipe), NATURAL, Dropout(dropout, seed=8), 4)
    return (
        ReferenceSimulation(*arguments, training=training),
        FastSimulation(*arguments, training=training),
    )


RULES = ("auto", "stc:keep=0.1", "qsgd")
DOWNLINKS = ("full", "exact", "condensed")


@pytest.mark.parametrize(
    ("setting", "downlink", "recipe"), crossed(list(SETTINGS), DOWNLINKS, RULES)
)
def test_the_engine_takes_the_steps_of_the_reference(setting, downlink, recipe):
    reference, fast = simulations(setting, downlink, recipe)
    assert_same(fast, reference, rounds=ROUNDS)


@pytest.mark.parametrize("engine", [0, 1], ids=["reference", "fast"])
@pytest.mark.parametrize("downlink", ["full", "condensed"])
def test_a_resumed_run_takes_the_same_steps(downlink, engine):
    whole = simulations("sampled, momentum", downlink)[1]
    records = [whole.run_round() for _ in range(ROUNDS)]
    halves = simulations("sampled, momentum", downlink)
    for expected in records[:11]:
        assert halves[1 - engine].run_round() == expected
    arrays = halves[1 - engine].state().to_arrays()
    halves[engine].restore(SimulationState.from_arrays(arrays))
    for expected in records[11:]:
        assert halves[engine].run_round() == expected
    assert halves[engine].parameters.tobytes() == whole.parameters.tobytes()


def test_every_client_follows_to_the_servers_model():
    reference, _ = simulations("all take part", "condensed")
    for _ in range(ROUNDS):
        reference.run_round()
        for clients, delivery in reference._deliver(np.arange(6))[0]:
            for m in clients.tolist():
                news = reference._tell(m, delivery)
                assert news.parameters.tobytes() == reference.parameters.tobytes()


def test_a_state_of_fixed_steps_does_not_fit():
    _, found = simulations("all take part", "full")
    training = replace(found.training, step=Fixed())
    fixed = FastSimulation(found.problem, found.recipe, NATURAL, training=training)
    with pytest.raises(RunError, match="does not fit"):
        found.restore(fixed.state())
    with pytest.raises(RunError, match="does not fit"):
        fixed.restore(found.state())


@pytest.mark.parametrize("scale", [0.0, 1e3, *map(soak, (1e-2, 1.0))])
def test_any_starting_norm_is_trained_from(scale):
    """At zero, near it, and a thousand times off."""
    losses = []
    for rule in (DistanceOverGradients(), Fixed()):
        _, fast = simulations("all take part", "condensed", "stc:keep=0.1", scale)
        training = replace(fast.training, step=rule)
        fast = FastSimulation(fast.problem, fast.recipe, NATURAL, seed=4, training=training)
        first = fast.loss()
        for _ in range(60):
            fast.run_round(evaluate=False)
        losses.append(fast.loss())
        assert losses[-1] < first
    found, fixed = losses
    assert found < 1.05 * fixed


@pytest.mark.parametrize("device", ["torch:cpu"])
def test_torch_finds_the_steps_of_numpy(device):
    pytest.importorskip("torch")
    _, fast = simulations("sampled, momentum", "condensed", "stc:keep=0.1")
    arguments = (fast.problem, fast.recipe, NATURAL, fast.dropout, 4)
    other = FastSimulation(*arguments, device=device, training=fast.training)
    for _ in range(10):
        fast.run_round(evaluate=False)
        other.run_round(evaluate=False)
    one, two = fast.state().model, other.state().model
    assert one.step.reach == pytest.approx(two.step.reach, rel=1e-9)
    assert one.step.energy == pytest.approx(two.step.energy, rel=1e-9)
    assert np.allclose(one.parameters, two.parameters, rtol=1e-9, atol=1e-12)
