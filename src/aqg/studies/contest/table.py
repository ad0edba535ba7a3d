"""What a comparison found: cost, savings and delay of every recipe, for every task and target.

``docs/explanation/measure.md`` says what is in a comparison's directory. A trial's run directory is
in ``TASK/RECIPE/`` below it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from aqg.core.recipes import FROM_MEMORY
from aqg.report.frontier import draw, of_cells
from aqg.runs.files import write_atomically
from aqg.runs.table import Table, format_bytes
from aqg.studies.contest import measure, plan
from aqg.studies.contest.search import FEDAVG, OURS, SEARCH_SEED, TUNED, Setting, write_tuned

TABLES = "tables.md"
PICTURE = "frontier.png"
PARTIAL = "†"
AS_GOOD = "as good as"
_FROM_MEMORY = "‡"


@dataclass(frozen=True)
class Cell:
    """One recipe on one task for one target, over the seeds that were run; None is unknown."""

    task: str
    recipe: str
    goal: str
    setting: Setting  # that was run, the best on seed 0
    num_seeds: int
    num_reached: int
    cost: measure.Mean | None  # total bytes, over the seeds that reached the target
    savings: measure.Mean | None  # federated averaging's bytes over these
    delay: measure.Mean | None  # rounds over those of federated averaging
    test: float | None  # the mean test accuracy when the target was reached
    best_value: float | None  # that was measured, over all seeds
    is_partial: bool = False  # runs are missing
    same_as: str | None = None  # an earlier recipe whose runs were the same, to the byte
    level: float | None = None  # the mean plateau, where all runs went to the last round
    plateau: measure.Mean | None = None  # points above federated averaging's; of losses percent
    versus: measure.Mean | None = None  # its bytes over those of `auto`, by seed
    num_settings: int = 1  # that were tried on seed 0
    rounds: float | None = None  # the mean of those until the target
    upload_bytes: float | None = None  # likewise, where the target is fixed

    @property
    def is_main(self) -> bool:
        return self.goal in (measure.PLATEAU, measure.FIXED)

    @property
    def is_swap_in(self) -> bool:
        """Whether all seeds reach the target, on average with little delay."""
        if self.delay is None or self.num_reached < self.num_seeds:
            return False
        return self.delay.value <= measure.MOST_DELAY

    def to_json(self) -> dict[str, Any]:
        row = asdict(self)
        del row["setting"]
        return {**self.setting.to_json(), **row, "is_swap_in": self.is_swap_in}


def make_cells(
    comparison: plan.Comparison, outcomes: Mapping[plan.Trial, plan.Outcome]
) -> list[Cell]:
    pairs = set(comparison.pairs())
    cells: list[Cell] = []
    for task in comparison.tasks:
        findings = plan.Findings(task, comparison.seeds, outcomes.values())
        seen: dict[tuple[Any, ...], str] = {}
        ours = _runs(OURS, findings)
        for recipe in comparison.recipes:
            runs = _runs(recipe, findings)
            if not runs or (recipe, task) not in pairs:
                continue
            same = seen.setdefault(tuple(o.curve for o in runs), recipe)
            setting = runs[0].trial.setting
            tuned = {task.name: {recipe: setting}} if setting.multiplier >= 0 else {}
            left, later = plan.pending_trials(comparison, recipe, findings, tuned)
            tried = findings.by_recipe[recipe]
            about = {
                "is_partial": bool(left or later),
                "same_as": None if same == recipe else same,
                "num_settings": len({t.setting for t in tried if t.seed == SEARCH_SEED}),
            }
            cells += [_make_cell(name, runs, ours, findings, about) for name in task.goal.names]
    return cells


def _runs(recipe: str, findings: plan.Findings) -> list[plan.Outcome]:
    """Return the runs of a recipe's best setting by seed; nothing while there is no target."""
    setting = findings.best(recipe)
    if setting is None or SEARCH_SEED not in findings.references:
        return []
    if recipe == FEDAVG:
        setting = findings.fedavg_settings()[-1]
    own = findings.counted(recipe)
    return sorted((o for t, o in own.items() if t.setting == setting), key=lambda o: o.trial.seed)


def _scores(
    name: str, runs: Sequence[plan.Outcome], findings: plan.Findings
) -> dict[int, measure.Crossing | None]:
    """Return each seed's score, None where it misses the target; not runs to an easier one."""
    found = {}
    for outcome in runs:
        seed = outcome.trial.seed
        reference = findings.references.get(seed)
        if reference is None or outcome.is_cut(reference.targets[name]):
            continue
        one = measure.score(outcome.curve, reference, name)
        if one is not None and outcome.trial.recipe == FEDAVG and name in reference.crossings:
            # of several steps, the one that gets there first
            first = reference.crossings[name]
            one = replace(first, test=one.test, savings=1.0, delay=1.0)
        found[seed] = one
    return found


def _make_cell(
    name: str,
    runs: Sequence[plan.Outcome],
    ours: Sequence[plan.Outcome],
    findings: plan.Findings,
    about: Mapping[str, Any],
) -> Cell:
    trial, goal = runs[0].trial, findings.task.goal
    found = _scores(name, runs, findings)
    scores = [one for one in found.values() if one is not None]

    def known(key: str) -> list[float]:
        return [value for one in scores if (value := getattr(one, key)) is not None]

    own = [o for o in runs if o.trial.seed in found]
    values = [v for o in own for v in o.curve.values if v == v]
    default = _scores(name, ours, findings)
    pairs = [(one, default.get(seed)) for seed, one in found.items()]
    ratios = [a.total_bytes / b.total_bytes for a, b in pairs if a is not None and b is not None]
    uploads = [o.upload_bytes for o in own if goal.target and found[o.trial.seed]]
    level, plateau = _plateau(own, findings)
    what = trial.task, trial.recipe, name, trial.setting, len(found), len(scores)
    return Cell(
        *what,
        cost=measure.geometric_mean(known("total_bytes")),
        savings=measure.geometric_mean(known("savings")),
        delay=measure.geometric_mean(known("delay")),
        test=_mean(known("test")),
        rounds=_mean(known("rounds")),
        best_value=min(values, key=lambda value: goal.sign * value, default=None),
        level=level,
        upload_bytes=_mean([size for size in uploads if size is not None]),
        plateau=plateau,
        versus=None if trial.recipe in (FEDAVG, OURS) else measure.geometric_mean(ratios),
        **about,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _plateau(
    runs: Sequence[plan.Outcome], findings: plan.Findings
) -> tuple[float | None, measure.Mean | None]:
    """Return the mean plateau, and its points above federated averaging's, paired by seed.

    Nothing where a run ended earlier.
    """
    goal = findings.task.goal
    references = [findings.references[o.trial.seed].plateau for o in runs]
    known = [plateau for plateau in references if plateau is not None]
    if not known:
        return None, None
    if runs[0].trial.recipe == FEDAVG:
        return _mean(known), None
    plateaus = [measure.plateau_of(o.curve, goal.num_rounds) for o in runs]
    if any(math.isnan(plateau) for plateau in plateaus):
        return None, None
    above = [measure.points_above(goal.kind, *p) for p in zip(plateaus, known, strict=True)]
    return _mean(plateaus), measure.arithmetic_mean(above)


def _order(cell: Cell) -> tuple[int, float]:
    """Sort federated averaging first, then swap-ins by cost, others by delay, then the rest."""
    if cell.recipe == FEDAVG:
        return 0, 0.0
    if cell.cost is None:
        return 3, 0.0
    if cell.is_swap_in or cell.delay is None or cell.goal == measure.FIXED:
        return 1, cell.cost.value
    return 2, cell.delay.value


_FOOTNOTE = f"{_FROM_MEMORY}: implemented from memory, not checked against its paper's text."
_NOTE = (
    "Federated averaging's plateau, and every byte that all clients send and receive until the "
    "validation accuracy is that of the plateau less one point (a loss: plus one percent); for "
    "each recipe how many times fewer it needs, its delay, which is its rounds over those of "
    "federated averaging, and, where runs go that far, by how many points its own plateau is "
    f"higher. Bold: a swap-in; all seeds get there, with a delay of at most {measure.MOST_DELAY}. "
    f"{PARTIAL}: runs are missing. {_FOOTNOTE}"
)
_FIXED_NOTE = "Where the head of a column names a target, that is the goal, and not the plateau. "
_TASK_NOTE = (
    "Geometric means over seeds, in brackets the 95 % confidence interval. Tried: settings on seed "
    "0. Plateau: federated averaging's on the validation set, and points above it. Against `auto`: "
    "bytes of a swap-in over those of `auto`, paired by seed; where the interval includes 1, seeds "
    "do not tell them apart. Test: accuracy on the test set when the target is reached."
)
_FIXED_TASK_NOTE = _TASK_NOTE.replace(
    "Plateau: federated averaging's on the validation set, and points above it",
    "Uploaded: the part of the bytes that clients send",
).replace("a swap-in", "what reaches the target")


def label(recipe: str) -> str:
    return recipe + (_FROM_MEMORY if recipe.partition(":")[0] in FROM_MEMORY else "")


def format_saving(factor: float) -> str:
    """Return how many times fewer bytes.

    >>> format_saving(1661.4), format_saving(8.349)
    ('1,661×', '8.35×')
    """
    return f"{factor:,.0f}×" if factor >= 100 else f"{factor:.3g}×"


def as_tables(comparison: plan.Comparison, cells: Sequence[Cell]) -> list[Table]:
    tables = []
    for task in comparison.tasks:
        own = [cell for cell in cells if cell.task == task.name and cell.is_main]
        if own:
            rows = tuple(_row(cell, task.goal) for cell in sorted(own, key=_order))
            title, note, shown = task.name, _TASK_NOTE, "plateau"
            if task.goal.target is not None:
                title, note = f"{task.name}, {task.goal.target}", _FIXED_TASK_NOTE
                shown = "uploaded"
            names = ("recipe", "setting", "tried", "cost", "saved", "delay", shown, "swap-in")
            header = (*names, "against `auto`", "test", "seeds")
            tables.append(Table(f"swap-in-{task.name}", title, note, header, rows, 2))
    if tables:
        goals = _all_goals(comparison, cells)
        tables = [_overview(comparison, cells), *tables, *([goals] if goals.rows else [])]
    return tables


def _row(cell: Cell, goal: measure.Goal) -> tuple[str, ...]:
    name = f"`{label(cell.recipe)}`{PARTIAL if cell.is_partial else ''}"
    setting, tried = setting_text(cell), str(cell.num_settings)
    share = f"{cell.num_reached}/{cell.num_seeds}"
    if cell.same_as is not None:
        return name, f"the same as `{cell.same_as}`, to the byte", tried, *[""] * 7, share
    plateau = plateau_text(cell, goal)
    if goal.target is not None:
        plateau = "" if cell.upload_bytes is None else format_bytes(cell.upload_bytes)
    if cell.cost is None:
        best = f"– ({_value(cell.best_value, goal)})"
        return name, setting, tried, best, "", "", plateau, "no", "", "", share
    is_swap_in = "" if cell.recipe == FEDAVG else "**yes**" if cell.is_swap_in else "no"
    return (
        *(name, setting, tried, _with_interval(cell.cost, format_bytes)),
        _with_interval(cell.savings, format_saving),
        _with_interval(cell.delay, "{:.2f}".format),
        plateau,
        is_swap_in,
        versus_text(cell) if cell.is_swap_in or goal.target is not None else "",
        "" if cell.test is None else f"{cell.test:.1%}",
        share,
    )


def plateau_text(cell: Cell, goal: measure.Goal) -> str:
    """Write federated averaging's plateau, and others as points above it."""
    if cell.recipe == FEDAVG:
        return "" if cell.level is None else _value(cell.level, goal)
    return _with_interval(cell.plateau, "{:+.1f}".format)


def versus_text(cell: Cell) -> str:
    """Compare bytes with those of `auto`; "as good as" it within the noise of seeds."""
    versus = cell.versus
    if versus is None:
        return ""
    if versus.low is None or versus.high is None:
        return f"{versus.value:.2f}× (one seed)"
    interval = f"({versus.low:.2f}–{versus.high:.2f})"
    return f"{AS_GOOD} {interval}" if versus.includes(1) else f"{versus.value:.2f}× {interval}"


def _value(value: float | None, goal: measure.Goal) -> str:
    if value is None:
        return "diverged"
    return f"{value:.1%}" if goal.kind == "accuracy" else f"{value:.3g}"


def _with_interval(mean: measure.Mean | None, write: Any) -> str:
    if mean is None:
        return ""
    if mean.low is None or mean.high is None or mean.low == mean.high:
        return str(write(mean.value))
    return f"{write(mean.value)}<br>({write(mean.low)}–{write(mean.high)})"


def setting_text(cell: Cell) -> str:
    return str(cell.setting).removeprefix(cell.recipe).lstrip(":, ") or "step ×1"


def _short(cell: Cell | None, goal: measure.Goal) -> str:
    """Write a cell as what it saves and its delay; bold for a swap-in."""
    if cell is None:
        return ""
    mark = PARTIAL if cell.is_partial else ""
    if cell.same_as is not None:
        return f"as `{cell.same_as}`"
    if cell.cost is None:
        return f"–{mark}"
    if cell.recipe == FEDAVG or cell.savings is None or cell.delay is None:
        is_shown = cell.level is not None and cell.goal == measure.PLATEAU
        level = f"{_value(cell.level, goal)}, " if is_shown else ""
        return f"{level}{format_bytes(cell.cost.value)}{mark}"
    text = f"{format_saving(cell.savings.value)}, {cell.delay.value:.2f}"
    if cell.plateau is not None and cell.goal == measure.PLATEAU:
        text += f", {cell.plateau.value:+.1f}"
    if cell.num_reached < cell.num_seeds:
        text += f" ({cell.num_reached}/{cell.num_seeds})"
    return (f"**{text}**" if cell.is_swap_in else text) + mark


def _overview(comparison: plan.Comparison, cells: Sequence[Cell]) -> Table:
    by_place = {(c.recipe, c.task): c for c in cells if c.is_main}
    tasks = [t for t in comparison.tasks if any(name == t.name for _, name in by_place)]
    rows = []
    for recipe in comparison.recipes:
        own = [by_place.get((recipe, task.name)) for task in tasks]
        if any(own):
            texts = [_short(cell, task.goal) for cell, task in zip(own, tasks, strict=True)]
            rows.append((f"`{label(recipe)}`", *texts))
    goals = [(task.name, task.goal.target) for task in tasks]
    heads = [name if target is None else f"{name}<br>{target}" for name, target in goals]
    note = (_FIXED_NOTE if any(target is not None for _, target in goals) else "") + _NOTE
    title = "In the place of federated averaging"
    return Table("swap-in", title, note, ("recipe", *heads), tuple(rows), 1)


def _all_goals(comparison: plan.Comparison, cells: Sequence[Cell]) -> Table:
    by_place = {(c.task, c.recipe, c.goal): c for c in cells}
    names: tuple[str, ...] = ()
    rows = []
    for task in comparison.tasks:
        if task.goal.target is not None:
            continue
        names = task.goal.names
        for recipe in comparison.recipes:
            own = [by_place.get((task.name, recipe, name)) for name in names]
            if own[0] is not None and own[0].same_as is None:
                texts = [_short(cell, task.goal) for cell in own]
                rows.append((task.name, f"`{label(recipe)}`", *texts))
    note = (
        "As above, until shares of federated averaging's plateau are reached, and the plateau less "
        "one point, with the setting that is best for the latter."
    )
    goals = (name.replace(measure.PLATEAU, "plateau − 1 point") for name in names)
    header = ("task", "recipe", *goals)
    return Table("swap-in-goals", "Several goals", note, header, tuple(rows), 2)


def write_results(comparison: plan.Comparison, directory: Path) -> list[Cell]:
    outcomes = plan.read_outcomes(directory)
    cells = make_cells(comparison, outcomes)
    rows = [cell.to_json() for cell in cells]
    text = json.dumps({"cells": rows}, indent=1, allow_nan=False)
    write_atomically(directory / measure.RESULTS, (text + "\n").encode())
    tables = "\n".join(table.to_markdown() for table in as_tables(comparison, cells))
    write_atomically(directory / TABLES, tables.encode())
    write_atomically(directory / PICTURE, draw(of_cells(rows), comparison.recipes))
    found = (plan.Findings(t, comparison.seeds, outcomes.values()) for t in comparison.tasks)
    plan.write_targets(directory, found)
    if comparison.search:
        tuned: dict[str, dict[str, Setting]] = {}
        for cell in cells:
            if cell.is_main and cell.num_reached:
                tuned.setdefault(cell.task, {})[cell.recipe] = cell.setting
        write_atomically(directory / TUNED, write_tuned(tuned).encode())
    return cells


def read_tables(directory: Path) -> list[Table]:
    comparison = plan.Comparison.open(directory)
    return as_tables(comparison, make_cells(comparison, plan.read_outcomes(directory)))
