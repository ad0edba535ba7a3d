"""How clients receive the model: whole, exactly, or as short corrections.

`Full` sends the model itself. With the others clients hold a track of the model
(`aqg.core.public`), and an entry of a log says how it is corrected. `Exact` corrects it exactly.
`Condensed` says as little as training can do with: where the recipe keeps mirrors, the fewest bits
that bring the velocity within a tolerance of the step that the server would take, or nothing; else
the largest coordinates of what the model should be less what it is, as sparse ternary. What is left
out stays in that difference.
"""

import math
from dataclasses import dataclass, fields

from aqg.core.grids import Grid, round_up_to_bfloat16
from aqg.core.messages import Upload
from aqg.core.policies import Always, Tolerance
from aqg.core.quantizers import (
    TERNARY_WIDTH,
    GridQuantizer,
    Quantizer,
    Request,
    largest,
    num_kept,
    ternary,
)
from aqg.core.recipe import Recipe
from aqg.core.types import FloatArray
from aqg.errors import require
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
        return Recipe(policy=Always(TERNARY_WIDTH), quantizer=_Ternary(count))


Downlink = Full | Exact | Condensed
DOWNLINKS: dict[str, type[Downlink]] = {"full": Full, "exact": Exact, "condensed": Condensed}


@dataclass(frozen=True)
class _Ternary(Quantizer):
    """The ``count`` largest coordinates as ternary."""

    count: int

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        return ternary(vector, largest(vector, self.count), request.width)


_ALL = Recipe(policy=Always(_ALL_WIDTH), quantizer=GridQuantizer(Grid.MIDTREAD, _ALL_WIDTH))


def make_downlink(spec: str) -> Downlink:
    """Make a downlink from its name and options.

    >>> make_downlink("condensed:tolerance=0.03")
    Condensed(tolerance=0.03, ratio=1.0, bits=6, keep=0.0, away=0.0)
    """
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
