"""What the last bit of the data changes: logistic runs repeated with perturbed features.

Two machines that round sums in another order differ in the last bit, so data perturbed by one unit
in the last place stand in for another machine. A difference can decide who speaks once the loss is
as close to its minimum as rounding lets it come; uploads until then are counted apart.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aqg.runs.config import RunConfig
    from aqg.runs.directory import Line

PERTURBED = "rounding.csv"
ROUNDING = 1e-12
"""A residual that is hardly more than the rounding of a loss of about 70."""


@dataclass(frozen=True)
class Perturbed:
    """One run on perturbed data.

    Attributes:
        partition: how the data was split.
        recipe: its spec.
        alpha: the step size.
        draw: the number of the perturbation; 0 is the data as it is.
        uploads: in all rounds.
        uploads_before: until the loss first came within `ROUNDING` of the minimum.
        bits_per_param: in all rounds.
        residual: ``f(θ) - f*`` at the end; infinity where it diverged.

    """

    partition: str
    recipe: str
    alpha: float
    draw: int
    uploads: int
    uploads_before: int
    bits_per_param: int
    residual: float

    @property
    def key(self) -> tuple[str, str, float, int]:
        """What tells runs apart."""
        return self.partition, self.recipe, self.alpha, self.draw

    @staticmethod
    def of(config: RunConfig, lines: Sequence[Line], summary: Mapping[str, Any]) -> Perturbed:
        """Make a row of a finished run."""
        residual = np.inf if summary["diverged"] else summary["residual"]
        minimum = -np.inf if summary["diverged"] else summary["final_loss"] - residual
        before = itertools.takewhile(
            lambda record: record.loss is None or not record.loss - minimum <= ROUNDING,
            (line.record for line in lines),
        )
        return Perturbed(
            config.partition,
            config.recipe,
            config.alpha,
            config.perturbation,
            summary["uploads"],
            sum(record.num_uploads for record in before),
            summary["bits_per_param"],
            float(residual),
        )

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> Perturbed:
        """Read a row of ``rounding.csv``."""
        return Perturbed(
            row["partition"],
            row["recipe"],
            float(row["alpha"]),
            int(row["draw"]),
            int(row["uploads"]),
            int(row["uploads_before"]),
            int(row["bits_per_param"]),
            float(row["residual"]),
        )


def key_of(config: RunConfig) -> tuple[str, str, float, int]:
    """Return the key that a run on perturbed data, or on the data itself, has among them."""
    return config.partition, config.recipe, config.alpha, config.perturbation
