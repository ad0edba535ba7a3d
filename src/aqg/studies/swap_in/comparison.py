"""What is compared, and the file that remembers it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from aqg.core.downlink import AUTO, make_downlink
from aqg.core.recipes import make_recipe
from aqg.errors import ConfigError, RunError
from aqg.runs.directory import create_directory
from aqg.runs.files import write_atomically
from aqg.studies.compare.comparison import PLAN
from aqg.studies.swap_in.search import parse_swap_recipes
from aqg.studies.swap_in.tasks import SWAP_TASKS, select_swap_tasks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from aqg.studies.swap_in.tasks import SwapTask

MEASURE = "swap-in"


@dataclass(frozen=True)
class SwapIn:
    """What is compared.

    Attributes:
        tasks: on what.
        recipes: names, in the order they are run, federated averaging first.
        seeds: how many; each makes its own split, start, batches, dropouts and targets.
        search: find every recipe's best setting first, on seed 0; federated averaging's always is.
        downlink: how clients receive the model; what suits each recipe, by default.

    """

    tasks: tuple[SwapTask, ...]
    recipes: tuple[str, ...]
    seeds: int
    search: bool = False
    downlink: str = AUTO

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ConfigError(f"seeds is {self.seeds}; it must be at least 1")
        if self.downlink != AUTO:
            make_downlink(self.downlink)

    def tasks_of(self, recipe: str) -> tuple[SwapTask, ...]:
        """Return the tasks where a recipe differs from all others: some act on dropouts only."""
        if not make_recipe(recipe).amplify_dropouts:
            return self.tasks
        return tuple(task for task in self.tasks if task.dropout > 0)

    def extended(
        self, tasks: Sequence[SwapTask], recipes: Sequence[str], seeds: int | None
    ) -> SwapIn:
        """Return the comparison with more tasks and recipes, and another number of seeds."""
        return replace(
            self,
            tasks=select_swap_tasks(task.name for task in (*self.tasks, *tasks)),
            recipes=parse_swap_recipes(",".join(dict.fromkeys((*self.recipes, *recipes)))),
            seeds=self.seeds if seeds is None else seeds,
        )

    def narrowed(self, tasks: Sequence[SwapTask], recipes: Sequence[str]) -> SwapIn:
        """Return the part with these tasks and recipes; none given means all of them."""
        return replace(
            self,
            tasks=tuple(task for task in self.tasks if not tasks or task in tasks),
            recipes=parse_swap_recipes(",".join(recipes)) if recipes else self.recipes,
        )

    def to_json(self) -> str:
        """Return the settings as JSON."""
        row: dict[str, Any] = {
            "measure": MEASURE,
            "tasks": [task.name for task in self.tasks],
            "recipes": list(self.recipes),
            "seeds": self.seeds,
            "search": self.search,
            "downlink": self.downlink,
        }
        return json.dumps(row, indent=1) + "\n"


def create_swap_in(directory: Path, comparison: SwapIn) -> None:
    """Make a comparison's directory."""
    create_directory(directory)
    write_swap_in(directory, comparison)


def write_swap_in(directory: Path, comparison: SwapIn) -> None:
    """Write down what is compared."""
    write_atomically(directory / PLAN, comparison.to_json().encode())


def is_swap_in(directory: Path) -> bool:
    """Tell whether a directory holds such a comparison."""
    try:
        row = json.loads((directory / PLAN).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(row, dict) and row.get("measure") == MEASURE


def open_swap_in(directory: Path) -> SwapIn:
    """Read what a directory compares."""
    path = directory / PLAN
    try:
        row = json.loads(path.read_bytes())
        return SwapIn(
            tasks=tuple(task for name, task in SWAP_TASKS.items() if name in row["tasks"]),
            recipes=parse_swap_recipes(",".join(row["recipes"])),
            seeds=row["seeds"],
            search=row["search"],
            downlink=row["downlink"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{str(path)!r} is damaged ({error!r}); start a new comparison") from None
