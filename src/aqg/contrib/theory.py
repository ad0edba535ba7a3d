r"""The paper's convergence theory as running checks, for ``f = Σ_m w_m f_m``.

The server's step is ``θ ← θ - α Σ_m w_m ref_m``, a sum, so the function that theory is about is
the *sum* of the clients' losses. Losses that the simulator reports are its mean, ``f/M``;
everything here that is called ``L``, ``μ`` or ``V`` belongs to the sum. The Lyapunov function is

    V^k = f(θ^k) - f* + Σ_{d=1..D} β_d ‖θ^{k+1-d} - θ^{k-d}‖²   with β_d = (1/α) Σ_{j≥d} ξ_j,

where steps before the first round count as zero. ``docs/explanation/theory.md`` derives what the
functions return: ``L`` and ``μ``, the region ``S + αL/2 < 1/6`` of Lemma 1, ``S = Σ_d ξ_d``, the
wider one ``S + αL ≤ 1`` of rules that keep the server's error within their tolerance, and how the
first rounds differ where missing steps count as the mean of the others.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from aqg.core.types import Float64Array, FloatArray
from aqg.errors import ConfigError, require
from aqg.objectives.closed_form import Logistic, Softmax
from aqg.sim.engine import FastSimulation
from aqg.sim.problem import Problem
from aqg.sim.reference import ReferenceSimulation

LARGEST_WEIGHT_SUM = 1 / 6
"""``Σξ`` has to be below this for Lemma 1 to leave room for any ``α``."""
_SAMPLE_CURVATURE = {"logistic": 0.25, "softmax": 0.5}
_LANCZOS_TOLERANCE = 1e-4
_MOST_SAMPLES = 1000
_ROUNDING = 1e-11
"""Below this part of its first value, ``V`` is a difference of rounded losses."""


class Constants(NamedTuple):
    """``L`` and ``μ`` of the sum of the clients' losses."""

    smoothness: float
    strong_convexity: float

    @property
    def condition(self) -> float:
        return self.smoothness / self.strong_convexity if self.strong_convexity else np.inf


class Curvature(NamedTuple):
    """The extreme eigenvalues of ``∇²f`` at one model."""

    largest: float
    smallest: float


def global_constants(problem: Problem, weights: Float64Array) -> Constants | None:
    """Return ``L`` and ``μ``; None where the loss is not convex, as for networks.

    ``weights`` are ``w_m``, ``(M,)``; ones in the paper.
    """
    objective = problem.objective
    if not isinstance(objective, Logistic | Softmax):
        return None
    if len(weights) != problem.num_clients:
        raise ConfigError(f"{len(weights)} weights for {problem.num_clients} clients")
    num_features = objective.num_features + isinstance(objective, Softmax)
    gram = np.zeros((num_features, num_features))
    for samples, weight in zip(problem.clients, weights, strict=True):
        features = samples.features.astype(np.float64)
        if isinstance(objective, Softmax):
            features = np.column_stack([features, np.ones(len(features))])
        share = 1.0 if objective.scaling == "sum" else 1 / len(features)
        gram += weight * share * (features.T @ features)
    largest = float(np.linalg.eigvalsh(gram)[-1])
    strong_convexity = objective.l2 * float(weights.sum())
    smoothness = _SAMPLE_CURVATURE[objective.name] * largest + strong_convexity
    return Constants(smoothness, strong_convexity)


def local_curvature(
    problem: Problem, params: FloatArray, weights: Float64Array, smallest: bool = True
) -> Curvature:
    """Estimate the extreme eigenvalues of ``∇²f(θ)``, for any objective.

    Lanczos iterations on Hessian-vector products, which are central differences of gradients:
    ``∇²f(θ) v ≈ (∇f(θ + hv) - ∇f(θ - hv)) / 2h``. Of a client with more than 1,000 samples, so many
    are drawn at random. Without ``smallest`` only the largest is looked for, and the other is NaN.
    """
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    objective = problem.objective
    random = np.random.default_rng(0)
    clients = []
    for samples in problem.clients:
        chosen = random.permutation(len(samples.labels))[:_MOST_SAMPLES]
        is_sum = getattr(objective, "scaling", "mean") == "sum"
        factor = len(samples.labels) / len(chosen) if is_sum else 1.0
        features = samples.features[chosen].astype(np.float64)
        clients.append((features, samples.labels[chosen], factor))
    point = params.astype(np.float64)

    def gradient(at: Float64Array) -> Float64Array:
        regularizer = objective.l2 * at
        total = np.zeros_like(at)
        for (features, labels, factor), weight in zip(clients, weights, strict=True):
            full = objective.losses_and_gradients(at, features, labels)[1]
            total += weight * (factor * (full - regularizer) + regularizer)
        return total

    def multiply(vector: Float64Array) -> Float64Array:
        direction = vector.ravel()
        step = 1e-4 * max(1.0, float(np.linalg.norm(point))) / float(np.linalg.norm(direction))
        ahead, behind = gradient(point + step * direction), gradient(point - step * direction)
        return (ahead - behind) / (2 * step)

    length = len(point)
    if length <= 2:
        hessian = np.column_stack([multiply(unit) for unit in np.eye(length)])
        values = np.linalg.eigvalsh((hessian + hessian.T) / 2)
        return Curvature(float(values[-1]), float(values[0]))
    operator = LinearOperator((length, length), matvec=multiply, dtype=np.float64)
    start = random.standard_normal(length)
    how = {"k": 1, "v0": start, "tol": _LANCZOS_TOLERANCE, "maxiter": 30}

    def extreme(which: str) -> float:
        try:
            values = eigsh(operator, which=which, return_eigenvectors=False, **how)
        except ArpackNoConvergence as error:
            values = error.eigenvalues
        return float(values[0]) if len(values) else float("nan")

    return Curvature(extreme("LA"), extreme("SA") if smallest else float("nan"))


def largest_step_size(weight_sum: float, smoothness: float) -> float:
    """Return the supremum of Lemma 1's step sizes; 0 where there is none.

    A rule that never skips has no ``ξ`` and only the first inequality: ``ρ2 → 0`` is best and the
    bound is ``1/(2L)``.
    """
    check_positive(1.0, smoothness)
    if weight_sum == 0:
        return 1 / (2 * smoothness)
    return max(0.0, 2 / smoothness * (LARGEST_WEIGHT_SUM - weight_sum))


def largest_step_size_within_tolerance(weight_sum: float, smoothness: float) -> float:
    """Return the largest step size of the wider region, ``S + αL ≤ 1``."""
    check_positive(1.0, smoothness)
    return max(0.0, (1 - weight_sum) / smoothness)


def early_weight_sum(weights: Sequence[float]) -> float:
    """Return ``S_1``: what the first step counts for where missing steps are filled by the mean.

    >>> round(early_weight_sum((0.1,) * 10), 3)
    2.929
    """
    values = np.asarray(weights, np.float64)
    known = np.cumsum(values)
    return float(known[-1] * np.sum(values[known > 0] / known[known > 0]))


def contraction(
    alpha: float, weights: Sequence[float], smoothness: float, strong_convexity: float
) -> float | None:
    """Return Lemma 2's ``c`` with the best ``ρ2`` and ``ρ1 → 0``; None outside the region.

    ``V^{k+1} ≤ (1 - c) V^k``, up to quantization errors, with
    ``c = min{μα[1 - 2(αL + 2S)(1 + ρ2)], κ[1/2 - (αL/2 + S)(1 + 1/ρ2)]}`` with
    ``κ = min_d ξ_d / Σ_{j≥d} ξ_j``. (The paper's third term of ``c`` has ``+β_{d+1}/β_d``; its own
    derivation gives ``-β_{d+1}/β_d``, which is used here.) The first falls in ``ρ2`` and the second
    rises: where they meet, a quadratic equation holds.
    """
    check_positive(alpha, smoothness)
    weight_sum = math.fsum(weights)
    if not 0 < alpha < largest_step_size(weight_sum, smoothness):
        return None
    load, pull, rho2 = smoothness * alpha + 2 * weight_sum, strong_convexity * alpha, 0.0
    if weight_sum > 0 and pull > 0:
        falls, rises = 2 * load * pull, load / 2 * slowest_share(weights)
        gap = pull - falls - (slowest_share(weights) / 2 - rises)
        rho2 = (gap + math.sqrt(gap * gap + 4 * falls * rises)) / (2 * falls)
    return pull * (1 - 2 * load * (1 + rho2))


def contraction_within_tolerance(
    alpha: float, weights: Sequence[float], smoothness: float, strong_convexity: float
) -> float | None:
    """Return ``c`` for the wider region; None outside.

    With ``β_d = (γ/α) Σ_{j≥d} ξ_j`` any ``1/2 ≤ γ ≤ (1 - αL)/(2S)`` will do, and the largest gives
    ``c = min{αμ, κ (1 - S/(1 - αL))}``.
    """
    check_positive(alpha, smoothness)
    weight_sum = math.fsum(weights)
    if weight_sum + alpha * smoothness > 1:
        return None
    if weight_sum == 0:
        return alpha * strong_convexity
    room = 1 - weight_sum / (1 - alpha * smoothness)
    return min(alpha * strong_convexity, slowest_share(weights) * room)


def fewest_bits_of_theorem_1(num_clients: int, smoothness: float, strong_convexity: float) -> int:
    """Return a width below which no upload fits Theorem 1, whatever ``α``, ``ξ``, ``P`` and rate.

    Its conditions give ``P ≥ 24L²/μ`` and ``B M P τ_b² ≤ c``; with ``B ≥ 3Mα/2`` and ``c ≤ μα``
    that is ``τ_b ≤ μ/(6ML)``.
    """
    finest = strong_convexity / (6 * num_clients * smoothness)
    return math.ceil(math.log2(1 + 1 / finest))


def slowest_share(weights: Sequence[float]) -> float:
    """Return ``κ = min_d ξ_d / Σ_{j≥d} ξ_j``."""
    values = np.asarray(weights, np.float64)
    return float((values / np.cumsum(values[::-1])[::-1]).min())


def check_positive(alpha: float, smoothness: float = 1.0) -> None:
    require(alpha > 0, "alpha", alpha, "above 0")
    require(smoothness > 0, "the smoothness constant", smoothness, "above 0")


class LyapunovTrace(NamedTuple):
    """``V^k`` for ``k = 1, 2, …``, of the sum over clients."""

    values: Float64Array

    @property
    def above_rounding(self) -> int:
        """How many of the values are more than rounding."""
        small = np.flatnonzero(~(self.values > _ROUNDING * self.values[0]))
        return int(small[0]) if len(small) else len(self.values)

    @property
    def decrease_share(self) -> float:
        """The part of the rounds in which ``V`` did not rise."""
        steps = np.diff(self.values[: self.above_rounding])
        return float(np.mean(steps <= 0)) if len(steps) else float("nan")

    @property
    def fitted_rate(self) -> float:
        """``σ`` of the ``V^k ≈ C σ^k`` that fits the later half best; NaN if there is none."""
        values = self.values[: self.above_rounding]
        half = values[len(values) // 2 :]
        half = half[half > 0]
        if len(half) < 2:
            return float("nan")
        return float(np.exp(np.polyfit(np.arange(len(half)), np.log(half), 1)[0]))


def step_weights(weights: Sequence[float], alpha: float) -> Float64Array:
    """Return ``β_1..β_D``."""
    check_positive(alpha)
    return np.cumsum(np.asarray(weights, np.float64)[::-1])[::-1] / alpha


def watch_run(
    simulation: FastSimulation | ReferenceSimulation,
    num_rounds: int,
    num_clients: int,
    minimum: float,
    weights: Sequence[float],
    alpha: float,
    report: Callable[[int], None] | None = None,
) -> LyapunovTrace:
    """Run and measure ``V`` before every round.

    ``minimum`` is ``f*/M``, as reported losses are means over the ``M`` clients, and ``weights``
    are ``ξ_1..ξ_D``; ``report`` is told the number of every finished round.
    """
    beta = step_weights(weights, alpha)
    steps: deque[float] = deque(maxlen=max(1, len(beta)))
    values = []
    before = simulation.parameters.astype(np.float64)
    for number in range(1, num_rounds + 1):
        moved = sum(b * step for b, step in zip(beta, steps, strict=False))
        record = simulation.run_round()
        if record.loss is None or not np.isfinite(record.loss):
            break
        values.append(num_clients * (record.loss - minimum) + moved)
        after = simulation.parameters.astype(np.float64)
        steps.appendleft(float(np.sum((after - before) ** 2)))
        before = after
        if report is not None:
            report(number)
    return LyapunovTrace(np.array(values))
