"""What the server publishes of its sums: the whole model, the exact change, or a condensed one.

`Full` sends the model itself. `Exact` publishes the sums as they are, so that clients compute the
very same model. `Condensed` treats the sums as a client treats its updates: of the sum that lasts
it sends the fewest bits that bring the public copy within a tolerance, or nothing; of the sum that
counts in one round it sends the largest coordinates as sparse ternary, with error feedback. The
step is then taken with what was sent, so that everyone holds the same model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqg.core.grids import Grid, num_levels, round_up_to_bfloat16
from aqg.core.links import Link, Memory, direction_of
from aqg.core.messages import Upload
from aqg.core.policies import Always, Tolerance
from aqg.core.quantizers import GridQuantizer, NormOnly, Request
from aqg.core.recipe import Recipe
from aqg.core.round import Clients, News, settle, speak
from aqg.core.selection import largest, num_kept
from aqg.core.sparsifiers import TERNARY_WIDTH, ternary
from aqg.core.stages.feedback import ErrorFeedback
from aqg.errors import ConfigError
from aqg.spec import make_named

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aqg.core.public import Entry, Rates
    from aqg.core.space import Array, Space
    from aqg.core.types import FloatArray

_FIRST = np.arange(1)
_NO_LOSS = np.full(1, math.nan)
_FOREVER = 1 << 62
_FEWEST = 32
"""Coordinates of a sum that passes below which what is around them in an entry outweighs them."""


_MANY = 0.5
"""The part of all coordinates from which on an entry has all of them."""
_WHOLE_WIDTH = 4
"""Bits per coordinate then: one magnitude for all of them would say little of each."""
LARGEST_SHORT = 2.0**127
"""Stands for all movements beyond it, and for those of a diverging run that are no numbers."""


class DownlinkState(NamedTuple):
    """What the server has published of its sums, and what it left out.

    Attributes:
        total: the public copy of the sum that lasts, ``(n,)``; ``(0,)`` where there is none.
        direction: which way it went in the last change.
        residual: what was left out of the sums that passed, ``(n,)``.
        gap: ``‖sum - total‖²`` when it was last looked at.
        passed: whether the last entry had a part that passes; the next movement differs then.
        rates: those of the last entry.

    """

    total: Array
    direction: NDArray[np.int8]
    residual: Array
    gap: float = 0.0
    passed: bool = True
    rates: Rates | None = None


class Published(NamedTuple):
    """What a round's step is taken with, and the messages that say so; None: nothing changed."""

    total: Array | None
    passing: Array | None
    lasting_message: Upload | None = None
    passing_message: Upload | None = None


@dataclass(frozen=True)
class Full:
    """Every sampled client receives the whole model."""

    name = "full"


@dataclass(frozen=True)
class Exact:
    """The sums as they are: the same model as with `Full`, to the bit."""

    name = "exact"


@dataclass(frozen=True)
class Condensed:
    """The sums within a tolerance (see `condense`).

    Attributes:
        tolerance: ``c``: nothing is sent of the sum that lasts while the public copy is within
            ``c·M²·movement`` of it, and else as few bits as bring it within half of that.
        ratio: coordinates sent of a sum that passes, in those of an average upload to it.
        bits: the most bits per coordinate for the sum that lasts.
        keep: the share of the coordinates sent of a sum that passes, in place of ``ratio``; 0: as
            ``ratio`` says.

    """

    tolerance: float = 0.2
    ratio: float = 1.0
    bits: int = 6
    keep: float = 0.0

    name = "condensed"

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise ConfigError(f"tolerance is {self.tolerance}; it must be at least 0 and finite")
        if not 0 < self.ratio < math.inf:
            raise ConfigError(f"ratio is {self.ratio}; it must be above 0 and finite")
        if not (float(self.bits).is_integer() and 1 <= self.bits <= 8):
            raise ConfigError(f"bits is {self.bits}; it must be a whole number in 1..8")
        if not 0 <= self.keep <= 1:
            raise ConfigError(f"keep is {self.keep}; it must be at least 0 and at most 1")

    @property
    def lasting(self) -> Recipe:
        """The recipe for the sum that lasts: `lean`, one floor up."""
        return Recipe(
            memory=Memory.INNOVATION,
            policy=Tolerance(),
            quantizer=GridQuantizer(Grid.MIDTREAD, int(self.bits)),
            max_staleness=_FOREVER,
        )


Downlink = Full | Exact | Condensed
DOWNLINKS: dict[str, type[Full | Exact | Condensed]] = {
    "full": Full,
    "exact": Exact,
    "condensed": Condensed,
}


@dataclass(frozen=True)
class _Ternary(NormOnly):
    """The ``count`` largest coordinates as ternary."""

    count: int

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        """Write their signs, and their mean magnitude."""
        return ternary(vector, largest(vector, self.count), request.width)


_WHOLE = Recipe(
    policy=Always(_WHOLE_WIDTH),
    quantizer=GridQuantizer(Grid.MIDTREAD, _WHOLE_WIDTH),
    stages=(ErrorFeedback(),),
)


def make_downlink(spec: str) -> Downlink:
    """Make a downlink from its name and options.

    >>> make_downlink("condensed:tolerance=0.03")
    Condensed(tolerance=0.03, ratio=1.0, bits=6, keep=0.0)
    """
    made: Downlink = make_named("downlink", spec, DOWNLINKS, also=(AUTO,))
    return made


def describe_downlink(downlink: Downlink) -> str:
    """Return the name and all options, from which `make_downlink` makes the same again.

    >>> describe_downlink(Condensed(ratio=2.0))
    'condensed:tolerance=0.2:ratio=2.0:bits=6'
    """
    options = [
        f"{field.name}={getattr(downlink, field.name)!r}"
        for field in fields(downlink)
        if field.name != "keep" or getattr(downlink, field.name)
    ]
    return ":".join([downlink.name, *options])


AUTO = "auto"


def resolve_downlink(spec: str, recipe: Recipe) -> Downlink:
    """Return the downlink that a setting names; ``"auto"`` is the recipe's own."""
    return make_downlink(recipe.downlink if spec == AUTO else spec)


def init_downlink(downlink: Downlink, recipe: Recipe, num_params: int) -> DownlinkState | None:
    """Return the state before the first round, in NumPy: nothing is published."""
    if isinstance(downlink, Full):
        return None
    length = num_params if recipe.memory.keeps_mirror else 0
    passes = not recipe.memory.keeps_mirror and isinstance(downlink, Condensed)
    return DownlinkState(
        np.zeros(length), np.zeros(length, np.int8), np.zeros(num_params if passes else 0)
    )


def condense(
    space: Space,
    downlink: Condensed,
    state: DownlinkState,
    total: Array | None,
    passing: Array | None,
    tolerance: float,
    senders: float,
    num_sent: int,
    round_number: int,
    is_moved: bool,
) -> tuple[DownlinkState, Published]:
    """Decide what is published of a round's sums.

    Args:
        space: where vectors live; ``passing`` and the residual are its own, and written to.
        downlink: the settings.
        state: before the round.
        total: the sum that lasts, where there is one.
        passing: the sum of this round alone, where anything passed.
        tolerance: ``c·M²·movement``.
        senders: how many clients are expected to send in a round.
        num_sent: coordinates in all uploads to ``passing``.
        round_number: ``k``.
        is_moved: whether ``total`` has changed since the last round.

    """
    lasting_message = passing_message = None
    if total is not None:
        state, lasting_message = _condense_lasting(
            space, downlink, state, total, tolerance, round_number, is_moved
        )
    sent = None
    if passing is not None:
        state, passing_message = _condense_passing(
            space, downlink, state, passing, senders, num_sent, round_number
        )
        sent = space.put(passing_message.values(np.float64))
    public = None if total is None else state.total
    return state, Published(public, sent, lasting_message, passing_message)


def _condense_lasting(
    space: Space,
    downlink: Condensed,
    state: DownlinkState,
    total: Array,
    tolerance: float,
    round_number: int,
    is_moved: bool,
) -> tuple[DownlinkState, Upload | None]:
    if not is_moved and state.gap <= tolerance:
        return state, None
    recipe = downlink.lasting
    link = Link(state.total[None], state.direction[None], np.ones(1, np.bool_))
    holder = Clients(len(state.direction), link, np.zeros(1, np.int64), {})
    vector = space.zeros_like(total)[None] + total  # measured in place, perhaps
    news = News(round_number, tolerance, _NO_LOSS)
    spoken = speak(space, recipe, holder, _FIRST, vector, news)
    part = spoken.part
    state = state._replace(gap=float(part.innovation.squared_norm[0]))
    if not spoken.uploads:
        return state, None
    (upload,) = spoken.uploads
    assert isinstance(upload, Upload)
    moved, unused = space.zeros_like(total) + state.total, space.zeros_like(total)
    space.move(recipe.memory, moved[None], unused, _FIRST, [upload], np.ones(1))
    direction = direction_of(upload.levels, num_levels(upload.grid, upload.width))
    gap = float(part.innovation.errors[0, upload.width - 1])
    return state._replace(total=moved, direction=direction, gap=gap), upload


def _condense_passing(
    space: Space,
    downlink: Condensed,
    state: DownlinkState,
    passing: Array,
    senders: float,
    num_sent: int,
    round_number: int,
) -> tuple[DownlinkState, Upload]:
    num_params = len(passing)
    if downlink.keep:
        count = num_kept(downlink.keep, num_params)
    else:
        count = max(_FEWEST, round(downlink.ratio * num_sent / max(1.0, senders)))
    if count > _MANY * num_params:
        recipe = _WHOLE
    else:
        sparse = _Ternary(count)
        recipe = Recipe(policy=Always(TERNARY_WIDTH), quantizer=sparse, stages=(ErrorFeedback(),))
    link = Link(passing[:0][None], np.zeros((1, 0), np.int8), np.zeros(1, np.bool_))
    residuals = {ErrorFeedback.name: {"residual": state.residual[None]}}
    holder = Clients(num_params, link, np.zeros(1, np.int64), residuals)
    spoken = speak(space, recipe, holder, _FIRST, passing[None], News(round_number, 0.0, _NO_LOSS))
    if not spoken.uploads:  # a run that diverges: its sums are beyond any grid
        nothing = np.ones(num_params, np.uint8)
        return state, Upload(nothing, 0.0, TERNARY_WIDTH, Grid.MIDTREAD)
    (upload,) = spoken.uploads
    assert isinstance(upload, Upload)
    holder = settle(space, recipe, holder, spoken)
    return state._replace(residual=holder.stages[ErrorFeedback.name]["residual"][0]), upload


def noted(state: DownlinkState, entry: Entry) -> DownlinkState:
    """Return the state after an entry was published."""
    return state._replace(passed=entry.passing is not None, rates=entry.rates_after(state.rates))


def shortened(movement: float) -> float:
    """Return the movement as a condensed entry carries it: a bfloat16 number, not below it.

    >>> shortened(1.0), shortened(1.001)
    (1.0, 1.0078125)
    """
    if movement <= 0:
        return 0.0
    return round_up_to_bfloat16(movement) if movement < LARGEST_SHORT else LARGEST_SHORT
