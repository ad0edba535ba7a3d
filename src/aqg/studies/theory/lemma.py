r"""Which step sizes ``α`` and weights ``ξ`` are guaranteed to make the Lyapunov function fall.

With ``S = Σ_d ξ_d`` and ``β_1 = S/α``, Lemma 1 of the paper asks for ``ρ1, ρ2 > 0`` such that

    -α/2 + α ρ1/2 + (L + 2β_1)(1 + ρ2) α² ≤ 0             ⇔  S + αL/2 ≤ (1 - ρ1) / (4 (1 + ρ2))
    [α/2 + (L/2 + β_1)(1 + 1/ρ2) α²] ξ_d/α² ≤ β_d - β_{d+1}  ⇔  S + αL/2 ≤ 1 / (2 (1 + 1/ρ2)).

The first bound falls in ``ρ2`` and the second rises; they meet at ``ρ2 = (1 - ρ1)/2`` in
``(1 - ρ1)/(6 - 2ρ1)``, which is largest, ``1/6``, as ``ρ1 → 0``. Hence the region of Lemma 1 is

    S + αL/2 < 1/6:   no α at all where S ≥ 1/6, and α < 1/(3L) where S is small.

**A wider region where the server's error is within the tolerance.** Let
``e = Σ_m w_m ref_m - ∇f``. Rules that skip only while ``‖Δ_m‖² ≤ t`` and otherwise send
enough bits for that (``lag`` always, ``lean`` unless ``b_max`` runs out) have
``‖e‖² ≤ Σ_d ξ_d ‖θ^{k+1-d} - θ^{k-d}‖² / α²``. With
``-⟨∇f, ∇f + e⟩ = -(‖∇f‖² + ‖∇f + e‖² - ‖e‖²)/2`` in place of Young's inequality, and half of the
paper's ``β_d``, the change of ``V`` is at most
``-α/2 ‖∇f‖² - (1 - αL - S)/(2α) ‖θ^{k+1} - θ^k‖²``, so

    S + αL ≤ 1

is enough. The paper's ``S = 1`` is the very edge of it.

**The first rounds.** ``lean`` counts steps before the first round as the mean of those there are,
so in round ``k ≤ D`` the weights are ``ξ_d S / Σ_{i<k} ξ_i`` in place of ``ξ_d``. The bound above
is for ``ξ_d`` and so holds from round ``D + 1`` on. Before that, a step counts for more: added up
over all rounds that look back at it, the first one counts for ``S_1 = Σ_d ξ_d S / Σ_{i≤d} ξ_i``,
which is ``S (1 + 1/2 + … + 1/D)`` for equal weights, and later ones for less. Charging each step
with what later tolerances make of it, as ``V`` does with ``β_d``, shows that from the second round
on

    S_1 + αL ≤ 1

is enough. In the first round nothing has moved, the tolerance is zero, and what ``b_max`` bits
leave over is within no tolerance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aqg.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

LARGEST_WEIGHT_SUM = 1 / 6
"""``Σξ`` has to be below this for Lemma 1 to leave room for any ``α``."""


@dataclass(frozen=True)
class Contraction:
    """``V^{k+1} ≤ (1 - c) V^k``, up to quantization errors, and the ``ρ2`` that gives it."""

    c: float
    rho2: float


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
    _check(alpha, smoothness)
    beta = np.append(np.cumsum(weights[::-1])[::-1] / alpha, 0.0)
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


def largest_step_size(weight_sum: float, smoothness: float) -> float:
    """Return the supremum of Lemma 1's step sizes; 0 where there is none.

    A rule that never skips has no ``ξ`` and only the first inequality: ``ρ2 → 0`` is best and the
    bound is ``1/(2L)``.

    >>> largest_step_size(1 / 12, smoothness=2.0)
    0.08333333333333333
    >>> largest_step_size(1.0, smoothness=2.0), largest_step_size(0.0, smoothness=2.0)
    (0.0, 0.25)
    """
    _check(1.0, smoothness)
    if weight_sum == 0:
        return 1 / (2 * smoothness)
    return max(0.0, 2 / smoothness * (LARGEST_WEIGHT_SUM - weight_sum))


def largest_step_size_within_tolerance(weight_sum: float, smoothness: float) -> float:
    """Return the largest step size of the wider region, ``S + αL ≤ 1``.

    >>> largest_step_size_within_tolerance(0.5, smoothness=2.0)
    0.25
    """
    _check(1.0, smoothness)
    return max(0.0, (1 - weight_sum) / smoothness)


def early_weight_sum(weights: Sequence[float]) -> float:
    """Return ``S_1``: what the first step counts for where missing steps are filled by the mean.

    >>> round(early_weight_sum((0.1,) * 10), 3)
    2.929
    """
    values = np.asarray(weights, np.float64)
    known = np.cumsum(values)
    if not known[-1] > 0:
        return 0.0
    return float(known[-1] * np.sum(values[known > 0] / known[known > 0]))


def contraction(
    alpha: float, weights: Sequence[float], smoothness: float, strong_convexity: float
) -> Contraction | None:
    """Return Lemma 2's ``c`` with the best ``ρ2`` and ``ρ1 → 0``; None outside the region.

    ``c = min{μα[1 - 2(αL + 2S)(1 + ρ2)], κ[1/2 - (αL/2 + S)(1 + 1/ρ2)]}`` with
    ``κ = min_d ξ_d / Σ_{j≥d} ξ_j``. (The paper's third term of ``c`` has ``+β_{d+1}/β_d``; its own
    derivation gives ``-β_{d+1}/β_d``, which is used here.) The first falls in ``ρ2`` and the second
    rises, so that bisection finds where they meet.

    >>> round(contraction(0.1, (), smoothness=1.0, strong_convexity=0.1).c, 6)
    0.008
    """
    _check(alpha, smoothness)
    weight_sum = math.fsum(weights)
    if not 0 < alpha < largest_step_size(weight_sum, smoothness):
        return None
    load = smoothness * alpha + 2 * weight_sum

    def gradient_term(rho2: float) -> float:
        return strong_convexity * alpha * (1 - 2 * load * (1 + rho2))

    if weight_sum == 0:
        return Contraction(gradient_term(0.0), 0.0)
    share = slowest_share(weights)

    def movement_term(rho2: float) -> float:
        return share * (0.5 - load / 2 * (1 + 1 / rho2))

    low, high = 1e-9, 1 / (2 * load)
    for _ in range(200):
        middle = (low + high) / 2
        if gradient_term(middle) > movement_term(middle):
            low = middle
        else:
            high = middle
    return Contraction(min(gradient_term(low), movement_term(low)), low)


def contraction_within_tolerance(
    alpha: float, weights: Sequence[float], smoothness: float, strong_convexity: float
) -> float | None:
    """Return ``c`` for the wider region; None outside.

    With ``β_d = (γ/α) Σ_{j≥d} ξ_j`` any ``1/2 ≤ γ ≤ (1 - αL)/(2S)`` will do, and the largest gives
    ``c = min{αμ, κ (1 - S/(1 - αL))}``.

    >>> round(contraction_within_tolerance(0.1, (), smoothness=1.0, strong_convexity=0.1), 6)
    0.01
    """
    _check(alpha, smoothness)
    weight_sum = math.fsum(weights)
    if weight_sum + alpha * smoothness > 1:
        return None
    if weight_sum == 0:
        return alpha * strong_convexity
    room = 1 - weight_sum / (1 - alpha * smoothness)
    return min(alpha * strong_convexity, slowest_share(weights) * room)


def slowest_share(weights: Sequence[float]) -> float:
    """Return ``κ = min_d ξ_d / Σ_{j≥d} ξ_j``."""
    values = np.asarray(weights, np.float64)
    return float((values / np.cumsum(values[::-1])[::-1]).min())


def _check(alpha: float, smoothness: float) -> None:
    if not alpha > 0:
        raise ConfigError(f"alpha is {alpha}; it must be above 0")
    if not smoothness > 0:
        raise ConfigError(f"the smoothness constant is {smoothness}; it must be above 0")
