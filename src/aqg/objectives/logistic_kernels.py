"""The logistic loss and gradient of many small clients, compiled.

For a few hundred samples of a few dozen features, a chain of array operations spends its time
between them. Here a client's samples are read twice while they are in the cache: once for the
scores, once for the gradient. The exponential is a polynomial, which unlike a call into the C
library works on several samples at once; it is good to about one unit in the last place of float64.
Logarithms are taken of whole products: ``Σ log(1 + d_i) = log Π (1 + d_i)``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aqg.core.types import FloatArray, IntArray
from aqg.jit import njit

_SUMS = {"reassoc", "contract", "nsz"}
_LOG2_E = 1.4426950408889634
_LN2_HIGH = 6.93147180369123816490e-01  # with 21 zero bits at its end: times an exponent, exact
_LN2_LOW = 1.90821492927058770002e-10
_LARGEST = 708.0
"""``exp(-708)`` is the last that is a normal number."""
_FACTORS = 512
"""So many numbers from 1 to 2 have a product that is in range."""


def losses_and_gradients(
    params: FloatArray, features: FloatArray, labels: IntArray, weight: float, l2: float
) -> tuple[FloatArray, FloatArray]:
    """Return losses ``(...)`` and gradients ``(..., f)`` for ``(..., n, f)`` features."""
    if features.ndim != 3:
        clients = features.shape[:-2]
        losses, gradients = losses_and_gradients(
            params,
            features.reshape(-1, *features.shape[-2:]),
            labels.reshape(-1, labels.shape[-1]),
            weight,
            l2,
        )
        return losses.reshape(clients)[()], gradients.reshape(*clients, len(params))
    losses = np.empty(len(features), features.dtype)
    gradients = np.empty((len(features), len(params)), features.dtype)
    _logistic_rows(
        np.ascontiguousarray(params),
        np.ascontiguousarray(features),
        np.ascontiguousarray(labels),
        weight,
        l2,
        losses,
        gradients,
    )
    return losses, gradients


@njit(fastmath=_SUMS)
def _logistic_rows(
    params: Any, features: Any, labels: Any, weight: Any, l2: Any, losses: Any, gradients: Any
) -> None:
    num_clients, num_samples, num_features = features.shape
    scores = np.empty(num_samples)
    slopes = np.empty(num_samples)
    exponents = np.empty(num_samples, np.int64)
    penalty = 0.0
    for j in range(num_features):
        penalty += params[j] * params[j]
    for client in range(num_clients):
        _write_scores(params, features[client], scores)
        _write_exponentials(scores, slopes, exponents)
        total = _loss_and_slopes(scores, labels[client], exponents.view(np.float64), slopes)
        losses[client] = weight * total + l2 / 2 * penalty
        _add_gradients(features[client], slopes, weight, gradients[client])
        for j in range(num_features):
            gradients[client, j] += l2 * params[j]


@njit(fastmath=_SUMS)
def _write_scores(params: Any, features: Any, scores: Any) -> None:
    num_samples, num_features = features.shape
    zero = features.dtype.type(0)
    for i in range(0, num_samples - 3, 4):  # four at a time: a parameter is loaded once for all
        score0, score1, score2, score3 = zero, zero, zero, zero
        for j in range(num_features):
            score0 += params[j] * features[i, j]
            score1 += params[j] * features[i + 1, j]
            score2 += params[j] * features[i + 2, j]
            score3 += params[j] * features[i + 3, j]
        scores[i] = score0
        scores[i + 1] = score1
        scores[i + 2] = score2
        scores[i + 3] = score3
    for i in range(num_samples - num_samples % 4, num_samples):
        score0 = zero
        for j in range(num_features):
            score0 += params[j] * features[i, j]
        scores[i] = score0


@njit(error_model="numpy", fastmath={"contract"})
def _write_exponentials(scores: Any, mantissas: Any, exponents: Any) -> None:
    """Write ``exp(-|s|)`` as the product of a number around 1 and the bits of a power of two."""
    for i in range(len(scores)):
        size = abs(scores[i])
        size = _LARGEST if size > _LARGEST else size  # NaN stays
        power = np.rint(size * _LOG2_E)
        rest = (power * _LN2_HIGH - size) + power * _LN2_LOW
        # The Taylor series, from the outside in, as two interleaved ones: a shorter chain.
        square = rest * rest
        even = 1 / 479001600
        odd = 1 / 39916800
        even = even * square + 1 / 3628800
        odd = odd * square + 1 / 362880
        even = even * square + 1 / 40320
        odd = odd * square + 1 / 5040
        even = even * square + 1 / 720
        odd = odd * square + 1 / 120
        even = even * square + 1 / 24
        odd = odd * square + 1 / 6
        even = even * square + 0.5
        mantissas[i] = 1.0 + (rest + square * (odd * rest + even))
        exponents[i] = (1023 - np.int64(power if power == power else 0.0)) << 52


@njit(error_model="numpy", fastmath=_SUMS)
def _loss_and_slopes(scores: Any, labels: Any, powers: Any, slopes: Any) -> Any:
    """Return ``Σ log(1 + exp(-y s))``; turn the mantissas in ``slopes`` into the derivatives."""
    total = 0.0
    for start in range(0, len(scores), _FACTORS):
        chunk = slice(start, start + _FACTORS)
        some_slopes, some_labels = slopes[chunk], labels[chunk]
        some_scores, some_powers = scores[chunk], powers[chunk]
        excess = 0.0  # of the product over 1, which keeps small losses precise
        for i in range(len(some_slopes)):
            sign = 1.0 if some_labels[i] > 0 else -1.0
            margin = sign * some_scores[i]
            decay = some_slopes[i] * some_powers[i]
            excess = excess * (1.0 + decay) + decay
            total += 0.0 if margin >= 0 else -margin  # NaN counts
            some_slopes[i] = -sign * (decay if margin >= 0 else 1.0) / (1.0 + decay)
        total += np.log1p(excess)
    return total


@njit(fastmath=_SUMS)
def _add_gradients(features: Any, slopes: Any, weight: Any, gradient: Any) -> None:
    num_samples, num_features = features.shape
    kind = features.dtype.type
    for j in range(num_features):
        gradient[j] = 0
    for i in range(0, num_samples - 7, 8):  # eight at a time: a sum is loaded once for all
        slope0, slope1 = kind(weight * slopes[i]), kind(weight * slopes[i + 1])
        slope2, slope3 = kind(weight * slopes[i + 2]), kind(weight * slopes[i + 3])
        slope4, slope5 = kind(weight * slopes[i + 4]), kind(weight * slopes[i + 5])
        slope6, slope7 = kind(weight * slopes[i + 6]), kind(weight * slopes[i + 7])
        rows = features[i : i + 8]
        for j in range(num_features):
            gradient[j] += (
                (slope0 * rows[0, j] + slope1 * rows[1, j])
                + (slope2 * rows[2, j] + slope3 * rows[3, j])
            ) + (
                (slope4 * rows[4, j] + slope5 * rows[5, j])
                + (slope6 * rows[6, j] + slope7 * rows[7, j])
            )
    for i in range(num_samples - num_samples % 8, num_samples):
        slope0 = kind(weight * slopes[i])
        for j in range(num_features):
            gradient[j] += slope0 * features[i, j]
