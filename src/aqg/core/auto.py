r"""The default recipe: what ``auto`` sends, how it steps, and what the server publishes.

**Exact gradients** (a client uses all its samples: known from the settings) hardly change from one
round to the next. `lean` sends their innovations, with as few bits as the step can bear, or
nothing; see `aqg.core.policies.Tolerance`.

**All other updates are noisy**, and there are two ways to send them.

*Clients that are asked in every round* send the coordinates that matter most now and keep the rest
for later. Of ``u = g + e``, the update and what is left of earlier ones, a client takes the fewest
coordinates that hold three quarters of the energy ``‖u‖₂²`` (`Share`), sends their signs and their
mean magnitude, and keeps ``e ← u - Q(u)``. Nothing is lost, and what waits grows until it is sent.
Peaked updates send few coordinates, dense ones many.

*Clients that are sampled* may never be asked again, so what they keep would be lost. They remember
nothing. Every coordinate of ``g`` is rounded at random to a multiple of one step,

    ``Q(g)_i = τ·⌊g_i/τ + u_i⌋``, ``u_i`` uniform on [0, 1),   ``τ = (1 + b)·‖g‖₂²/‖g‖₁``.

`Draws` is QSGD with its step chosen by the noise ``b`` that the server allows. Where that comes
from: a coordinate is off by ``τ·(B - p)`` with ``B`` a Bernoulli variable of probability ``p``, the
part of a step that is left over. Below one step ``p = |g_i|/τ``, so that
``E(Q(g)_i - g_i)² = τ²·p(1 - p) = τ|g_i| - g_i²`` and, summed,

    ``E‖Q(g) - g‖² = τ‖g‖₁ - ‖g‖₂² = b·‖g‖₂²``,

whatever the model, its size and the shape of the update are: ``‖g‖₁²/‖g‖₂²/(1 + b)`` coordinates on
average. The mean is right whatever ``τ`` is: a client may vanish, be new, or be one of a million.
The server chooses ``b`` so that the sum of a round's uploads carries as much noise as signal
(`Budget`). It can tell both apart: noise is independent, and updates are not. Where they agree
their sum grows faster than the noise in it, and every client may say less. From the sum
``T = Σ_m w_m Q_m`` of a round and the energies ``W = Σ_m ‖w_m Q_m‖²`` of its parts,

    ``‖Σ_m w_m g_m‖² ≈ ‖T‖² - W·b/(1 + b)``  and  ``Σ_m ‖w_m g_m‖² ≈ W/(1 + b)``,

because noise adds ``b·‖g_m‖²`` to the energy of an upload and, being independent, as much to that
of the sum. The noise of the sum is ``ν`` times its own energy if in the next round

    ``b = ν·‖Σ_m w_m g_m‖² / Σ_m ‖w_m g_m‖²``,

which is ``ν`` for updates that have nothing in common, ``ν·m`` for ``m`` equal ones, and less than
``ν`` for those that cancel each other.

*Where the model gets nowhere* steady clients round at random, too. What they keep and send at
different times does not cancel out, so that updates which do cancel, as those of clients with one
label each that train hard, move the model at random. After steps ``s_k`` that have nothing in
common its squared distance from the start is ``Σ_k ‖s_k‖²``. While it is less than half of that,
they are told ``b`` in place of 0, and keep nothing.

**The step** is DoG's (`aqg.core.step_sizes.DistanceOverGradients`), and the mean over the last
models is what counts. **The downlink** is `aqg.core.downlink.Condensed`, with entries of ``√p``
mean uploads where a share ``p`` of the clients is asked in a round, and at most half of one: a
client that comes back pays for ``1/p`` entries, and if ``r`` mean uploads in each make training
``1 + c/r`` times as long, the bytes ``(1 + c/r)·(1 + r/p)`` are least at ``r = √(c·p)``.

``docs/explanation/default-recipe.md`` lists every number, and what training is like without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from aqg.core.grids import MAX_RADIUS, MIN_STEP, Grid, round_up_to_bfloat16
from aqg.core.messages import Upload
from aqg.core.policies import Always
from aqg.core.quantizers import Quantizer, Request, ternary
from aqg.core.recipe import Recipe
from aqg.core.stages import ErrorFeedback, StageState
from aqg.core.track import Outcome
from aqg.core.types import FloatArray
from aqg.errors import require

SHARE = 0.75
"""Of the energy of an update and what is left of earlier ones, what a client sends in a round."""
NOISE = 1.0
"""``ν``: the noise of a round's sum, in its own energy."""
LOST = 0.5
"""A squared distance from the start below which a model gets nowhere, in that of a random walk."""
FIRST, LONGEST_FIRST, AVERAGE = 0.2, 16, 8
"""Options of `aqg.core.step_sizes.DistanceOverGradients`."""
RATIO, AWAY = 0.5, 0.5
"""Coordinates of an entry, in those of a mean upload, and the power of the share of clients in a
round which this is at most."""
WIDEST = 3.0
"""Exact gradients: the tolerance of clients that differ from the others, at most."""

EXACT_TOLERANCE = 0.4
"""Exact gradients: tolerance of the downlink; half as much costs a tenth more bytes in total."""

STEP = f"dog:average={AVERAGE}:first={FIRST}:widest={LONGEST_FIRST}"
DOWNLINK = f"condensed:ratio={RATIO}:away={AWAY}"
EXACT_DOWNLINK = f"condensed:tolerance={EXACT_TOLERANCE}"

_BELOW = 1 - 2.0**-40
"""So that what is 1 but for its last bits, as with a single upload, is rounded to 1."""
_LEAST = 2.0**-20
"""A noise that is as good as none, where uploads are rounded at random all the same."""
_WIDTH = 8
_TOP = (1 << (_WIDTH - 1)) - 1
"""The largest level: a byte per coordinate holds it."""
_PIECE = 1 << 16
"""Coordinates that are looked at at a time."""
_NUM_MAGNITUDES = 1 << 15
"""Of bfloat16 numbers, zero and infinity among them."""


@dataclass(frozen=True)
class Share(Quantizer):
    """Signs and mean magnitude of the fewest coordinates that hold a share of the energy.

    Magnitudes are told apart by the eight digits that bfloat16 has, so that those of a model are
    counted and not sorted.

    >>> vector = np.array([3.0, -1.0, 0.0, 0.5])
    >>> Share(0.9).quantize(vector, Request(2)).values(np.float32)
    array([ 2., -2.,  0.,  0.], dtype=float32)
    """

    share: float

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, "share", self.share, "above 0 and at most 1")

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        magnitudes = np.empty(len(vector), np.uint16)
        energies = np.zeros(_NUM_MAGNITUDES)
        for start in range(0, len(vector), _PIECE):
            piece = vector[start : start + _PIECE]
            found = np.abs(piece).astype(np.float32).view(np.uint32) >> 16
            squares = np.square(piece, dtype=np.float64)
            energies += np.bincount(found, squares, _NUM_MAGNITUDES)
            magnitudes[start : start + _PIECE] = found
        held = energies[::-1].cumsum()
        least = _NUM_MAGNITUDES - 1 - int(np.searchsorted(held, self.share * held[-1]))
        return ternary(vector, np.flatnonzero(magnitudes >= max(1, least)), request.width)


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


@dataclass(frozen=True)
class Steady(Share):
    """The share, or draws where the server allows noise."""

    def quantize(self, vector: FloatArray, request: Request) -> Upload:
        if request.noise:
            return Draws().quantize(vector, request)
        return super().quantize(vector, request)


class Patience(ErrorFeedback):
    """Keeps what is not sent, or nothing where uploads were draws, which lack nothing in the mean.

    What was kept before is in the draws.
    """

    def after(self, state: StageState, outcome: Outcome) -> StageState:
        if outcome.noise:
            return {"residual": outcome.space.zeros_like(outcome.vectors)}
        return super().after(state, outcome)


class Budget(NamedTuple):
    """What uploads may add."""

    noise: float = 0.0  # ``b`` of the next round, a bfloat16 number
    walk: float = 0.0  # ``Σ_k ‖s_k‖²``, where clients keep what they do not send

    def after(self, nu: float, of_sum: float, of_parts: float, most: float) -> Budget:
        """Return the budget after a round, from ``ν``, ``‖T‖²`` and ``W``.

        ``most`` is how many uploads there were, or were expected.

        >>> Budget(1.0).after(1.0, of_sum=2.0, of_parts=2.0, most=10).noise  # nothing in common
        1.0
        >>> Budget(1.0).after(1.0, of_sum=11.0, of_parts=2.0, most=10).noise  # ten that are equal
        10.0
        """
        if not 0 < of_parts < float("inf") or not of_sum < float("inf"):
            return self
        b = self.noise
        signal, energy = of_sum - of_parts * b / (1.0 + b), of_parts / (1.0 + b)
        if not energy:  # too small a number
            return self
        agreement = min(max(signal / energy, 0.0), max(1.0, most))
        return self._replace(noise=round_up_to_bfloat16(nu * agreement * _BELOW))

    def while_steady(self, moved: float, distance: float) -> Budget:
        """Return the budget of clients that keep what they do not send, after a step.

        ``moved`` is ``‖s_k‖²``, ``distance`` that of the model from where it started, squared.

        >>> Budget(0.5, walk=4.0).while_steady(4.0, distance=8.0).noise  # as far as at random
        0.0
        >>> Budget(0.5, walk=4.0).while_steady(4.0, distance=2.0).noise
        0.5
        """
        walk = self.walk + moved
        noise = max(self.noise, _LEAST) if distance < LOST * walk else 0.0
        return Budget(noise, walk)


def first_budget(nu: float) -> Budget:
    """Return the budget of the first round: as if updates had nothing in common."""
    return Budget(round_up_to_bfloat16(nu))


def make_auto(exact: Recipe, share: float = SHARE, noise: float = NOISE) -> Recipe:
    """Make the default of the recipe for exact gradients; without a share there are only draws."""
    require(0 < noise < math.inf, "noise", noise, "above 0 and finite")
    draws = Recipe(policy=Always(2), quantizer=Draws(), noise=noise, step=STEP, downlink=DOWNLINK)
    steady = None
    if share:
        steady = replace(draws, quantizer=Steady(share), stages=(Patience(),))
    return replace(draws, exact=replace(exact, downlink=EXACT_DOWNLINK), steady=steady)
