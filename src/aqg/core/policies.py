"""Rules that decide whether a client uploads, and with how many bits.

Every rule is a pure function of the innovation's statistics and one number from the server, with
any leading client axes: the same code decides for one client and for a thousand.

With ``Δ`` the innovation, ``ε_b`` its error at ``b`` bits and ``ε̂_b`` the errors stored at the last
upload, the paper's criterion (its equation 5) for width ``b`` is ``‖Q_bmax(Δ)‖² ≥ T_b``, with

    ``T_b = movement + 3 (‖ε̂_{b_max-b+1}‖² + ‖ε_{b_max-b+1}‖²)``.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from aqg.core.grids import Innovation
from aqg.core.types import BoolArray, Float64Array, IntArray
from aqg.errors import ConfigError, require


class Decision(NamedTuple):
    """Whether to send, and the width to send with (also where a stale client must)."""

    send: BoolArray
    width: IntArray


class Case(NamedTuple):
    """What a rule decides by."""

    innovation: Innovation  # statistics of what each client would send
    # the number to compare with, one for all clients or one for each
    movement: float | Float64Array
    # ``‖ε̂_b‖²``, where the recipe keeps them (`aqg.core.stages.StoredErrors`); else None
    stored_errors: Float64Array | None = None


class Policy(Protocol):
    """A rule; see the module's text."""

    def decide(self, case: Case) -> Decision:
        """Decide for every client on the leading axes; errors are on the last axis."""


def thresholds(case: Case) -> Float64Array:
    """Return the paper's ``T_b`` for ``b = 1..b_max`` on the last axis (equation 5)."""
    if case.stored_errors is None:
        raise ConfigError("the paper's criterion needs the stage StoredErrors in the recipe")
    # T_b uses the errors of width b_max - b + 1: the list of widths, read backwards.
    errors = case.stored_errors + case.innovation.errors
    return np.asarray(case.movement)[..., None] + 3.0 * errors[..., ::-1]


def _passes(case: Case) -> BoolArray:
    return case.innovation.quantized_norm[..., None] >= thresholds(case)


@dataclass(frozen=True)
class Always:
    """Send every round at one width (GD, QGD and the memoryless quantizers)."""

    width: int

    def decide(self, case: Case) -> Decision:
        shape = case.innovation.squared_norm.shape
        return Decision(np.ones(shape, np.bool_), np.full(shape, self.width))


@dataclass(frozen=True)
class LazyExact:
    """LAG: send the exact innovation, in 32 bits, when ``‖Δ‖² ≥ movement``."""

    def decide(self, case: Case) -> Decision:
        send = np.asarray(case.innovation.squared_norm >= case.movement)
        return Decision(send, np.full(send.shape, 32))


@dataclass(frozen=True)
class LazyOwn:
    """CLAG's trigger: send when ``‖v - ref_m‖² > ζ·movement``.

    The movement is the client's own, ``‖v^k - v^{k-1}‖²`` (`aqg.core.stages.OwnMovement`).
    """

    zeta: float
    width: int

    def __post_init__(self) -> None:
        require(0 <= self.zeta < np.inf, "zeta", self.zeta, "at least 0 and finite")

    def decide(self, case: Case) -> Decision:
        send = np.asarray(case.innovation.squared_norm > self.zeta * np.asarray(case.movement))
        return Decision(send, np.full(send.shape, self.width))


@dataclass(frozen=True)
class Lazy:
    """LAQ: send ``b_max`` bits when ``‖Q_bmax(Δ)‖² ≥ T_1`` (equation 4 of the paper)."""

    def decide(self, case: Case) -> Decision:
        passes = _passes(case)
        max_width = passes.shape[-1]
        return Decision(passes[..., 0], np.full(passes.shape[:-1], max_width))


@dataclass(frozen=True)
class Multilevel:
    """AQG: among the widths whose criterion holds, the largest (Algorithm 1)."""

    def decide(self, case: Case) -> Decision:
        """Scan ``b = b_max .. 1``; a stale client with none that holds sends one bit."""
        passes = _passes(case)
        widths = np.arange(1, passes.shape[-1] + 1)
        return Decision(passes[..., 0], np.where(passes, widths, 1).max(axis=-1))


@dataclass(frozen=True)
class TwoLevel:
    """Two-level AQG: ``b_max`` bits where its criterion holds, else ``⌈b_max/2⌉``."""

    def decide(self, case: Case) -> Decision:
        passes = _passes(case)
        max_width = passes.shape[-1]
        width = np.where(passes[..., -1], max_width, (max_width + 1) // 2)
        return Decision(passes[..., 0], width)


@dataclass(frozen=True)
class Tolerance:
    """Lean: skip while ``‖Δ‖² ≤ t``, else the fewest bits with ``‖ε_b‖² ≤ η·t``.

    ``t`` is the movement: an error in the gradient that small is lost in the step being taken
    anyway. When no width reaches ``η·t``, ``b_max`` is sent.
    """

    eta: float = 0.5

    def decide(self, case: Case) -> Decision:
        tolerance = np.asarray(case.movement)
        is_enough = case.innovation.errors <= self.eta * tolerance[..., None]
        is_enough[..., -1] = True
        send = np.asarray(case.innovation.squared_norm > tolerance)
        return Decision(send, np.asarray(is_enough.argmax(axis=-1) + 1))


@dataclass(frozen=True)
class ScheduledWidth:
    """Send every round, ``q`` levels of either sign that a `aqg.core.stages.LossSchedule` gives."""

    def decide(self, case: Case) -> Decision:
        shape = case.innovation.squared_norm.shape
        lengths = np.frexp(case.movement)[1]  # of ``q`` in bits
        return Decision(np.ones(shape, np.bool_), np.full(shape, lengths + 1, np.int64))


@dataclass(frozen=True)
class AquilaPolicy:
    """Send when ``‖Q_b(Δ)‖² + ‖ε_b‖² > β·movement``, with the one width that was measured.

    In AQUILA's paper the server takes ``α/M`` times the sum: the movement is that of one step.
    """

    def decide(self, case: Case) -> Decision:
        innovation = case.innovation
        error = innovation.errors.min(axis=-1)
        send = np.asarray(innovation.quantized_norm + error > case.movement)
        return Decision(send, innovation.errors.argmin(axis=-1) + 1)
