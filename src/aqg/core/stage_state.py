"""The state of stages for some of many clients: taken out, moved, put back.

Stages see rows of the clients at hand only, and return new ones; here is where these rows come
from and go to. A stage written for NumPy runs on vectors that live elsewhere, too: they are brought
over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aqg.core.space import Space
    from aqg.core.stage import Flow, Outcome, Stage, StageState
    from aqg.core.types import IntArray

    Tables = Mapping[str, StageState]


def lives_on_device(stage: Stage) -> bool:
    """Tell whether a stage keeps its state where the vectors are, and works on them there."""
    return getattr(stage, "vectors", "host") == "device"


def home_of(space: Space, stage: Stage) -> Space:
    """Return the space of a stage's state."""
    return space if lives_on_device(stage) else space.host


def take(space: Space, stage: Stage, tables: Tables, clients: IntArray) -> dict[str, Any]:
    """Return the rows of some clients."""
    table = tables[stage.name]
    home = home_of(space, stage)
    return {field: home.take(column, clients) for field, column in table.items()}


def before(space: Space, stage: Stage, rows: StageState, flow: Flow) -> tuple[StageState, Flow]:
    """Call `Stage.before`, with the vectors in NumPy if that is what the stage is written for.

    What it keeps in the memory of the vectors is copied: they may be overwritten from now on.
    """
    kind = getattr(stage, "vectors", "host")
    if kind in ("unused", "read"):
        return stage.before(rows, flow)
    if kind == "device" or space is space.host:
        new, changed = stage.before(rows, flow)
        vectors = changed.vectors
        return {f: v if v is rows[f] else space.apart(v, vectors) for f, v in new.items()}, changed
    brought = flow._replace(vectors=space.get(flow.vectors), space=space.host)
    new, changed = stage.before(rows, brought)
    vectors = flow.vectors
    if changed.vectors is not brought.vectors:
        vectors = space.put(changed.vectors)
    return new, changed._replace(vectors=vectors, space=space)


def after(space: Space, stage: Stage, rows: StageState, outcome: Outcome) -> StageState:
    """Call `Stage.after`, likewise."""
    if getattr(stage, "vectors", "host") != "host" or space is space.host:
        return stage.after(rows, outcome)
    brought = outcome._replace(vectors=space.get(outcome.vectors), space=space.host)
    return stage.after(rows, brought)


def undo(
    space: Space, stage: Stage, old: StageState, new: StageState, faulty: IntArray
) -> StageState:
    """Return the new rows, but the old ones of those whose vectors were faulty."""
    if not len(faulty) or getattr(stage, "notes_faults", False):
        return new
    home = home_of(space, stage)
    kept = {}
    for field, rows in new.items():
        changed = rows
        if rows is not old[field]:
            changed = home.own(rows)
            changed[faulty] = old[field][faulty]
        kept[field] = changed
    return kept


def store(
    space: Space,
    stage: Stage,
    tables: dict[str, StageState],
    clients: IntArray,
    old: StageState,
    new: StageState,
) -> None:
    """Put the rows that changed back into the tables of all clients."""
    if new is old:
        return
    home = home_of(space, stage)
    table = tables[stage.name]
    changed = {
        field: home.store(table[field], clients, rows)
        for field, rows in new.items()
        if rows is not old[field]
    }
    if changed:
        tables[stage.name] = {**table, **changed}
