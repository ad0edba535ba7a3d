"""Motion from a smartwatch, one client per person: which of seven exercises it is.

    aqg run --problem examples/watch.py:problem --data-dir DIR

Data: 4,677 windows of 100 measurements of acceleration and rotation (six numbers each) from the
watches of ten persons doing physiotherapy exercises, after Burns and others, "Shoulder
physiotherapy exercise recognition", 2018 (https://github.com/dmbee/seglearn, BSD).
``DIR/watch/watch_windows.npz`` holds ``X`` (N×100×6), ``y``, ``subject``, ``recording`` and
``side``, the arm.

Neighboring windows overlap, so a random test set would hold half of what was trained on. The test
set is two persons whom no client has seen.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

from aqg.data.datasets import read_arrays
from aqg.sim.problem import Problem, Samples

if TYPE_CHECKING:
    from pathlib import Path

TEST_PERSONS = (9, 10)
SETTINGS = {
    "rounds": 100,
    "recipe": "auto,gd",
    "batch_size": 32,
    "local_steps": 5,
    "local_rate": 0.1,
    "eval_every": 5,
}


def problem(
    data_dir: Path, dtype: str = "float32", fraction: float = 1.0, validates: bool = False
) -> Problem:
    """Make eight clients, persons 1 to 8; ``fraction`` takes that part of everybody's windows.

    With ``validates``, the last fifth of every recording is a validation set.
    """
    made = watch_problem(data_dir, dtype, _motion_network(), False, round(1 / fraction), validates)
    return made if validates else replace(made, validation=None)


def watch_problem(
    data_dir: Path,
    dtype: str,
    module: nn.Module,
    by_arm: bool,
    step: int = 1,
    holds_out: bool = True,
) -> Problem:
    """Make a client of each person, or arm, with every so many windows.

    The validation set is the last fifth of every recording. If it is held out, the window before it
    is left out, too, as it overlaps.
    """
    names = ("X", "y", "subject", "recording", *(("side",) if by_arm else ()))
    arrays = read_arrays(data_dir / "watch" / "watch_windows.npz", names)
    arrays = {name: array[::step] for name, array in arrays.items()}
    windows, exercises, persons = arrays["X"], arrays["y"].astype(np.int64), arrays["subject"]
    in_test = np.isin(persons, TEST_PERSONS)
    mean, deviation = windows[~in_test].mean((0, 1)), windows[~in_test].std((0, 1))
    windows = ((windows - mean) / deviation).astype(dtype)
    trains, validates = (np.zeros(len(persons), bool) for _ in range(2))
    for recording in np.unique(arrays["recording"][~in_test]):
        places = np.flatnonzero(arrays["recording"] == recording)
        first = len(places) - len(places) // 5
        trains[places[: first - 1] if holds_out else places] = True
        validates[places[first:]] = True
    owners = 2 * persons.astype(np.int64) + (arrays["side"] if by_arm else 0)
    problem = Problem.from_module(
        module,
        clients=[
            (windows[trains & (owners == owner)], exercises[trains & (owners == owner)])
            for owner in np.unique(owners[~in_test])
        ],
        test=(windows[in_test], exercises[in_test]),
        dtype=dtype,
    )
    return replace(problem, validation=Samples(windows[validates], exercises[validates]))


class TimeFirst(nn.Module):
    def forward(self, windows: Tensor) -> Tensor:
        return windows.movedim(-1, -2)


class MeanOverTime(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mean(-1)


def _motion_network(width: int = 24) -> nn.Module:
    layers: list[nn.Module] = [TimeFirst()]
    for before, after in itertools.pairwise((6, width, width, width)):
        layers.append(nn.Conv1d(before, after, kernel_size=5, stride=2, padding=2))
        layers += [nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*layers, MeanOverTime(), nn.Dropout(0.2), nn.Linear(width, 7))
