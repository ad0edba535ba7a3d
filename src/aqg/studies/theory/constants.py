"""Smoothness and strong convexity of ``f = Σ_m w_m f_m``.

For the built-in convex models both are exact, as a supremum and an infimum over all models:

- logistic: a sample's second derivative along its score is ``σ'(s) ≤ 1/4``, with equality at
  ``θ = 0``;
- softmax: ``diag(p) - p pᵀ`` has no eigenvalue above ``1/2``, and comes as close as one likes for
  all samples at once when two classes share all of the probability, which biases alone can do;
- both: far out every sample's curvature vanishes and the regularizer's, ``λ`` per client, remains.

So ``L = c·λ_max(Σ_m w_m s_m X_mᵀX_m) + λ Σ_m w_m`` with ``c`` as above, ``s_m = 1/n_m`` for mean
losses and 1 for sums, and a column of ones in ``X_m`` where the model has a bias; and
``μ = λ Σ_m w_m``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aqg.errors import ConfigError
from aqg.objectives.closed_form import Logistic, Softmax

if TYPE_CHECKING:
    from aqg.core.types import Float64Array, FloatArray
    from aqg.sim.problem import Problem

_SAMPLE_CURVATURE = {"logistic": 0.25, "softmax": 0.5}
_LANCZOS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Constants:
    """``L`` and ``μ`` of the sum of the clients' losses."""

    smoothness: float
    strong_convexity: float

    @property
    def condition(self) -> float:
        """``L/μ``."""
        return self.smoothness / self.strong_convexity if self.strong_convexity else np.inf


@dataclass(frozen=True)
class Curvature:
    """The extreme eigenvalues of ``∇²f`` at one model."""

    largest: float
    smallest: float


def global_constants(problem: Problem, weights: Float64Array) -> Constants | None:
    """Return ``L`` and ``μ``; None where the loss is not convex, as for networks.

    Args:
        problem: the clients and their loss.
        weights: ``w_m``, ``(M,)``; ones in the paper.

    >>> from aqg.objectives import make_objective
    >>> from aqg.sim.problem import Problem, Samples
    >>> objective = make_objective("logistic", 1, 2, l2=0.5, scaling="sum")
    >>> client = Samples(np.array([[2.0], [4.0]]), np.array([0, 1]))
    >>> global_constants(Problem(objective, (client, client), np.zeros(1)), np.ones(2))
    Constants(smoothness=11.0, strong_convexity=1.0)

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
    problem: Problem,
    params: FloatArray,
    weights: Float64Array,
    max_samples: int = 1000,
    seed: int = 0,
    smallest: bool = True,
) -> Curvature:
    """Estimate the extreme eigenvalues of ``∇²f(θ)``, for any objective.

    Lanczos iterations on Hessian-vector products, which are central differences of gradients:
    ``∇²f(θ) v ≈ (∇f(θ + hv) - ∇f(θ - hv)) / 2h``. Clients with more than ``max_samples`` samples
    are represented by that many, drawn at random; the result is an estimate then. Without
    ``smallest`` only the largest is looked for, and the other is NaN.
    """
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    objective = problem.objective
    random = np.random.default_rng(seed)
    clients = []
    for samples in problem.clients:
        chosen = random.permutation(len(samples.labels))[:max_samples]
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
        product: Float64Array = (ahead - behind) / (2 * step)
        return product

    length = len(point)
    if length <= 2:
        hessian = np.column_stack([multiply(unit) for unit in np.eye(length)])
        values = np.linalg.eigvalsh((hessian + hessian.T) / 2)
        return Curvature(float(values[-1]), float(values[0]))
    operator = LinearOperator((length, length), matvec=multiply, dtype=np.float64)
    start = random.standard_normal(length)

    def extreme(which: str) -> float:
        try:
            values = eigsh(
                operator,
                k=1,
                which=which,
                v0=start,
                tol=_LANCZOS_TOLERANCE,
                maxiter=30,
                return_eigenvectors=False,
            )
        except ArpackNoConvergence as error:
            values = error.eigenvalues
        return float(values[0]) if len(values) else float("nan")

    return Curvature(extreme("LA"), extreme("SA") if smallest else float("nan"))
