"""How clients receive the model: whole, exactly, or as short corrections.

`Full` sends the model itself. With the others clients hold a public model, and an entry of a log
says how it is corrected. `Exact` corrects it exactly. `Condensed` says as little as training can do
with: where the recipe keeps mirrors, the fewest bits that bring the velocity within a tolerance of
the step that the server would take, or nothing; else the largest coordinates of what the model
should be less what it is, as sparse ternary. What is left out stays in that difference.

The public model is what server and clients both hold. It is a track of its own (`aqg.core.track`):
a position, which is the model, and where the recipe keeps mirrors a velocity. Whoever holds ``P^k``
and gets entry ``k`` has ``P^{k+1}``, to the bit. How the server came to what an entry says is its
own affair: optimizers, step sizes and averages are not public.

Where there is no velocity, entries are quantized vectors and their steps powers of two, the
position lies on an exact grid: all coordinates are multiples of a quantum, a power of two, and
within what the mantissa holds of these. Then additions are exact, in whatever order: what a client
missed is one sum. An entry names the quantum, at first and when coordinates outgrow it, and both
ends round the position to it. Exact entries hold any values, and a velocity shrinks with the
gradients until single precision could not hold its multiples: these models are on no grid, and
their entries are followed one by one.

An entry is made from the sum of the round's uploads, whoever sent them. No client learns more of
another than that sum, which it would see in the model, too.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqg.core.grids import Grid, affine, round_up_to_bfloat16, snap
from aqg.core.messages import Upload
from aqg.core.policies import Always, Tolerance
from aqg.core.quantizers import TERNARY_WIDTH, GridQuantizer, LargestTernary, num_kept
from aqg.core.recipe import Movement, Recipe
from aqg.core.track import Part, Track, follow, init_track
from aqg.core.types import Float64Array, FloatArray, IntArray
from aqg.errors import MessageError, require
from aqg.jit import njit, part
from aqg.spec import make_named

_FOREVER = 1 << 62
_FEWEST = 32
"""Smallest number of coordinates in an entry; with fewer, the header is longer than the data."""

_MANY = 0.5
"""Share of all coordinates from which on an entry has all of them."""
_ALL_WIDTH = 4
"""Bits per coordinate then: one magnitude for all of them would say little of each."""
LARGEST_MOVEMENT = 2.0**127
"""Stands for all movements beyond it, and for those of a diverging run that are no numbers."""


@dataclass(frozen=True)
class Full:
    """Every sampled client receives the whole model."""

    name = "full"


@dataclass(frozen=True)
class Exact:
    """Exact corrections: the same model as with `Full`, to the bit."""

    name = "exact"


@dataclass(frozen=True)
class Condensed:
    """Short corrections."""

    # ``c``: nothing is said of the velocity while its gap is at most ``c`` times the mean energy of
    # the last steps, and else as few bits as bring it within half of that
    tolerance: float = 0.2
    # coordinates of the position that are corrected, in those of an average upload
    ratio: float = 1.0
    bits: int = 6  # the most bits per coordinate of the velocity
    # the share of the coordinates of the position that are corrected, in place of ``ratio``; 0: as
    # ``ratio`` says
    keep: float = 0.0
    # unless 0, the power of the share of clients in a round which ``ratio`` is at most: a client
    # that is asked in one round of ten receives the entries of ten
    away: float = 0.0

    name = "condensed"

    def __post_init__(self) -> None:
        c = self.tolerance
        require(0 <= c < math.inf, "tolerance", c, "at least 0 and finite")
        require(0 < self.ratio < math.inf, "ratio", self.ratio, "above 0 and finite")
        is_fine = float(self.bits).is_integer() and 1 <= self.bits <= 8
        require(is_fine, "bits", self.bits, "a whole number in 1..8")
        require(0 <= self.keep <= 1, "keep", self.keep, "at least 0 and at most 1")
        require(0 <= self.away <= 1, "away", self.away, "at least 0 and at most 1")

    @property
    def of_velocity(self) -> Recipe:
        """The recipe for velocities: `lean`, one floor up."""
        quantizer = GridQuantizer(Grid.MIDTREAD, int(self.bits))
        return Recipe(policy=Tolerance(), quantizer=quantizer, max_staleness=_FOREVER)

    def of_position(self, num_params: int, num_sent: int, senders: float, sampled: float) -> Recipe:
        """Return the recipe for positions.

        ``num_sent`` coordinates are in all uploads of the round, of which ``senders`` are expected
        from the ``sampled`` share of the clients.
        """
        if self.keep:
            count = num_kept(self.keep, num_params)
        else:
            ratio = min(self.ratio, sampled**self.away) if self.away else self.ratio
            count = max(_FEWEST, round(ratio * num_sent / max(1.0, senders)))
        if count > _MANY * num_params:
            return _ALL
        return Recipe(policy=Always(TERNARY_WIDTH), quantizer=LargestTernary(count))


Downlink = Full | Exact | Condensed
DOWNLINKS: dict[str, type[Downlink]] = {"full": Full, "exact": Exact, "condensed": Condensed}


_ALL = Recipe(policy=Always(_ALL_WIDTH), quantizer=GridQuantizer(Grid.MIDTREAD, _ALL_WIDTH))


def make_downlink(spec: str) -> Downlink:
    """Make a downlink from its name and options."""
    return make_named("downlink", spec, DOWNLINKS, also=(AUTO,))


def describe_downlink(downlink: Downlink) -> str:
    """Return the name and all options, from which `make_downlink` makes the same again.

    >>> describe_downlink(Condensed(ratio=2.0))
    'condensed:tolerance=0.2:ratio=2.0:bits=6'
    """
    options = [
        f"{field.name}={getattr(downlink, field.name)!r}"
        for field in fields(downlink)
        if field.name not in ("keep", "away") or getattr(downlink, field.name)
    ]
    return ":".join([downlink.name, *options])


AUTO = "auto"


def resolve_downlink(spec: str, recipe: Recipe) -> Downlink:
    """Return the downlink that a setting names; ``"auto"`` is the recipe's own."""
    return make_downlink(recipe.downlink if spec == AUTO else spec)


def rounded_up(movement: float) -> float:
    """Return the movement as a condensed entry carries it: a bfloat16 number, not below it.

    >>> rounded_up(1.0), rounded_up(1.001)
    (1.0, 1.0078125)
    """
    if movement <= 0:
        return 0.0
    return round_up_to_bfloat16(movement) if movement < LARGEST_MOVEMENT else LARGEST_MOVEMENT


_PIECE = 1 << 14
"""Coordinates that are looked at together."""


class Entry(NamedTuple):
    """What moves the public model from round ``k`` to the next."""

    round: int  # ``k``
    velocity: Part | None = None  # what is added to the velocity, before it moves the position
    position: Part | None = None  # what is added to the position besides
    # the newest number of the history. None where it is the last one again.
    movement: float | None = None
    is_step: bool = True  # False in a round without a step, which only counts
    is_rounded: bool = False  # whether the movement is a bfloat16 number
    # what the position is rounded to multiples of, first of all; None: as before
    quantum: float | None = None


class Merged(NamedTuple):
    """Entries of consecutive rounds added up."""

    rounds: int  # how many
    position: Float64Array  # their sum, ``(n,)`` in float64
    # the newest numbers of the history that they brought, newest first
    movements: tuple[float, ...]
    quantum: float | None = None  # what the position is rounded to multiples of, first of all


class Public(NamedTuple):
    """``P^k``: the public model before round ``k``."""

    round: int  # ``k``, counted from 1
    track: Track  # one track; its position is the model
    history: tuple[float, ...] = ()  # the newest numbers of `Entry.movement`, newest first
    quantum: float = 0.0  # of which the position has multiples; 0 where it is on no grid
    mark: int | None = None  # the linear digest of these multiples; None where it is not known

    @staticmethod
    def at_rest(parameters: FloatArray, round_number: int = 1) -> Public:
        """Return the public model of a vector without a velocity."""
        track = init_track(0, parameters.dtype)._replace(position=parameters[None])
        return Public(round_number, track)

    @staticmethod
    def first(recipe: Recipe, parameters: FloatArray) -> Public:
        """Return the first public model; it has a velocity where the recipe keeps mirrors."""
        if not recipe.memory.keeps_mirror:
            return Public.at_rest(parameters)
        track = init_track(len(parameters), parameters.dtype, has_velocity=True)
        return Public(1, track._replace(position=parameters[None]))

    @property
    def parameters(self) -> FloatArray:
        return self.track.position[0]

    @property
    def velocity(self) -> FloatArray:
        """What moves the model in every round, ``(n,)``; ``(0,)`` where nothing does."""
        return self.track.velocity[0]

    @property
    def vectors(self) -> tuple[NDArray[Any], ...]:
        """All that both ends must hold alike, coordinate by coordinate."""
        return self.parameters, self.velocity, self.track.direction[0]

    def marked(self, mark: int | None = None) -> Public:
        """Return the same with its mark, which is taken of all coordinates where none is given.

        A position that is damaged below its quantum has one that no other has.
        """
        if self.quantum and mark is None:
            mark = _mark_of(self.parameters, self.quantum)
        return self._replace(mark=mark)

    def marked_after(self, mark: int | None, entry: Entry) -> Public:
        """Return the same with its mark, given the one before the entry that led here."""
        part = entry.position
        if not self.quantum or mark is None or entry.quantum is not None:
            return self.marked()
        if part is None:
            return self._replace(mark=mark)
        if not isinstance(part, Upload):
            return self.marked()
        scale, offset, unit = affine(part.grid, part.width, part.step)
        if unit < self.quantum:  # of someone who is on no grid
            return self.marked()
        change = 0
        for start in range(0, len(part), _PIECE):
            multiples = part.levels[start : start + _PIECE].astype(np.int64) * scale - offset
            change += linear_digest(multiples, start)
        return self._replace(mark=(mark + int(unit / self.quantum) * change) % PRIME)

    def digest(self) -> bytes:
        """Return a digest of every bit: all that later entries build on.

        Of a position on an exact grid the mark is taken, which costs the length of the last entry.
        """
        digest = hashlib.blake2b(digest_size=STATE_DIGEST_BYTES)
        digest.update(struct.pack("<2qd", self.round, len(self.history), self.quantum))
        digest.update(struct.pack(f"<{len(self.history)}d", *self.history))
        if self.quantum:
            mark = self.mark if self.mark is not None else self.marked().mark
            digest.update(struct.pack("<Q", mark))
            return digest.digest()
        for vector in self.vectors:
            _add(digest, vector)
        return digest.digest()


def lies_on_grid(recipe: Recipe, downlink: Downlink) -> bool:
    """Tell whether entries add up exactly."""
    return isinstance(downlink, Condensed) and not recipe.memory.keeps_mirror


def advance(public: Public, entry: Entry, movement: Movement, in_place: bool = False) -> Public:
    """Return the public model after an entry; the old one is left as it was.

    With ``in_place`` the old one is given away: its arrays that can be written to are moved.
    """
    if entry.round != public.round:
        raise MessageError(f"entry {entry.round} cannot follow: the model is at {public.round}")
    if not entry.is_step:
        return public._replace(round=public.round + 1)
    if entry.velocity is not None and not len(public.velocity):
        raise MessageError("the entry changes a velocity; the model of this recipe has none")
    with np.errstate(over="ignore", invalid="ignore"):  # a diverging run is a result
        track, quantum = public.track, public.quantum
        if entry.quantum is not None:
            quantum = entry.quantum
            snapped = snap(track.position, quantum, _own(track.position, in_place))
            track = track._replace(position=snapped)
        track = follow(track, entry.position, entry.velocity, in_place=in_place)
    newest = entry.movement
    if newest is None:
        newest = public.history[0] if public.history else 0.0
    history = movement.extend(public.history, newest)
    return Public(public.round + 1, track, history, quantum).marked_after(public.mark, entry)


def _own(array: NDArray[Any], in_place: bool) -> NDArray[Any] | None:
    """Return an array that may be moved where it is; None where it may not."""
    return array if in_place and array.flags.writeable else None


@np.errstate(over="ignore", invalid="ignore")
def follow_merged(
    public: Public, merged: Merged, movement: Movement, in_place: bool = False
) -> Public:
    """Return what `advance` does after all of the entries, to the bit where they lie on a grid."""
    quantum, params = merged.quantum, public.parameters
    if quantum is not None:
        params = snap(params, quantum, _own(params, in_place))
    elif _own(params, in_place) is None:
        params = params.copy()
    for start in range(0, len(params), _PIECE):
        piece = slice(start, start + _PIECE)
        params[piece] += merged.position[piece].astype(params.dtype)
    history = public.history
    for number in reversed(merged.movements):
        history = movement.extend(history, number)
    track = public.track._replace(position=params[None])
    new_quantum = public.quantum if quantum is None else quantum
    return Public(public.round + merged.rounds, track, history, new_quantum).marked()


def _mark_of(vector: FloatArray, quantum: float) -> int:
    """Return the linear digest of a position's multiples; what others may send is cut to fit."""
    mark = 0
    for start in range(0, len(vector), _PIECE):
        piece = vector[start : start + _PIECE]
        with np.errstate(over="ignore", invalid="ignore"):
            wide = np.nan_to_num(piece.astype(np.float64) / quantum)
        multiples = wide.clip(-(2.0**54), 2.0**54).astype(np.int64)
        if (multiples * quantum).astype(piece.dtype).tobytes() != piece.tobytes():
            return PRIME
        mark += linear_digest(multiples, start)
    return mark % PRIME


PRIME = (1 << 61) - 1


@np.errstate(over="ignore")
def linear_digest(integers: IntArray, first: int = 0) -> int:
    """Return the digest of a vector that is zero but for these integers, from a place on.

    Integers lie between ``-2^54`` and ``2^54``.
    """
    return int(_digest(np.ascontiguousarray(integers), first))


@njit()
def _digest(integers: Any, first: Any) -> Any:
    """Return the sum of the products with SplitMix64 of the places, in 61 bits, modulo `PRIME`."""
    total = 0
    for i in range(len(integers)):
        integer = integers[i]
        if integer == 0:
            continue
        bits = np.uint64(first + i + 1) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        coefficient = np.int64((bits ^ (bits >> np.uint64(31))) & np.uint64(PRIME))
        product = _product(coefficient, abs(integer))
        total = _reduced(total + (product if integer > 0 else PRIME - product))
    return total


@part()
def _product(coefficient: Any, magnitude: Any) -> Any:
    """Return a product modulo the prime; those of the magnitude's halves fit into 64 bits."""
    low = _short_product(coefficient, magnitude & (1 << 27) - 1)
    high = _short_product(coefficient, magnitude >> 27)
    return _reduced(low + _reduced(((high & (1 << 34) - 1) << 27) + (high >> 34)))


@part()
def _short_product(coefficient: Any, magnitude: Any) -> Any:
    upper = (coefficient >> 31) * magnitude  # times 2^31, of which 61 bits are kept
    lower = (coefficient & (1 << 31) - 1) * magnitude
    return _reduced((upper >> 30) + ((upper & (1 << 30) - 1) << 31) + lower)


@part()
def _reduced(number: Any) -> Any:
    number = (number & PRIME) + (number >> 61)
    return number - PRIME if number >= PRIME else number


DIGEST_BYTES = 16
STATE_DIGEST_BYTES = 4
"""Of the states that both ends hold, which go with every message. Two that differ in their content
but not in round or number of uploads are mistaken for each other once in four billion times."""


def start_digest(parameters: FloatArray) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    _add(digest, parameters)
    return digest.digest()


def xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def is_zero(vector: NDArray[Any]) -> bool:
    """Tell whether all bits of a vector are zero: of ``-0.0`` one is not."""
    bits = np.ascontiguousarray(vector).reshape(-1).view(np.uint8)
    wide = len(bits) - len(bits) % 8
    return not (bits[:wide].view(np.uint64).any() or bits[wide:].any())


def _add(digest: Any, vector: NDArray[Any]) -> None:
    """Add kind, length and content; zeros are not read twice, as a sum that is not used yet."""
    zero = is_zero(vector)
    digest.update(f"{vector.dtype.newbyteorder('<').str} {len(vector)} {zero}|".encode())
    if not zero:
        digest.update(np.ascontiguousarray(vector, vector.dtype.newbyteorder("<")).data)
