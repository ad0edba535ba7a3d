r"""The default recipe: what ``auto`` sends, how it steps, and what the server publishes.

**Exact gradients** (a client uses all its samples: known from the settings) hardly change from one
round to the next. `lean` sends their innovations, with as few bits as the step can bear, or
nothing; see `aqg.core.policies.Tolerance`.

**All other updates are noisy**, and a client remembers nothing. Of an update ``g`` it sends every
coordinate rounded at random to a multiple of one step,

    ``Q(g)_i = τ·⌊g_i/τ + u_i⌋``, ``u_i`` uniform on [0, 1),   ``τ = (1 + b)·‖g‖₂²/‖g‖₁``.

`Draws` is QSGD with its step chosen by the noise ``b`` that the server allows. Where that comes
from: a coordinate is off by ``τ·(B - p)`` with ``B`` a Bernoulli variable of probability ``p``, the
part of a step that is left over. Below one step ``p = |g_i|/τ``, so that
``E(Q(g)_i - g_i)² = τ²·p(1 - p) = τ|g_i| - g_i²`` and, summed,

    ``E‖Q(g) - g‖² = τ‖g‖₁ - ‖g‖₂² = b·‖g‖₂²``,

whatever the model, its size and the shape of the update are. A peaked update sends few coordinates
and a dense one many, ``‖g‖₁²/‖g‖₂²/(1 + b)`` on average. The mean is right whatever ``τ`` is, so
that nothing need be kept of what was not sent: a client may vanish, be new, or be one of a million.

The server chooses ``b`` so that the sum of a round's uploads carries as much noise as signal
(`aqg.core.budget`): errors of clients are independent and average out, updates that agree do not.
The more clients there are and the more they agree, the less each of them says; where they cancel
each other, as with one class of labels per client, they say more.

**The step** is DoG's (`aqg.core.step_sizes.DistanceOverGradients`): long enough to come as far as
the updates agree, which their noise does not, and the mean over the last models is what counts.

**The downlink**: of its sum the server publishes the largest coordinates, half as many as a mean
upload has, and keeps the rest for later rounds (`aqg.core.downlink.Condensed`).

``docs/explanation/default-recipe.md`` lists every number, and what training is like without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from aqg.core.grids import MAX_RADIUS, MIN_STEP, Grid, round_up_to_bfloat16
from aqg.core.messages import Upload
from aqg.core.policies import Always
from aqg.core.quantizers import Quantizer, Request
from aqg.core.recipe import Recipe
from aqg.errors import ConfigError

if TYPE_CHECKING:
    from aqg.core.types import FloatArray

NOISE = 1.0
"""``ν``: the noise of a round's sum, in its own energy."""
FIRST = 0.2
"""What the first step moves the model by at most, in its own length."""
LONGEST_FIRST = 8
"""Likewise, in steps of federated averaging."""
AVERAGE = 8
"""``γ``: the mean over the models is about that of the last ``1/(γ + 1)`` of them."""
RATIO = 0.5
"""Coordinates of an entry, in those of a mean upload."""
WIDEST = 3.0
"""Exact gradients: the tolerance of clients that differ from the others, at most."""

EXACT_TOLERANCE = 0.4
"""Exact gradients: tolerance of the downlink; half as much costs a tenth more bytes in total."""

STEP = f"dog:average={AVERAGE}:first={FIRST}:widest={LONGEST_FIRST}"
DOWNLINK = f"condensed:ratio={RATIO}"
EXACT_DOWNLINK = f"condensed:tolerance={EXACT_TOLERANCE}"

_WIDTH = 8
_TOP = (1 << (_WIDTH - 1)) - 1
"""The largest level: a byte per coordinate holds it."""
_PIECE = 1 << 16
"""Coordinates that are rounded at a time."""


@dataclass(frozen=True)
class Draws(Quantizer):
    """Unbiased rounding to multiples of ``τ = (1 + b)·‖g‖₂²/‖g‖₁``.

    >>> vector = np.array([3.0, -1.0, 0.0, 0.5])
    >>> request = Request(2, squared_norm=float(vector @ vector), key=(0, 0, 1), noise=0.0)
    >>> Draws().quantize(vector, request).values(np.float32)
    array([ 2.28125, -2.28125,  0.     ,  0.     ], dtype=float32)
    """

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        """Round every coordinate up or down at random, by its distance.

        The width is the least that holds the largest level that came out.
        """
        step = self.step_of(vector, request)
        if not step:
            return Upload(np.ones(len(vector), np.uint8), 0.0, 2, Grid.MIDTREAD)
        draw = np.random.default_rng(list(request.key))
        levels = np.empty(len(vector), np.int8)
        for start in range(0, len(vector), _PIECE):
            piece = vector[start : start + _PIECE].astype(np.float64)
            piece /= step
            piece += draw.random(len(piece))
            levels[start : start + _PIECE] = np.clip(np.floor(piece), -_TOP, _TOP)
        largest = max(int(levels.max(initial=0)), -int(levels.min(initial=0)))
        width = max(2, largest.bit_length() + 1)
        middle = (1 << (width - 1)) - 1
        unsigned = levels.view(np.uint8)
        unsigned += np.uint8(middle)  # modulo 256, so that the sum is right
        return Upload(unsigned, step, width, Grid.MIDTREAD)

    def step_of(self, vector: FloatArray, request: Request) -> float:
        """Return ``τ`` as a bfloat16 number, not below it; 0 for a vector of zeros.

        It is longer where a coordinate would be beyond the largest level.
        """
        total, largest = 0.0, 0.0
        for start in range(0, len(vector), _PIECE):
            piece = np.abs(vector[start : start + _PIECE], dtype=np.float64)
            total += float(piece.sum())
            largest = max(largest, float(piece.max(initial=0.0)))
        if not total > 0:
            return 0.0
        step = (1.0 + request.noise) * request.squared_norm / total
        step = min(max(step, largest / _TOP), 2 * MAX_RADIUS)
        return 0.0 if step < MIN_STEP else round_up_to_bfloat16(step)


def make_auto(exact: Recipe, noise: float = NOISE) -> Recipe:
    """Make the default: draws, and the recipe for exact gradients."""
    if not 0 < noise < math.inf:
        raise ConfigError(f"noise is {noise}; it must be above 0 and finite")
    return Recipe(
        policy=Always(2),
        quantizer=Draws(),
        noise=noise,
        step=STEP,
        downlink=DOWNLINK,
        exact=replace(exact, downlink=EXACT_DOWNLINK),
    )
