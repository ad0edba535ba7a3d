"""The field: published compressors as recipes, to compare with.

Each maker takes the parameters that its paper has. ``docs/reference/recipes.md`` lists the
formulas, and where a reading of a paper had to be chosen.
"""

from __future__ import annotations

from dataclasses import replace

from aqg.core.aquila import AquilaPolicy, AquilaQuantizer
from aqg.core.grids import MAX_WIDTH
from aqg.core.movement import Movement
from aqg.core.policies import Always, LazyOwn, StageWidth
from aqg.core.quantizers import Blockwise, Half, QsgdAtWidth, Rotated, Stochastic
from aqg.core.recipe import Recipe
from aqg.core.rotation import WIDTHS
from aqg.core.sparsifiers import SparseTernary, TopK
from aqg.core.stages import (
    DoublingLevels,
    ErrorControl,
    ErrorFeedback,
    LossSchedule,
    OwnMovement,
    RunningAverage,
)
from aqg.core.track import Memory
from aqg.errors import ConfigError


def fp16() -> Recipe:
    """IEEE 754 half precision, as in Micikevicius et al., Mixed Precision Training."""
    return Recipe(policy=Always(16), quantizer=Half(), step="dog")


def blockwise8() -> Recipe:
    """Dettmers et al., 8-bit Optimizers via Block-wise Quantization."""
    return Recipe(policy=Always(8), quantizer=Blockwise(), step="dog")


def stc(*, keep: float = 0.01) -> Recipe:
    """Sattler et al., Robust and Communication-Efficient Federated Learning from Non-IID Data."""
    quantizer = SparseTernary(keep)
    return Recipe(policy=Always(2), quantizer=quantizer, stages=(ErrorFeedback(),), step="dog")


def stc_both(*, keep: float = 0.01) -> Recipe:
    """Sattler et al., as published: the server condenses its sum in the same way."""
    return replace(stc(keep=keep), downlink=f"condensed:keep={keep}")


def topk(*, keep: float = 0.01) -> Recipe:
    """Stich et al., Sparsified SGD with Memory; Aji & Heafield, Sparse Communication."""
    return Recipe(policy=Always(16), quantizer=TopK(keep), stages=(ErrorFeedback(),), step="dog")


def ef21(*, keep: float = 0.01) -> Recipe:
    """Richtárik et al., EF21: A New, Simpler, Theoretically Better Error Feedback."""
    return Recipe(memory=Memory.INNOVATION, policy=Always(16), quantizer=TopK(keep))


def ef21_both(*, keep: float = 0.01) -> Recipe:
    """Fatkhullin et al., EF21 with Bells & Whistles: EF21-BC, compressed in both directions."""
    return replace(ef21(keep=keep), downlink=f"condensed:keep={keep}")


def econtrol(*, keep: float = 0.01, eta: float = 0.1) -> Recipe:
    """Gao et al., EControl: Fast Distributed Optimization with Compression and Error Control."""
    return replace(ef21(keep=keep), stages=(ErrorControl(eta),))


def ef21_momentum(*, keep: float = 0.01, eta: float = 0.1) -> Recipe:
    """Fatkhullin et al., Momentum Provably Improves Error Feedback!."""
    return replace(ef21(keep=keep), stages=(RunningAverage(eta),) if eta != 1 else ())


def clag(*, keep: float = 0.01, zeta: float = 1.0) -> Recipe:
    """Richtárik et al., 3PC: Three Point Compressors for Communication-Efficient Training."""
    return Recipe(
        memory=Memory.INNOVATION,
        policy=LazyOwn(zeta, width=16),
        quantizer=TopK(keep),
        stages=(OwnMovement(),),
    )


def fedpaq(*, levels: float = 4) -> Recipe:
    """Reisizadeh et al., FedPAQ; its quantizer is that of Alistarh et al., QSGD."""
    largest = (1 << (MAX_WIDTH - 1)) - 1
    if not 1 <= levels <= largest or levels != int(levels):
        raise ConfigError(f"levels is {levels}; it must be a whole number in 1..{largest}")
    quantizer = Stochastic(int(levels))
    width = int(levels).bit_length() + 1
    return Recipe(policy=Always(width), quantizer=quantizer, step="dog")


def eden(*, unbiased: float = 1, width: float = 1) -> Recipe:
    """Vargaftik et al., EDEN; with ``unbiased=0`` the scale of DRIVE's least error."""
    if unbiased not in (0, 1):
        raise ConfigError(f"unbiased is {unbiased}; it must be 0 or 1")
    if width not in WIDTHS:
        raise ConfigError(f"width is {width:g}; it must be one of {', '.join(map(str, WIDTHS))}")
    return Recipe(policy=Always(int(width)), quantizer=Rotated(bool(unbiased)), step="dog")


def aquila(*, beta: float = 0.1) -> Recipe:
    """Zhao et al., AQUILA."""
    return Recipe(
        memory=Memory.INNOVATION,
        policy=AquilaPolicy(),
        quantizer=AquilaQuantizer(),
        movement=Movement((beta,)),
    )


def dadaquant(*, q: float = 1, phi: float = 50, psi: float = 0.9) -> Recipe:
    """Hönig et al., DAdaQuant: Doubly-adaptive Quantization for Federated Learning."""
    for name, value in (("q", q), ("phi", phi)):
        if not float(value).is_integer():
            raise ConfigError(f"{name} is {value}; it must be a whole number")
    return Recipe(
        policy=StageWidth(),
        quantizer=QsgdAtWidth(),
        stages=(LossSchedule(DoublingLevels(int(q), int(phi), psi)),),
        step="dog",
    )


FIELD = (
    ("fp16", "every gradient in half precision, no memory", fp16),
    ("blockwise8", "8 bits and a step for every 256 coordinates, no memory", blockwise8),
    ("stc", "STC: the signs of the largest and their mean magnitude, error feedback", stc),
    ("stc-both", "STC, and the server sends the same share of its sum, as published", stc_both),
    ("topk", "the largest coordinates in half precision, with error feedback", topk),
    ("ef21", "EF21: the largest coordinates of every innovation", ef21),
    ("ef21-both", "EF21-BC: EF21, and the server condenses its sum to the same share", ef21_both),
    ("econtrol", "EControl: EF21 with a share of the error added, for noisy updates", econtrol),
    ("ef21-m", "EF21 on a running average of the client's gradients", ef21_momentum),
    ("clag", "CLAG: EF21, skips while the gap is small against its own movement", clag),
    ("fedpaq", "FedPAQ: QSGD's quantizer with a number of levels, no memory", fedpaq),
    ("eden", "EDEN: the signs of the randomly rotated gradient, no memory", eden),
    ("aquila", "AQUILA: a width from the innovation's shape, or nothing", aquila),
    ("dadaquant", "DAdaQuant: QSGD, levels double when the loss stalls", dadaquant),
)
"""Name, summary and maker of each."""

FROM_MEMORY = frozenset({"aquila"})
"""Recipes that were written down from memory, without their paper's text."""
