"""Write the tables of README.md and docs/explanation/swap-in.md anew: ``python tools/readme.py``.

They come from ``results/swap-in`` (`benchmarks/swap_in.py`), and from ``results/swap-in-mnist``,
``results/swap-in-large`` and ``results/swap-in-compare`` (``aqg compare --swap-in``). They stand
between ``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean, mean
from typing import TYPE_CHECKING

from aqg.runs.table import Table, format_bytes
from aqg.studies.document import refresh
from aqg.studies.swap_in.comparison import open_swap_in
from aqg.studies.swap_in.measure import PLATEAU
from aqg.studies.swap_in.plan import read_outcomes
from aqg.studies.swap_in.table import Cell, as_tables, format_saving, make_cells

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs/explanation/swap-in.md")
SWAP_IN = ROOT / "results/swap-in/table.csv"
MNIST, LARGE = ROOT / "results/swap-in-mnist", ROOT / "results/swap-in-large"
FIELDS = (MNIST, LARGE, ROOT / "results/swap-in-compare")
OURS = ("auto", "lean")
TASKS = {
    "digits-local": "digits, 2,410 parameters, Dirichlet(0.3)",
    "local-iid": "MNIST, 159,010 parameters, IID",
    "local-dirichlet": "MNIST, 159,010 parameters, Dirichlet(0.3)",
    "sampled-dirichlet": "the same, 10 of 100 clients sampled",
}
"""The tasks of the short script that the README shows, in words."""


@dataclass(frozen=True)
class Run:
    """One seed of one recipe until federated averaging's accuracy, less one point."""

    seed: int
    target: float
    rounds: int
    upload_bytes: int
    download_bytes: int
    saving: float


def read_runs(task: str, recipe: str) -> list[Run]:
    """Return the runs of a recipe by seed; its step, after ``@``, may differ among seeds."""
    with SWAP_IN.open(encoding="utf-8") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["task"] == task and row["recipe"].partition("@")[0] == recipe and row["rounds"]
        ]
    runs = [
        Run(
            seed=int(row["seed"]),
            target=float(row["target"]),
            rounds=int(row["rounds"]),
            upload_bytes=int(row["upload_bytes"]),
            download_bytes=int(row["download_bytes"]),
            saving=float(row["saving"]),
        )
        for row in rows
    ]
    return sorted(runs, key=lambda run: run.seed)


def _up(runs: list[Run]) -> str:
    return format_bytes(round(mean(run.upload_bytes for run in runs)))


def _down(runs: list[Run]) -> str:
    return format_bytes(round(mean(run.download_bytes for run in runs)))


def _delays(plain: list[Run], runs: list[Run]) -> list[float]:
    pace = {run.seed: run.rounds for run in plain}
    return sorted(run.rounds / pace[run.seed] for run in runs)


def _seeds(counts: Iterable[int]) -> str:
    """Say how many seeds there are.

    >>> _seeds([3, 3]), _seeds([5, 3])
    ('3 seeds', '3 to 5 seeds')
    """
    numbers = sorted(set(counts))
    return " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1])))) + " seeds"


def short_table() -> Table:
    """Return `auto` beside federated averaging: accuracy, rounds, bytes up and down."""
    header = ("task", "accuracy", "FedAvg: rounds, up, down", "`auto`: rounds, up, down", "fewer")
    rows = []
    for task, words in TASKS.items():
        plain, runs = read_runs(task, "fedavg"), read_runs(task, "auto")
        rows.append(
            (
                words,
                f"{100 * mean(run.target for run in plain):.1f} %",
                f"{mean(run.rounds for run in plain):.0f}, {_up(plain)}, {_down(plain)}",
                f"{mean(run.rounds for run in runs):.0f}, {_up(runs)}, {_down(runs)}",
                f"{geometric_mean(run.saving for run in runs):,.0f}×",
            )
        )
    seeds = _seeds(len(read_runs(task, "auto")) for task in TASKS)
    note = f"Rounds and bytes of all clients until FedAvg's accuracy, less one point; {seeds}."
    return Table("in-place", "`auto` in place of FedAvg", note, header, tuple(rows))


def long_table() -> Table:
    """Return the same with the smallest and the largest value over seeds."""
    header = ("task", "FedAvg: rounds, bytes", "rounds", "delay", "bytes", "saving")
    rows = []
    for task in TASKS:
        plain, runs = read_runs(task, "fedavg"), read_runs(task, "auto")
        delays = _delays(plain, runs)
        savings = sorted(run.saving for run in runs)
        totals = [
            round(mean(run.upload_bytes + run.download_bytes for run in found))
            for found in (plain, runs)
        ]
        rows.append(
            (
                task,
                f"{mean(run.rounds for run in plain):.0f}, {format_bytes(totals[0])}",
                f"{mean(run.rounds for run in runs):.0f}",
                f"{geometric_mean(delays):.2f} ({delays[0]:.2f} to {delays[-1]:.2f})",
                format_bytes(totals[1]),
                f"{geometric_mean(savings):,.0f} ({savings[0]:,.0f} to {savings[-1]:,.0f})",
            )
        )
    note = "Bytes of all clients in both directions."
    return Table(
        "in-place-ranges", "`auto` in place of federated averaging", note, header, tuple(rows)
    )


def field_table() -> Table:
    """Return `auto` beside the best recipe of the field, whose settings were searched."""
    rows, seeds = [], []
    header = ("task", "FedAvg", "`auto`, nothing set", "best of the field, tuned")
    for folder in FIELDS:
        comparison = open_swap_in(folder)
        cells = [c for c in make_cells(comparison, read_outcomes(folder)) if c.goal == PLATEAU]
        for task in comparison.tasks:
            found = {cell.recipe: cell for cell in cells if cell.task == task.name}
            if "auto" not in found:
                continue
            others = [c for r, c in found.items() if r.partition(":")[0] not in (*OURS, "fedavg")]
            best = max((c for c in others if c.savings), key=_rank, default=None)
            plain = found["fedavg"]
            cost = format_bytes(round(plain.cost.value)) if plain.cost else "-"
            rows.append(
                (
                    task.name,
                    f"{_accuracy(plain)}, {cost}",
                    _outcome(found["auto"]),
                    f"`{best.recipe}`: {_outcome(best)}" if best else _without(others),
                )
            )
            seeds.append(plain.num_seeds)
    note = (
        f"Test accuracy, rounds and bytes in both directions, at the same target; {_seeds(seeds)} "
        "of FedAvg and `auto`."
    )
    return Table("field", "`auto` and the field", note, header, tuple(rows))


def _rank(cell: Cell) -> tuple[bool, float]:
    """Swap-ins first, by bytes; then by rounds."""
    if cell.savings is None or cell.delay is None:
        return False, 0.0
    return cell.is_swap_in, cell.savings.value if cell.is_swap_in else -cell.delay.value


def _accuracy(cell: Cell) -> str:
    return "-" if cell.test is None else f"{100 * cell.test:.1f} %"


def _without(cells: list[Cell]) -> str:
    """Say why no recipe of the field has a result."""
    tried = ", ".join(f"`{cell.recipe}`" for cell in cells if cell.num_seeds)
    return f"not reached: {tried}" if tried else "not run"


def _outcome(cell: Cell) -> str:
    if cell.savings is None or cell.delay is None:
        return f"not reached ({cell.num_reached} of {cell.num_seeds} seeds)"
    text = (
        f"{_accuracy(cell)}, {cell.delay.value:.2f} of the rounds, "
        f"{format_saving(cell.savings.value)} fewer"
    )
    missed = cell.num_seeds - cell.num_reached
    return text + (f" ({cell.num_reached} of {cell.num_seeds} seeds)" if missed else "")


def refreshed(page: Path) -> str:
    """Return a page with its tables written anew."""
    tables = [short_table(), long_table(), field_table()]
    for folder, suffix in ((MNIST, "mnist"), (LARGE, "large")):
        comparison = open_swap_in(folder)
        overview = as_tables(comparison, make_cells(comparison, read_outcomes(folder)))[0]
        tables.append(replace(overview, name=f"{overview.name}-{suffix}"))
    return refresh(page.read_text(encoding="utf-8"), tables)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(refreshed(path), encoding="utf-8")
