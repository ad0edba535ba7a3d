"""The paper's own figures, from ``paper.toml`` beside this module."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

SETTINGS = ("logistic-iid", "logistic-noniid", "network-iid", "network-noniid")
"""The four blocks of Table 1."""


@dataclass(frozen=True)
class PaperRow:
    """A row of Table 1.

    Attributes:
        setting: one of `SETTINGS`.
        recipe: the recipe that stands for the paper's algorithm.
        rounds: the paper's "Iteration #".
        uploads: "Communication #".
        bits: "Bit #", bits per parameter over all uploads.
        saving: "Transmission Reduction" against LAQ, as a fraction; None where the paper has none.
        why: where a difference from our run comes from, in one line.

    """

    setting: str
    recipe: str
    rounds: int
    uploads: int
    bits: int
    why: str
    saving: float | None = None


@cache
def table_one() -> tuple[PaperRow, ...]:
    """Return Table 1, row by row.

    >>> row = table_one()[8]
    >>> row.setting, row.recipe, row.uploads, row.bits
    ('network-iid', 'aqg-2', 854, 1708)
    """
    text = resources.files("aqg.reproduce").joinpath("paper.toml").read_text(encoding="utf-8")
    return tuple(PaperRow(**row) for row in tomllib.loads(text)["row"])
