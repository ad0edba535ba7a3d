"""A table of text, and the cells that several tables share."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.reproduce.outcomes import Outcome

SPLITS = {"iid": "IID", "label": "one digit per client", "source": "by source"}


@dataclass(frozen=True)
class Table:
    """Text in cells; ``name`` marks its place in a document."""

    name: str
    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def size(count: float) -> str:
    """Write a number of bytes.

    >>> size(289_147), size(46_053_665)
    ('289 kB', '46.1 MB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def mean_cost_to(outcomes: Sequence[Outcome], residual: float, name: str) -> float | None:
    """Return a cost's mean over seeds; None unless all of them arrived."""
    costs = [o.reached.get(residual) for o in outcomes]
    known = [float(getattr(cost, name)) for cost in costs if cost is not None]
    return fmean(known) if known and len(known) == len(costs) else None


def beside(paper: int | None, ours: float | None) -> str:
    """Write the paper's figure beside ours.

    >>> beside(854, 821.0), beside(None, 476.0), beside(921, None)
    ('854 / 821 (0.96)', '476', '921 / -')
    """
    shown = "-" if ours is None else f"{ours:.0f}"
    if not paper:
        return shown
    return f"{paper} / {shown}" + ("" if ours is None else f" ({ours / paper:.2f})")


def spread_cell(outcomes: Sequence[Outcome], residual: float) -> str:
    """Write mean bits and bytes, the range of bits, and how many seeds arrived if not all."""
    costs = [cost for o in outcomes if (cost := o.reached.get(residual)) is not None]
    if not costs:
        return "-"
    bits = [cost.bits_per_param for cost in costs]
    text = f"{fmean(bits):.0f} / {size(fmean(cost.upload_bytes for cost in costs))}"
    if min(bits) < max(bits):
        text += f" [{min(bits)}..{max(bits)}]"
    return text if len(costs) == len(outcomes) else f"{len(costs)}/{len(outcomes)}: {text}"
