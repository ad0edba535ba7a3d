"""Stages that recipes are made of: each owns its state, and none knows of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aqg.core.grids import MAX_WIDTH
from aqg.core.space import Space, energies, with_rows
from aqg.core.track import Flow, Outcome
from aqg.core.types import Float64Array, IntArray
from aqg.errors import ConfigError, require

StageState: TypeAlias = Mapping[str, Any]
"""Named arrays, a row per client."""


class Stage:
    """One step of a recipe; its classes are frozen dataclasses, and this one changes nothing."""

    # under which its state is kept; unlike that of any other stage of the recipe
    name: ClassVar[str]
    # "unused" if it looks at numbers only, "device" if it works on vectors where they live, by way
    # of ``flow.space``, and keeps some there; else they are brought to NumPy first
    vectors: ClassVar[str] = "host"
    notes_faults: ClassVar[bool] = False  # whether vectors that cannot be quantized count
    keeps: ClassVar[str] = ""  # the name of the vector, zeros at first, that is all of its state

    def init(self, num_params: int, dtype: np.dtype[Any]) -> Mapping[str, NDArray[Any]]:
        """Return the state of one client before the first round, without the leading axis."""
        return {self.keeps: np.zeros(num_params, dtype)} if self.keeps else {}

    def before(self, state: StageState, flow: Flow) -> tuple[StageState, Flow]:
        """Return the state and the flow to go on with."""
        return state, flow

    def after(self, state: StageState, _outcome: Outcome) -> StageState:
        """Return the state after the round."""
        return state

    def home(self, space: Space) -> Space:
        """Return the space in which the stage keeps its state."""
        return space if self.vectors == "device" else space.host


def call_before(stage: Stage, rows: StageState, flow: Flow) -> tuple[StageState, Flow]:
    """Call `Stage.before`, with the vectors in NumPy if that is what the stage is written for.

    What it keeps in the memory of the vectors is copied: they may be overwritten from now on.
    """
    if stage.vectors == "unused":
        return stage.before(rows, flow)
    space, home = flow.space, stage.home(flow.space)
    given = flow if home is space else flow._replace(vectors=space.get(flow.vectors), space=home)
    new, changed = stage.before(rows, given)
    vectors = changed.vectors
    new = {f: v if v is rows[f] else home.apart(v, vectors) for f, v in new.items()}
    if home is not space:
        moved = flow.vectors if vectors is given.vectors else space.put(vectors)
        changed = changed._replace(vectors=moved, space=space)
    return new, changed


def settle_stage(
    stage: Stage,
    tables: dict[str, StageState],
    clients: IntArray,
    states: tuple[StageState, StageState],  # of these clients, before the round and on the way
    outcome: Outcome,
) -> None:
    """Call `Stage.after`, likewise, and put the rows that changed into the tables of all clients.

    Of a client whose vector was faulty they stay as they were before the round.
    """
    old, new = states
    space, home = outcome.space, stage.home(outcome.space)
    if stage.vectors == "host" and home is not space:
        outcome = outcome._replace(vectors=space.get(outcome.vectors), space=home)
    new = stage.after(new, outcome)
    table, faulty = tables[stage.name], outcome.faulty
    changed = {}
    for field, column in new.items():
        if column is old[field]:
            continue
        rows = column
        if len(faulty) and not stage.notes_faults:
            rows = home.own(column)
            rows[faulty] = old[field][faulty]
        changed[field] = home.store(table[field], clients, rows)
    if changed:
        tables[stage.name] = {**table, **changed}


@dataclass(frozen=True)
class ErrorFeedback(Stage):
    """Sends ``C(g + e)`` and keeps ``e ← g + e - C(g + e)``, the residual.

    Seide et al., 1-Bit Stochastic Gradient Descent; Stich et al., Sparsified SGD with Memory. With
    an ``η`` below 1 it keeps ``η·e``, of the error ``e ← (1 - η)·e + v - C(v)`` with ``v`` what was
    to be sent: Gao et al., EControl: Fast Distributed Optimization with Compression and Error
    Control.
    """

    eta: float = 1.0
    name: ClassVar[str] = "feedback"
    keeps: ClassVar[str] = "residual"
    vectors: ClassVar[str] = "device"

    def __post_init__(self) -> None:
        require(0 < self.eta <= 1, "eta", self.eta, "above 0 and at most 1")

    def before(self, state: StageState, flow: Flow) -> tuple[StageState, Flow]:
        return state, flow._replace(vectors=flow.space.add(flow.vectors, state["residual"]))

    def after(self, state: StageState, outcome: Outcome) -> StageState:
        space, senders = outcome.space, outcome.senders
        if not len(senders):
            return {"residual": outcome.vectors}
        pairs = zip(space.rows(outcome.vectors, senders), outcome.uploads, strict=True)
        left = np.stack([vector - upload.values(vector.dtype.type) for vector, upload in pairs])
        if self.eta < 1:
            old = np.asarray(space.rows(state["residual"], senders))
            left = (1 - self.eta) * old + self.eta * left
        return {"residual": space.store(outcome.vectors, senders, left)}


@dataclass(frozen=True)
class RunningAverage(Stage):
    """``v ← (1 - η)·v + η·g``; the first gradient starts it."""

    eta: float
    name: ClassVar[str] = "average"
    keeps: ClassVar[str] = "average"
    vectors: ClassVar[str] = "device"

    def __post_init__(self) -> None:
        require(0 < self.eta <= 1, "eta", self.eta, "above 0 and at most 1")

    def before(self, state: StageState, flow: Flow) -> tuple[StageState, Flow]:
        average = flow.space.blend(state["average"], flow.vectors, self.eta)
        return {"average": average}, flow._replace(vectors=average)


@dataclass(frozen=True)
class MomentumCorrection(Stage):
    """Sends ``C(v)`` of ``u ← m·u + g``, ``v ← v + u``, and forgets both where something was sent.

    Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
    Training. What waits in ``v`` has all the momentum that it would have had in training; what is
    sent takes its momentum along. ``v`` keeps what rounding left of what was sent.
    """

    momentum: float
    name: ClassVar[str] = "feedback"  # what it keeps must not be lost, as with `ErrorFeedback`

    def __post_init__(self) -> None:
        require(0 <= self.momentum < 1, "momentum", self.momentum, "at least 0 and below 1")

    def init(self, num_params: int, dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        return {"velocity": np.zeros(num_params, dtype), "residual": np.zeros(num_params, dtype)}

    def before(self, state: StageState, flow: Flow) -> tuple[StageState, Flow]:
        velocity = (self.momentum * state["velocity"] + flow.vectors).astype(flow.vectors.dtype)
        waiting = state["residual"] + velocity
        return {"velocity": velocity, "residual": waiting}, flow._replace(vectors=waiting)

    def after(self, state: StageState, outcome: Outcome) -> StageState:
        velocity, waiting = (state[name].copy() for name in ("velocity", "residual"))
        for row, upload in zip(outcome.senders, outcome.uploads, strict=True):
            sent = upload.values(waiting.dtype.type)
            velocity[row][sent != 0] = 0
            waiting[row] -= sent
        return {"velocity": velocity, "residual": waiting}


@dataclass(frozen=True)
class OwnMovement(Stage):
    """Gives the policy ``‖v^k - v^{k-1}‖²``; zero at the first vector."""

    name: ClassVar[str] = "own_movement"
    keeps: ClassVar[str] = "last"
    vectors: ClassVar[str] = "device"

    def before(self, state: StageState, flow: Flow) -> tuple[StageState, Flow]:
        movement = flow.space.distances(flow.vectors, state["last"])
        return {"last": flow.vectors}, flow._replace(movement=movement)


@dataclass(frozen=True)
class StoredErrors(Stage):
    """Keeps ``‖ε̂_b‖²`` for ``b = 1..b_max`` as they were at the last upload; zeros before it."""

    max_width: int
    name: ClassVar[str] = "stored_errors"
    vectors: ClassVar[str] = "unused"

    def init(self, _num_params: int, _dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        return {"errors": np.zeros(self.max_width)}

    def before(self, state: StageState, flow: Flow) -> tuple[StageState, Flow]:
        return state, flow._replace(stored_errors=state["errors"])

    def after(self, state: StageState, outcome: Outcome) -> StageState:
        senders = outcome.senders
        return {"errors": with_rows(state["errors"], senders, outcome.innovation.errors[senders])}


@dataclass(frozen=True)
class WiderTolerance(Stage):
    """Gives each client the movement ``min(max(t, ‖ref_m‖²), widest·t)`` to compare with.

    The movement ``t`` is the energy of the mean gradient. Where clients agree, each one's own
    gradient has about the same energy, and so have the errors of all if they point the same way.
    The more a client's gradient exceeds the mean, the less the clients agree: then their errors do
    not add up either, and more of them can be tolerated.
    """

    widest: float  # the most that a client is given, in movements of the server
    name: ClassVar[str] = "wider_tolerance"
    vectors: ClassVar[str] = "unused"

    def __post_init__(self) -> None:
        require(1 <= self.widest < math.inf, "widest", self.widest, "at least 1 and finite")

    def init(self, _num_params: int, _dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        return {"energy": np.zeros(())}

    def before(self, state: StageState, flow: Flow) -> tuple[StageState, Flow]:
        own = np.maximum(state["energy"], flow.movement)
        return state, flow._replace(movement=np.minimum(own, self.widest * flow.movement))

    def after(self, state: StageState, outcome: Outcome) -> StageState:
        if not len(outcome.senders):
            return state
        found = np.array([energies(mirror) for mirror in outcome.mirrors()])
        return {"energy": with_rows(state["energy"], outcome.senders, found)}


@dataclass(frozen=True)
class LossSchedule(Stage):
    """DAdaQuant in time: the number of levels ``q`` doubles when the loss stops falling.

    With the running average ``Ĝ_t = ψ·Ĝ_{t-1} + (1 - ψ)·G_t`` of the losses, ``q`` doubles where
    ``Ĝ`` is not below what it was ``φ - 1`` rounds before, and then stays for ``φ`` rounds. What is
    kept is a width ``b``, which stands for ``q = 2^(b-2)``. The policy gets the number of levels in
    place of the movement. The loss of a round counts although its gradient cannot be used.
    """

    start: int = 1  # ``q`` at the start, a power of two
    patience: int = 50  # ``φ``
    smoothing: float = 0.9  # ``ψ``
    name: ClassVar[str] = "loss_schedule"
    vectors: ClassVar[str] = "unused"
    notes_faults: ClassVar[bool] = True

    def __post_init__(self) -> None:
        largest = 1 << (MAX_WIDTH - 2)
        if not 1 <= self.start <= largest or self.start & (self.start - 1):
            raise ConfigError(f"q is {self.start}; it must be a power of two in 1..{largest}")
        require(2 <= self.patience <= 10_000, "phi", self.patience, "in 2..10000")
        require(0 <= self.smoothing < 1, "psi", self.smoothing, "at least 0 and below 1")

    def init(self, _num_params: int, _dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        """Return width, rounds since it changed, and the last ``φ`` averages, newest first."""
        width = self.start.bit_length() + 1
        return {"notes": np.array([width, 0.0] + [math.inf] * self.patience)}

    def before(self, state: StageState, flow: Flow) -> tuple[StageState, Flow]:
        losses = flow.space.get(flow.losses).tolist()
        pairs = zip(state["notes"], losses, strict=True)
        notes = np.array([self._observe(row, loss) for row, loss in pairs])
        factors = [1.0] * len(notes) if flow.level_factors is None else flow.level_factors.tolist()
        counts = [self._num_levels(*pair) for pair in zip(notes, factors, strict=True)]
        return {"notes": notes}, flow._replace(movement=np.array(counts, np.float64))

    def _observe(self, notes: Float64Array, loss: float) -> Float64Array:
        """Average the loss, and double ``q`` on a plateau; one that is not finite is ignored."""
        if not math.isfinite(loss):
            return notes
        newest = float(notes[2])
        if math.isfinite(newest):
            loss = self.smoothing * newest + (1.0 - self.smoothing) * loss
        after = np.concatenate([notes[:2], [loss], notes[2:-1]])
        after[1] += 1
        is_flat = after[1] >= self.patience and after[2] >= after[-1]
        if is_flat and after[0] < MAX_WIDTH:
            after[:2] = after[0] + 1, 0
        return after

    def _num_levels(self, notes: Float64Array, factor: float) -> int:
        """Return ``q`` of a client that uses ``factor`` times as many levels as the average."""
        most = (1 << (MAX_WIDTH - 1)) - 1
        return min(most, max(1, round(factor * (1 << (int(notes[0]) - 2)))))


def level_factors(weights: Float64Array) -> Float64Array | None:
    """Return DAdaQuant's ``q_m/q`` for clients of these weights; None where all are equal.

    ``q_m = q·w_m^(2/3)·√(Σ w^(2/3) / Σ w²)``: of all with the same variance of the weighted sum,
    ``Σ w²/q_m²``, these have the fewest levels.
    """
    if not len(weights) or (weights == weights[0]).all() or not (weights > 0).all():
        return None
    powers = weights ** (2 / 3)
    return powers * math.sqrt(powers.sum() / np.square(weights).sum())
