"""When a deployment's run ends before its last round: its time, its bytes, or no progress."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from aqg.flower.client_metrics import EVALUATED, TRAINED
from aqg.objectives.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.flower.settings import Settings
    from aqg.runs.directory import Line

LOSS = "loss"


def ending(settings: Settings, lines: Sequence[Line], seconds: float) -> str:
    """Return why a run is over; empty while it is not.

    Args:
        settings: of the run.
        lines: of all its rounds, those before a restart included; their metrics are the server's
            and the clients'.
        seconds: since this server began.

    """
    if settings.max_seconds and seconds >= settings.max_seconds:
        return f"{seconds:.0f} s have passed, and max-seconds is {settings.max_seconds:g}"
    total = sum(line.record.total_bytes or 0 for line in lines)
    if settings.max_bytes and total >= settings.max_bytes:
        return f"{total} bytes have been sent, and max-bytes is {settings.max_bytes}"
    if settings.patience:
        values = watched(settings.monitor, lines)
        since = len(values) - 1 - _best(values) if values else 0
        if since >= settings.patience:
            return (
                f"{settings.monitor or 'the loss'} has not improved the last {since} times it was "
                f"measured, and patience is {settings.patience}"
            )
    return ""


def watched(monitor: str, lines: Sequence[Line]) -> list[float]:
    """Return what is to become small, as often as it was measured.

    A metric that is better the larger it is, as far as is known, is taken with the other sign; a
    minus before the name says that a metric of one's own is better the smaller it is.
    """
    name = monitor.removeprefix("-")
    if name in ("", LOSS):
        found = [line.record.loss for line in lines]
        return [math.inf if math.isnan(v) else v for v in found if v is not None]
    word = name.removeprefix(TRAINED).removeprefix(EVALUATED)
    known = METRICS.get(word)
    is_rising = known.higher_is_better if known is not None else not monitor.startswith("-")
    is_rising = is_rising and word != LOSS
    values = [line.metrics[name] for line in lines if name in line.metrics]
    signed = [-value if is_rising else value for value in values]
    return [math.inf if math.isnan(value) else value for value in signed]


def _best(values: list[float]) -> int:
    return min(range(len(values)), key=values.__getitem__)
