"""The next character of Shakespeare, one client per role: a small transformer.

    aqg run --problem examples/shakespeare.py:problem --data-dir DIR

Data: the speeches of 37 plays from Project Gutenberg (public domain), in
``DIR/shakespeare/roles.json.gz``: a JSON object ``{"play__ROLE": ["a speech", ...]}``. It is
another edition and another parser than that of the LEAF benchmark, so scores do not compare with
those published for it.

Clients are the roles with the most text. The last tenth of every role's speeches is its part of the
test set.
"""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING

import numpy as np

from aqg.errors import DataError
from aqg.models.nets import Transformer
from aqg.sim.problem import Problem

if TYPE_CHECKING:
    from pathlib import Path

LENGTH = 64
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


def read_roles(data_dir: Path) -> dict[str, list[str]]:
    """Return the speeches of every role."""
    file = data_dir / "shakespeare" / "roles.json.gz"
    try:
        with gzip.open(file, "rt", encoding="utf-8") as text:
            roles: dict[str, list[str]] = json.load(text)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{str(file)!r} cannot be read: {reason}; see {__file__}") from None
    except ValueError as error:
        raise DataError(f"{str(file)!r} is not JSON: {error}") from None
    return roles


def alphabet_of(roles: dict[str, list[str]]) -> dict[str, int]:
    """Return a number for every character; 0 is the line break between speeches."""
    characters = {letter for speeches in roles.values() for text in speeches for letter in text}
    return {letter: token for token, letter in enumerate(["\n", *sorted(characters - {"\n"})])}


def windows(speeches: list[str], alphabet: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Cut a role's text into pieces; the target at every place is the character after it."""
    tokens = np.array([alphabet[letter] for letter in "\n".join(["", *speeches, ""])], np.int64)
    num_windows = (len(tokens) - 1) // LENGTH
    size = num_windows * LENGTH
    shape = (num_windows, LENGTH)
    return tokens[:size].reshape(shape), tokens[1 : size + 1].reshape(shape)


def problem(data_dir: Path, dtype: str = "float32", fraction: float = 1.0) -> Problem:
    """Make a client for each of the largest roles; ``fraction`` takes that part of the roles."""
    roles = read_roles(data_dir)
    alphabet = alphabet_of(roles)
    largest = sorted(roles, key=lambda role: -sum(map(len, roles[role])))
    clients, tests = [], []
    for role in largest[: max(2, round(fraction * NUM_ROLES))]:
        speeches = roles[role]
        last = len(speeches) - len(speeches) // 10
        clients.append(windows(speeches[:last], alphabet))
        tests.append(windows(speeches[last:], alphabet))
    return Problem.from_module(
        Transformer(len(alphabet), LENGTH),
        clients=clients,
        test=tuple(np.concatenate(part)[::4] for part in zip(*tests, strict=True)),
        metrics="accuracy,perplexity",
        dtype=dtype,
    )
