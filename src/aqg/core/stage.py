"""What a stage of a recipe is: a step on the way of a client's vector, with a state of its own.

A round takes the clients' vectors through the stages in order (`Stage.before`), measures and
quantizes what comes out, and tells every stage what became of it (`Stage.after`). All arrays have a
leading axis of clients: a stage is written once for one client and for thousands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aqg.core.innovation import Innovation
    from aqg.core.messages import AnyUpload
    from aqg.core.space import Space
    from aqg.core.types import Float64Array, FloatArray, IntArray

StageState: TypeAlias = "Mapping[str, Any]"
"""Named arrays, a row per client."""


class Flow(NamedTuple):
    """What goes through the stages of ``m`` clients in a round.

    Attributes:
        vectors: what each client is about to compress, ``(m, n)``; at first its gradient. A stage
            replaces them, and never writes into them.
        movement: the number that criteria compare with, from the server; one for all, or ``(m,)``.
        losses: each client's loss at the model of this round, ``(m,)``, NaN where unknown.
        round: ``k``, counted from 1.
        space: where the vectors live.
        stored_errors: ``‖ε̂_b‖²`` of each client's last upload, ``(m, b_max)``, where a stage
            keeps them.
        advice: numbers that a stage has for the quantizer, a row per client, where it has any.
        level_factors: of each client, as in `aqg.core.round.News`.

    """

    vectors: Any
    movement: float | Float64Array
    losses: Any
    round: int
    space: Space
    stored_errors: Float64Array | None = None
    advice: Float64Array | None = None
    level_factors: Float64Array | None = None

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

    Attributes:
        vectors: what was to be quantized, ``(m, n)``: the flow's vectors, less the mirror where
            the recipe sends innovations.
        innovation: their statistics.
        senders: who sent.
        skipping: who chose not to.
        faulty: whose vector cannot be quantized; the state of these is left as it was.
        uploads: what each of the senders sent.
        space: where the vectors live.
        mirrors: returns ``ref_m`` after the uploads, of each of the senders.

    """

    vectors: Any
    innovation: Innovation
    senders: IntArray
    skipping: IntArray
    faulty: IntArray
    uploads: Sequence[AnyUpload]
    space: Space
    mirrors: Callable[[], Sequence[FloatArray]]


class Stage(Protocol):
    """One step of a recipe; a frozen dataclass without state of its own.

    Attributes:
        name: under which its state is kept; unlike that of any other stage of the recipe.

    A stage may also say how it treats the vectors: ``vectors = "unused"`` if it looks at numbers
    only, ``"read"`` if it looks at vectors by way of ``flow.space`` and keeps numbers, ``"device"``
    if it keeps vectors there, too. The vectors of all others are brought to NumPy first, wherever
    they live.

    """

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
