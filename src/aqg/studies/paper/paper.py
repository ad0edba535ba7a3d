"""The paper's own figures, from ``paper.toml`` beside this module."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

SETTINGS = ("logistic-iid", "logistic-noniid", "network-iid", "network-noniid")
"""The four blocks of Table 2."""
PAPER_RESIDUAL = 1e-6
"""Where the paper counts the costs of its network rows."""
KINDS = ("definition", "reading", "conjecture")
"""How far a reason goes: true by definition; a choice of ours where the paper says nothing; or an
explanation that nothing here decides."""


@dataclass(frozen=True)
class PaperRow:
    """A row of the paper's Table 2, "Performance comparison"; its Table 1 is the notation.

    Attributes:
        setting: one of `SETTINGS`.
        recipe: the recipe that stands for the paper's algorithm.
        rounds: the paper's "Iteration #".
        uploads: "Communication #".
        bits: "Bit #", bits per parameter over all uploads.
        saving: "Transmission Reduction" against LAQ, as a fraction; None where the paper has none.
        why: where a difference from our runs may come from, in one line.
        kind: how far that reason goes, one of `KINDS`.

    """

    setting: str
    recipe: str
    rounds: int
    uploads: int
    bits: int
    why: str
    kind: str
    saving: float | None = None


@cache
def performance() -> tuple[PaperRow, ...]:
    """Return Table 2, row by row.

    >>> row = performance()[8]
    >>> row.setting, row.recipe, row.uploads, row.bits
    ('network-iid', 'aqg-2', 854, 1708)
    """
    text = resources.files("aqg.studies.paper").joinpath("paper.toml").read_text(encoding="utf-8")
    return tuple(PaperRow(**row) for row in tomllib.loads(text)["row"])
