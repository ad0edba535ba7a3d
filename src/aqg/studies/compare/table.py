"""What a comparison found: for every recipe and task the bytes to target, and how it compares."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from aqg.runs.table import Table, format_bytes
from aqg.studies.compare.labels import FOOTNOTE, label
from aqg.studies.compare.plan import Finished, pending_trials
from aqg.studies.compare.search import SEARCH_SEED, leading_setting, winning_setting
from aqg.studies.compare.trial import CEILING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from aqg.studies.compare.comparison import Comparison
    from aqg.studies.compare.tasks import Task
    from aqg.studies.compare.trial import Outcome, Setting, Trial


DEFAULT = "auto"
PARTIAL = "†"
TOTAL, UPLOADS = "total_bytes", "upload_bytes"
_CLOSE = 1.1


@dataclass(frozen=True)
class Cell:
    """One recipe on one task, over all seeds that were run.

    Attributes:
        task: its name.
        recipe: its name.
        setting: what was run; of several that did not reach the target, the one that came closest.
        num_seeds: how many were run.
        num_reached: how many of them reached the target.
        median_bytes: the cost, where a seed that did not counts as infinite; None if that is the
            median.
        lowest_bytes: of the seeds that reached the target.
        highest_bytes: of the seeds that reached the target.
        median_rounds: of the seeds that reached the target.
        value: the loss, residual or accuracy at the end of seed 0.
        is_partial: whether the search is not finished, or the final.
        beyond_bytes: where the median is None: what some setting had sent when it was stopped at
            the ceiling; None if none was.
        ratio: ``median_bytes`` over the smallest of all recipes on this task.
        ratio_above: ``beyond_bytes`` over the smallest of all recipes on seed 0, at most the
            ceiling: the ratio is larger than this.
        counted: which bytes the costs above are: ``"total_bytes"``, those of both directions, or
            ``"upload_bytes"`` in a comparison from before downloads were counted.
        median_upload_bytes: of the seeds that reached the target.
        median_download_bytes: likewise; None where it is not on record.
        same_as: an earlier recipe whose runs had the same outcomes, to the byte.

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
    beyond_bytes: int | None = None
    ratio: float | None = None
    ratio_above: int | None = None
    counted: str = TOTAL
    median_upload_bytes: float | None = None
    median_download_bytes: float | None = None
    same_as: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return one flat object."""
        row = asdict(self)
        return {**row.pop("setting"), **row}


def make_cells(comparison: Comparison, outcomes: Mapping[Trial, Outcome]) -> list[Cell]:
    """Return a cell for every pair with at least one finished trial, in the order of recipes."""
    finished = Finished(outcomes, comparison.seeds)
    cells: list[Cell] = []
    seen: dict[tuple[Any, ...], str] = {}
    for recipe, task in comparison.pairs():
        own = finished.by_pair.get((recipe, task.name))
        if own:
            left, _ = pending_trials(comparison, recipe, task, finished, tuned={})
            is_partial = comparison.search and bool(left)
            cell = replace(_make_cell(task, list(own.values())), is_partial=is_partial)
            same = seen.setdefault((task.name, *_outcomes_of(cell, own.values())), recipe)
            cells.append(replace(cell, same_as=None if same == recipe else same))
    best: dict[str, float] = {}
    for cell in cells:
        if cell.median_bytes is not None:
            best[cell.task] = min(cell.median_bytes, best.get(cell.task, math.inf))
    bar = finished.fewest_bytes
    return [_with_ratio(c, best.get(c.task), bar.get(c.task)) for c in cells]


def _outcomes_of(cell: Cell, outcomes: Iterable[Outcome]) -> list[tuple[Any, ...]]:
    """Return what came of a cell's runs, seed by seed."""
    own = [o for o in outcomes if o.trial.setting == cell.setting]
    return sorted(
        (o.trial.seed, o.ending, o.rounds, o.uploads, o.upload_bytes, o.download_bytes, o.value)
        for o in own
    )


def _with_ratio(cell: Cell, best: float | None, bar: float | None) -> Cell:
    """Add the ratio, or a bound on it where the recipe was stopped at the ceiling.

    The bound is computed anew: the best recipe may have been measured again since.
    """
    if cell.median_bytes is not None and best is not None:
        return replace(cell, ratio=cell.median_bytes / max(1.0, best))
    if cell.beyond_bytes is not None and bar is not None:
        bound = math.floor(cell.beyond_bytes / max(1.0, bar))
        return replace(cell, ratio_above=min(CEILING, bound))
    return cell


def _make_cell(task: Task, outcomes: Sequence[Outcome]) -> Cell:
    searched = [o for o in outcomes if o.trial.seed == SEARCH_SEED] or list(outcomes)
    setting = winning_setting(outcomes) or leading_setting(searched, task)
    own = sorted((o for o in outcomes if o.trial.setting == setting), key=lambda o: o.trial.seed)
    reached = [o for o in own if o.is_reached]
    costs = [o.cost for o in reached]
    middle = median([*costs, *[math.inf] * (len(own) - len(costs))])
    downloads = [o.download_bytes for o in reached if o.download_bytes is not None]
    uploads_only = any(outcome.download_bytes is None for outcome in outcomes)
    beyond = [o.cost for o in (own if reached else searched) if o.ending == "beyond"]
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
        beyond_bytes=None if math.isfinite(middle) else min(beyond, default=None),
        counted=UPLOADS if uploads_only else TOTAL,
        median_upload_bytes=median([o.upload_bytes for o in reached]) if reached else None,
        median_download_bytes=median(downloads) if downloads and not uploads_only else None,
    )


def counts_uploads_only(cells: Sequence[Cell]) -> bool:
    """Tell whether the comparison is from before downloads were counted."""
    return any(cell.counted == UPLOADS for cell in cells)


def upload_text(cell: Cell | None) -> str:
    """Write what of a cell's cost was uploaded.

    It is empty where the target was not reached.
    """
    if cell is None or cell.same_as is not None or cell.median_bytes is None:
        return ""
    if cell.median_upload_bytes is None:
        return ""
    return format_bytes(cell.median_upload_bytes)


def cell_text(cell: Cell | None, task: Task) -> tuple[str, str]:
    """Write a cell as its bytes and ratio, and, for a second line, its spread.

    Where the target was not reached, the first is how far it came.
    """
    if cell is None:
        return "", ""
    if cell.same_as is not None:
        return f"= `{cell.same_as}`", ""
    mark = PARTIAL if cell.is_partial else ""
    share = f"{cell.num_reached}/{cell.num_seeds}"
    if cell.median_bytes is None:
        text = f"– ({_how_far(cell, task)})" if cell.ratio_above is None else above_text(cell)
        return f"{text}{mark}", share if cell.num_reached else ""
    text = f"{format_bytes(cell.median_bytes)} ×{cell.ratio:.2f}{mark}"
    assert cell.lowest_bytes is not None
    assert cell.highest_bytes is not None
    spread = ""
    if cell.lowest_bytes < cell.highest_bytes:
        spread = f"{format_bytes(cell.lowest_bytes)}–{format_bytes(cell.highest_bytes)}"
    if cell.num_reached < cell.num_seeds:
        spread += f" {share}"
    return text, spread.strip()


def above_text(cell: Cell) -> str:
    """Write the ratio of a recipe that was stopped at the ceiling."""
    return f"> ×{cell.ratio_above}"


def _how_far(cell: Cell, task: Task) -> str:
    if cell.value is None:
        return "diverged"
    return f"{cell.value:.1%}" if task.target.kind == "accuracy" else f"{cell.value:.2g}"


def table_row(cells: Sequence[Cell | None], tasks: Sequence[Task], with_uploads: bool) -> list[str]:
    """Return a recipe's row: for every task its cost, and what of it was uploaded."""
    row = []
    for cell, task in zip(cells, tasks, strict=True):
        text, spread = cell_text(cell, task)
        row.append(f"{text}<br>{spread}" if spread else text)
        if with_uploads:
            row.append(upload_text(cell))
    return row


def as_tables(comparison: Comparison, cells: Sequence[Cell]) -> list[tuple[Table, str]]:
    """Return the comparison as text: full-batch tasks in one table, local ones in the other.

    With each, a line for below it. Tasks and recipes without any result are left out.
    """
    by_place = {(cell.recipe, cell.task): cell for cell in cells}
    uploads_only = counts_uploads_only(cells)
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
                lines = table_row(own, tasks, not uploads_only)
                rows.append((f"`{label(recipe)}`", *lines))
        heads = [(f"{task.name}<br>{task.target}", "of it uploaded") for task in tasks]
        header = ("recipe", *(title for pair in heads for title in pair[: 1 + (not uploads_only)]))
        note = _UPLOADS_NOTE if uploads_only else _NOTE
        table = Table(f"comparison-{name}", title, note, header, tuple(rows))
        names = {task.name for task in tasks}
        tables.append((table, summary([cell for cell in cells if cell.task in names])))
    return tables


_LEGEND = (
    " by all clients until the target is reached: median over seeds, its ratio to "
    "the best recipe of the task, smallest and largest; 2/3: only so many seeds reached it. "
    f"> ×{CEILING}: stopped when it had sent so many times what the best recipe needs on seed 0. "
    f"–: not reached; in brackets, where it ended. {PARTIAL}: its search or final is not finished. "
    f"=: the same runs as another recipe's, to the byte. {FOOTNOTE}"
)
_UPLOADS_NOTE = f"Bytes uploaded{_LEGEND}"
_NOTE = f"Bytes uploaded and downloaded{_LEGEND}".replace("had sent", "had cost")


def summary(cells: Sequence[Cell]) -> str:
    """Say how the default compares: how often close to the best, and at worst.

    Tasks that no recipe reached say nothing, and do not count.
    """
    reached = {cell.task for cell in cells if cell.ratio is not None}
    own = [cell for cell in cells if cell.recipe == DEFAULT and cell.task in reached]
    if not own:
        return ""
    ratios = {cell.task: cell.ratio for cell in own if cell.ratio is not None}
    num_close = sum(ratio <= _CLOSE for ratio in ratios.values())
    text = f"{DEFAULT} is within {_CLOSE - 1:.0%} of the best on {num_close} of {len(own)} tasks"
    if ratios:
        worst = max(ratios, key=lambda task: ratios[task])
        text += f"; at worst it needs ×{ratios[worst]:.2f}, on {worst}"
    failed = [cell.task for cell in own if cell.ratio is None]
    if failed:
        text += f"; it does not reach the target on {', '.join(failed)}"
    return text + "."


def settings_table(cells: Sequence[Cell]) -> Table:
    """Return the settings that were run, a row per recipe and a column per task."""
    tasks = list(dict.fromkeys(cell.task for cell in cells))
    recipes = list(dict.fromkeys(cell.recipe for cell in cells))
    chosen = {(cell.recipe, cell.task): _setting_text(cell) for cell in cells}
    rows = tuple((f"`{r}`", *(chosen.get((r, task), "") for task in tasks)) for r in recipes)
    note = "The best that the search found, or the closest where none reached the target."
    return Table("comparison-settings", "Settings", note, ("recipe", *tasks), rows)


def _setting_text(cell: Cell) -> str:
    """Write a setting without the name of its recipe; a step that is the task's is left out."""
    return str(cell.setting).removeprefix(cell.recipe).lstrip(":, ") or "step ×1"
