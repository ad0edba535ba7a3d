"""The next character of Shakespeare, one client per role: a small transformer.

    aqg run --problem examples/shakespeare.py:problem --data-dir DIR

Data: the speeches of 37 plays from Project Gutenberg (public domain), in
``DIR/shakespeare/roles.json.gz``: a JSON object ``{"play__ROLE": ["a speech", ...]}``. It is
another edition and another parser than that of the LEAF benchmark, so scores do not compare with
those published for it.

Clients are the roles with the most text. The last tenth of every role's speeches is its part of the
test set.

The problem itself is in ``aqg/studies/contest/natural.py``; here are settings of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqg.studies.contest.natural import shakespeare

if TYPE_CHECKING:
    from pathlib import Path

    from aqg.sim.problem import Problem

NUM_ROLES = 40
SETTINGS = {
    "rounds": 120,
    "recipe": "auto",
    "batch_size": 16,
    "local_steps": 2,
    "participation": 0.2,
    "optimizer": "adam",
    "alpha": 0.01,
    "eval_every": 20,
}


def problem(data_dir: Path, dtype: str = "float32", fraction: float = 1.0) -> Problem:
    """Make a client for each of the largest roles; ``fraction`` takes that part of the roles."""
    roles = max(2, round(fraction * NUM_ROLES))
    return shakespeare(data_dir, dtype, roles, metrics="accuracy,perplexity")
