"""Cost and delay: the bytes and the rounds that each recipe needs until it is good enough.

Panels come from two places. Runs on the same problem are compared at a level that most of them
reach. A directory that ``aqg compare`` left has the cost and the delay of every recipe
against federated averaging in its ``results.json``.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.errors import RunError
from aqg.objectives.metrics import Metric
from aqg.report.curves import described, metric_names, result_of, run_points, spread, test_title
from aqg.report.pictures import grid, png
from aqg.report.runs import Comparison, Group, Run, setting_text
from aqg.studies.contest.measure import FIXED, MOST_DELAY, PLATEAU, RESULTS
from aqg.studies.contest.search import FEDAVG, OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Spread = list[float]
"""The middle, the lower and the upper end."""
_PROBLEM = ("dataset", "partition", "model", "clients", "target", "problem")
_MOST_PANELS = 12
_SHARE = 2 / 3
_SLACK = 0.01
_FEWEST_RUNS = 5
"""With fewer, a confidence interval is wider than the picture."""


@dataclass(frozen=True)
class Point:
    """What a recipe needs: rounds (or delay) and bytes, over the runs that reach the level."""

    label: str
    recipe: str
    x: Spread
    y: Spread
    is_reached_by_all: bool
    group: int | None = None


@dataclass(frozen=True)
class Panel:
    """The points of one problem at one level; ``never`` names who does not reach it."""

    title: str
    goal: str
    points: tuple[Point, ...]
    never: tuple[str, ...] = ()
    x: str = "rounds"
    y: str = "bytes uploaded and downloaded"
    limit: float | None = None

    def to_json(self, colors: Mapping[str, int]) -> dict[str, Any]:
        points = []
        for point in self.points:
            row = {name: getattr(point, name) for name in ("label", "group", "x", "y")}
            row |= {"color": colors.get(point.recipe, 0), "open": not point.is_reached_by_all}
            points.append(row)
        return vars(self) | {"points": points}


def of_runs(comparison: Comparison) -> list[Panel]:
    """Compare runs on the same problem by every measure that says which way is better."""
    problems: dict[str, list[int]] = {}
    for index, group in enumerate(comparison.groups):
        config = group.runs[0].config
        problem = setting_text([config.get(name) for name in _PROBLEM])
        problems.setdefault(problem, []).append(index)
    panels = []
    for members in problems.values():
        if len({comparison.groups[index].label for index in members}) < 2:
            continue
        metrics = [described(name, comparison.runs) for name in metric_names(comparison.runs)]
        for metric in (None, *metrics):  # the loss first
            panel = _compare({index: comparison.groups[index] for index in members}, metric)
            if panel is not None:
                panels.append(panel if len(problems) > 1 else replace(panel, title=""))
    return panels[:_MOST_PANELS]


def _compare(groups: Mapping[int, Group], metric: Metric | None) -> Panel | None:
    """Compare groups by a metric, or by the loss; None where nobody can say who is better."""
    name, sign, is_percent = "loss", 1, False
    if metric is not None:
        name, sign = metric.name, -1 if metric.higher_is_better else 1
        is_percent = metric.is_percent
        if metric.higher_is_better is None:
            return None
    level = _target(groups.values()) if metric is None else None
    if level is not None:
        goal = f"loss is within {level:g} of its minimum"
        name = "residual"
    else:
        level = _common_level(groups.values(), name, sign, is_percent)
        if level is None:
            return None
        title = name if metric is None else test_title(name)
        side = "at least" if sign < 0 else "at most"
        goal = f"{title} is {side} " + (f"{level:.1%}" if is_percent else f"{level:.4g}")
    points, never = [], []
    for index, group in groups.items():
        found = [_first(run, name, sign, level) for run in group.runs]
        reached = [one for one in found if one is not None]
        if not reached:
            never.append(group.label)
            continue
        rounds, sizes = map(spread, zip(*reached, strict=True))
        is_whole = len(reached) == len(found)
        points.append(Point(group.label, group.recipe, rounds, sizes, is_whole, index))
    if not points:
        return None
    config = next(iter(groups.values())).runs[0].config
    title = ", ".join(setting_text(config.get(key)) for key in ("dataset", "partition"))
    return Panel(title, goal, tuple(points), tuple(never))


def _target(groups: Iterable[Group]) -> float | None:
    """Return the distance from the minimum that all runs were asked for and some reached."""
    results = [result_of(run) for group in groups for run in group.runs]
    targets: set[float | None] = {result["target"] for result in results}
    if len(targets) > 1 or all(result["target_rounds"] is None for result in results):
        return None
    return targets.pop()


def _common_level(groups: Iterable[Group], name: str, sign: int, is_percent: bool) -> float | None:
    """Return a level that two groups in three reach with every run, less a little."""
    best = []
    for group in groups:
        curves = [run_points(run, "rounds", name).y for run in group.runs]
        if all(len(curve) for curve in curves):
            best.append(max(float((sign * curve).min()) for curve in curves))
    if len(best) < 2:
        return None
    chosen = sorted(best)[math.ceil(_SHARE * len(best)) - 1]
    # A little easier than that: a point less, or a hundredth.
    return sign * (chosen + (_SLACK if is_percent else _SLACK * abs(chosen)))


def _first(run: Run, name: str, sign: int, level: float) -> tuple[float, float] | None:
    """Return the rounds and bytes when the level is reached for the first time."""
    curve, costs = run_points(run, "rounds", name), run_points(run, "total_bytes", name)
    is_reached = sign * curve.y <= sign * level
    if not is_reached.any():
        return None
    place = int(np.argmax(is_reached))
    return max(1.0, float(curve.x[place])), max(1.0, float(costs.x[place]))


def of_studies(directories: Sequence[Path]) -> dict[Path, list[Panel]]:
    found = {}
    for directory in directories:
        file = directory / RESULTS
        if not file.is_file():
            continue
        try:
            content = json.loads(file.read_text())
        except (OSError, ValueError):
            raise RunError(f"{str(file)!r} cannot be read as JSON") from None
        cells = content.get("cells") if isinstance(content, dict) else None
        known = [c for c in cells if isinstance(c, dict)] if isinstance(cells, list) else []
        known = [cell for cell in known if "delay" in cell and "goal" in cell]
        try:
            panels = of_cells(known)
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{str(file)!r} holds a cell without a usable {error}") from None
        if known:
            found[directory] = panels
    return found


def of_cells(cells: Sequence[dict[str, Any]]) -> list[Panel]:
    """Return a panel for each task, for the goal that counts."""
    shown = [c for c in cells if c.get("goal") in (FIXED, PLATEAU) and not c.get("same_as")]
    return [
        _task_panel(task, [cell for cell in shown if cell["task"] == task])
        for task in dict.fromkeys(cell["task"] for cell in shown)
    ]


def _task_panel(task: str, cells: Sequence[dict[str, Any]]) -> Panel:
    """Where federated averaging does not reach the target, rounds take the place of the delay."""
    points, never = [], []
    has_delays = any(cell["delay"] is not None for cell in cells)
    for cell in cells:
        recipe, x = str(cell["recipe"]), cell["delay"]
        if not has_delays and cell.get("rounds") is not None:
            x = {"value": max(1.0, cell["rounds"]), "low": None, "high": None}
        if cell["cost"] is None or x is None:
            never.append(recipe)
            continue
        count = cell["num_reached"]
        ends = _interval(x, count), _interval(cell["cost"], count)
        points.append(Point(recipe, recipe, *ends, count == cell["num_seeds"]))
    is_averaging = cells[0]["goal"] == PLATEAU
    goal = "as good as federated averaging" if is_averaging else "at the task's target"
    panel = Panel(str(task), goal, tuple(points), tuple(never))
    delay = "delay: rounds over those of federated averaging"
    return replace(panel, x=delay, limit=MOST_DELAY) if has_delays else panel


def _interval(mean: dict[str, Any], num_runs: int) -> Spread:
    value = float(mean["value"])
    ends = (mean["low"], mean["high"]) if num_runs >= _FEWEST_RUNS else (None, None)
    return [value, *(value if end is None else float(end) for end in ends)]


_COLORS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7f6a3b", "#666666")
_MARKERS = "osD^vPX<>hp"
_OUR_COLOR = "#D55E00"
_OPEN = "none"
"""The face of a marker where some seeds do not reach the goal."""
_PANEL = 3.6
"""Inches."""
_TICKS = (0.25, 0.5, 0.75, 1, 1.25, 2, 3, 4, 10, 30)


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


def draw(panels: Sequence[Panel], recipes: Sequence[str]) -> bytes:
    """Draw panels of a comparison as PNG: an open marker is reached by some seeds only."""
    figure, axes = grid(len(panels), _PANEL, _PANEL, 1.6)
    others = [recipe for recipe in recipes if recipe not in (FEDAVG, OURS)]
    looks = {OURS: (_OUR_COLOR, "*")}
    for n, recipe in enumerate(others):
        marker = _MARKERS[(n + n // len(_COLORS)) % len(_MARKERS)]
        looks[recipe] = _COLORS[n % len(_COLORS)], marker
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes, panels, strict=True):
        _draw_panel(axis, panel, looks)
        legend: Any = axis.get_legend_handles_labels()
        for artist, name in zip(*legend, strict=True):
            if name not in handles or artist.get_markerfacecolor() != _OPEN:
                handles[name] = artist
    if order := [name for name in recipes if name in handles]:
        look: dict[str, Any] = {"loc": "outside right upper", "fontsize": 8, "frameon": False}
        figure.legend([handles[name] for name in order], order, **look)
    return png(figure)


def _draw_panel(axis: Axes, panel: Panel, looks: Mapping[str, tuple[str, str]]) -> None:
    others = [point for point in panel.points if point.recipe != FEDAVG]
    for point in panel.points:
        (x, *xs), (y, *ys) = point.x, point.y
        if point.recipe == FEDAVG:
            axis.plot(x, y, "s", color="black", markersize=6, label=FEDAVG, linestyle="none")
            axis.axhline(y / 1000, color="black", linewidth=0.6, linestyle="--")
            edge = axis.get_yaxis_transform()
            axis.text(1, y / 1000, "1/1000", transform=edge, ha="right", va="bottom", fontsize=7)
            continue
        color, marker = looks[point.recipe]
        size, edge_color, order = (13, "black", 4) if point.recipe == OURS else (7, color, 3)
        face = color if point.is_reached_by_all else _OPEN
        look: dict[str, Any] = {"markersize": size, "markeredgecolor": edge_color, "zorder": order}
        look |= {"markerfacecolor": face, "linestyle": "none"}
        axis.plot(x, y, marker, color=color, label=point.recipe, **look)
        axis.plot(xs, [y, y], color=color, linewidth=1)
        axis.plot([x, x], ys, color=color, linewidth=1)
    axis.set_xscale("log")
    axis.set_yscale("log")
    delays = [point.x[0] for point in others]
    if best := frontier([(point.x[0], point.y[0]) for point in others]):
        ends = [x for x, _ in best] + [max(delays)], [y for _, y in best] + [best[-1][1]]
        axis.step(*ends, where="post", color="#999999", linewidth=1.2, zorder=1)
    axis.set_xlabel("rounds", fontsize=8)
    if panel.limit is not None:
        axis.axvline(panel.limit, color="black", linewidth=0.9, linestyle=":")
        delays += [1.0, panel.limit]
        low, high = min(delays) / 1.25, max(delays) * 1.25
        axis.set_xlim(low, high)
        ticks = [tick for tick in _TICKS if low < tick < high]
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_xticks([], minor=True)
        axis.set_xlabel("delay (rounds over federated averaging's)", fontsize=8)
    axis.set_title(panel.title, fontsize=10)
    axis.set_ylabel("bytes, both directions", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    if panel.never:
        names = textwrap.fill("not reached: " + ", ".join(panel.never), 44)
        axis.text(0.02, 0.08, names, transform=axis.transAxes, fontsize=7, va="bottom")
