"""Simulators: a reference that reads like the paper, and a fast engine that equals it."""

from aqg.sim.engine import FastSimulation
from aqg.sim.problem import Problem, Samples
from aqg.sim.record import RoundRecord
from aqg.sim.reference import ReferenceSimulation
from aqg.sim.training import LocalTraining, Training

__all__ = [
    "FastSimulation",
    "LocalTraining",
    "Problem",
    "ReferenceSimulation",
    "RoundRecord",
    "Samples",
    "Training",
]
