"""What a stage of a recipe is: a step on the way of a client's vector, with a state of its own.

A round takes the clients' vectors through the stages in order (`Stage.before`), measures and
quantizes what comes out, and tells every stage what became of it (`Stage.after`). All arrays have a
leading axis of clients: a stage is written once for one client and for thousands.

Stages see rows of the clients at hand only, and return new ones; the functions below take these
rows out of the tables of all clients and put them back. A stage written for NumPy runs on vectors
that live elsewhere, too: they are brought over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aqg.core.kernels import Innovation
from aqg.core.messages import AnyUpload
from aqg.core.space import Space
from aqg.core.types import Float64Array, FloatArray, IntArray

StageState: TypeAlias = Mapping[str, Any]
"""Named arrays, a row per client."""


class Flow(NamedTuple):
    """What goes through the stages of ``m`` clients in a round."""

    # what each client is about to compress, ``(m, n)``; at first its gradient. A stage replaces
    # them, and never writes into them.
    vectors: Any
    # the number that criteria compare with, from the server; one for all, or ``(m,)``
    movement: float | Float64Array
    losses: Any  # each client's loss at the model of this round, ``(m,)``, NaN where unknown
    round: int  # ``k``, counted from 1
    space: Space  # where the vectors live
    # ``‖ε̂_b‖²`` of each client's last upload, ``(m, b_max)``, where a stage keeps them
    stored_errors: Float64Array | None = None
    # numbers that a stage has for the quantizer, a row per client, where it has any
    advice: Float64Array | None = None
    level_factors: Float64Array | None = None  # of each client, as in `aqg.core.round.News`

    def of(self, places: IntArray) -> Flow:
        """Return the flow of some of the clients, at increasing places."""
        movement = self.movement
        if not isinstance(movement, float | int):
            movement = movement[places]
        return Flow(
            self.space.take(self.vectors, places),
            movement,
            self.losses[places],
            self.round,
            self.space,
            None if self.stored_errors is None else self.stored_errors[places],
            None if self.advice is None else self.advice[places],
            None if self.level_factors is None else self.level_factors[places],
        )


class Outcome(NamedTuple):
    """What became of the vectors of ``m`` clients.

    ``senders``, ``skipping`` and ``faulty`` are places on the axis of ``m`` clients.
    """

    # what was to be quantized, ``(m, n)``: the flow's vectors, less the mirror where the recipe
    # sends innovations
    vectors: Any
    innovation: Innovation  # their statistics
    senders: IntArray  # who sent
    skipping: IntArray  # who chose not to
    faulty: IntArray  # whose vector cannot be quantized; the state of these is left as it was
    uploads: Sequence[AnyUpload]  # what each of the senders sent
    space: Space  # where the vectors live
    # returns ``ref_m`` after the uploads, of each of the senders
    mirrors: Callable[[], Sequence[FloatArray]]


class Stage(Protocol):
    """One step of a recipe; a frozen dataclass without state of its own.

    A stage may also say how it treats the vectors: ``vectors = "unused"`` if it looks at numbers
    only, ``"read"`` if it looks at vectors by way of ``flow.space`` and keeps numbers, ``"device"``
    if it keeps vectors there, too. The vectors of all others are brought to NumPy first, wherever
    they live.
    """

    # under which its state is kept; unlike that of any other stage of the recipe
    name: ClassVar[str]

    def init(self, num_params: int, dtype: np.dtype[Any], /) -> Mapping[str, NDArray[Any]]:
        """Return the state of one client before the first round, without the leading axis."""

    def before(self, state: StageState, flow: Flow, /) -> tuple[StageState, Flow]:
        """Return the state and the flow to go on with."""

    def after(self, state: StageState, outcome: Outcome, /) -> StageState:
        """Return the state after the round."""


class Plain:
    """Part of the stages that need only one of the two calls."""

    def before(self, state: StageState, flow: Flow) -> tuple[StageState, Flow]:
        """Pass everything on."""
        return state, flow

    def after(self, state: StageState, _outcome: Outcome) -> StageState:
        """Leave the state as it is."""
        return state


def lives_on_device(stage: Stage) -> bool:
    """Tell whether a stage keeps its state where the vectors are, and works on them there."""
    return getattr(stage, "vectors", "host") == "device"


def take_rows(
    space: Space, stage: Stage, tables: Mapping[str, StageState], clients: IntArray
) -> dict[str, Any]:
    """Return the rows of some clients."""
    home = space if lives_on_device(stage) else space.host
    return {field: home.take(column, clients) for field, column in tables[stage.name].items()}


def call_before(
    space: Space, stage: Stage, rows: StageState, flow: Flow
) -> tuple[StageState, Flow]:
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


def call_after(space: Space, stage: Stage, rows: StageState, outcome: Outcome) -> StageState:
    """Call `Stage.after`, likewise."""
    if getattr(stage, "vectors", "host") != "host" or space is space.host:
        return stage.after(rows, outcome)
    brought = outcome._replace(vectors=space.get(outcome.vectors), space=space.host)
    return stage.after(rows, brought)


def undo_faults(
    space: Space, stage: Stage, old: StageState, new: StageState, faulty: IntArray
) -> StageState:
    """Return the new rows, but the old ones of those whose vectors were faulty."""
    if not len(faulty) or getattr(stage, "notes_faults", False):
        return new
    home = space if lives_on_device(stage) else space.host
    kept = {}
    for field, rows in new.items():
        changed = rows
        if rows is not old[field]:
            changed = home.own(rows)
            changed[faulty] = old[field][faulty]
        kept[field] = changed
    return kept


def store_rows(
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
    home = space if lives_on_device(stage) else space.host
    table = tables[stage.name]
    changed = {
        field: home.store(table[field], clients, rows)
        for field, rows in new.items()
        if rows is not old[field]
    }
    if changed:
        tables[stage.name] = {**table, **changed}
