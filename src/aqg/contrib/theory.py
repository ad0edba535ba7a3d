"""The paper's convergence theory as running checks, for ``f = Σ_m w_m f_m``.

``docs/explanation/theory.md`` derives what the functions return. Losses that the simulator reports
are the mean over the clients, and the theory is about their *sum*: everything here that is called
``L``, ``μ`` or ``V`` (the Lyapunov function) belongs to the sum. `advise` applies all to one
config, and `sentences` says it in words that can be acted on.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from aqg.core.policies import Always, Lazy, LazyExact, Multilevel, Tolerance, TwoLevel
from aqg.core.recipe import widest_weights
from aqg.core.recipes import make_recipe
from aqg.core.types import Float64Array, FloatArray
from aqg.errors import ConfigError, require
from aqg.objectives.base import Logistic, Softmax
from aqg.runs.config import RunConfig
from aqg.runs.directory import finite_or_none
from aqg.sim.problem import Problem
from aqg.sim.simulation import Simulation

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
    """Return ``S_1``: what the first step counts for where missing steps are filled by the mean."""
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
    """``V^k`` for ``k = 1, 2, …``; steps before the first round count as zero."""

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
    simulation: Simulation,
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


class Landscape(NamedTuple):
    constants: Constants | None  # None where the loss is not convex
    start: Curvature  # at the model that a run starts from; then with its smallest value, too

    @property
    def smoothness(self) -> float:
        """``L``; for a loss that is not convex, the curvature where the run starts."""
        return self.start.largest if self.constants is None else self.constants.smoothness


def survey(problem: Problem, weights: Float64Array) -> Landscape:
    """Measure the loss ``Σ_m w_m f_m``, once for all rules that may run on it."""
    constants, model = global_constants(problem, weights), problem.initial_params
    start = local_curvature(problem, model, weights, smallest=constants is None)
    return Landscape(constants, start)


@dataclass(frozen=True)
class Advice:
    """The theory of one config: ``row`` has its numbers as ``--json`` prints them."""

    row: dict[str, Any]
    landscape: Landscape
    num_clients: int
    early_weight_sum: float
    trace: LyapunovTrace | None = None  # along the run, if it was repeated


def advise(
    config: RunConfig,
    num_clients: int,
    landscape: Landscape,
    trace: LyapunovTrace | None = None,
    end: Curvature | None = None,
) -> Advice:
    """Apply the theory; ``end`` is the curvature at the model that the run ended with."""
    recipe = make_recipe(config.recipe, config.bits, config.max_staleness)
    policy, alpha = recipe.policy, config.alpha
    never_skips = isinstance(policy, Always)
    weights = () if never_skips else widest_weights(recipe)
    constants, smoothness = landscape.constants, landscape.smoothness
    convexity = None if constants is None else constants.strong_convexity
    guaranteed = largest_step_size(math.fsum(weights), smoothness)
    # The wider region is of rules that keep the server's copy within their tolerance.
    wider = None
    if isinstance(policy, LazyExact | Tolerance):
        wider = largest_step_size_within_tolerance(math.fsum(weights), smoothness)
    is_guaranteed = alpha < guaranteed or (wider is not None and alpha <= wider)
    early = early_weight_sum(weights) if weights else 0.0
    from_round = None
    if is_guaranteed:
        from_round = 1
        if not never_skips and recipe.movement.fill == "mean":
            is_early = wider is not None and early + alpha * smoothness <= 1
            from_round = 2 if is_early else len(weights) + 1
    rate = fewest_bits = None
    if convexity:
        numbers = (alpha, weights, smoothness, convexity)
        found = contraction(*numbers) or 0.0
        if wider is not None:
            found = max(found, contraction_within_tolerance(*numbers) or 0.0)
        rate = 1 - found if found > 0 else None
        if isinstance(policy, Lazy | TwoLevel | Multilevel):  # what Theorem 1 is about
            fewest_bits = fewest_bits_of_theorem_1(num_clients, smoothness, convexity)
    row: dict[str, Any] = {
        "recipe": config.recipe,
        "alpha": alpha,
        "weight_sum": math.fsum(weights),
        "smoothness": None if constants is None else smoothness,
        "strong_convexity": convexity,
        "largest_curvature_at_start": landscape.start.largest,
        "smallest_curvature_at_start": finite_or_none(landscape.start.smallest),
        "largest_guaranteed_alpha": guaranteed,
        "largest_guaranteed_alpha_within_tolerance": wider,
        "is_guaranteed": is_guaranteed,
        "guaranteed_from_round": from_round,
        "rate_bound": rate,
        "fewest_bits_of_theorem_1": fewest_bits,
        "outside_the_theory": _outside(config),
    }
    if trace is not None:
        row["lyapunov"] = {
            "rounds": len(trace.values),
            "rounds_above_rounding": trace.above_rounding,
            "decrease_share": finite_or_none(trace.decrease_share),
            "fitted_rate": finite_or_none(trace.fitted_rate),
        }
    if end is not None:
        row["largest_curvature_at_end"] = finite_or_none(end.largest)
    return Advice(row, landscape, num_clients, early, trace)


def _outside(config: RunConfig) -> list[str]:
    """Return what a config does that the theory does not cover."""
    found = {
        f"clients drop out with probability {config.dropout:g}": config.dropout > 0,
        "clients have scripted absences": bool(config.absences),
        f"only {config.participation:.0%} of the clients are sampled": config.participation < 1,
        f"gradients are of batches of {config.batch_size}": config.batch_size is not None,
        "clients take several local steps": config.local_steps > 1 or bool(config.local_epochs),
        f"the server's optimizer is {config.optimizer}": config.optimizer != "sgd",
    }
    return [text for text, holds in found.items() if holds]


def sentences(advice: Advice) -> Iterator[str]:
    yield from _about_the_problem(advice)
    yield from _about_the_step_size(advice)
    row = advice.row
    if (fewest := row["fewest_bits_of_theorem_1"]) is not None:
        yield (
            "Theorem 1 adds quantization errors to the linear rate. Its conditions ask for uploads "
            f"of {fewest} bits or more here, and of three bits less than b_max at most: it "
            "promises nothing for this rule."
        )
    for text in row["outside_the_theory"]:
        yield f"Not covered by the theory: {text}."
    if advice.trace is not None:
        yield from _about_the_run(advice, advice.trace)


def _about_the_problem(advice: Advice) -> Iterator[str]:
    clients, (constants, start) = advice.num_clients, advice.landscape
    yield (
        f"The server steps along a sum, so the theory is about the sum of {clients} losses, "
        f"{clients} times the loss that is reported."
    )
    if constants is None:
        yield (
            "The loss is not convex: there is no global L to compute. Where the run starts, the "
            f"curvature lies between {start.smallest:.3g} and {start.largest:.3g}; "
            "the larger one stands in for L below, and nothing is guaranteed elsewhere."
        )
    else:
        yield (
            f"Smoothness L = {constants.smoothness:.4g} (largest curvature anywhere), strong "
            f"convexity μ = {constants.strong_convexity:.4g} (clients × l2), "
            f"L/μ = {constants.condition:,.0f}. Where the run starts, the largest curvature is "
            f"{start.largest:.4g}; nearby, the edge of stability is "
            f"2/{start.largest:.3g} = {2 / start.largest:.3g}."
        )


def _about_the_step_size(advice: Advice) -> Iterator[str]:
    row, smoothness = advice.row, advice.landscape.smoothness
    alpha, weight_sum, recipe = row["alpha"], row["weight_sum"], row["recipe"]
    where = "near the start" if advice.landscape.constants is None else "whatever model it is at"
    yield (
        f"α is {alpha:g}, so αL = {alpha * smoothness:.3g}. Gradient descent without any "
        f"compression is sure to descend up to 2/L = {2 / smoothness:.3g}, {where}."
    )
    guaranteed = row["largest_guaranteed_alpha"]
    lemma = f"Lemma 1 asks for Σξ + αL/2 < 1/6 (best ρ2 = 1/2, ρ1 → 0). Σξ is {weight_sum:.3g}, "
    if not weight_sum:
        yield (
            f"{recipe} never skips: Lemma 1 guarantees descent, up to quantization errors, "
            f"for α below 1/(2L) = {guaranteed:.3g}."
        )
    elif guaranteed > 0:
        yield (
            f"{lemma}so α below {guaranteed:.3g} is guaranteed to descend, up to quantization "
            "errors."
        )
    else:
        yield (
            f"{lemma}outside whatever α is: the paper's own setting, Σξ = 1, is outside its "
            "guarantee, and it converges in the paper's experiments anyway. With Σξ = 1/12, α "
            f"below {1 / (6 * smoothness):.3g} would be guaranteed."
        )
    wider = row["largest_guaranteed_alpha_within_tolerance"]
    if wider is not None:
        text = f"α up to {wider:.3g}."
        if wider <= 0:
            half = 1 / (2 * smoothness)
            text = f"no α at Σξ = {weight_sum:.3g}, only below 1; at 0.5 up to {half:.3g}"
            text += " (lean:xi=0.5)." if recipe.split(":")[0] == "lean" else "."
        yield (
            "Since this rule keeps the server's copy within its tolerance, Σξ + αL ≤ 1 is enough: "
            f"{text}"
        )
    first = row["guaranteed_from_round"] or 1
    verdict = "inside" if row["is_guaranteed"] else "outside"
    since = f", from round {first} on" if first > 1 else ""
    yield f"The current α = {alpha:g} with Σξ = {weight_sum:.3g} is {verdict}{since}."
    if first > 2:
        yield (
            f"In the first {first - 1} rounds, missing steps count as the mean of the others. From "
            f"the second round on, {advice.early_weight_sum:.3g} + αL ≤ 1 would be enough."
        )


def _about_the_run(advice: Advice, trace: LyapunovTrace) -> Iterator[str]:
    row, rounds = advice.row, trace.above_rounding
    if rounds < 2:
        yield "The run is too short to follow the Lyapunov function."
        return
    if not trace.values[-1] < trace.values[0]:
        yield (
            f"Along the run the Lyapunov function grew from {trace.values[0]:.3g} to "
            f"{trace.values[-1]:.3g} in {len(trace.values)} rounds: the run does not converge. "
            "Try a smaller α."
        )
        return
    yield (
        f"Along the run the Lyapunov function went from {trace.values[0]:.3g} to "
        f"{trace.values[rounds - 1]:.3g} in {rounds} rounds (below that it is rounding), and did "
        f"not rise in {trace.decrease_share:.1%} of them."
    )
    fitted = trace.fitted_rate
    text = f"Fitted linear rate: V shrinks by a factor of {fitted:.5f} per round"
    if 0 < fitted < 1:
        text += f", to half in {np.log(2) / -np.log(fitted):.0f} rounds"
    if row["rate_bound"] is not None:
        text += f". The theory promises {row['rate_bound']:.5f}"
    elif row["strong_convexity"] is not None:
        linear = (1 - row["alpha"] * row["strong_convexity"]) ** 2
        text += (
            f". No rate is promised out here; uncompressed gradient descent would shrink the "
            f"flattest direction there can be by (1 - αμ)² = {linear:.5f}"
        )
    yield text + "."
    if (largest := row.get("largest_curvature_at_end")) is not None:
        yield (
            f"Where the run ended, the largest curvature is {largest:.4g}: near there, steps above "
            f"2/{largest:.4g} = {2 / largest:.3g} make gradient descent itself oscillate."
        )
