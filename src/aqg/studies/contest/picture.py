"""Delay and cost of every recipe, a panel for each task, with the frontier."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING

from aqg.studies.contest.measure import MOST_DELAY, Mean
from aqg.studies.contest.search import FEDAVG, OURS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from aqg.studies.contest.plan import Comparison
    from aqg.studies.contest.table import Cell

_COLORS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7f6a3b", "#666666")
_MARKERS = "osD^vPX<>hp"
_OPEN = "none"
"""The face of a marker where some seeds do not reach the goal."""
_OUR_COLOR = "#D55E00"
_PANEL = 3.6
"""Inches."""
_MOST_COLUMNS = 3
_FEWEST_SEEDS = 5
"""With fewer, an interval is wider than the picture."""


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other beats in both coordinates, by increasing first one.

    >>> frontier([(1.0, 5.0), (2.0, 3.0), (1.5, 6.0), (3.0, 3.0)])
    [(1.0, 5.0), (2.0, 3.0)]
    """
    best: list[tuple[float, float]] = []
    for delay, cost in sorted(points):
        if not best or cost < best[-1][1]:
            best.append((delay, cost))
    return best


def draw(comparison: Comparison, cells: Sequence[Cell]) -> bytes:
    """Draw a panel for each task; return a PNG.

    Recipes that do not reach the target are named in the corner, and those with an open marker
    reach it with some seeds only. What lies left of the dotted line is a swap-in; the step line is
    the frontier. Where federated averaging does not reach a fixed target, rounds take the place of
    the delay.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [cell for cell in cells if cell.is_main and cell.same_as is None]
    tasks = [t.name for t in comparison.tasks if any(cell.task == t.name for cell in shown)]
    num_columns = max(1, min(_MOST_COLUMNS, len(tasks)))
    num_rows = max(1, -(-len(tasks) // num_columns))
    size = (_PANEL * num_columns + 1.6, _PANEL * num_rows + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    looks = _looks([recipe for recipe in comparison.recipes if recipe != FEDAVG])
    for axis, task in zip(panels, tasks, strict=False):
        _draw_panel(axis, task, [cell for cell in shown if cell.task == task], looks)
    for axis in panels[len(tasks) :]:
        axis.set_visible(False)
    handles: dict[str, Artist] = {}
    for axis in panels:
        artists, names = axis.get_legend_handles_labels()
        for name, artist in zip(names, artists, strict=True):
            if name not in handles or artist.get_markerfacecolor() != _OPEN:
                handles[name] = artist
    order = [name for name in comparison.recipes if name in handles]
    if handles:
        figure.legend(
            [handles[name] for name in order],
            order,
            loc="outside right upper",
            fontsize=8,
            frameon=False,
        )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _looks(recipes: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return a color and a marker for each recipe; our own is a star."""
    others = [recipe for recipe in recipes if recipe != OURS]
    looks = {
        recipe: (_COLORS[n % len(_COLORS)], _MARKERS[(n + n // len(_COLORS)) % len(_MARKERS)])
        for n, recipe in enumerate(others)
    }
    return looks | {OURS: (_OUR_COLOR, "*")}


def _draw_panel(
    axis: Axes, task: str, cells: Sequence[Cell], looks: dict[str, tuple[str, str]]
) -> None:
    points, never = [], []
    has_delays = any(cell.delay is not None for cell in cells)
    for cell in cells:
        delay = cell.delay if has_delays else Mean(max(1.0, cell.rounds or 0.0))
        cost = cell.cost
        if cost is None or delay is None:
            never.append(cell.recipe)
            continue
        x, y = delay.value, cost.value
        if cell.recipe == FEDAVG:
            axis.plot(x, y, "s", color="black", markersize=6, label=FEDAVG, linestyle="none")
            axis.axhline(y / 1000, color="black", linewidth=0.6, linestyle="--")
            axis.annotate(
                "1/1000",
                (1, y / 1000),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                fontsize=7,
            )
            continue
        points.append((x, y))
        color, marker = looks[cell.recipe]
        is_ours = cell.recipe == OURS
        axis.plot(
            x,
            y,
            marker,
            color=color,
            markersize=13 if is_ours else 7,
            markeredgecolor="black" if is_ours else color,
            markerfacecolor=color if cell.num_reached == cell.num_seeds else _OPEN,
            label=cell.recipe,
            linestyle="none",
            zorder=4 if is_ours else 3,
        )
        if cell.num_reached >= _FEWEST_SEEDS:
            axis.plot([delay.low, delay.high], [y, y], color=color, linewidth=1)  # type: ignore[arg-type]
            axis.plot([x, x], [cost.low, cost.high], color=color, linewidth=1)  # type: ignore[arg-type]
    axis.set_xscale("log")
    axis.set_yscale("log")
    if best := frontier(points):
        right = max(x for x, _ in points)
        xs, ys = [x for x, _ in best] + [right], [y for _, y in best] + [best[-1][1]]
        axis.step(xs, ys, where="post", color="#999999", linewidth=1.2, zorder=1)
    axis.set_xlabel("rounds", fontsize=8)
    if has_delays:
        axis.axvline(MOST_DELAY, color="black", linewidth=0.9, linestyle=":")
        delays = [x for x, _ in points] + [1.0, MOST_DELAY]
        low, high = min(delays) / 1.25, max(delays) * 1.25
        axis.set_xlim(low, high)
        ticks = [t for t in (0.25, 0.5, 0.75, 1, 1.25, 2, 3, 4, 10, 30) if low < t < high]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_xticks([], minor=True)
        axis.set_xlabel("delay (rounds over federated averaging's)", fontsize=8)
    axis.set_title(task, fontsize=10)
    axis.set_ylabel("bytes, both directions", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    if never:
        names = textwrap.fill("not reached: " + ", ".join(never), 44)
        axis.text(0.02, 0.98, names, transform=axis.transAxes, fontsize=7, va="top")
