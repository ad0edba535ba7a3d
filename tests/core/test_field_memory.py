"""What clients of the field remember: any combination, in both engines, saved and restored."""

import dataclasses

import numpy as np
import pytest

from aqg.core.recipes import make_recipe
from aqg.core.space import NumpySpace
from aqg.core.stages import OwnMovement, RunningAverage
from aqg.sim.engine import FastSimulation
from aqg.sim.training import Dropout, LocalTraining, Training

from tests.problems import check_engines, crossed, tiny_problem


def after(*stages, name):
    """Return a recipe with stages before its own."""
    recipe = make_recipe(name)
    return dataclasses.replace(recipe, stages=(*stages, *recipe.stages))


COMBINATIONS = {
    "stc of averages": after(RunningAverage(0.3), name="stc:keep=0.2"),
    "lean by own movement": after(OwnMovement(), name="lean"),
    "clag of averages": after(RunningAverage(0.5), name="clag:zeta=4"),
    "momentum": make_recipe("ef21-m:keep=0.2:eta=0.5", max_staleness=5),
    "schedule": make_recipe("dadaquant:phi=4:psi=0.5"),
}
TRAINING = Training(LocalTraining(batch_size=8, steps=3, rate=0.05), participation=0.7)


@pytest.mark.parametrize(("name", "dtype"), crossed(list(COMBINATIONS), ["float32", "float64"]))
def test_engines_agree_and_resume(name, dtype):
    problem = tiny_problem(dtype, num_clients=5, unequal=True)
    arguments = (problem, COMBINATIONS[name], 0.05, Dropout(0.2, seed=2), 3)
    check_engines(*arguments, training=TRAINING, rounds=40)


def test_only_what_a_recipe_needs_is_kept():
    used = {
        "topk": {"clients/stages/feedback/residual"},
        "ef21": {"clients/track/position"},
        "ef21-m": {"clients/track/position", "clients/stages/average/average"},
        "clag": {"clients/track/position", "clients/stages/own_movement/last"},
        "eden": set(),
        "dadaquant": {"clients/stages/loss_schedule/notes"},
        "auto": {"clients/track/position", "clients/stages/wider_tolerance/energy"},
    }
    for name, expected in used.items():
        arrays = FastSimulation(tiny_problem(), make_recipe(name), 0.1).state().to_arrays()
        slots = {
            "clients/track/position",
            *(key for key in arrays if key.startswith("clients/stages/")),
        }
        assert {slot for slot in slots if arrays[slot].size} == expected, name


def test_a_running_average_starts_at_the_first_vector_and_refuses_what_no_grid_holds():
    space = NumpySpace()
    zeros, vector, huge = np.zeros(3), np.array([1.0, -2.0, 4.0]), np.array([0.0, 1e31, 0.0])
    averages, vectors = np.stack([zeros, vector, vector]), np.stack([vector, zeros, huge])
    blended = space.blend(averages, vectors, 0.25)
    assert blended.tolist() == [vector.tolist(), [0.75, -1.5, 3.0], huge.tolist()]
    rows, earlier = np.stack([vector, vector]), np.stack([zeros, np.ones(3)])
    assert space.distances(rows, earlier).tolist() == [0.0, 18.0]


@pytest.mark.parametrize("device", ["cpu", "torch:cpu"])
def test_a_bad_gradient_leaves_the_average_alone(device):
    if device != "cpu":
        pytest.importorskip("torch")
    problem = tiny_problem(num_clients=3)
    simulation = FastSimulation(problem, make_recipe("ef21-m"), 0.05, device=device)
    simulation.run_round()
    before = simulation.state()
    parameters = before.model.parameters.copy()
    parameters[0] = np.nan
    simulation.restore(before._replace(model=before.model._replace(parameters=parameters)))
    record = simulation.run_round(evaluate=False)
    assert len(record.faults) == 3
    average = simulation.state().clients.stages["average"]["average"]
    assert np.array_equal(average, before.clients.stages["average"]["average"])
