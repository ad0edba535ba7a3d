"""Train your own torch model: a small CNN on MNIST, by several clients, with any recipe.

python examples/mnist_cnn.py                       # lean beside gd, half a minute
python examples/mnist_cnn.py lean laq --partition label --samples 5000
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import nn

from aqg.core.recipes import make_recipe
from aqg.data import PARTITIONS, Dataset, load_dataset, parse_partition
from aqg.errors import AqgError
from aqg.objectives import Objective
from aqg.sim.engine import FastSimulation
from aqg.sim.problem import Problem, Samples

NUM_LINES = 10
"""Progress lines per recipe."""

NUM_TEST = 2000
"""Test images that the accuracy is measured on."""


class Result(NamedTuple):
    """The end of one recipe's training."""

    recipe: str
    loss: float
    accuracy: float
    num_uploads: int
    upload_bytes: int
    seconds: float


def make_cnn() -> nn.Module:
    """Return two convolutions that halve the image, and a linear layer: 9,098 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 8, kernel_size=3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 16, kernel_size=3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 10),
    )


def make_problem(options: argparse.Namespace) -> Problem:
    """Deal a random part of MNIST to the clients, and make an objective of the CNN."""
    mnist = load_dataset("mnist", options.data_dir)
    assert mnist.test_features is not None
    assert mnist.test_labels is not None
    random = np.random.default_rng(options.seed)
    chosen = random.permutation(len(mnist))[: options.samples]
    mean, deviation = mnist.features.mean(), mnist.features.std()
    part: Dataset = replace(
        mnist,
        features=(mnist.features[chosen] - mean) / deviation,
        labels=mnist.labels[chosen],
    )
    test_features = (mnist.test_features[:NUM_TEST] - mean) / deviation
    shares = parse_partition(options.partition).split(part, options.clients, options.seed)
    objective = Objective.from_module(make_cnn(), input_shape=(1, 28, 28), name="cnn", reset=True)
    return Problem(
        objective=objective,
        clients=tuple(Samples(part.features[share], part.labels[share]) for share in shares),
        initial_params=objective.init_params(options.seed).astype(np.float32),
        test=Samples(test_features, mnist.test_labels[:NUM_TEST]),
    )


def train(problem: Problem, recipe: str, options: argparse.Namespace) -> Result:
    """Run one recipe from the start, with a line of progress now and then."""
    simulation = FastSimulation(
        problem,
        make_recipe(recipe),
        options.step / problem.num_clients,  # the server steps along the clients' sum
        seed=options.seed,
        device=options.device,
    )
    num_uploads = upload_bytes = 0
    loss = accuracy = float("nan")
    started = time.perf_counter()
    for number in range(1, options.rounds + 1):
        record = simulation.run_round(evaluate=False)
        num_uploads += record.num_uploads
        upload_bytes += record.upload_bytes
        if number % max(1, options.rounds // NUM_LINES) == 0 or number == options.rounds:
            loss = simulation.loss()
            accuracy = measure_accuracy(problem, simulation)
            print(
                f"{recipe:>8}  round {number:4}  loss {loss:.4f}  test accuracy {accuracy:.1%}  "
                f"{upload_bytes:11,} bytes",
                flush=True,
            )
    seconds = time.perf_counter() - started
    return Result(recipe, loss, accuracy, num_uploads, upload_bytes, seconds)


def measure_accuracy(problem: Problem, simulation: FastSimulation) -> float:
    """Return the share of right answers, not a number once the model has diverged."""
    accuracy = problem.test_accuracy(simulation.parameters)
    return float("nan") if accuracy is None else accuracy


def print_table(results: list[Result]) -> None:
    """Compare all recipes with the first one."""
    print(f"\n{'recipe':>8}    loss  accuracy  uploads        bytes    fewer  seconds")
    for result in results:
        ratio = results[0].upload_bytes / result.upload_bytes
        print(
            f"{result.recipe:>8}  {result.loss:.4f}  {result.accuracy:8.1%}  "
            f"{result.num_uploads:7,}  {result.upload_bytes:11,}  {ratio:6.1f}×  "
            f"{result.seconds:7.1f}"
        )


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=["gd", "lean"], help="such as lean:eta=0.3")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--samples", type=int, default=1000, help="training images, of all clients")
    parser.add_argument("--partition", default="iid", help=", ".join(PARTITIONS))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--step", type=float, default=0.1, help="along the clients' mean")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--data-dir", type=Path, help="where MNIST is; or set AQG_DATA_DIR")
    return parser.parse_args()


def main() -> None:
    """Train with every recipe and compare."""
    options = parse_options()
    try:
        problem = make_problem(options)
        results = [train(problem, recipe, options) for recipe in options.recipes]
    except AqgError as error:
        sys.exit(f"error: {error}")
    print_table(results)


if __name__ == "__main__":
    main()
