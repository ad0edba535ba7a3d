"""What the theory says about one config, in numbers and in words that can be acted on."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from aqg.contrib import theory
from aqg.contrib.theory import Constants, Curvature, LyapunovTrace
from aqg.core.policies import Always, Lazy, LazyExact, Multilevel, Tolerance, TwoLevel
from aqg.core.recipe import widest_weights
from aqg.core.recipes import make_recipe
from aqg.core.types import Float64Array
from aqg.runs.config import RunConfig
from aqg.runs.directory import finite_or_none
from aqg.sim.problem import Problem


class Landscape(NamedTuple):
    """The shape of a problem's loss."""

    constants: Constants | None  # None where the loss is not convex
    start: Curvature  # at the model that a run starts from; then with its smallest value, too

    @property
    def smoothness(self) -> float:
        """``L``; for a loss that is not convex, the curvature where the run starts."""
        return self.start.largest if self.constants is None else self.constants.smoothness


def survey(problem: Problem, weights: Float64Array) -> Landscape:
    """Measure the loss ``Σ_m w_m f_m``, once for all rules that may run on it."""
    constants, model = theory.global_constants(problem, weights), problem.initial_params
    start = theory.local_curvature(problem, model, weights, smallest=constants is None)
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
    guaranteed = theory.largest_step_size(math.fsum(weights), smoothness)
    # The wider region is of rules that keep the server's copy within their tolerance.
    wider = None
    if isinstance(policy, LazyExact | Tolerance):
        wider = theory.largest_step_size_within_tolerance(math.fsum(weights), smoothness)
    is_guaranteed = alpha < guaranteed or (wider is not None and alpha <= wider)
    early = theory.early_weight_sum(weights) if weights else 0.0
    from_round = None
    if is_guaranteed:
        from_round = 1
        if not never_skips and recipe.movement.fill == "mean":
            is_early = wider is not None and early + alpha * smoothness <= 1
            from_round = 2 if is_early else len(weights) + 1
    rate = fewest_bits = None
    if convexity:
        numbers = (alpha, weights, smoothness, convexity)
        found = theory.contraction(*numbers) or 0.0
        if wider is not None:
            found = max(found, theory.contraction_within_tolerance(*numbers) or 0.0)
        rate = 1 - found if found > 0 else None
        if isinstance(policy, Lazy | TwoLevel | Multilevel):  # what Theorem 1 is about
            fewest_bits = theory.fewest_bits_of_theorem_1(num_clients, smoothness, convexity)
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
