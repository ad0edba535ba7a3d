"""The app's ResNet in the simulator: for its test, and for `benchmarks/batchnorm.py`."""

import numpy as np

from aqg.core.recipes import make_recipe
from aqg.objectives import Objective
from aqg.sim.engine import FastSimulation
from aqg.sim.problem import Problem, Samples
from aqg.sim.training import LocalTraining, Training

from tests.flower.resnet_app.resnet import task

STEPS, RATE, ROUNDS = 8, 0.2, 20


def make_simulation(recipe, net, seed=0):
    """Return clients that train on minibatches; with ``gd`` it is federated averaging."""
    clients, test = task.load()
    objective = Objective.from_module(net, name="resnet")
    problem = Problem(
        objective,
        tuple(Samples(images.numpy(), labels.numpy()) for images, labels in clients),
        objective.init_params(0).astype(np.float32),
        Samples(*(part.numpy() for part in test)),
    )
    local = LocalTraining(batch_size=task.BATCH_SIZE, steps=STEPS, rate=RATE)
    return FastSimulation(
        problem,
        make_recipe(recipe),
        RATE * STEPS / task.NUM_CLIENTS,  # so that plain averaging is federated averaging
        seed=seed,
        training=Training(local, weighting="samples"),
    )


def accuracy(simulation):
    """Return the share of test images that are right, with the statistics of the run."""
    return float(simulation.problem.measure(simulation.parameters)["accuracy"])
