"""Motion from a smartwatch, one client per person: which of seven exercises it is.

    aqg run --problem examples/watch.py:problem --data-dir DIR

Data: 4,677 windows of 100 measurements of acceleration and rotation (six numbers each) from the
watches of ten persons doing physiotherapy exercises, after Burns and others, "Shoulder
physiotherapy exercise recognition", 2018 (https://github.com/dmbee/seglearn, BSD).
``DIR/watch/watch_windows.npz`` holds ``X`` (N×100×6), ``y`` and ``subject``.

Neighboring windows overlap, so a random test set would hold half of what was trained on. The test
set is two persons whom no client has seen.

The problem itself is in ``aqg/studies/contest/natural.py``; here are settings of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqg.studies.contest.natural import watch

if TYPE_CHECKING:
    from pathlib import Path

    from aqg.sim.problem import Problem

SETTINGS = {
    "rounds": 100,
    "recipe": "auto,gd",
    "batch_size": 32,
    "local_steps": 5,
    "local_rate": 0.1,
    "eval_every": 5,
}


def problem(data_dir: Path, dtype: str = "float32", fraction: float = 1.0) -> Problem:
    """Make eight clients, persons 1 to 8; ``fraction`` takes that part of everybody's windows."""
    return watch(data_dir, dtype, fraction, validates=False)
