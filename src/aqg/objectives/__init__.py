"""Losses and gradients on flat parameter vectors, one per client."""

from aqg.objectives.base import Objective, Scaling, make_objective

__all__ = ["Objective", "Scaling", "make_objective"]
