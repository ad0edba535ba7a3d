"""Lemma 1 and Theorem 1 of Mao et al. as the paper prints them, to be held against settings.

What `aqg theory` tells users is in `aqg.contrib.theory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aqg.contrib.theory import check_positive, step_weights


def inequalities_hold(
    alpha: float, weights: Sequence[float], smoothness: float, rho1: float, rho2: float
) -> bool:
    """Check the three inequalities of Lemma 1 as the paper prints them.

    >>> weights = (0.005,) * 10
    >>> inequalities_hold(0.1, weights, smoothness=1.0, rho1=1e-3, rho2=0.5)
    True
    >>> inequalities_hold(0.1, (0.1,) * 10, smoothness=1.0, rho1=1e-3, rho2=0.5)
    False
    """
    check_positive(alpha, smoothness)
    beta = np.append(step_weights(weights, alpha), 0.0)
    first = -alpha / 2 + alpha * rho1 / 2 + (smoothness + 2 * beta[0]) * (1 + rho2) * alpha**2
    bracket = alpha / 2 + (smoothness / 2 + beta[0]) * (1 + 1 / rho2) * alpha**2
    others = bracket * np.asarray(weights) / alpha**2 + beta[1:] - beta[:-1]
    return bool(first <= 0 and (others <= 0).all())


def capacity(rho1: float, rho2: float) -> float:
    """Return the bound on ``S + αL/2`` for these ``ρ1, ρ2``."""
    return min((1 - rho1) / (4 * (1 + rho2)), 1 / (2 * (1 + 1 / rho2)))


def best_rho2(rho1: float = 0.0) -> float:
    """Return the ``ρ2`` with the largest `capacity`.

    >>> best_rho2(), capacity(0.0, best_rho2())
    (0.5, 0.16666666666666666)
    """
    return (1 - rho1) / 2


class TheoremOne(NamedTuple):
    """Whether each of the three conditions holds that the proof of Theorem 1 ends with."""

    errors_fit: bool
    errors_shrink: bool
    step_is_long: bool


def theorem_1(
    alpha: float,
    weights: Sequence[float],
    smoothness: float,
    strong_convexity: float,
    num_clients: int,
    widths: Sequence[int],
    max_width: int,
    *,
    rho1: float,
    rho2: float,
    constant: float,
    rate: float,
    as_printed: bool = False,
) -> TheoremOne:
    """Check the conditions of Theorem 1, with ``P`` the constant and ``σ2`` the rate.

    ``4BMP τ_bmax² + BMP Σ_b τ_b² ≤ σ2 - σ1``,
    ``24L²/(μP) + 18 τ_{bmax-b}² + 3 τ_bmax² ≤ σ2`` for every width ``b`` in use, and
    ``α ≥ μ/(4L²M²)``, where ``σ1 = 1 - c`` and ``B`` are those of Lemma 2. The paper prints the
    second one without ``P``; the last line of its proof has it.

    Args:
        alpha: the step size.
        weights: ``ξ_1..ξ_D``, all above 0.
        smoothness: ``L``.
        strong_convexity: ``μ``.
        num_clients: ``M``.
        widths: those that clients send with.
        max_width: ``b_max``.
        rho1: as in Lemma 1.
        rho2: as in Lemma 1.
        constant: ``P``.
        rate: ``σ2``, above 0 and below 1.
        as_printed: leave ``P`` out of the second condition.

    >>> numbers = dict(rho1=0.1, rho2=0.5, constant=1e-6, rate=0.9999)
    >>> theorem_1(0.3, (0.005,) * 10, 0.01, 0.01, 10, (1,), 12, as_printed=True, **numbers)
    TheoremOne(errors_fit=True, errors_shrink=True, step_is_long=True)
    >>> theorem_1(0.3, (0.005,) * 10, 0.01, 0.01, 10, (1,), 12, **numbers).errors_shrink
    False
    """
    check_positive(alpha, smoothness)
    beta = np.append(step_weights(weights, alpha), 0.0)
    forward = (smoothness + 2 * beta[0]) * (1 + rho2) * alpha**2
    bracket = alpha / 2 + (smoothness / 2 + beta[0]) * (1 + 1 / rho2) * alpha**2
    shrinking = 1 - bracket * np.asarray(weights) / (alpha**2 * beta[:-1]) - beta[1:] / beta[:-1]
    gradient_term = 2 * strong_convexity * (alpha / 2 - alpha * rho1 / 2 - forward)
    shares = min(gradient_term, float(shrinking.min()))
    growth = max(alpha / (2 * rho1) + forward, 3 * num_clients * bracket)
    finest, squares = granularity(max_width) ** 2, [granularity(b) ** 2 for b in widths]
    spent = growth * num_clients * constant * (4 * finest + sum(squares))
    coarsest = max(granularity(max_width - b) ** 2 for b in widths)
    curvature = 24 * smoothness**2 / (strong_convexity * (1 if as_printed else constant))
    return TheoremOne(
        bool(spent <= rate - (1 - shares)),
        curvature + 18 * coarsest + 3 * finest <= rate < 1,
        alpha >= strong_convexity / (4 * smoothness**2 * num_clients**2),
    )


def granularity(width: int) -> float:
    """Return ``τ_b``, the step of a grid of ``2^b`` values over twice the radius.

    >>> granularity(1), granularity(4), granularity(0)
    (1.0, 0.06666666666666667, inf)
    """
    return 1 / (2**width - 1) if width else np.inf
