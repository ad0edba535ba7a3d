"""The table of recipes, by name.

A recipe is made by a function of keyword options of its own, which can be set in the name, as in
``lean:eta=0.3``, and of the bit limit ``b_max`` if it has a parameter ``bits``. `register` adds one
to the table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from aqg.core import policies, quantizers, stages
from aqg.core.auto import NOISE, SHARE, WIDEST, make_auto
from aqg.core.grids import MAX_WIDTH, Grid
from aqg.core.messages import WIDTHS
from aqg.core.policies import Always, Policy
from aqg.core.quantizers import GridQuantizer, Quantizer, TopK, Verbatim
from aqg.core.recipe import Movement, Recipe, even_movement
from aqg.core.stages import ErrorFeedback, Stage
from aqg.core.track import Memory
from aqg.errors import ConfigError, require
from aqg.spec import defaults, make_named

Maker = Callable[..., Recipe]


@dataclass(frozen=True)
class Entry:
    """A row of the table."""

    name: str
    summary: str
    make: Maker

    @property
    def options(self) -> dict[str, float]:
        return defaults(self.make)


RECIPES: dict[str, Entry] = {}


def register(name: str, summary: str) -> Callable[[Maker], Maker]:
    """Add a recipe under ``name``: decorates ``make(*, option=default)``, or ``make(bits, …)``."""
    if not name or set(name) & set(":,= "):
        raise ConfigError(
            f"recipe name {name!r} must be non-empty, without ':', ',', '=' and blanks"
        )

    def add(make: Maker) -> Maker:
        if name in RECIPES and RECIPES[name].make.__qualname__ != make.__qualname__:
            raise ConfigError(f"a recipe named {name!r} exists already")
        RECIPES[name] = Entry(name, summary, make)
        return make

    return add


def make_recipe(spec: str, bits: int = 4, max_staleness: int = 100) -> Recipe:
    """Make a recipe from its name and options.

    >>> make_recipe("lean:eta=0.3").policy
    Tolerance(eta=0.3)
    """
    require(1 <= bits <= MAX_WIDTH, "bits", bits, f"in 1..{MAX_WIDTH}")
    entry = RECIPES.get(spec.partition(":")[0])
    given = [bits] if entry and "bits" in inspect.signature(entry.make).parameters else []
    makers = {name: RECIPES[name].make for name in sorted(RECIPES)}
    recipe: Recipe = make_named("recipe", spec, makers, *given)
    others = recipe.exact, recipe.steady
    exact, steady = (other and replace(other, max_staleness=max_staleness) for other in others)
    return replace(recipe, max_staleness=max_staleness, exact=exact, steady=steady)


# The menu. A recipe names what clients send, which is a policy, a quantizer and what goes before
# it; what the server publishes, ``downlink``, condensed where nothing is said; and how long its
# steps are, ``step``. `_innovations` and `_updates` are the two kinds of memory.


def _innovations(policy: Policy, quantizer: Quantizer, *before: Stage, **parts: Any) -> Recipe:
    """Send what both ends add to a mirror; steps are as they are given."""
    memory = Memory.INNOVATION
    return Recipe(memory=memory, policy=policy, quantizer=quantizer, stages=before, **parts)


def _updates(policy: Policy, quantizer: Quantizer, *before: Stage) -> Recipe:
    """Send updates, each for its round alone; steps are found by DoG where these are noisy."""
    return Recipe(policy=policy, quantizer=quantizer, stages=before, step="dog")


@register("gd", "gradient descent: every gradient in full, 32 bits (the baseline)")
def _gd() -> Recipe:
    return Recipe(memory=Memory.LATEST, policy=Always(32), quantizer=Verbatim(), downlink="full")


@register("fedavg", "federated averaging: the mean of the updates in full, 32 bits, no memory")
def _fedavg() -> Recipe:
    return Recipe(policy=Always(32), quantizer=Verbatim(), averages=True, downlink="full")


@register("lag", "lazily aggregated gradients: 32-bit innovations, sent only when they matter")
def _lag() -> Recipe:
    return _innovations(policies.LazyExact(), Verbatim(), downlink="full")


def _published(policy: Policy, bits: int, xi: float = 1.0) -> Recipe:
    """Make one of the paper's rules: innovations on the grid of LAQ's published code.

    ``xi`` is the sum of the weights ``ξ_d``, all equal; 1 in the paper.
    """
    grid, errors = GridQuantizer(Grid.MIDRISE, bits), stages.StoredErrors(bits)
    return _innovations(policy, grid, errors, movement=even_movement(xi))


@register("qgd", "quantized gradient descent: every innovation at b_max bits")
def _qgd(bits: int) -> Recipe:
    return _published(Always(bits), bits)


@register("laq", "lazily aggregated quantized gradients: b_max bits, or nothing")
def _laq(bits: int, *, xi: float = 1.0) -> Recipe:
    return _published(policies.Lazy(), bits, xi)


@register("aqg", "the paper's multilevel AQG: 1 to b_max bits, or nothing")
def _aqg(bits: int, *, xi: float = 1.0) -> Recipe:
    return _published(policies.Multilevel(), bits, xi)


@register("aqg-2", "the paper's two-level AQG: b_max bits, half of them, or nothing")
def _aqg_two_level(bits: int, *, xi: float = 1.0) -> Recipe:
    return _published(policies.TwoLevel(), bits, xi)


@register("aqg-augmented", "two-level AQG with the sum amplified by 1/(1-p) against dropouts")
def _aqg_augmented(bits: int, *, xi: float = 1.0) -> Recipe:
    return replace(_aqg_two_level(bits, xi=xi), amplify_dropouts=True)


@register("lean", "ours: the fewest bits that are good enough for the step, or nothing")
def _lean(bits: int, *, xi: float = 1.0, eta: float = 0.5, widest: float = 1.0) -> Recipe:
    policy, grid = policies.Tolerance(eta), GridQuantizer(Grid.MIDTREAD, bits)
    wider = () if widest == 1 else (stages.WiderTolerance(widest),)
    return _innovations(policy, grid, *wider, movement=even_movement(xi, fill="mean"))


@register("auto", "ours: by how clients train, lean, most of the energy, or unbiased rounding")
def _auto(bits: int, *, share: float = SHARE, noise: float = NOISE) -> Recipe:
    return make_auto(_lean(bits, widest=WIDEST), share, noise)


@register("qsgd", "QSGD: unbiased stochastic rounding of every gradient, no memory")
def _qsgd(bits: int, *, bucket: int = 0) -> Recipe:
    if bits < 2:
        raise ConfigError(f"qsgd needs at least 2 bits, not {bits}: one sign and one level")
    if not bucket:
        return _updates(Always(bits), quantizers.Stochastic())
    most = quantizers.MAX_BUCKET_BITS
    require(bits <= most, "bits", bits, f"at most {most} with buckets")
    return _updates(Always(bits), quantizers.Blockwise(bucket))


@register("signsgd", "SignSGD: the sign of every coordinate, no memory (wants a smaller alpha)")
def _signsgd() -> Recipe:
    return _updates(Always(1), quantizers.Sign())


@register("onebit", "1-bit SGD: sign and mean magnitude, with error feedback")
def _onebit() -> Recipe:
    return _updates(Always(1), GridQuantizer(Grid.MIDTREAD, 1), ErrorFeedback())


# The field: published compressors, to compare with. ``docs/reference/recipes.md`` lists the
# formulas, and where a reading of a paper had to be chosen.


@register("fp16", "every gradient in half precision, no memory")
def _fp16() -> Recipe:
    return _updates(Always(16), quantizers.Half())


@register("blockwise8", "8 bits and a step for every 256 coordinates, no memory")
def _blockwise8() -> Recipe:
    return _updates(Always(8), quantizers.Blockwise())


@register("stc", "STC: the signs of the largest and their mean magnitude, error feedback")
def _stc(*, keep: float = 0.01) -> Recipe:
    return _updates(Always(2), quantizers.SparseTernary(keep), ErrorFeedback())


@register("stc-both", "STC, and the server sends the same share of its sum, as published")
def _stc_both(*, keep: float = 0.01) -> Recipe:
    return replace(_stc(keep=keep), downlink=f"condensed:keep={keep}")


@register("topk", "the largest coordinates in half precision, with error feedback")
def _topk(*, keep: float = 0.01) -> Recipe:
    return _updates(Always(16), TopK(keep), ErrorFeedback())


@register("dgc", "DGC: the largest coordinates of a sum with momentum, which stays with the rest")
def _dgc(*, keep: float = 0.01, momentum: float = 0.9) -> Recipe:
    return _updates(Always(16), TopK(keep), stages.MomentumCorrection(momentum))


@register("ef21", "EF21: the largest coordinates of every innovation")
def _ef21(*, keep: float = 0.01) -> Recipe:
    """Richtárik et al., EF21: A New, Simpler, Theoretically Better Error Feedback."""
    return _innovations(Always(16), TopK(keep))


@register("ef21-both", "EF21-BC: EF21, and the server condenses its sum to the same share")
def _ef21_both(*, keep: float = 0.01) -> Recipe:
    """Fatkhullin et al., EF21 with Bells & Whistles: EF21-BC, compressed in both directions."""
    return _innovations(Always(16), TopK(keep), downlink=f"condensed:keep={keep}")


@register("econtrol", "EControl: EF21 with a share of the error added, for noisy updates")
def _econtrol(*, keep: float = 0.01, eta: float = 0.1) -> Recipe:
    return _innovations(Always(16), TopK(keep), ErrorFeedback(eta))


@register("ef21-m", "EF21 on a running average of the client's gradients")
def _ef21_momentum(*, keep: float = 0.01, eta: float = 0.1) -> Recipe:
    """Fatkhullin et al., Momentum Provably Improves Error Feedback!."""
    average = (stages.RunningAverage(eta),) if eta != 1 else ()
    return _innovations(Always(16), TopK(keep), *average)


@register("clag", "CLAG: EF21, skips while the gap is small against its own movement")
def _clag(*, keep: float = 0.01, zeta: float = 1.0) -> Recipe:
    """Richtárik et al., 3PC: Three Point Compressors for Communication-Efficient Training."""
    return _innovations(policies.LazyOwn(zeta, width=16), TopK(keep), stages.OwnMovement())


@register("fedpaq", "FedPAQ: QSGD's quantizer with a number of levels, no memory")
def _fedpaq(*, levels: int = 4) -> Recipe:
    """Reisizadeh et al., FedPAQ; its quantizer is that of Alistarh et al., QSGD."""
    largest = (1 << (MAX_WIDTH - 1)) - 1
    require(1 <= levels <= largest, "levels", levels, f"in 1..{largest}")
    return _updates(Always(levels.bit_length() + 1), quantizers.Stochastic(levels))


@register("eden", "EDEN: the signs of the randomly rotated gradient, no memory")
def _eden(*, unbiased: int = 1, width: float = 1) -> Recipe:
    """Vargaftik et al., EDEN; with ``unbiased=0`` the scale of DRIVE's least error.

    A width below one is the share of the coordinates that are sent, with one bit each.
    """
    require(unbiased in (0, 1), "unbiased", unbiased, "0 or 1")
    known = ", ".join(map(str, WIDTHS))
    require(0 < width < 1 or width in WIDTHS, "width", width, f"one of {known}, or in (0, 1)")
    quantizer = quantizers.Rotated(bool(unbiased), share=min(width, 1.0))
    return _updates(Always(max(1, int(width))), quantizer)


@register("aquila", "AQUILA: a width from the innovation's shape, or nothing")
def _aquila(*, beta: float = 0.1) -> Recipe:
    policy, quantizer = policies.AquilaPolicy(), quantizers.AquilaQuantizer()
    return _innovations(policy, quantizer, movement=Movement((beta,)))


@register("dadaquant", "DAdaQuant: QSGD, levels double when the loss stalls")
def _dadaquant(*, q: int = 1, phi: int = 50, psi: float = 0.9) -> Recipe:
    """Hönig et al., DAdaQuant: Doubly-adaptive Quantization for Federated Learning."""
    schedule = stages.LossSchedule(q, phi, psi)
    quantizer = quantizers.Stochastic(is_scheduled=True)
    return _updates(policies.ScheduledWidth(), quantizer, schedule)


FROM_MEMORY = frozenset({"aquila"})
"""Recipes that were written down from memory, without their paper's text."""
