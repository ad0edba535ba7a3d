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
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.errors import DataError
from aqg.models.nets import Transformer
from aqg.sim.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import nn

LENGTH = 64
"""Characters that the transformer sees."""
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


def shakespeare(
    data_dir: Path,
    dtype: str,
    clients: int,
    by: str = "role",
    skip: int = 0,
    metrics: str | None = None,
    make_net: Callable[[int], nn.Module] | None = None,
) -> Problem:
    """Make a client of each of the largest roles, or plays (``by=play``).

    The ``skip`` largest of all are left out, and by default a transformer reads them. The last
    tenth of every client's speeches is its part of the test set.
    """
    speeches = read_roles(data_dir)
    alphabet = alphabet_of(speeches)
    if by == "play":
        plays: dict[str, list[str]] = {}
        for role, texts in speeches.items():
            plays.setdefault(role.partition("__")[0], []).extend(texts)
        speeches = plays
    largest = sorted(speeches, key=lambda name: -sum(map(len, speeches[name])))
    parts, tests = [], []
    for name in largest[skip : skip + clients]:
        texts = speeches[name]
        last = len(texts) - len(texts) // 10
        parts.append(text_windows(texts[:last], alphabet))
        tests.append(text_windows(texts[last:], alphabet))
    return Problem.from_module(
        Transformer(len(alphabet), LENGTH) if make_net is None else make_net(len(alphabet)),
        clients=parts,
        test=tuple(np.concatenate(part)[::4] for part in zip(*tests, strict=True)),
        metrics=metrics,
        dtype=dtype,
    )


def read_roles(data_dir: Path) -> dict[str, list[str]]:
    file = data_dir / "shakespeare" / "roles.json.gz"
    try:
        with gzip.open(file, "rt", encoding="utf-8") as text:
            roles: dict[str, list[str]] = json.load(text)
    except OSError as error:
        raise DataError(f"{str(file)!r} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise DataError(f"{str(file)!r} is not JSON: {error}") from None
    return roles


def alphabet_of(roles: dict[str, list[str]]) -> dict[str, int]:
    """Return a number for every character; 0 is the line break between speeches."""
    letters = {letter for speeches in roles.values() for text in speeches for letter in text}
    return {letter: token for token, letter in enumerate(["\n", *sorted(letters - {"\n"})])}


def text_windows(texts: list[str], alphabet: dict[str, int]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Cut a text into pieces; the target at every place is the character after it."""
    tokens = np.array([alphabet[letter] for letter in "\n".join(["", *texts, ""])], np.int64)
    num_windows = (len(tokens) - 1) // LENGTH
    size, shape = num_windows * LENGTH, (num_windows, LENGTH)
    return tokens[:size].reshape(shape), tokens[1 : size + 1].reshape(shape)
