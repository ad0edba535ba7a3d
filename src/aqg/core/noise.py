"""Telling updates that repeat themselves from updates that are mostly noise.

A mirror of the last gradient saves bytes while the next gradient is nearly the same. Where every
round brings new noise (minibatches, local epochs), the mirror is out of date at once, and error
feedback saves more: in its residual noise cancels and signal adds up. `NoiseMeter` estimates which
of the two holds, from the client's own updates and a few thousand numbers of state.

With differences ``d^k = g^k - g^{k-1}``, independent noise of energy ``σ²`` in every ``g`` makes
``-2⟨d^k, d^{k-1} + d^{k-2}⟩`` equal ``2σ²`` on average, the part of ``‖d‖²`` that is noise. A
gradient that drifts makes it negative, however long ago the client was last sampled, and one that
oscillates, as at the edge of stability, makes it zero. Its running mean over that of
``‖g‖²`` is the noise ratio ``ν``.

The estimate also covers how much updates change, noise or not, and every how many rounds the client
is sampled: a mirror of updates that change much saves nothing, and the residuals of a client that
is rarely sampled are out of date before they are sent.

Inner products are those of sketches: coordinates are added up, with random signs, into a few
thousand buckets, which keeps them up to a few percent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aqg.errors import ConfigError
from aqg.jit import HAVE_NUMBA, njit

if TYPE_CHECKING:
    from aqg.core.types import Float64Array, FloatArray

SKETCH_LENGTH = 4096
_COUNT, _NOISE, _ENERGY, _CHANGE, _NOISY, _ROUND, _PAUSE, _HEAD = range(8)
_SMALL_MODEL = 1024
"""Up to so many parameters, a whole upload at four bits costs no more than a few sparse ones."""
_FIRST_RATIO = 4
"""Updates it takes to have three differences."""
_FIRST_VERDICT = 5
"""Updates seen before the verdict may change."""


@dataclass(frozen=True)
class NoiseMeter:
    """Follows ``ν`` with two thresholds, so that it does not waver between them.

    A client's updates count as noisy at the start, so that little is sent until they are known.
    With a small model they count as low-noise, since there whole uploads cost little, too.

    Attributes:
        low_noise_below: updates count as repeating once ``ν`` is below this,
        repeats_below: and what changes between two of them, noise or not, below this part of them;
        noisy_above: and as noise again once it is above this: a tenth of their energy is.
        smoothing: weight of the newest round in the running means.

    """

    low_noise_below: float = 0.02
    noisy_above: float = 0.2
    repeats_below: float = 0.2
    smoothing: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.low_noise_below <= self.noisy_above:
            raise ConfigError(
                f"low_noise is {self.low_noise_below} and noisy {self.noisy_above}; "
                "they must not be negative, nor the first above the second"
            )

    def init(self, num_params: int) -> Float64Array:
        """Return the notes before the first update."""
        notes = np.zeros(_HEAD + 3 * min(num_params, SKETCH_LENGTH))
        notes[_NOISY] = num_params > _SMALL_MODEL
        return notes

    def observe(self, notes: Float64Array, gradient: FloatArray, round_number: int) -> Float64Array:
        """Return the notes after another update, in this round."""
        before, (last, difference, earlier) = notes[:_HEAD], notes[_HEAD:].reshape(3, -1)
        sketch = fold(gradient, len(last))
        after = np.concatenate([before, sketch, sketch - last, difference])
        count = after[_COUNT] = before[_COUNT] + 1
        pause = max(1.0, round_number - before[_ROUND])
        after[_PAUSE] += max(self.smoothing, 1.0 / count) * (pause - after[_PAUSE])
        after[_ROUND] = round_number
        if count >= _FIRST_RATIO:
            noise = -2.0 * float((sketch - last) @ (difference + earlier))
            energy = float(sketch @ sketch)
            change = float((sketch - last) @ (sketch - last))
            share = 1.0 if count == _FIRST_RATIO else self.smoothing
            after[_NOISE] += share * (noise - after[_NOISE])
            after[_ENERGY] += share * (energy - after[_ENERGY])
            after[_CHANGE] += share * (change - after[_CHANGE])
        if count >= _FIRST_VERDICT:
            after[_NOISY] = self._verdict(after, was_noisy=bool(before[_NOISY]))
        return after

    def _verdict(self, notes: Float64Array, was_noisy: bool) -> bool:
        """Tell whether the updates count as noise, or at least do not repeat themselves."""
        limit = self.low_noise_below if was_noisy else self.noisy_above
        ratio, repeats = self.ratio(notes), self.change(notes) < self.repeats_below
        return (ratio >= limit if limit else ratio > 0) or (was_noisy and not repeats)

    def change(self, notes: Float64Array) -> float:
        """Return how much an update differs from the last one, ``‖d‖²/‖g‖²`` in the mean."""
        return float(notes[_CHANGE]) / float(notes[_ENERGY]) if notes[_ENERGY] > 0 else 0.0

    def ratio(self, notes: Float64Array) -> float:
        """Return ``ν``; 1 before there is anything to tell from."""
        noise, energy = float(notes[_NOISE]), float(notes[_ENERGY])
        if notes[_COUNT] < _FIRST_RATIO:
            return 1.0
        return max(0.0, noise) / energy if energy > 0 else 0.0

    def noise_share(self, notes: Float64Array) -> float:
        """Return the part of an update's energy that is noise, ``ν/2``; 1 where nothing is known.

        The difference of two updates holds the noise of both.
        """
        return min(1.0, self.ratio(notes) / 2.0) if notes[_COUNT] >= _FIRST_RATIO else 1.0

    def mean_pause(self, notes: Float64Array) -> float:
        """Return every how many rounds the client is sampled; 1 before it was."""
        return max(1.0, float(notes[_PAUSE]))

    def num_seen(self, notes: Float64Array) -> int:
        """Return how many updates the client has made."""
        return int(notes[_COUNT])

    def is_of_small_model(self, notes: Float64Array) -> bool:
        """Tell whether the client's model is so small that whole uploads cost little."""
        return len(notes) <= _HEAD + 3 * _SMALL_MODEL

    def is_noisy(self, notes: Float64Array) -> bool:
        """Tell which the client's updates are."""
        return bool(notes[_NOISY])


def fold(vector: FloatArray, length: int) -> Float64Array:
    """Return the sketch of a vector: ``length`` sums of its coordinates with random signs.

    A vector no longer than that is its own sketch.

    >>> fold(np.array([1.0, 2.0]), 2)
    array([1., 2.])
    """
    if len(vector) == length:
        return vector.astype(np.float64)
    if HAVE_NUMBA:
        sketch = np.zeros(length)
        _fold(vector, sketch)
        return sketch
    signs = np.where((np.arange(len(vector), dtype=np.uint64) * _MIXER) >> np.uint64(63), -1, 1)
    padded = np.zeros(-(-len(vector) // length) * length)
    padded[: len(vector)] = signs * vector
    total: Float64Array = padded.reshape(-1, length).sum(axis=0)
    return total


_MIXER = np.uint64(0x9E3779B97F4A7C15)
"""Multiplying by the golden ratio scatters the highest bit."""


@njit()
def _fold(vector: FloatArray, sketch: Float64Array) -> None:
    length = len(sketch)
    for start in range(0, len(vector), length):
        for bucket in range(min(length, len(vector) - start)):
            index = start + bucket
            if (np.uint64(index) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(63):
                sketch[bucket] -= vector[index]
            else:
                sketch[bucket] += vector[index]
