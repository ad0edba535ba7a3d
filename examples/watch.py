"""Motion from a smartwatch, one client per person: which of seven exercises it is.

    aqg run --problem examples/watch.py:problem --data-dir DIR

Data: 4,677 windows of 100 measurements of acceleration and rotation (six numbers each) from the
watches of ten persons doing physiotherapy exercises, after Burns and others, "Shoulder
physiotherapy exercise recognition", 2018 (https://github.com/dmbee/seglearn, BSD).
``DIR/watch/watch_windows.npz`` holds ``X`` (N×100×6), ``y`` and ``subject``.

Neighboring windows overlap, so a random test set would hold half of what was trained on. The test
set is two persons whom no client has seen.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from aqg.data.files import read_arrays
from aqg.sim.problem import Problem

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

TEST_PERSONS = (9, 10)
SETTINGS = {
    "rounds": 100,
    "recipe": "auto,gd",
    "batch_size": 32,
    "local_steps": 5,
    "local_rate": 0.1,
    "eval_every": 5,
}


class Convolutions(nn.Module):
    """Three convolutions along time, with batch normalization, and a linear layer."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        channels = (6, width, width, width)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(before, after, kernel_size=5, stride=2, padding=2)
            for before, after in itertools.pairwise(channels)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in self.convolutions)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, 7)

    def forward(self, windows: Tensor) -> Tensor:
        """Return seven logits for each window ``(100, 6)``."""
        hidden = windows.movedim(-1, -2)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            hidden = norm(convolution(hidden)).relu()
        logits: Tensor = self.head(self.dropout(hidden.mean(-1)))
        return logits


def problem(data_dir: Path, dtype: str = "float32", fraction: float = 1.0) -> Problem:
    """Make eight clients, persons 1 to 8; ``fraction`` takes that part of everybody's windows."""
    arrays = read_arrays(data_dir / "watch" / "watch_windows.npz", ("X", "y", "subject"))
    windows, exercises, persons = arrays["X"], arrays["y"].astype(np.int64), arrays["subject"]
    step = round(1 / fraction)
    windows, exercises, persons = windows[::step], exercises[::step], persons[::step]
    in_test = np.isin(persons, TEST_PERSONS)
    mean, deviation = windows[~in_test].mean((0, 1)), windows[~in_test].std((0, 1))
    windows = (windows - mean) / deviation
    return Problem.from_module(
        Convolutions(),
        clients=[
            (windows[persons == person], exercises[persons == person])
            for person in np.unique(persons[~in_test])
        ],
        test=(windows[in_test], exercises[in_test]),
        dtype=dtype,
    )
