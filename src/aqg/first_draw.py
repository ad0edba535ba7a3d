"""Random numbers that are the same bits on every machine, and the laws of fresh tensors.

A *law* is what a fresh tensor is drawn from: a constant, a uniform or a normal distribution. Draws
come from Philox4x64-10, a counter-based generator that is fixed by its publication; integers become
numbers by additions, multiplications, divisions and square roots in double precision alone, which
IEEE 754 defines to the last bit. Normal numbers are the quantiles of uniform ones (Wichura's
algorithm AS 241, seven digits), with a logarithm made of the same operations: libraries' own
``log``, ``cos`` and ``exp`` differ in the last bit from machine to machine.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqg.core.types import Float64Array
from aqg.errors import ConfigError

CONSTANT, UNIFORM, NORMAL = range(3)
MAX_SEED = 2**63 - 1
_STREAM = 0xF125
"""Keeps these draws apart from others of the same seed."""
_BITS = 32
_LOG_2 = 0.6931471805599453
_LOG_TERMS = 12
"""Of the series of the logarithm: its rest is below 1e-17 for mantissas from 0.7 to 1.4."""

_CENTRAL = 0.425
_TAIL_SHIFT = 1.6
_A = (3.3871327179, 50.434271938, 159.29113202, 59.109374720)
_B = (1.0, 17.895169469, 78.757757664, 67.187563600)
_C = (1.4234372777, 2.7568153900, 1.3067284816, 0.17023821103)
_D = (1.0, 0.73700164250, 0.12021132975)


class Law(NamedTuple):
    """What a tensor is drawn from."""

    kind: int  # `CONSTANT`, `UNIFORM` or `NORMAL`
    center: float  # the value, the middle or the mean
    scale: float = 0.0  # half the range, or the standard deviation; 0 of a constant

    @property
    def deviation(self) -> float:
        return self.scale / 3**0.5 if self.kind == UNIFORM else self.scale


def draw(law: Law, count: int, seed: int, stream: int) -> Float64Array:
    """Return ``count`` values of a law; ``stream`` tells apart the tensors of one seed.

    >>> draw(Law(NORMAL, 0.0, 1.0), 2, seed=7, stream=0).tolist()
    [-1.7173647425310925, -1.894787537757483]
    """
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"seed {seed} is not in 0..{MAX_SEED}")
    if law.kind == CONSTANT:
        return np.full(count, law.center)
    generator = np.random.Philox(key=[seed, _STREAM], counter=[0, 0, 0, stream])
    # Odd numbers over 2^33: uniform between 0 and 1, never one of them, and exact.
    raw = generator.random_raw(count) >> np.uint64(64 - _BITS)
    odd = (raw << np.uint64(1) | np.uint64(1)).astype(np.float64)
    shares = odd * 2.0 ** -(_BITS + 1)
    numbers = 2.0 * shares - 1.0 if law.kind == UNIFORM else normal_quantiles(shares)
    return law.center + law.scale * numbers


def normal_quantiles(shares: Float64Array) -> Float64Array:
    """Return the points below which a standard normal number lies with these probabilities.

    >>> normal_quantiles(np.array([0.5, 0.975])).round(6).tolist()
    [0.0, 1.959964]
    """
    offsets = shares - 0.5
    squares = 0.180625 - offsets * offsets
    found = offsets * _polynomial(_A, squares) / _polynomial(_B, squares)
    is_tail = np.abs(offsets) > _CENTRAL
    tails = offsets[is_tail]
    roots = np.sqrt(-_logarithm(0.5 - np.abs(tails))) - _TAIL_SHIFT
    found[is_tail] = np.copysign(_polynomial(_C, roots) / _polynomial(_D, roots), tails)
    return found


def _logarithm(numbers: Float64Array) -> Float64Array:
    mantissas, exponents = np.frexp(numbers)
    is_small = mantissas < 0.5**0.5
    mantissas = np.where(is_small, 2.0 * mantissas, mantissas)
    ratios = (mantissas - 1.0) / (mantissas + 1.0)
    odd_terms = [1.0 / (2 * term + 1) for term in range(_LOG_TERMS)]
    series = 2.0 * ratios * _polynomial(odd_terms, ratios * ratios)
    return (exponents - is_small) * _LOG_2 + series


def _polynomial(coefficients: Sequence[float], x: NDArray[np.float64]) -> Float64Array:
    total = np.full(len(x), coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x
        total = total + coefficient
    return total
