"""Tracks: vectors that one side moves and the other follows to the bit.

A track has a position, and perhaps a velocity, which both ends add to it in every round without a
word. The side that knows the truth says from time to time what is to be added to either
(`correct`), in quantized vectors; the other side adds it (`follow`). What was not said is
``truth - position``: it is said later, or never, when it does not matter any more.

On the way up a track is the mirror ``ref_m`` that a client and the server hold of its gradients;
on the way down it is the model that clients hold. Arrays have a leading axis of tracks; one of
them is an axis of length one. Both ends arrive at the same bits: quantized values are exact
products, and one addition per coordinate rounds the same way everywhere.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aqg.core.grids import Innovation, add_levels, num_levels, value_table
from aqg.core.messages import AnyUpload, Upload
from aqg.core.policies import Case
from aqg.core.quantizers import Request
from aqg.core.types import BoolArray, Float64Array, FloatArray, IntArray
from aqg.jit import njit

if TYPE_CHECKING:
    from aqg.core.recipe import Recipe
    from aqg.core.space import Array, Space

MAX_DIRECTION = 3


class Memory(enum.Enum):
    """What an upload stands for, and what both ends remember of it."""

    INNOVATION = "innovation"
    """``Δ = g - ref_m`` is sent and added to ``ref_m``; a skip repeats ``ref_m``."""
    LATEST = "latest"
    """``g`` is sent and replaces ``ref_m``; a skip repeats ``ref_m``."""
    NONE = "none"
    """What is sent counts in its round alone; a skip contributes nothing."""

    @property
    def keeps_mirror(self) -> bool:
        return self is not Memory.NONE


class Track(NamedTuple):
    """``M`` vectors, as both ends hold them."""

    position: Any  # ``(M, n)``; ``(M, 0)`` where nothing is held. On the device where vectors live.
    velocity: Any  # what is added to the position in every round, in float64; ``(M, 0)`` for none
    # which way each coordinate went in the last quantized correction, by which the coder writes
    # less; ``(M, n)`` or ``(M, 0)``
    direction: NDArray[np.int8]
    is_held: BoolArray  # whether the position may differ from zero, ``(M,)``

    def copy(self) -> Track:
        return Track._make(part.copy() for part in self)


class Change(NamedTuple):
    """A vector as it was and as it is; what is sent is the difference, exactly."""

    old: FloatArray
    new: FloatArray


Part: TypeAlias = AnyUpload | Change


class Flow(NamedTuple):
    """What is to be sent of ``m`` tracks in a round, and what it depends on."""

    # where each track should be, ``(m, n)``: of a client at first its gradient, which the stages of
    # its recipe replace, and never write into
    vectors: Any
    # the number that criteria compare with, from the server; one for all, or ``(m,)``
    movement: float | Float64Array
    space: Space  # where the vectors live; `correct` may overwrite them if they are its own
    round: int = 0  # ``k``, counted from 1
    seed: int = 0  # makes the round's randomness, with client and round
    first: int = 0  # the number of the first client on the axis
    losses: Any = None  # each client's loss at the model of this round, ``(m,)``, NaN where unknown
    # how many levels each of them uses over the average, where recipes give more of them to clients
    # that count more; None: all the same
    level_factors: Float64Array | None = None
    noise: float = 1.0  # ``b``, the noise that uploads may carry, in their own energy
    # ``‖ε̂_b‖²`` of each client's last upload, ``(m, b_max)``, where a stage keeps them
    stored_errors: Float64Array | None = None


class Outcome(NamedTuple):
    """What became of the vectors of ``m`` tracks, a row for each; places are rows of that."""

    # ``truth - position``, which was to be quantized: the flow's vectors, less the mirrors where
    # the recipe sends innovations
    vectors: Any
    innovation: Innovation  # their statistics
    senders: IntArray  # places of those that are corrected
    faulty: IntArray  # of those whose vectors cannot be quantized: their state is left as it was
    skipped_rounds: IntArray  # how many rounds in a row each was not corrected, this one included
    space: Space  # where the vectors live
    noise: float  # that uploads might carry
    uploads: Sequence[AnyUpload] = ()  # what each of the senders sent
    # returns ``ref_m`` after the uploads, of each of the senders
    mirrors: Callable[[], Sequence[FloatArray]] = tuple


def init_track(
    length: int, dtype: np.dtype[Any], num_tracks: int = 1, has_velocity: bool = False
) -> Track:
    return Track(
        np.zeros((num_tracks, length), dtype),
        np.zeros((num_tracks, length if has_velocity else 0)),
        np.zeros((num_tracks, length), np.int8),
        np.zeros(num_tracks, np.bool_),
    )


def init_mirrors(
    memory: Memory, num_params: int, dtype: np.dtype[Any], num_clients: int = 1
) -> Track:
    """Return the mirrors of clients before the first message: every ``ref_m`` is zero."""
    return init_track(num_params if memory.keeps_mirror else 0, dtype, num_clients)


_ONE, _NO_ROUNDS = np.arange(1), np.zeros(1, np.int64)


def correct(
    recipe: Recipe,  # how corrections are chosen and written
    flow: Flow,  # where the tracks should be
    positions: Array | None = None,  # of all tracks; None where they are zero
    rows: IntArray = _ONE,  # which tracks these are: increasing places on the axis of ``positions``
    skipped_rounds: IntArray = _NO_ROUNDS,  # how many in a row each was not corrected, ``(m,)``
) -> Outcome:
    """Decide which tracks to correct, and what is to be added to each of these."""
    space = flow.space
    vectors, innovation = space.measure(recipe.quantizer, flow.vectors, positions, rows)
    decision = recipe.policy.decide(Case(innovation, flow.movement, flow.stored_errors))
    skipped_rounds = skipped_rounds.copy()
    places = who_sends(decision.send, innovation.in_range, skipped_rounds, recipe.max_staleness)
    found = Outcome(vectors, innovation, *places, skipped_rounds, space, flow.noise)
    senders = found.senders
    if not len(senders):
        return found
    chosen = space.rows(vectors, senders)
    steps, norms = innovation.steps, innovation.squared_norm
    movements = np.broadcast_to(flow.movement, len(rows))

    def encode(index: int) -> AnyUpload:
        place = senders.item(index)
        width = int(decision.width[place])
        request = Request(
            width=width,
            step=steps.item(place, width - 1) if width <= steps.shape[1] else 0.0,
            squared_norm=norms.item(place),
            key=(flow.seed, flow.first + rows.item(place), flow.round),
            movement=movements.item(place),
            noise=flow.noise,
        )
        return recipe.quantizer.quantize(chosen[index], request)

    uploads = space.map(encode, range(len(senders)), len(senders) * chosen[0].size)
    return found._replace(uploads=uploads)


def follow(
    track: Track,
    position: Part | None = None,
    velocity: Part | None = None,
    memory: Memory = Memory.INNOVATION,
    in_place: bool = False,
) -> Track:
    """Return a track after a round: ``velocity += v``, ``position += velocity``, ``position += p``.

    With `Memory.LATEST` a correction of the position replaces it. The old track is left as it was;
    with ``in_place`` it is given away: its arrays that can be written to are moved.
    """
    if not memory.keeps_mirror:
        return track
    place, speed, direction = track.position[0], track.velocity[0], track.direction[0]
    if velocity is not None:
        speed = advance(Memory.INNOVATION, speed, velocity, in_place)
    if len(speed):
        steps = speed.astype(place.dtype, copy=False)
        if steps is speed:
            place = place + steps
        else:  # steps are a copy: of a large model there is no third one
            steps += place
            place = steps
    if position is not None:
        place = advance(memory, place, position, in_place)
    for part in (position, velocity):
        if part is not None:
            direction = next_direction(direction, part)
    return Track(place[None], speed[None], direction[None], np.ones(1, np.bool_))


def advance(memory: Memory, position: FloatArray, part: Part, in_place: bool = False) -> FloatArray:
    """Return one position, of shape ``(n,)``, after a correction.

    A sum takes the place of the old position if that is given away and can be written to.
    """
    if isinstance(part, Change):
        return part.new
    dtype, out = position.dtype.type, position if in_place and position.flags.writeable else None
    if memory is Memory.LATEST:
        return part.values(dtype)
    if not isinstance(part, Upload):
        moved: FloatArray = np.add(position, part.values(dtype), out=out)
        return moved
    values = value_table(part.grid, part.width, part.step, dtype)
    return add_levels(position, part.levels, values, out)


def next_direction(direction: NDArray[np.int8], part: Part) -> NDArray[np.int8]:
    """Return the direction after a correction: that of the last quantized one."""
    if not isinstance(part, Upload) or not len(direction):
        return direction
    return direction_of(part.levels, num_levels(part.grid, part.width))


def direction_of(levels: NDArray[np.unsignedinteger], num_symbols: int) -> NDArray[np.int8]:
    """Return where an upload went, ``v = 2q - (num_symbols - 1)`` cut to ``-3..3``."""
    direction = np.empty(len(levels), np.int8)
    _write_direction(levels, num_symbols, direction)
    return direction


@njit()
def _write_direction(levels: Any, num_symbols: Any, direction: Any) -> None:
    for i in range(len(levels)):
        v = 2 * np.int32(levels[i]) - np.int32(num_symbols - 1)
        direction[i] = min(max(v, -MAX_DIRECTION), MAX_DIRECTION)


def who_sends(
    wanting: BoolArray, in_range: BoolArray, skipped_rounds: IntArray, max_staleness: int
) -> tuple[IntArray, IntArray]:
    """Return the places of those that send, and of those whose vectors are out of range.

    One sends if it wants to, or if it skipped ``max_staleness`` rounds in a row, which
    ``skipped_rounds`` counts; it is brought up to date. All arrays are ``(M,)``.
    """
    sends = in_range & (wanting | (skipped_rounds >= max_staleness))
    skipped_rounds[sends] = 0
    skipped_rounds += in_range & ~sends
    return np.flatnonzero(sends), np.flatnonzero(~in_range)
