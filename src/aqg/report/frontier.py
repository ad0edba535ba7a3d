"""Cost and delay: the bytes and the rounds that each recipe needs until it is good enough.

Panels come from two places. Runs on the same problem are compared at a level that most of them
reach. A directory that ``aqg compare`` left has the cost and the delay of every recipe
against federated averaging in its ``results.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from aqg.errors import RunError
from aqg.report.curves import describe_metric, metric_names, result_of, run_points
from aqg.report.runs import Comparison, Group, Run, setting_text
from aqg.studies.contest.measure import FIXED, MOST_DELAY, PLATEAU
from aqg.studies.contest.table import RESULTS

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
    x: str
    y: str
    points: tuple[Point, ...]
    never: tuple[str, ...] = ()
    limit: float | None = None

    def to_json(self, colors: dict[str, int]) -> dict[str, Any]:
        """Return what the page draws."""
        points = [
            {
                "label": point.label,
                "color": colors.get(point.recipe, 0),
                "group": point.group,
                "x": point.x,
                "y": point.y,
                "open": not point.is_reached_by_all,
            }
            for point in self.points
        ]
        return {
            **{name: getattr(self, name) for name in ("title", "goal", "x", "y", "limit")},
            "never": list(self.never),
            "points": points,
        }


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
        for measure in _measures(comparison.runs):
            panel = _compare(comparison, members, measure, len(problems) > 1)
            if panel is not None:
                panels.append(panel)
    return panels[:_MOST_PANELS]


@dataclass(frozen=True)
class _Measure:
    name: str
    sign: int
    """1 where a lower value is better, -1 where a higher one is."""
    is_percent: bool = False
    title: str = field(default="")

    def worsened(self, value: float) -> float:
        """Return a level that is a little easier: a point less, or a hundredth."""
        step = _SLACK if self.is_percent else _SLACK * abs(value)
        return value + self.sign * step

    def write(self, value: float) -> str:
        return f"{value:.1%}" if self.is_percent else f"{value:.4g}"


def _measures(runs: Sequence[Run]) -> list[_Measure]:
    found = []
    for name in metric_names(runs):
        known = describe_metric(name, runs)
        is_higher = known.get("higher_is_better")
        if is_higher is not None:
            title = f"test {name.replace('_', ' ')}"
            sign = -1 if is_higher else 1
            found.append(_Measure(name, sign, bool(known.get("percent")), title))
    return [_Measure("loss", 1, title="loss"), *found]


def _compare(
    comparison: Comparison, members: Sequence[int], measure: _Measure, is_named: bool
) -> Panel | None:
    groups = {index: comparison.groups[index] for index in members}
    level = _target(groups.values()) if measure.name == "loss" else None
    name = "loss"
    if level is not None:
        goal = f"loss is within {level:g} of its minimum"
        name = "residual"
    else:
        level = _common_level(groups.values(), measure)
        if level is None:
            return None
        name = measure.name
        side = "at least" if measure.sign < 0 else "at most"
        goal = f"{measure.title} is {side} {measure.write(level)}"
    points, never = [], []
    for index, group in groups.items():
        found = [_first(run, name, measure.sign, level) for run in group.runs]
        reached = [one for one in found if one is not None]
        if not reached:
            never.append(group.label)
            continue
        rounds, sizes = zip(*reached, strict=True)
        all_of_them = len(reached) == len(found)
        points.append(
            Point(group.label, group.recipe, _spread(rounds), _spread(sizes), all_of_them, index)
        )
    if not points:
        return None
    config = next(iter(groups.values())).runs[0].config
    problem = ", ".join(setting_text(config.get(key)) for key in ("dataset", "partition"))
    return Panel(
        title=problem if is_named else "",
        goal=goal,
        x="rounds",
        y="bytes uploaded and downloaded",
        points=tuple(points),
        never=tuple(never),
    )


def _target(groups: Iterable[Group]) -> float | None:
    """Return the distance from the minimum that all runs were asked for and some reached."""
    results = [result_of(run) for group in groups for run in group.runs]
    targets: set[float | None] = {result["target"] for result in results}
    if len(targets) > 1 or all(result["target_rounds"] is None for result in results):
        return None
    return targets.pop()


def _common_level(groups: Iterable[Group], measure: _Measure) -> float | None:
    """Return a level that two groups in three reach with every run, less a little."""
    best = []
    for group in groups:
        curves = [run_points(run, "rounds", measure.name).y for run in group.runs]
        if all(len(curve) for curve in curves):
            best.append(max(float((measure.sign * curve).min()) for curve in curves))
    if len(best) < 2:
        return None
    chosen = sorted(best)[math.ceil(_SHARE * len(best)) - 1]
    return measure.worsened(measure.sign * chosen)


def _first(run: Run, name: str, sign: int, level: float) -> tuple[float, float] | None:
    """Return the rounds and bytes when the level is reached for the first time."""
    curve, costs = run_points(run, "rounds", name), run_points(run, "total_bytes", name)
    is_reached = sign * curve.y <= sign * level
    if not is_reached.any():
        return None
    place = int(np.argmax(is_reached))
    return max(1.0, float(curve.x[place])), max(1.0, float(costs.x[place]))


def _spread(values: Sequence[float]) -> Spread:
    return [float(np.median(values)), float(min(values)), float(max(values))]


def find_studies(directories: Sequence[Path]) -> list[Path]:
    return [directory for directory in directories if _cells(directory)]


def of_study(directory: Path) -> list[Panel]:
    cells = [
        cell
        for cell in _cells(directory)
        if cell.get("goal") in (FIXED, PLATEAU) and not cell.get("same_as")
    ]
    try:
        return [
            _task_panel(task, [cell for cell in cells if cell["task"] == task])
            for task in dict.fromkeys(cell["task"] for cell in cells)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{str(directory / RESULTS)!r} holds a cell without a usable {error}"
        ) from None


def _task_panel(task: str, cells: Sequence[dict[str, Any]]) -> Panel:
    points, never = [], []
    is_averaging = cells[0]["goal"] == PLATEAU
    for cell in cells:
        if cell["cost"] is None or cell["delay"] is None:
            never.append(str(cell["recipe"]))
            continue
        points.append(
            Point(
                str(cell["recipe"]),
                str(cell["recipe"]),
                _interval(cell["delay"], cell["num_reached"]),
                _interval(cell["cost"], cell["num_reached"]),
                cell["num_reached"] == cell["num_seeds"],
            )
        )
    return Panel(
        title=str(task),
        goal="as good as federated averaging" if is_averaging else "at the task's target",
        x="delay: rounds over those of federated averaging",
        y="bytes uploaded and downloaded",
        points=tuple(points),
        never=tuple(never),
        limit=MOST_DELAY,
    )


def _interval(mean: dict[str, Any], num_runs: int) -> Spread:
    value = float(mean["value"])
    ends = (mean["low"], mean["high"]) if num_runs >= _FEWEST_RUNS else (None, None)
    return [value, *(value if end is None else float(end) for end in ends)]


def _cells(directory: Path) -> list[dict[str, Any]]:
    """Return the cells of a comparison; none where there is no such thing."""
    file = directory / RESULTS
    if not file.is_file():
        return []
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        raise RunError(f"{str(file)!r} cannot be read as JSON") from None
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list):
        return []
    return [cell for cell in cells if isinstance(cell, dict) and "delay" in cell and "goal" in cell]
