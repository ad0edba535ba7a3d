"""Stages that recipes are made of: each owns its state, and none knows of the others."""

from aqg.core.stages.averaging import RunningAverage
from aqg.core.stages.feedback import ErrorControl, ErrorFeedback
from aqg.core.stages.loss_schedule import DoublingLevels, LossSchedule, level_factors
from aqg.core.stages.own_movement import OwnMovement
from aqg.core.stages.stored_errors import StoredErrors
from aqg.core.stages.wider_tolerance import WiderTolerance

__all__ = [
    "DoublingLevels",
    "ErrorControl",
    "ErrorFeedback",
    "LossSchedule",
    "OwnMovement",
    "RunningAverage",
    "StoredErrors",
    "WiderTolerance",
    "level_factors",
]
