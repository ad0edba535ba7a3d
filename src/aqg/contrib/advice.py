"""What the theory says about one config, in numbers and in words that can be acted on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from aqg.contrib import theory
from aqg.contrib.theory import (
    Constants,
    Curvature,
    LyapunovTrace,
    global_constants,
    local_curvature,
)
from aqg.core.policies import Always, Lazy, LazyExact, Multilevel, Tolerance, TwoLevel
from aqg.core.recipe import widest_weights
from aqg.core.recipes import make_recipe
from aqg.core.types import Float64Array
from aqg.runs.config import RunConfig
from aqg.sim.problem import Problem


class Landscape(NamedTuple):
    """The shape of a problem's loss.

    Without ``L`` and ``μ``, the loss is not convex, and then the curvature at the model that a run
    starts from has its smallest value, too.
    """

    constants: Constants | None
    start: Curvature


def survey(problem: Problem, weights: Float64Array) -> Landscape:
    """Measure the loss ``Σ_m w_m f_m``, once for all rules that may run on it."""
    constants = global_constants(problem, weights)
    start = local_curvature(problem, problem.initial_params, weights, smallest=constants is None)
    return Landscape(constants, start)


@dataclass(frozen=True)
class Advice:
    """The theory of one config."""

    recipe: str
    alpha: float
    weights: tuple[float, ...]  # ξ; none for a rule that never skips
    within_tolerance: bool  # whether the wider region holds for the rule (``lag`` and ``lean``)
    is_published: bool  # whether it is one of the paper's lazy rules
    fills_missing: bool  # whether steps before the first round count as the mean of the others
    num_clients: int
    constants: Constants | None
    start: Curvature
    outside: tuple[str, ...]  # what the config does that the theory does not cover
    trace: LyapunovTrace | None = None  # along the run, if it was repeated
    end: Curvature | None = None  # at the model that the run ended with

    @property
    def weight_sum(self) -> float:
        return math.fsum(self.weights)

    @property
    def smoothness(self) -> float:
        """``L``; for a loss that is not convex, the curvature where the run starts."""
        return self.start.largest if self.constants is None else self.constants.smoothness

    @property
    def guaranteed(self) -> float:
        """The largest step size that Lemma 1 guarantees; 0 if there is none."""
        return theory.largest_step_size(self.weight_sum, self.smoothness)

    @property
    def guaranteed_within_tolerance(self) -> float | None:
        """The largest step size of the wider region; None where the rule is not of that kind."""
        if not self.within_tolerance:
            return None
        return theory.largest_step_size_within_tolerance(self.weight_sum, self.smoothness)

    @property
    def is_guaranteed(self) -> bool:
        """Whether the step size in use is inside a region that holds for the rule."""
        wider = self.guaranteed_within_tolerance
        return self.alpha < self.guaranteed or (wider is not None and self.alpha <= wider)

    @property
    def guaranteed_from_round(self) -> int | None:
        """The first round that the guarantee is for; None where there is no guarantee."""
        if not self.is_guaranteed:
            return None
        if not self.fills_missing:
            return 1
        early = theory.early_weight_sum(self.weights) + self.alpha * self.smoothness
        return 2 if self.within_tolerance and early <= 1 else len(self.weights) + 1

    @property
    def rate_bound(self) -> float | None:
        """The ``σ`` in ``V^{k+1} ≤ σ V^k`` that theory promises; None outside its regions."""
        if self.constants is None or not self.constants.strong_convexity:
            return None
        numbers = (self.alpha, self.weights, self.smoothness, self.constants.strong_convexity)
        wider = theory.contraction_within_tolerance(*numbers) if self.within_tolerance else None
        contraction = theory.contraction(*numbers)
        best = max(wider or 0.0, 0.0 if contraction is None else contraction.c)
        return 1 - best if best > 0 else None

    @property
    def fewest_bits(self) -> int | None:
        """How many bits Theorem 1 asks of every upload; None where it is not about the rule."""
        constants = self.constants
        if not self.is_published or constants is None or not constants.strong_convexity:
            return None
        return theory.fewest_bits_of_theorem_1(
            self.num_clients, constants.smoothness, constants.strong_convexity
        )

    def to_json(self) -> dict[str, Any]:
        constants = self.constants
        row: dict[str, Any] = {
            "recipe": self.recipe,
            "alpha": self.alpha,
            "weight_sum": self.weight_sum,
            "smoothness": constants.smoothness if constants else None,
            "strong_convexity": constants.strong_convexity if constants else None,
            "largest_curvature_at_start": self.start.largest,
            "smallest_curvature_at_start": _finite(self.start.smallest),
            "largest_guaranteed_alpha": self.guaranteed,
            "largest_guaranteed_alpha_within_tolerance": self.guaranteed_within_tolerance,
            "is_guaranteed": self.is_guaranteed,
            "guaranteed_from_round": self.guaranteed_from_round,
            "rate_bound": self.rate_bound,
            "fewest_bits_of_theorem_1": self.fewest_bits,
            "outside_the_theory": list(self.outside),
        }
        if self.trace is not None:
            row["lyapunov"] = {
                "rounds": len(self.trace.values),
                "rounds_above_rounding": self.trace.above_rounding,
                "decrease_share": _finite(self.trace.decrease_share),
                "fitted_rate": _finite(self.trace.fitted_rate),
            }
        if self.end is not None:
            row["largest_curvature_at_end"] = _finite(self.end.largest)
        return row


def advise(
    config: RunConfig,
    num_clients: int,
    landscape: Landscape,
    trace: LyapunovTrace | None = None,
    end: Curvature | None = None,
) -> Advice:
    recipe = make_recipe(config.recipe, config.bits, config.max_staleness)
    never_skips = isinstance(recipe.policy, Always)
    return Advice(
        recipe=config.recipe,
        alpha=config.alpha,
        weights=() if never_skips else widest_weights(recipe),
        within_tolerance=isinstance(recipe.policy, LazyExact | Tolerance),
        is_published=isinstance(recipe.policy, Lazy | TwoLevel | Multilevel),
        fills_missing=not never_skips and recipe.movement.fill == "mean",
        num_clients=num_clients,
        constants=landscape.constants,
        start=landscape.start,
        outside=_outside(config),
        trace=trace,
        end=end,
    )


def _outside(config: RunConfig) -> tuple[str, ...]:
    found = {
        f"clients drop out with probability {config.dropout:g}": config.dropout > 0,
        "clients have scripted absences": bool(config.absences),
        f"only {config.participation:.0%} of the clients are sampled": config.participation < 1,
        f"gradients are of batches of {config.batch_size}": config.batch_size is not None,
        "clients take several local steps": config.local_steps > 1
        or config.local_epochs is not None,
        f"the server's optimizer is {config.optimizer}": config.optimizer != "sgd",
    }
    return tuple(text for text, holds in found.items() if holds)


def sentences(advice: Advice) -> list[str]:
    lines = _about_the_problem(advice) + _about_the_step_size(advice)
    if advice.fewest_bits is not None:
        lines.append(
            "Theorem 1 adds quantization errors to the linear rate. Its conditions ask for uploads "
            f"of {advice.fewest_bits} bits or more here, and of three bits less than b_max at "
            "most: it promises nothing for this rule."
        )
    lines += [f"Not covered by the theory: {text}." for text in advice.outside]
    if advice.trace is not None:
        lines += _about_the_run(advice, advice.trace)
    return lines


def _about_the_problem(advice: Advice) -> list[str]:
    clients = advice.num_clients
    lines = [
        f"The server steps along a sum, so the theory is about the sum of {clients} losses, "
        f"{clients} times the loss that is reported."
    ]
    constants = advice.constants
    if constants is None:
        lines.append(
            "The loss is not convex: there is no global L to compute. Where the run starts, the "
            f"curvature lies between {advice.start.smallest:.3g} and {advice.start.largest:.3g}; "
            "the larger one stands in for L below, and nothing is guaranteed elsewhere."
        )
    else:
        lines.append(
            f"Smoothness L = {constants.smoothness:.4g} (largest curvature anywhere), strong "
            f"convexity μ = {constants.strong_convexity:.4g} (clients × l2), "
            f"L/μ = {constants.condition:,.0f}. Where the run starts, the largest curvature is "
            f"{advice.start.largest:.4g}; nearby, the edge of stability is "
            f"2/{advice.start.largest:.3g} = {2 / advice.start.largest:.3g}."
        )
    return lines


def _about_the_step_size(advice: Advice) -> list[str]:
    alpha, smoothness = advice.alpha, advice.smoothness
    product = alpha * smoothness
    where = "near the start" if advice.constants is None else "whatever model it is at"
    lines = [
        f"α is {alpha:g}, so αL = {product:.3g}. Gradient descent without any compression is "
        f"sure to descend up to 2/L = {2 / smoothness:.3g}, {where}."
    ]
    lemma = (
        f"Lemma 1 asks for Σξ + αL/2 < 1/6 (best ρ2 = 1/2, ρ1 → 0). Σξ is {advice.weight_sum:.3g}, "
    )
    if not advice.weights:
        lines.append(
            f"{advice.recipe} never skips: Lemma 1 guarantees descent, up to quantization errors, "
            f"for α below 1/(2L) = {advice.guaranteed:.3g}."
        )
    elif advice.guaranteed > 0:
        lines.append(
            f"{lemma}so α below {advice.guaranteed:.3g} is guaranteed to descend, up to "
            "quantization errors."
        )
    else:
        lines.append(
            f"{lemma}outside whatever α is: the paper's own setting, Σξ = 1, is outside its "
            "guarantee, and it converges in the paper's experiments anyway. With Σξ = 1/12, α "
            f"below {1 / (6 * smoothness):.3g} would be guaranteed."
        )
    wider = advice.guaranteed_within_tolerance
    if wider is not None:
        text = (
            "Since this rule keeps the server's copy within its tolerance, Σξ + αL ≤ 1 is enough: "
        )
        if wider > 0:
            text += f"α up to {wider:.3g}."
        else:
            half = 1 / (2 * smoothness)
            text += f"no α at Σξ = {advice.weight_sum:.3g}, only below 1; at 0.5 up to {half:.3g}"
            text += " (lean:xi=0.5)." if advice.recipe.split(":")[0] == "lean" else "."
        lines.append(text)
    verdict = "inside" if advice.is_guaranteed else "outside"
    text = f"The current α = {alpha:g} with Σξ = {advice.weight_sum:.3g} is {verdict}"
    first = advice.guaranteed_from_round
    if first is not None and first > 1:
        text += f", from round {first} on"
    lines.append(f"{text}.")
    if first is not None and first > 2:
        early = theory.early_weight_sum(advice.weights)
        lines.append(
            f"In the first {first - 1} rounds, missing steps count as the mean of the others. From "
            f"the second round on, {early:.3g} + αL ≤ 1 would be enough."
        )
    return lines


def _about_the_run(advice: Advice, trace: LyapunovTrace) -> list[str]:
    rounds = trace.above_rounding
    if rounds < 2:
        return ["The run is too short to follow the Lyapunov function."]
    if not trace.values[-1] < trace.values[0]:
        return [
            f"Along the run the Lyapunov function grew from {trace.values[0]:.3g} to "
            f"{trace.values[-1]:.3g} in {len(trace.values)} rounds: the run does not converge. "
            "Try a smaller α."
        ]
    lines = [
        f"Along the run the Lyapunov function went from {trace.values[0]:.3g} to "
        f"{trace.values[rounds - 1]:.3g} in {rounds} rounds (below that it is rounding), and did "
        f"not rise in {trace.decrease_share:.1%} of them."
    ]
    bound = advice.rate_bound
    fitted = trace.fitted_rate
    text = f"Fitted linear rate: V shrinks by a factor of {fitted:.5f} per round"
    if 0 < fitted < 1:
        text += f", to half in {np.log(2) / -np.log(fitted):.0f} rounds"
    if bound is not None:
        text += f". The theory promises {bound:.5f}"
    elif advice.constants is not None:
        linear = (1 - advice.alpha * advice.constants.strong_convexity) ** 2
        text += (
            f". No rate is promised out here; uncompressed gradient descent would shrink the "
            f"flattest direction there can be by (1 - αμ)² = {linear:.5f}"
        )
    lines.append(text + ".")
    if advice.end is not None and np.isfinite(advice.end.largest):
        largest = advice.end.largest
        lines.append(
            f"Where the run ended, the largest curvature is {largest:.4g}: near there, steps above "
            f"2/{largest:.4g} = {2 / largest:.3g} make gradient descent itself oscillate."
        )
    return lines


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
