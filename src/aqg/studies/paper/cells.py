"""The cells that several tables share."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from aqg.runs.table import format_bytes
from aqg.studies.paper.plan import BY_SOURCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aqg.runs.cost import Cost
    from aqg.studies.paper.outcomes import Outcome

SPLITS = {"iid": "IID", "label": "one digit per client", BY_SOURCE: "by source"}


def percent(share: float) -> str:
    """Write a share.

    >>> percent(0.4123), percent(-0.02)
    ('41 %', '-2 %')
    """
    return f"{100 * share:.0f} %"


def whole(count: float) -> str:
    """Write a count.

    >>> whole(1234.5)
    '1,234'
    """
    return f"{count:,.0f}"


def span(values: Sequence[float], form: Callable[[float], str] = whole) -> str:
    """Write the median and, in brackets, the range.

    >>> span([3, 1, 2]), span([4]), span([0.4, 0.42], percent), span([])
    ('2 [1..3]', '4', '41 % [40..42 %]', '-')
    """
    if not values:
        return "-"
    middle, low, high = form(median(values)), form(min(values)), form(max(values))
    if low == high:
        return middle
    unit = " " + high.split(" ")[-1] if " " in high else ""
    if unit and low.endswith(unit):
        low = low.removesuffix(unit)
    return f"{middle} [{low}..{high}]"


def out_of(part: int, whole_: int) -> str:
    """Write how many of how many."""
    return f"{part} of {whole_}"


def costs_to(outcomes: Sequence[Outcome], residual: float) -> list[Cost]:
    """Return what each run that arrives at the residual, and stays, cost until then."""
    return [cost for o in outcomes if (cost := o.reached.get(residual)) is not None]


def paired_ratios(
    ours: Sequence[Outcome],
    other: Sequence[Outcome],
    cost_of: Callable[[Outcome], Cost | None],
    name: str = "bits_per_param",
) -> list[float]:
    """Return our cost over the other's, seed by seed, where both have one."""
    by_seed = {outcome.seed: cost_of(outcome) for outcome in other}
    ratios = []
    for outcome in ours:
        left, right = cost_of(outcome), by_seed.get(outcome.seed)
        if left is not None and right is not None:
            ratios.append(getattr(left, name) / getattr(right, name))
    return ratios


def arrival_cell(outcomes: Sequence[Outcome], residual: float) -> str:
    """Write bits and bytes until the residual, and how many seeds arrived if not all."""
    costs = costs_to(outcomes, residual)
    if not costs:
        return "-"
    bits = span([cost.bits_per_param for cost in costs])
    text = f"{bits} / {format_bytes(median(cost.upload_bytes for cost in costs))}"
    if len(costs) < len(outcomes):
        text = f"{out_of(len(costs), len(outcomes))}: {text}"
    return text
