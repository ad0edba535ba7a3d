"""The table of recipes, by name.

A recipe is made by a function of keyword options of its own, which can be set in the name, as in
``lean:eta=0.3``, and of the bit limit ``b_max`` if it has a parameter ``bits``. `register` adds one
to the table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

from aqg.core.auto import NOISE, WIDEST, make_auto
from aqg.core.field import FIELD
from aqg.core.grids import MAX_WIDTH, Grid
from aqg.core.movement import Movement
from aqg.core.policies import Always, Lazy, LazyExact, Multilevel, Policy, Tolerance, TwoLevel
from aqg.core.quantizers import MAX_BUCKET_BITS, Buckets, GridQuantizer, Sign, Stochastic, Verbatim
from aqg.core.recipe import DEPTH, Recipe
from aqg.core.stages import ErrorFeedback, StoredErrors, WiderTolerance
from aqg.core.track import Memory
from aqg.errors import ConfigError
from aqg.spec import make_named

Maker = Callable[..., Recipe]


@dataclass(frozen=True)
class Entry:
    """A row of the table."""

    name: str
    summary: str
    make: Maker

    @property
    def options(self) -> dict[str, float]:
        """The recipe's own options with their defaults."""
        parameters = inspect.signature(self.make).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


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
    if not 1 <= bits <= MAX_WIDTH:
        raise ConfigError(f"bits is {bits}; it must be in 1..{MAX_WIDTH}")
    entry = RECIPES.get(spec.partition(":")[0])
    given = [bits] if entry and "bits" in inspect.signature(entry.make).parameters else []
    makers = {name: RECIPES[name].make for name in sorted(RECIPES)}
    recipe: Recipe = make_named("recipe", spec, makers, *given)
    exact = recipe.exact
    if exact is not None:
        exact = replace(exact, max_staleness=max_staleness)
    return replace(recipe, max_staleness=max_staleness, exact=exact)


@register("gd", "gradient descent: every gradient in full, 32 bits (the baseline)")
def _gd() -> Recipe:
    return Recipe(memory=Memory.LATEST, policy=Always(32), quantizer=Verbatim(), downlink="full")


@register("fedavg", "federated averaging: the mean of the updates in full, 32 bits, no memory")
def _fedavg() -> Recipe:
    return Recipe(policy=Always(32), quantizer=Verbatim(), averages=True, downlink="full")


@register("lag", "lazily aggregated gradients: 32-bit innovations, sent only when they matter")
def _lag() -> Recipe:
    return Recipe(
        memory=Memory.INNOVATION, policy=LazyExact(), quantizer=Verbatim(), downlink="full"
    )


def _published(policy: Policy, bits: int, xi: float = 1.0) -> Recipe:
    """Make one of the paper's rules: innovations on the grid of LAQ's published code.

    ``xi`` is the sum of the weights ``ξ_d``, all equal; 1 in the paper.
    """
    return Recipe(
        memory=Memory.INNOVATION,
        policy=policy,
        quantizer=GridQuantizer(Grid.MIDRISE, bits),
        stages=(StoredErrors(bits),),
        movement=Movement((xi / DEPTH,) * DEPTH),
    )


@register("qgd", "quantized gradient descent: every innovation at b_max bits")
def _qgd(bits: int) -> Recipe:
    return _published(Always(bits), bits)


@register("laq", "lazily aggregated quantized gradients: b_max bits, or nothing")
def _laq(bits: int, *, xi: float = 1.0) -> Recipe:
    return _published(Lazy(), bits, xi)


@register("aqg", "the paper's multilevel AQG: 1 to b_max bits, or nothing")
def _aqg(bits: int, *, xi: float = 1.0) -> Recipe:
    return _published(Multilevel(), bits, xi)


@register("aqg-2", "the paper's two-level AQG: b_max bits, half of them, or nothing")
def _aqg_two_level(bits: int, *, xi: float = 1.0) -> Recipe:
    return _published(TwoLevel(), bits, xi)


@register("aqg-augmented", "two-level AQG with the sum amplified by 1/(1-p) against dropouts")
def _aqg_augmented(bits: int, *, xi: float = 1.0) -> Recipe:
    return replace(_published(TwoLevel(), bits, xi), amplify_dropouts=True)


@register("lean", "ours: the fewest bits that are good enough for the step, or nothing")
def _lean(bits: int, *, xi: float = 1.0, eta: float = 0.5, widest: float = 1.0) -> Recipe:
    return Recipe(
        memory=Memory.INNOVATION,
        policy=Tolerance(eta),
        quantizer=GridQuantizer(Grid.MIDTREAD, bits),
        stages=() if widest == 1 else (WiderTolerance(widest),),
        movement=Movement((xi / DEPTH,) * DEPTH, fill="mean"),
    )


@register("auto", "ours: lean for exact gradients, unbiased rounding for all other updates")
def _auto(bits: int, *, noise: float = NOISE) -> Recipe:
    return make_auto(_lean(bits, widest=WIDEST), noise)


@register("qsgd", "QSGD: unbiased stochastic rounding of every gradient, no memory")
def _qsgd(bits: int, *, bucket: float = 0) -> Recipe:
    if bits < 2:
        raise ConfigError(f"qsgd needs at least 2 bits, not {bits}: one sign and one level")
    if not bucket:
        return Recipe(policy=Always(bits), quantizer=Stochastic(), step="dog")
    if bucket != int(bucket) or bits > MAX_BUCKET_BITS:
        raise ConfigError(
            f"bucket is {bucket:g} with {bits} bits; it must be a whole number, with at most "
            f"{MAX_BUCKET_BITS} bits"
        )
    return Recipe(policy=Always(bits), quantizer=Buckets(int(bucket)), step="dog")


@register("signsgd", "SignSGD: the sign of every coordinate, no memory (wants a smaller alpha)")
def _signsgd() -> Recipe:
    return Recipe(policy=Always(1), quantizer=Sign(), step="dog")


@register("onebit", "1-bit SGD: sign and mean magnitude, with error feedback")
def _onebit() -> Recipe:
    quantizer = GridQuantizer(Grid.MIDTREAD, 1)
    return Recipe(policy=Always(1), quantizer=quantizer, stages=(ErrorFeedback(),), step="dog")


for _name, _summary, _make in FIELD:
    register(_name, _summary)(_make)
