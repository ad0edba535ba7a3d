"""A small ResNet that learns the digits 0 to 4, split unevenly."""

from functools import cache

import numpy as np
import torch
from torch import nn
from torch.nn.functional import relu

from aqg.core.recipes import make_recipe
from aqg.data import load_dataset, parse_partition
from aqg.objectives import Objective
from aqg.sim.engine import FastSimulation
from aqg.sim.problem import Problem, Samples
from aqg.sim.training import LocalTraining, Training

NUM_CLIENTS = 3
NUM_CLASSES = 5
BATCH_SIZE, STEPS, SIMULATED_RATE, SIMULATED_ROUNDS = 32, 8, 0.2, 20


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, num_in, num_out, stride, norm):
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.norm1 = norm(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.norm2 = norm(num_out)
        self.shortcut = nn.Sequential(
            nn.Conv2d(num_in, num_out, 1, stride, bias=False), norm(num_out)
        )

    def forward(self, images):
        """Add the shortcut."""
        hidden = relu(self.norm1(self.conv1(images)))
        return relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


class ResNet(nn.Module):
    """A stem, two blocks and a head, with a normalization after every convolution."""

    def __init__(self, norm, width=6):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.norm = norm(width)
        self.blocks = nn.Sequential(Block(width, width, 1, norm), Block(width, 2 * width, 2, norm))
        self.head = nn.Linear(2 * width, NUM_CLASSES)

    def forward(self, images):
        """Return class scores."""
        return self.head(self.blocks(relu(self.norm(self.stem(images)))).mean((2, 3)))


def group_norm(num_channels):
    """Normalize each sample by itself, three channels at a time: no statistics to keep."""
    return nn.GroupNorm(num_channels // 3, num_channels)


def make_net(norm=nn.BatchNorm2d):
    """Return the net that training starts from."""
    torch.manual_seed(0)
    return ResNet(norm)


@cache
def load():
    """Return the clients' samples, and the test set."""
    digits = load_dataset("digits")
    parts = parse_partition("dirichlet:1.0").split(digits, NUM_CLIENTS, seed=0)

    def images(features, labels):
        kept = labels < NUM_CLASSES
        tensor = torch.tensor(features[kept], dtype=torch.float32)
        return tensor.reshape(-1, 1, 8, 8), torch.tensor(labels[kept])

    clients = [images(digits.features[part], digits.labels[part]) for part in parts]
    return clients, images(digits.test_features, digits.test_labels)


def make_simulation(recipe, net, seed=0):
    """Return clients that train on minibatches; with ``gd`` it is federated averaging."""
    clients, test = load()
    objective = Objective.from_module(net, name="resnet")
    problem = Problem(
        objective,
        tuple(Samples(images.numpy(), labels.numpy()) for images, labels in clients),
        objective.init_params(0).astype(np.float32),
        Samples(*(part.numpy() for part in test)),
    )
    local = LocalTraining(batch_size=BATCH_SIZE, steps=STEPS, rate=SIMULATED_RATE)
    return FastSimulation(
        problem,
        make_recipe(recipe),
        SIMULATED_RATE * STEPS / NUM_CLIENTS,  # so that plain averaging is federated averaging
        seed=seed,
        training=Training(local, weighting="samples"),
    )


def simulated_accuracy(simulation):
    """Return the share of test images that are right, with the statistics of the run."""
    return float(simulation.problem.measure(simulation.parameters)["accuracy"])
