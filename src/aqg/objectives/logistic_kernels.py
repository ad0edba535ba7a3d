"""The logistic loss and gradient of many small clients, compiled.

For a few hundred samples of a few dozen features, a chain of array operations spends its time
between them. Here a client's samples are read twice while they are in the cache: once for the
scores, once for the gradient. The exponential and the logarithm are polynomials, which unlike calls
into the C library work on several samples at once; both are good to about one unit in the last
place of float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.jit import njit

if TYPE_CHECKING:
    from aqg.core.types import FloatArray, IntArray

_SUMS = {"reassoc", "contract", "nsz"}
_LOG2_E = 1.4426950408889634
_LN2 = 0.6931471805599453
_LN2_HIGH = 6.93147180369123816490e-01  # with 21 zero bits at its end: times an exponent, exact
_LN2_LOW = 1.90821492927058770002e-10
_LARGEST = 708.0
"""``exp(-708)`` is the last that is a normal number."""
_SQRT2_LESS_1 = 0.41421356237309503


def losses_and_gradients(
    params: FloatArray, features: FloatArray, labels: IntArray, weight: float, l2: float
) -> tuple[FloatArray, FloatArray]:
    """Return losses ``(M,)`` and gradients ``(M, f)`` for ``(M, n, f)`` features."""
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
    sample_losses = np.empty(num_samples)
    slopes = np.empty(num_samples)
    exponents = np.empty(num_samples, np.int64)
    penalty = 0.0
    for j in range(num_features):
        penalty += params[j] * params[j]
    for client in range(num_clients):
        _write_scores(params, features[client], scores)
        _write_exponentials(scores, slopes, exponents)
        _write_losses(scores, labels[client], exponents.view(np.float64), slopes, sample_losses)
        total = 0.0
        for i in range(num_samples):
            total += sample_losses[i]
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
        series = 1 / 479001600
        series = series * rest + 1 / 39916800
        series = series * rest + 1 / 3628800
        series = series * rest + 1 / 362880
        series = series * rest + 1 / 40320
        series = series * rest + 1 / 5040
        series = series * rest + 1 / 720
        series = series * rest + 1 / 120
        series = series * rest + 1 / 24
        series = series * rest + 1 / 6
        series = series * rest + 0.5
        series = series * rest + 1.0
        mantissas[i] = series * rest + 1.0
        exponents[i] = (1023 - np.int64(power if power == power else 0.0)) << 52


@njit(error_model="numpy", fastmath={"contract"})
def _write_losses(scores: Any, labels: Any, powers: Any, slopes: Any, losses: Any) -> None:
    """Write ``log(1 + exp(-y s))``; turn the mantissas in ``slopes`` into its derivative."""
    for i in range(len(scores)):
        sign = 1.0 if labels[i] > 0 else -1.0
        margin = sign * scores[i]
        decay = slopes[i] * powers[i]
        # log(1 + d) = log(c) + 2 artanh(x) with x = (1 + d - c)/(1 + d + c), for c = 1 or 2
        large = decay > _SQRT2_LESS_1
        x = (decay - 1.0 if large else decay) / (decay + 3.0 if large else decay + 2.0)
        square = x * x
        series = 1 / 21
        series = series * square + 1 / 19
        series = series * square + 1 / 17
        series = series * square + 1 / 15
        series = series * square + 1 / 13
        series = series * square + 1 / 11
        series = series * square + 1 / 9
        series = series * square + 1 / 7
        series = series * square + 1 / 5
        series = series * square + 1 / 3
        logarithm = (_LN2 if large else 0.0) + 2 * (x + x * square * series)
        losses[i] = logarithm + (0.0 if margin >= 0 else -margin)
        slopes[i] = -sign * (decay if margin >= 0 else 1.0) / (1.0 + decay)


@njit(fastmath=_SUMS)
def _add_gradients(features: Any, slopes: Any, weight: Any, gradient: Any) -> None:
    num_samples, num_features = features.shape
    kind = features.dtype.type
    for j in range(num_features):
        gradient[j] = 0
    for i in range(0, num_samples - 3, 4):
        slope0, slope1 = kind(weight * slopes[i]), kind(weight * slopes[i + 1])
        slope2, slope3 = kind(weight * slopes[i + 2]), kind(weight * slopes[i + 3])
        for j in range(num_features):
            gradient[j] += (
                slope0 * features[i, j]
                + slope1 * features[i + 1, j]
                + slope2 * features[i + 2, j]
                + slope3 * features[i + 3, j]
            )
    for i in range(num_samples - num_samples % 4, num_samples):
        slope0 = kind(weight * slopes[i])
        for j in range(num_features):
            gradient[j] += slope0 * features[i, j]
