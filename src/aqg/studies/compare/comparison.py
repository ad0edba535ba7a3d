"""What is compared with what, and the file that remembers it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from aqg.core.downlink import AUTO, make_downlink
from aqg.errors import ConfigError, RunError
from aqg.runs.directory import create_directory
from aqg.runs.files import write_atomically
from aqg.studies.compare.search import applies, parse_recipes
from aqg.studies.compare.tasks import (
    Task,
    from_row,
    in_order,
    parse_tasks,
    select_tasks,
    to_row,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

PLAN = "compare.json"


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        tasks: on what.
        recipes: names, in the order they are run.
        seeds: how many; each makes its own split, start, batches and dropouts.
        search: find every recipe's best setting first, on seed 0.
        quick: search a small part of the grid.
        downlink: how clients receive the model; what suits each recipe, by default.
        extends: whether a search that ends at the edge of its grid goes on; it did not in earlier
            versions.

    """

    tasks: tuple[Task, ...]
    recipes: tuple[str, ...]
    seeds: int
    search: bool = False
    quick: bool = False
    downlink: str = AUTO
    extends: bool = False

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ConfigError(f"seeds is {self.seeds}; it must be at least 1")
        if self.downlink != AUTO:
            make_downlink(self.downlink)

    @property
    def has_finals(self) -> bool:
        """Whether recipes close to the best have a final."""
        return self.search and self.seeds > 1 and not self.quick

    def pairs(self) -> Iterator[tuple[str, Task]]:
        """Yield what is measured: every recipe on every task where it makes a difference."""
        for recipe in self.recipes:
            yield from ((recipe, task) for task in self.tasks if applies(recipe, task))

    def parse_tasks(self, text: str) -> tuple[Task, ...]:
        """Return the tasks that ``--task`` names, which may be the user's own."""
        own = {task.name: task for task in self.tasks if task.is_own}
        names = [name.strip() for name in text.split(",")]
        ours = [name for name in names if name not in own]
        chosen = parse_tasks(",".join(ours)) if ours else ()
        return (*chosen, *(own[name] for name in names if name in own))

    def extended(
        self, tasks: Sequence[Task], recipes: Sequence[str], seeds: int | None
    ) -> Comparison:
        """Return the comparison with more tasks and recipes, and another number of seeds."""
        return replace(
            self,
            tasks=in_order((*self.tasks, *tasks)),
            recipes=parse_recipes(",".join(dict.fromkeys((*self.recipes, *recipes)))),
            seeds=self.seeds if seeds is None else seeds,
        )

    def narrowed(self, tasks: Sequence[Task], recipes: Sequence[str]) -> Comparison:
        """Return the part with these tasks and recipes; none given means all of them."""
        return replace(
            self,
            tasks=tuple(task for task in self.tasks if not tasks or task in tasks),
            recipes=tuple(name for name in self.recipes if not recipes or name in recipes),
        )

    def to_json(self) -> str:
        """Return the settings as JSON."""
        row: dict[str, Any] = {
            "tasks": [task.name for task in self.tasks if not task.is_own],
            "recipes": list(self.recipes),
            "seeds": self.seeds,
            "search": self.search,
            "quick": self.quick,
            "downlink": self.downlink,
            "extends": self.extends,
        }
        if own := [to_row(task) for task in self.tasks if task.is_own]:
            row["own"] = own
        return json.dumps(row, indent=1) + "\n"


def create_comparison(directory: Path, comparison: Comparison) -> None:
    """Make a comparison's directory."""
    create_directory(directory)
    write_comparison(directory, comparison)


def write_comparison(directory: Path, comparison: Comparison) -> None:
    """Write down what is compared."""
    write_atomically(directory / PLAN, comparison.to_json().encode())


def open_comparison(directory: Path) -> Comparison:
    """Read what a directory compares."""
    path = directory / PLAN
    if not path.is_file():
        raise RunError(f"{str(directory)!r} is not a comparison's directory: it has no {PLAN}")
    try:
        row = json.loads(path.read_bytes())
        return Comparison(
            tasks=(*select_tasks(row["tasks"]), *map(from_row, row.get("own", ()))),
            recipes=parse_recipes(",".join(row["recipes"])),
            seeds=row["seeds"],
            search=row["search"],
            quick=row["quick"],
            downlink=row.get("downlink", "full"),
            extends=row.get("extends", False),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{str(path)!r} is damaged ({error!r}); start a new comparison") from None
