"""QSGD with a width that a stage of the recipe gives (DAdaQuant)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aqg.core.messages import Upload
from aqg.core.policies import Case, Decision
from aqg.core.quantizers import NormOnly, Request, Stochastic
from aqg.core.types import FloatArray


@dataclass(frozen=True)
class StageWidth:
    """Send every round, with the width that a `aqg.core.stages.LossSchedule` gives."""

    def decide(self, case: Case) -> Decision:
        shape = case.innovation.squared_norm.shape
        return Decision(np.ones(shape, np.bool_), np.full(shape, case.movement, np.int64))


@dataclass(frozen=True)
class QsgdAtWidth(NormOnly):
    """QSGD with ``q = 2^(b-2)`` levels at ``b`` bits, or with as many as the advice says."""

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        """Round every coordinate up or down at random, by its distance."""
        num_levels = int(request.advice[0]) if request.advice else 1 << (request.width - 2)
        return Stochastic(num_levels).quantize(vector, request)
