"""Steps that set themselves, in both simulators: the same models, bytes and resumed runs."""

from dataclasses import replace

import pytest

from aqg.core.downlink import make_downlink
from aqg.core.optimizers import make_optimizer
from aqg.core.recipes import make_recipe
from aqg.core.step_sizes import DistanceOverGradients, Fixed
from aqg.errors import RunError
from aqg.sim.engine import FastSimulation
from aqg.sim.training import Dropout, LocalTraining, Training

from tests.problems import check_engines, check_torch, crossed, soak, tiny_problem

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


def terms(setting, downlink, recipe="auto", scale=1.0):
    problem = tiny_problem(num_clients=6, unequal=True)
    problem = replace(problem, initial_params=scale * problem.initial_params)
    options, dropout = SETTINGS[setting]
    training = Training(
        local=LOCAL, downlink=make_downlink(downlink), step=DistanceOverGradients(), **options
    )
    arguments = (problem, make_recipe(recipe), NATURAL, Dropout(dropout, seed=8), 4)
    return arguments, training


def simulate(kind, *setting):
    arguments, training = terms(*setting)
    return kind(*arguments, training=training)


RULES = ("auto", "stc:keep=0.1", "qsgd")
DOWNLINKS = ("full", "exact", "condensed")


@pytest.mark.parametrize(
    ("setting", "downlink", "recipe"), crossed(list(SETTINGS), DOWNLINKS, RULES)
)
def test_the_engine_takes_the_steps_of_the_reference(setting, downlink, recipe):
    arguments, training = terms(setting, downlink, recipe)
    check_engines(*arguments, training=training, rounds=ROUNDS)


def test_a_state_of_fixed_steps_does_not_fit():
    found = simulate(FastSimulation, "all take part", "full")
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
        fast = simulate(FastSimulation, "all take part", "condensed", "stc:keep=0.1", scale)
        training = replace(fast.training, step=rule)
        fast = FastSimulation(fast.problem, fast.recipe, NATURAL, seed=4, training=training)
        first = fast.loss()
        for _ in range(60):
            fast.run_round(evaluate=False)
        losses.append(fast.loss())
        assert losses[-1] < first
    found, fixed = losses
    assert found < 1.05 * fixed


def test_torch_finds_the_steps_of_numpy():
    pytest.importorskip("torch")
    arguments, training = terms("sampled, momentum", "condensed", "stc:keep=0.1")
    check_torch(*arguments, training=training, rounds=10)
