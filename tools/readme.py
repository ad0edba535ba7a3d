"""Write the tables of README.md and of swapping in anew: ``python tools/readme.py``.

They come from the runs of ``aqg compare`` in ``results/swap-in-*``, and stand between
``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from document import refresh

from aqg.runs.table import Table, format_bytes
from aqg.studies.contest.plan import FEWER_SEEDS, Comparison, read_outcomes
from aqg.studies.contest.table import (
    Cell,
    format_saving,
    make_cells,
    plateau_text,
    read_tables,
    versus_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aqg.studies.contest.tasks import Task

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    ROOT / "README.md",
    ROOT / "docs/explanation/swap-in.md",
    ROOT / "docs/explanation/measure.md",
)
SMALL, MNIST, LARGE, UNSEEN = (
    ROOT / "results" / f"swap-in-{name}" for name in ("compare", "mnist", "large", "unseen")
)
FOLDERS = {"small": SMALL, "mnist": MNIST, "large": LARGE, "unseen": UNSEEN}
"""Where the runs are, by the name of their table; those that are not there are left out."""
NOT_OF_THE_FIELD = ("auto", "lean", "fedavg")
NUM_PARAMS = {
    "digits-local": 2_410,
    "heart": 27,
    "watch": 6_871,
    "local-iid": 159_010,
    "local-dirichlet": 159_010,
    "local-dirichlet-dropout": 159_010,
    "sampled-dirichlet": 159_010,
    "sampled-iid": 159_010,
    "shakespeare": 114_512,
    "cifar10": 355_658,
    "cifar10-batchnorm": 78_042,
    "hold-out-cnn": 9_098,
    "hold-out-plays": 114_512,
    "unseen-synthetic": 4_554,
    "unseen-arms": 5_799,
    "unseen-many": 50_890,
    "unseen-vit": 41_674,
    "unseen-lstm": 95_312,
}
"""Of the model of each task, some of whose data are not in the repository."""


def _seeds(counts: Iterable[int]) -> str:
    """Say how many seeds there are.

    >>> _seeds([3, 3]), _seeds([5, 3])
    ('3 seeds', '3 to 5 seeds')
    """
    numbers = sorted(set(counts))
    return " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1])))) + " seeds"


def field_table() -> Table:
    """Return `auto` beside federated averaging and the best recipe of the field, task by task."""
    rows, seeds = [], []
    header = (
        "task: parameters, clients",
        "FedAvg: plateau, rounds, bytes",
        "`auto`: rounds, bytes, plateau",
        "best of the field, tuned: rounds, bytes, settings tried",
        "its bytes against `auto`",
    )
    for folder in FOLDERS.values():
        if not folder.is_dir():
            continue
        comparison = Comparison.open(folder)
        cells = [cell for cell in make_cells(comparison, read_outcomes(folder)) if cell.is_main]
        for task in comparison.tasks:
            found = {cell.recipe: cell for cell in cells if cell.task == task.name}
            if not found:
                continue
            best = best_of_the_field(found.values())
            rows.append(
                (
                    f"{task.name}: {NUM_PARAMS[task.name]:,}, {task.config.clients}",
                    _averaging(found["fedavg"], task),
                    _default(found.get("auto")),
                    _tuned(best),
                    "" if best is None else versus_text(best),
                )
            )
            seeds += [found[name].num_seeds for name in ("fedavg", "auto") if name in found]
    note = (
        "Until FedAvg's plateau on the validation set less one point: rounds as a share of "
        "FedAvg's, every byte in both directions and how many times fewer; the plateau in points "
        f"against FedAvg's, with its 95 % interval. {_seeds(seeds)} of FedAvg, with the best "
        "step that its search found, and of `auto`."
    )
    return Table("field", "`auto` and the field", note, header, tuple(rows))


def best_of_the_field(cells: Iterable[Cell]) -> Cell | None:
    """Return the cheapest swap-in or, without one, the recipe with the least delay.

    One with several seeds comes before one with fewer.
    """
    others = [cell for cell in cells if cell.recipe.partition(":")[0] not in NOT_OF_THE_FIELD]
    return max((cell for cell in others if cell.savings), key=_rank, default=None)


def _rank(cell: Cell) -> tuple[bool, bool, float]:
    assert cell.savings is not None
    assert cell.delay is not None
    value = cell.savings.value if cell.is_swap_in else -cell.delay.value
    return cell.is_swap_in, cell.num_seeds >= FEWER_SEEDS, value


def _averaging(cell: Cell, task: Task) -> str:
    if cell.cost is None or cell.rounds is None:
        return "not reached"
    size = format_bytes(round(cell.cost.value))
    return f"{plateau_text(cell, task.goal)}, {cell.rounds:.0f}, {size}"


def _reached(cell: Cell) -> str:
    if cell.savings is None or cell.delay is None:
        return f"not reached ({cell.num_reached} of {cell.num_seeds} seeds)"
    missed = cell.num_seeds - cell.num_reached
    text = f"{cell.delay.value:.2f}, {format_saving(cell.savings.value)} fewer"
    return text + (f" ({cell.num_reached} of {cell.num_seeds} seeds)" if missed else "")


def _default(cell: Cell | None) -> str:
    if cell is None:
        return "not run"
    if cell.plateau is None:
        return _reached(cell)
    low, high = cell.plateau.low, cell.plateau.high
    is_certain = low is not None and high is not None
    interval = f" ({low:+.1f} to {high:+.1f})" if is_certain else ""
    return f"{_reached(cell)}, {cell.plateau.value:+.1f}{interval}"


def _tuned(cell: Cell | None) -> str:
    if cell is None:
        return "no run that far"
    return f"`{cell.recipe}`: {_reached(cell)}, {cell.num_settings} tried"


def refreshed(page: Path) -> str:
    """Return a page with its tables written anew."""
    tables = [field_table(), *read_tables(SMALL)]
    for suffix, folder in FOLDERS.items():
        if folder.is_dir():
            overview = read_tables(folder)[0]
            tables.append(replace(overview, name=f"{overview.name}-{suffix}"))
    return refresh(page.read_text(encoding="utf-8"), tables)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(refreshed(path), encoding="utf-8")
