"""The comparison as a picture: a row for each task, a dot for each recipe, bytes to the right."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.compare.schedule import Comparison
    from aqg.compare.table import Cell

_COLORS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C510A", "#555555")
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")
_DEFAULT = "auto"
_DEFAULT_COLOR = "#D55E00"


def draw(comparison: Comparison, cells: Sequence[Cell]) -> bytes:
    """Draw medians as dots, smallest to largest as lines; return a PNG.

    Recipes that did not reach a target are named at the right end of its row.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = {cell.task for cell in cells}
    tasks = [task for task in reversed(comparison.tasks) if task.name in measured]
    height = max(1.4 + 0.55 * len(tasks), 0.7 + 0.21 * len(comparison.recipes))
    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    rows = {task.name: row for row, task in enumerate(tasks)}
    for index, recipe in enumerate(comparison.recipes):
        own = [c for c in cells if c.recipe == recipe and c.median_bytes is not None]
        is_default = recipe == _DEFAULT
        color = _DEFAULT_COLOR if is_default else _COLORS[index % len(_COLORS)]
        for cell in own:
            row = rows[cell.task]
            assert cell.lowest_bytes is not None
            assert cell.highest_bytes is not None
            axis.plot(
                [cell.lowest_bytes, cell.highest_bytes], [row, row], color=color, linewidth=1.2
            )
        axis.plot(
            [c.median_bytes or 0 for c in own],
            [rows[c.task] for c in own],
            linestyle="none",
            marker="*" if is_default else _MARKERS[index // len(_COLORS) % len(_MARKERS)],
            markersize=14 if is_default else 6.5,
            markeredgecolor="white",
            markeredgewidth=0.6,
            color=color,
            label=recipe,
            zorder=4 if is_default else 3,
        )
    for name, row in rows.items():
        missing = [c.recipe for c in cells if c.task == name and c.median_bytes is None]
        if missing:
            axis.annotate(
                "not reached: " + ", ".join(missing),
                (0.995, row),
                xycoords=("axes fraction", "data"),
                xytext=(0, -9),
                textcoords="offset points",
                ha="right",
                fontsize=6,
                color="#777777",
            )
    axis.set_xscale("log")
    axis.set_yticks(
        range(len(tasks)), [f"{task.name}\n{task.target}" for task in tasks], fontsize=8
    )
    axis.set_ylim(-0.6, len(tasks) - 0.4)
    axis.set_xlabel("bytes uploaded until the target is reached (all clients, median over seeds)")
    axis.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
