"""The comparison as a picture: a row for each recipe, a column for each task, bytes as colors."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from aqg.studies.compare.table import DEFAULT, PARTIAL, above_text, counts_uploads_only
from aqg.studies.compare.trial import CEILING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from aqg.studies.compare.comparison import Comparison
    from aqg.studies.compare.table import Cell

_BEYOND = "#3b2333"
_UNREACHED = "#dddddd"
_FRAME = "#D55E00"
_ROW, _COLUMN = 0.3, 0.72
"""Inches."""
_NARROWEST = 6.8
"""Inches, for the lines below."""


def draw(comparison: Comparison, cells: Sequence[Cell]) -> bytes:
    """Draw every cell's ratio to the best recipe of its task; return a PNG.

    A cell is as dark as its recipe is costly; those beyond the ceiling and those that did not reach
    the target have looks of their own, and what was not run stays white. The default is framed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [task for task in comparison.tasks if any(cell.task == task.name for cell in cells)]
    tasks = sorted(measured, key=lambda task: task.is_local)
    recipes = [name for name in comparison.recipes if any(cell.recipe == name for cell in cells)]
    width, height = max(_NARROWEST, 2.2 + _COLUMN * len(tasks)), 2.4 + _ROW * len(recipes)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    columns = {task.name: column for column, task in enumerate(tasks)}
    rows = {recipe: row for row, recipe in enumerate(recipes)}
    for cell in cells:
        _draw_cell(axis, cell, columns[cell.task], rows[cell.recipe])
    num_exact = sum(not task.is_local for task in tasks)
    for text, first, last in (
        ("exact gradients", 0, num_exact),
        ("local training", num_exact, len(tasks)),
    ):
        if first < last:
            center = (first + last - 1) / 2
            axis.text(center, len(recipes) - 0.35, text, ha="center", va="top", fontsize=9)
    if 0 < num_exact < len(tasks):
        axis.axvline(num_exact - 0.5, color="black", linewidth=2)
    if DEFAULT in rows:
        _frame_row(axis, rows[DEFAULT], len(tasks))
    axis.set_xlim(-0.5, max(1, len(tasks)) - 0.5)
    axis.set_ylim(max(1, len(recipes)) - 0.5, -0.5)
    axis.set_xticks(
        range(len(tasks)),
        [f"{task.name}{' *' if task.is_late else ''}" for task in tasks],
        rotation=40,
        ha="left",
        rotation_mode="anchor",
        fontsize=8,
    )
    axis.xaxis.tick_top()
    axis.set_yticks(range(len(recipes)), recipes, fontsize=9)
    for label in axis.get_yticklabels():
        if label.get_text() == DEFAULT:
            label.set(fontweight="bold", color=_FRAME)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    late = "*: first run late; the default was changed twice after that, so no independent test"
    uploads_only = counts_uploads_only(cells)
    counted = "bytes uploaded" if uploads_only else "bytes uploaded and downloaded"
    axis.set_xlabel(
        f"{counted} until the target, as a multiple of the best recipe's (median over seeds)\n"
        f"> ×{CEILING}: stopped there    –: target not reached    white: not run    "
        f"{PARTIAL}: search or final not finished\n"
        + (late if any(task.is_late for task in tasks) else ""),
        fontsize=8,
        labelpad=16,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _draw_cell(axis: Axes, cell: Cell, column: int, row: int) -> None:
    from matplotlib.patches import Rectangle

    hatch = None
    if cell.ratio is not None:
        fill, text = _shade(cell.ratio), _ratio_text(cell.ratio)
        ink = "white" if cell.ratio > math.sqrt(CEILING) else "black"
    elif cell.ratio_above is not None:
        fill, text, ink = _BEYOND, above_text(cell), "white"
    else:
        fill, text, ink, hatch = _UNREACHED, "–", "black", "////"
    box = Rectangle(
        (column - 0.5, row - 0.5), 1, 1, facecolor=fill, edgecolor="white", hatch=hatch, linewidth=1
    )
    axis.add_patch(box)
    weight = "bold" if cell.ratio == 1 else "normal"
    text += PARTIAL if cell.is_partial else ""
    axis.text(column, row, text, ha="center", va="center", fontsize=8, color=ink, fontweight=weight)


def _ratio_text(ratio: float) -> str:
    """Write a ratio with three digits, as far as they matter.

    >>> _ratio_text(1.234), _ratio_text(12.34), _ratio_text(123.4)
    ('1.23', '12.3', '123')
    """
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def _shade(ratio: float) -> str:
    """Return a color: light at 1, dark at the ceiling, in equal steps of the logarithm."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    share = min(1.0, math.log(ratio) / math.log(CEILING))
    return to_hex(colormaps["YlGnBu"](0.08 + 0.84 * share))


def _frame_row(axis: Axes, row: int, num_columns: int) -> None:
    from matplotlib.patches import Rectangle

    axis.add_patch(
        Rectangle(
            (-0.5, row - 0.5),
            num_columns,
            1,
            fill=False,
            edgecolor=_FRAME,
            linewidth=2.5,
            zorder=5,
            clip_on=False,
        )
    )
