"""What a comparison found: cost, savings and delay of every recipe, for every task and goal."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from aqg.runs.table import Table, format_bytes
from aqg.studies.compare.labels import FOOTNOTE, label
from aqg.studies.compare.search import SEARCH_SEED
from aqg.studies.swap_in.measure import (
    GOALS,
    MOST_DELAY,
    PLATEAU,
    Mean,
    Score,
    arithmetic_mean,
    geometric_mean,
    plateau_of,
    points_above,
    score,
)
from aqg.studies.swap_in.plan import Findings, pending_trials
from aqg.studies.swap_in.search import FEDAVG
from aqg.studies.swap_in.tasks import SWAP_TASKS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aqg.studies.compare.trial import Setting, Trial
    from aqg.studies.swap_in.comparison import SwapIn
    from aqg.studies.swap_in.plan import Outcome
    from aqg.studies.swap_in.tasks import SwapTask

DEFAULT = "auto"
"""The recipe that others are compared with."""
PARTIAL = "†"
AS_GOOD = "as good as"


@dataclass(frozen=True)
class Cell:
    """One recipe on one task for one goal, over the seeds that were run.

    Attributes:
        task: its name.
        recipe: its name.
        goal: its name.
        setting: what was run, the best on seed 0.
        num_seeds: how many were run.
        num_reached: how many of them reached the goal.
        cost: total bytes, over the seeds that reached it; None where none did, as the next two.
        savings: federated averaging's bytes over these.
        delay: rounds over those of federated averaging.
        test: the mean test accuracy when the goal was reached.
        best_value: the best accuracy or loss on the validation set, over all seeds.
        is_partial: whether runs are missing.
        same_as: an earlier recipe whose runs were the same, to the byte.
        level: the mean plateau on the validation set, where all runs went to the last round.
        plateau: how many points it is above federated averaging's, paired by seed; for losses
            percent.
        versus: its bytes over those of `auto`, paired by seed; None without a common seed.
        num_settings: how many were tried on seed 0.
        rounds: the mean of those until the goal.

    """

    task: str
    recipe: str
    goal: str
    setting: Setting
    num_seeds: int
    num_reached: int
    cost: Mean | None
    savings: Mean | None
    delay: Mean | None
    test: float | None
    best_value: float | None
    is_partial: bool = False
    same_as: str | None = None
    level: float | None = None
    plateau: Mean | None = None
    versus: Mean | None = None
    num_settings: int = 1
    rounds: float | None = None

    @property
    def is_swap_in(self) -> bool:
        """Whether all seeds reach the goal, on average with little delay."""
        if self.delay is None or self.num_reached < self.num_seeds:
            return False
        return self.delay.value <= MOST_DELAY

    def to_json(self) -> dict[str, Any]:
        """Return one object."""
        names = ("cost", "savings", "delay", "plateau", "versus")
        means = {name: getattr(self, name) for name in names}
        row = {key: value for key, value in vars(self).items() if key != "setting"}
        row |= {name: None if mean is None else vars(mean) for name, mean in means.items()}
        return {**self.setting.to_json(), **row, "is_swap_in": self.is_swap_in}


def make_cells(comparison: SwapIn, outcomes: Mapping[Trial, Outcome]) -> list[Cell]:
    """Return the cells of every recipe and task with at least one run, the goals in order."""
    findings = Findings(comparison, outcomes)
    cells: list[Cell] = []
    for task in comparison.tasks:
        seen: dict[tuple[Any, ...], str] = {}
        ours = _runs(DEFAULT, task, findings)
        for recipe in comparison.recipes:
            runs = _runs(recipe, task, findings)
            if not runs:
                continue
            same = seen.setdefault(tuple(o.curve for o in runs), recipe)
            left, later = pending_trials(comparison, recipe, task, findings)
            tried = {
                t.setting for t in findings.by_pair[recipe, task.name] if t.seed == SEARCH_SEED
            }
            for goal in GOALS:
                cell = _make_cell(task, goal, runs, ours, findings)
                cells.append(
                    replace(
                        cell,
                        is_partial=bool(left or later),
                        same_as=None if same == recipe else same,
                        num_settings=len(tried),
                    )
                )
    return cells


def _runs(recipe: str, task: SwapTask, findings: Findings) -> list[Outcome]:
    """Return the runs of a recipe's best setting by seed; nothing while there is no target."""
    setting = findings.best(recipe, task)
    if setting is None or (task.name, SEARCH_SEED) not in findings.references:
        return []
    if recipe == FEDAVG:
        setting = findings.fedavg_settings(task)[-1]
    own = findings.counted(recipe, task)
    return sorted((o for t, o in own.items() if t.setting == setting), key=lambda o: o.trial.seed)


def _scores(
    task: SwapTask, goal: str, runs: Sequence[Outcome], findings: Findings
) -> dict[int, Score | None]:
    """Return each seed's score, None where it does not reach the goal.

    Seeds without a target are left out, and runs that ended at an easier one.
    """
    found = {}
    for outcome in runs:
        seed = outcome.trial.seed
        reference = findings.references.get((task.name, seed))
        if reference is None or outcome.is_cut(reference.goals[goal]):
            continue
        one = score(outcome.curve, reference, goal)
        if one is not None and outcome.trial.recipe == FEDAVG:
            # of several steps, the one that gets there first
            first = reference.crossings[goal]
            one = Score(first.total_bytes, 1.0, 1.0, one.test, first.rounds)
        found[seed] = one
    return found


def _make_cell(
    task: SwapTask,
    goal: str,
    runs: Sequence[Outcome],
    ours: Sequence[Outcome],
    findings: Findings,
) -> Cell:
    recipe = runs[0].trial.recipe
    found = _scores(task, goal, runs, findings)
    scores = [one for one in found.values() if one is not None]
    tests = [one.test for one in scores if one.test is not None]
    values = [v for o in runs if o.trial.seed in found for v in o.curve.values if v == v]
    pick = max if task.kind == "accuracy" else min
    default = _scores(task, goal, ours, findings)
    ratios = [
        one.cost / other.cost
        for seed, one in found.items()
        if one is not None and (other := default.get(seed)) is not None
    ]
    level, plateau = _plateau(task, [o for o in runs if o.trial.seed in found], findings)
    return Cell(
        task=task.name,
        recipe=recipe,
        goal=goal,
        setting=runs[0].trial.setting,
        num_seeds=len(found),
        num_reached=len(scores),
        cost=geometric_mean([one.cost for one in scores]) if scores else None,
        savings=geometric_mean([one.savings for one in scores]) if scores else None,
        delay=geometric_mean([one.delay for one in scores]) if scores else None,
        test=sum(tests) / len(tests) if tests else None,
        best_value=pick(values) if values else None,
        level=level,
        rounds=sum(one.rounds for one in scores) / len(scores) if scores else None,
        plateau=plateau,
        versus=geometric_mean(ratios) if ratios and recipe not in (FEDAVG, DEFAULT) else None,
    )


def _plateau(
    task: SwapTask, runs: Sequence[Outcome], findings: Findings
) -> tuple[float | None, Mean | None]:
    """Return the mean plateau, and how many points it is above federated averaging's.

    The latter is that of its best step, seed by seed. Nothing where a run ended earlier.
    """
    references = [findings.references[task.name, o.trial.seed].plateau for o in runs]
    if runs and runs[0].trial.recipe == FEDAVG:
        return sum(references) / len(references), None
    plateaus = [plateau_of(o.curve, task.config.rounds) for o in runs]
    if not plateaus or any(math.isnan(plateau) for plateau in plateaus):
        return None, None
    pairs = zip(plateaus, references, strict=True)
    points = [points_above(task.kind, *pair) for pair in pairs]
    return sum(plateaus) / len(plateaus), arithmetic_mean(points)


def _order(cell: Cell) -> tuple[int, float]:
    """Sort federated averaging first, then swap-ins by cost, others by delay, then the rest."""
    if cell.recipe == FEDAVG:
        return 0, 0.0
    if cell.cost is None or cell.delay is None:
        return 3, 0.0
    return (1, cell.cost.value) if cell.is_swap_in else (2, cell.delay.value)


_NOTE = (
    "Federated averaging's plateau, and every byte that all clients send and receive until the "
    "validation accuracy is that of the plateau less one point (a loss: plus one percent); for "
    "each recipe how many times fewer it needs, its delay, which is its rounds over those of "
    "federated averaging, and, where runs go that far, by how many points its own plateau is "
    f"higher. Bold: a swap-in; all seeds get there, with a delay of at most {MOST_DELAY}. "
    f"{PARTIAL}: runs are missing. {FOOTNOTE}"
)
_TASK_NOTE = (
    "Geometric means over seeds, in brackets the 95 % confidence interval. Tried: settings on seed "
    "0. Plateau: federated averaging's on the validation set, and points above it. Against `auto`: "
    "bytes of a swap-in over those of `auto`, paired by seed; where the interval includes 1, seeds "
    "do not tell them apart. Test: accuracy on the test set when the target is reached."
)
_HEADER = (
    "recipe",
    "setting",
    "tried",
    "cost",
    "saved",
    "delay",
    "plateau",
    "swap-in",
    "against `auto`",
    "test",
    "seeds",
)


def format_saving(factor: float) -> str:
    """Return how many times fewer bytes.

    >>> format_saving(1661.4), format_saving(8.349)
    ('1,661×', '8.35×')
    """
    return f"{factor:,.0f}×" if factor >= 100 else f"{factor:.3g}×"


def as_tables(comparison: SwapIn, cells: Sequence[Cell]) -> list[Table]:
    """Return a table for each task, one of all tasks, and one of all goals."""
    tables = []
    for task in comparison.tasks:
        own = [cell for cell in cells if (cell.task, cell.goal) == (task.name, PLATEAU)]
        if own:
            rows = tuple(_row(cell, task) for cell in sorted(own, key=_order))
            tables.append(Table(f"swap-in-{task.name}", task.name, _TASK_NOTE, _HEADER, rows, 2))
    if tables:
        tables = [_overview(comparison, cells), *tables, _all_goals(comparison, cells)]
    return tables


def _row(cell: Cell, task: SwapTask) -> tuple[str, ...]:
    name = f"`{label(cell.recipe)}`{PARTIAL if cell.is_partial else ''}"
    setting, tried = setting_text(cell), str(cell.num_settings)
    share = f"{cell.num_reached}/{cell.num_seeds}"
    if cell.same_as is not None:
        return name, f"the same as `{cell.same_as}`, to the byte", tried, *[""] * 7, share
    plateau = plateau_text(cell, task)
    if cell.cost is None or cell.savings is None or cell.delay is None:
        best = f"– ({_value(cell.best_value, task)})"
        return name, setting, tried, best, "", "", plateau, "no", "", "", share
    is_swap_in = "" if cell.recipe == FEDAVG else "**yes**" if cell.is_swap_in else "no"
    test = "" if cell.test is None else f"{cell.test:.1%}"
    return (
        name,
        setting,
        tried,
        _with_interval(cell.cost, format_bytes),
        _with_interval(cell.savings, format_saving),
        _with_interval(cell.delay, lambda value: f"{value:.2f}"),
        plateau,
        is_swap_in,
        versus_text(cell) if cell.is_swap_in else "",
        test,
        share,
    )


def plateau_text(cell: Cell, task: SwapTask) -> str:
    """Write federated averaging's plateau, and others as points above it."""
    if cell.recipe == FEDAVG:
        return "" if cell.level is None else _value(cell.level, task)
    return "" if cell.plateau is None else _with_interval(cell.plateau, format_points)


def format_points(points: float) -> str:
    """Return points with their sign.

    >>> format_points(0.26), format_points(-1.0)
    ('+0.3', '-1.0')
    """
    return f"{points:+.1f}"


def versus_text(cell: Cell) -> str:
    """Say how a recipe's bytes compare with those of `auto`; not at all within the noise of seeds.

    With a single common seed there is no interval, and the ratio is marked as such.
    """
    versus = cell.versus
    if versus is None:
        return ""
    if versus.low is None or versus.high is None:
        return f"{versus.value:.2f}× (one seed)"
    interval = f"({versus.low:.2f}–{versus.high:.2f})"
    return f"{AS_GOOD} {interval}" if versus.includes(1) else f"{versus.value:.2f}× {interval}"


def _value(value: float | None, task: SwapTask) -> str:
    if value is None:
        return "diverged"
    return f"{value:.1%}" if task.kind == "accuracy" else f"{value:.3g}"


def _level(cell: Cell) -> str:
    return _value(cell.level, SWAP_TASKS[cell.task])


def _with_interval(mean: Mean, write: Any) -> str:
    if mean.low is None or mean.high is None or mean.low == mean.high:
        return str(write(mean.value))
    return f"{write(mean.value)}<br>({write(mean.low)}–{write(mean.high)})"


def setting_text(cell: Cell) -> str:
    """Write a setting without the name of its recipe; a step that is the task's is left out."""
    return str(cell.setting).removeprefix(cell.recipe).lstrip(":, ") or "step ×1"


def _short(cell: Cell | None) -> str:
    """Write a cell as what it saves and its delay; bold for a swap-in."""
    if cell is None:
        return ""
    mark = PARTIAL if cell.is_partial else ""
    if cell.recipe == FEDAVG and cell.cost is not None:
        is_shown = cell.level is not None and cell.goal == PLATEAU
        level = f"{_level(cell)}, " if is_shown else ""
        return f"{level}{format_bytes(cell.cost.value)}{mark}"
    if cell.same_as is not None:
        return f"as `{cell.same_as}`"
    if cell.savings is None or cell.delay is None:
        return f"–{mark}"
    text = f"{format_saving(cell.savings.value)}, {cell.delay.value:.2f}"
    if cell.plateau is not None and cell.goal == PLATEAU:
        text += f", {format_points(cell.plateau.value)}"
    if cell.num_reached < cell.num_seeds:
        text += f" ({cell.num_reached}/{cell.num_seeds})"
    return (f"**{text}**" if cell.is_swap_in else text) + mark


def _overview(comparison: SwapIn, cells: Sequence[Cell]) -> Table:
    by_place = {(c.recipe, c.task): c for c in cells if c.goal == PLATEAU}
    tasks = [task.name for task in comparison.tasks if any(t == task.name for _, t in by_place)]
    rows = []
    for recipe in comparison.recipes:
        own = [by_place.get((recipe, task)) for task in tasks]
        if any(own):
            rows.append((f"`{label(recipe)}`", *map(_short, own)))
    return Table(
        "swap-in", "In the place of federated averaging", _NOTE, ("recipe", *tasks), tuple(rows), 1
    )


def _all_goals(comparison: SwapIn, cells: Sequence[Cell]) -> Table:
    by_place = {(c.task, c.recipe, c.goal): c for c in cells}
    rows = []
    for task in comparison.tasks:
        for recipe in comparison.recipes:
            own = [by_place.get((task.name, recipe, goal)) for goal in GOALS]
            if own[0] is not None and own[0].same_as is None:
                rows.append((task.name, f"`{label(recipe)}`", *map(_short, own)))
    note = (
        "As above, until shares of federated averaging's plateau are reached, and the plateau less "
        "one point, with the setting that is best for the latter."
    )
    header = ("task", "recipe", *(goal.replace(PLATEAU, "plateau − 1 point") for goal in GOALS))
    return Table("swap-in-goals", "Several goals", note, header, tuple(rows), 2)
