"""What a default has to survive: absences, heavy dropouts, one client far louder than the rest."""

from dataclasses import replace

import numpy as np
import pytest

from aqg.core.recipes import make_recipe
from aqg.data import load_dataset, parse_partition
from aqg.objectives import make_objective
from aqg.sim.engine import FastSimulation
from aqg.sim.problem import Problem, Samples
from aqg.sim.training import Dropout


def digits(model="softmax"):
    """One digit per client."""
    dataset = load_dataset("digits")
    objective = make_objective(model, 64, 10, 0.01, "mean")
    parts = parse_partition("label").split(dataset, 10, 0)
    clients = tuple(Samples(dataset.features[p], dataset.labels[p]) for p in parts)
    return Problem(objective, clients, objective.init_params(0).astype(np.float64))


def descend(problem, step_size, rounds):
    """Return the loss after plain gradient descent."""
    params = problem.initial_params
    for _ in range(rounds):
        gradients = [
            problem.objective.losses_and_gradients(params, *samples)[1]
            for samples in problem.clients
        ]
        params = params - step_size * np.sum(gradients, axis=0)
    return mean_loss(problem, params)


def mean_loss(problem, params):
    return np.mean([problem.objective.losses(params, *samples) for samples in problem.clients])


def final_loss(problem, recipe, step_size, rounds, dropout=None):
    simulation = FastSimulation(problem, make_recipe(recipe), step_size, dropout)
    for _ in range(rounds):
        simulation.run_round(evaluate=False)
    return simulation.loss()


@pytest.mark.soak
def test_nine_of_ten_rounds_missed_by_everyone():
    dropout = Dropout(0.9, seed=0)
    lost = final_loss(digits(), "auto", 0.02, 1500, dropout)
    assert lost < descend(digits(), 0.02, 1500) + 0.05


@pytest.mark.soak
def test_a_client_that_vanishes_for_500_rounds_and_returns():
    dropout = Dropout(absences=((3, 100, 600),))
    lost = final_loss(digits(), "auto", 0.05, 900, dropout)
    assert lost < descend(digits(), 0.05, 900) + 1e-3


@pytest.mark.soak
def test_one_client_a_hundred_times_louder():
    problem = digits()
    loud = problem.clients[4]._replace(features=problem.clients[4].features * 100)
    problem = replace(problem, clients=(*problem.clients[:4], loud, *problem.clients[5:]))
    step_size = 1e-4  # what gradient descent survives
    start = mean_loss(problem, problem.initial_params)
    expected = descend(problem, step_size, 600)
    assert expected < start
    assert final_loss(problem, "auto", step_size, 600) < expected + 0.05 * (start - expected)


@pytest.mark.soak
@pytest.mark.parametrize("recipe", ["auto", "lean"])
def test_a_network_on_which_the_published_rules_fail(recipe):
    problem = digits("mlp:64")
    lost = final_loss(problem, recipe, 0.05, 300)
    assert lost < descend(problem, 0.05, 300) + 0.02
