"""The minimum ``f*`` of a convex objective, with a certificate, computed once and cached.

Residuals ``f(θ) - f*`` mean little without a trustworthy ``f*``. With the regularizer ``λ/2 ‖θ‖²``
every client's loss, and so their average ``f``, is strongly convex with modulus ``λ``, hence

    f(θ) - ‖∇f(θ)‖² / (2λ)  ≤  f*  ≤  f(θ)    for every θ,

which turns a small gradient into a bound on the error of ``f*``, however θ was found.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import optimize

from aqg.core.types import Float64Array
from aqg.data.datasets import chosen_directory, write_whole
from aqg.errors import ConfigError, DataError
from aqg.objectives.base import Array, ClosedForm, Objective

TOLERANCE = 1e-12
CACHE_VARIABLE = "AQG_CACHE_DIR"
"""Environment variable that overrides the cache directory."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The smallest average loss found; ``f*`` is in ``[value - error_bound, value]``."""

    value: float
    gradient_norm: float
    error_bound: float


def find_optimum(
    objective: Objective,
    clients: Sequence[tuple[Array, Array]],
    *,
    max_passes: int = 20_000,
    progress: Callable[[float], None] = lambda _: None,
) -> Optimum:
    """Minimize ``f(θ) = (1/M) Σ_m f_m(θ)`` over the features and labels of ``M`` clients.

    L-BFGS in double precision, started afresh from where it stopped for as long as that helps. It
    ends when the error bound is at most `TOLERANCE`, when rounding stops all progress, or after
    ``max_passes`` passes over the data: read ``error_bound`` for what was reached. ``progress`` is
    told after every step which share of the way lies behind, in the logarithm of the error bound.
    """
    if not objective.convex:
        raise ConfigError(
            f"the minimum of {objective.name} with l2={objective.l2} cannot be certified; "
            "that needs logistic or softmax with l2 above 0"
        )
    if not clients:
        raise DataError("the minimum over 0 clients is undefined; at least 1 is needed")
    assert isinstance(objective, ClosedForm), "what is convex has a gradient in closed form"
    counts = [len(labels) for _, labels in clients]
    weights = np.repeat([objective.sample_weight(count) / len(counts) for count in counts], counts)
    features = np.concatenate([features for features, _ in clients], dtype=np.float64)
    labels = np.concatenate([labels for _, labels in clients])
    best = Optimum(math.inf, math.inf, math.inf)
    best_params = np.zeros(objective.num_params)
    num_passes, first_bound = 0, math.inf

    def evaluate(params: Float64Array) -> tuple[float, Float64Array]:
        nonlocal best, best_params, first_bound, num_passes
        num_passes += 1
        value, gradient = objective.weighted_losses_and_gradients(params, features, labels, weights)
        value = float(value) + objective.l2 / 2 * float(params @ params)
        gradient += objective.l2 * params
        norm = float(np.linalg.norm(gradient))
        if norm < best.gradient_norm:
            if not math.isfinite(best.error_bound):
                first_bound = norm * norm / (2 * objective.l2)
            best = Optimum(value, norm, norm * norm / (2 * objective.l2))
            best_params = params.copy()
        return value, gradient

    def stop_when_certified(_: object) -> None:
        if best.error_bound <= TOLERANCE:
            raise StopIteration
        if math.isfinite(first_bound):
            progress(math.log(first_bound / best.error_bound) / math.log(first_bound / TOLERANCE))

    # Only the certificate decides: the solver's own criteria are switched off.
    options = {"maxcor": 40, "ftol": 0.0, "gtol": 0.0, "maxiter": max_passes}
    how: Any = {"jac": True, "method": "L-BFGS-B", "callback": stop_when_certified}
    while best.error_bound > TOLERANCE and num_passes < max_passes:
        previous, options["maxfun"] = best.error_bound, max_passes - num_passes
        optimize.minimize(evaluate, best_params, options=options, **how)
        if not math.isfinite(best.value):
            raise DataError("the loss is not finite at θ = 0; the data holds NaN or infinity")
        if best.error_bound > previous / 2:
            break
    return best


def cached_optimum(
    key: Mapping[str, str | int | float],
    compute: Callable[[], Optimum],
    cache_dir: Path | None = None,
) -> Optimum:
    """Return the optimum stored under ``key``, or compute and store it.

    ``key`` has to name everything the optimum depends on: data, partition, model, ``l2``, scaling.
    Entries lie in ``optima`` under ``cache_dir``, by default ``AQG_CACHE_DIR`` or the user's cache.
    An entry that cannot be read is computed again, and one that cannot be written is not kept.
    """
    canonical = json.dumps(dict(key), sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    path = chosen_directory(cache_dir, CACHE_VARIABLE, "") / "optima" / f"{digest}.json"
    cached = _read_entry(path, canonical)
    if cached is not None:
        return cached
    optimum = compute()
    entry = {"key": canonical, "optimum": asdict(optimum)}
    # No error: the value is at hand, only the next run will have to find it again.
    with contextlib.suppress(DataError):
        write_whole(path, json.dumps(entry, indent=2).encode())
    return optimum


def _read_entry(path: Path, canonical: str) -> Optimum | None:
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        stored_key, numbers = entry["key"], entry["optimum"]
        optimum = Optimum(**{name: float(number) for name, number in numbers.items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    is_intact = stored_key == canonical and all(map(math.isfinite, asdict(optimum).values()))
    return optimum if is_intact else None
