"""What a comparison found: for every recipe and task the bytes to target, and how it compares."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from aqg.compare.search import SEARCH_SEED, best_setting, settings_to_try
from aqg.reproduce.cells import Table, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aqg.compare.schedule import Comparison
    from aqg.compare.tasks import Task
    from aqg.compare.trial import Outcome, Setting, Trial


_PARTIAL = "†"


@dataclass(frozen=True)
class Cell:
    """One recipe on one task, over all seeds that were run.

    Attributes:
        task: its name.
        recipe: its name.
        setting: what was run; of several that did not reach the target, the one that came closest.
        num_seeds: how many were run.
        num_reached: how many of them reached the target.
        median_bytes: where a seed that did not counts as infinite; None if that is the median.
        lowest_bytes: of the seeds that reached the target.
        highest_bytes: of the seeds that reached the target.
        median_rounds: of the seeds that reached the target.
        value: the loss, residual or accuracy at the end of seed 0.
        is_partial: whether some settings of the search have not been tried.
        ratio: ``median_bytes`` over the smallest of all recipes on this task.

    """

    task: str
    recipe: str
    setting: Setting
    num_seeds: int
    num_reached: int
    median_bytes: float | None
    lowest_bytes: int | None
    highest_bytes: int | None
    median_rounds: float | None
    value: float | None
    is_partial: bool = False
    ratio: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return one flat object."""
        row = asdict(self)
        return {**row.pop("setting"), **row}


def make_cells(comparison: Comparison, outcomes: Mapping[Trial, Outcome]) -> list[Cell]:
    """Return a cell for every pair with at least one finished trial, in the order of recipes."""
    cells = []
    for recipe, task in comparison.pairs():
        own = [o for t, o in outcomes.items() if (t.task, t.recipe) == (task.name, recipe)]
        if own:
            settings = settings_to_try(recipe, task, comparison.quick) if comparison.search else ()
            tried = {o.trial.setting for o in own if o.trial.seed == SEARCH_SEED}
            cells.append(replace(_make_cell(task, own), is_partial=not tried.issuperset(settings)))
    best: dict[str, float] = {}
    for cell in cells:
        if cell.median_bytes is not None:
            best[cell.task] = min(cell.median_bytes, best.get(cell.task, math.inf))
    return [
        replace(cell, ratio=cell.median_bytes / max(1.0, best[cell.task]))
        if cell.median_bytes is not None
        else cell
        for cell in cells
    ]


def _make_cell(task: Task, outcomes: Sequence[Outcome]) -> Cell:
    searched = [o for o in outcomes if o.trial.seed == SEARCH_SEED] or list(outcomes)
    setting = best_setting(searched) or _closest(task, searched)
    own = sorted((o for o in outcomes if o.trial.setting == setting), key=lambda o: o.trial.seed)
    reached = [o for o in own if o.is_reached]
    costs = [o.upload_bytes for o in reached]
    middle = median([*costs, *[math.inf] * (len(own) - len(costs))])
    return Cell(
        task=task.name,
        recipe=own[0].trial.recipe,
        setting=setting,
        num_seeds=len(own),
        num_reached=len(reached),
        median_bytes=middle if math.isfinite(middle) else None,
        lowest_bytes=min(costs, default=None),
        highest_bytes=max(costs, default=None),
        median_rounds=median([o.rounds for o in reached]) if reached else None,
        value=own[0].value,
    )


def _closest(task: Task, outcomes: Sequence[Outcome]) -> Setting:
    """Return the setting that ended with the best value, of those that did not make it."""
    sign = -1.0 if task.target.kind == "accuracy" else 1.0

    def distance(outcome: Outcome) -> float:
        return math.inf if outcome.value is None else sign * outcome.value

    return min(outcomes, key=distance).trial.setting


def cell_text(cell: Cell | None, task: Task) -> tuple[str, str]:
    """Write a cell as its bytes and ratio, and, for a second line, its spread.

    Where the target was not reached, the first is how far it came.
    """
    if cell is None:
        return "", ""
    mark = _PARTIAL if cell.is_partial else ""
    if cell.median_bytes is None:
        how_far = "diverged" if cell.value is None else _value(cell.value, task)
        some = f"{cell.num_reached} of {cell.num_seeds} reached" if cell.num_reached else ""
        return f"– ({how_far}){mark}", some
    text = f"{size(cell.median_bytes)} ×{cell.ratio:.2f}{mark}"
    assert cell.lowest_bytes is not None
    assert cell.highest_bytes is not None
    spread = ""
    if cell.lowest_bytes < cell.highest_bytes:
        spread = f"{size(cell.lowest_bytes)}–{size(cell.highest_bytes)}"
    if cell.num_reached < cell.num_seeds:
        spread += f" ({cell.num_reached} of {cell.num_seeds})"
    return text, spread.strip()


def _value(value: float, task: Task) -> str:
    return f"{value:.1%}" if task.target.kind == "accuracy" else f"{value:.2g}"


def as_tables(comparison: Comparison, cells: Sequence[Cell]) -> list[Table]:
    """Return the comparison as text: full-batch tasks in one table, local ones in the other.

    Tasks and recipes without any result are left out.
    """
    by_place = {(cell.recipe, cell.task): cell for cell in cells}
    tables = []
    for name, title, is_local in (
        ("full-batch", "Exact gradients", False),
        ("local", "Local training", True),
    ):
        measured = {cell.task for cell in cells}
        tasks = [
            task for task in comparison.tasks if task.is_local == is_local and task.name in measured
        ]
        if not tasks:
            continue
        rows = []
        for recipe in comparison.recipes:
            own = [by_place.get((recipe, task.name)) for task in tasks]
            if any(own):
                texts = [cell_text(cell, task) for cell, task in zip(own, tasks, strict=True)]
                lines = [f"{text}<br>{spread}" if spread else text for text, spread in texts]
                rows.append((f"`{recipe}`", *lines))
        header = ("recipe", *(f"{task.name}<br>{task.target}" for task in tasks))
        tables.append(Table(f"comparison-{name}", title, _NOTE, header, tuple(rows)))
    return tables


_NOTE = (
    "Bytes uploaded by all clients until the target is reached: median over seeds, its ratio to "
    "the best recipe of the task, smallest and largest. –: not reached; in brackets, where it "
    f"ended. {_PARTIAL}: the search was cut short."
)


def settings_table(cells: Sequence[Cell]) -> Table:
    """Return the settings that were run, a row per recipe and a column per task."""
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    recipes = list(dict.fromkeys(cell.recipe for cell in cells))
    chosen = {(cell.recipe, cell.task): _setting_text(cell) for cell in cells}
    rows = tuple((f"`{r}`", *(chosen.get((r, task), "") for task in tasks)) for r in recipes)
    note = "The best of the grid on seed 0, or the closest where none reached the target."
    return Table("comparison-settings", "Settings", note, ("recipe", *tasks), rows)


def _setting_text(cell: Cell) -> str:
    """Write a setting without the name of its recipe; a step that is the task's is left out."""
    return str(cell.setting).removeprefix(cell.recipe).lstrip(":, ") or "step ×1"
