"""What server and client say to each other in a deployment, as plain fields.

An `Order` goes out with the model, or with the log that leads to it, and a `Reply` comes back. Both
travel as a flat mapping of names to integers, floats, texts and bytes; reading one checks every
name, type and bound.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Self, get_type_hints

from aqg.errors import MessageError
from aqg.protocol.digests import DIGEST_BYTES, STATE_DIGEST_BYTES
from aqg.protocol.follower import Holding, Parcel

if TYPE_CHECKING:
    from collections.abc import Mapping

Field = int | float | str | bytes | bool

MAX_FAULT_LENGTH = 500
_MAX_INTEGER = 2**63 - 1
_MAX_SECONDS = 1e9
_MAX_NOISE = 1e12


class Stamp(NamedTuple):
    """Names one state of one client's mirror.

    Attributes:
        epoch: grows whenever the mirror starts again from zero; 0 at the first start.
        uploads: how many there were since then.
        digest: of the mirror's content and of every upload that led to it.

    """

    epoch: int
    uploads: int
    digest: bytes


class _Fields:
    """Reading and writing of flat mappings, for dataclasses of plain values."""

    def to_fields(self) -> dict[str, Field]:
        """Return names and values."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]  # every user is a dataclass

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Self:
        """Return the message that `to_fields` wrote; raise `MessageError` on anything else."""
        types = get_type_hints(cls)
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        missing = [name for name in names if name not in values]
        unknown = sorted(str(name) for name in values if name not in types)
        if missing or unknown:
            raise MessageError(
                f"the fields of {cls.__name__} differ: missing {missing}, unknown {unknown[:5]}"
            )
        for name in names:
            if type(values[name]) is not types[name]:
                raise MessageError(
                    f"{name} is {type(values[name]).__name__}, not {types[name].__name__}"
                )
        return cls(**{name: values[name] for name in names})


@dataclass(frozen=True)
class Order(_Fields):
    """What one client receives in a round, beside the model.

    Attributes:
        run: names the training run, across restarts of the server.
        fingerprint: of everything both sides must agree on (see `fingerprint`).
        recipe: the recipe's name and options; empty where the client must bring its own.
        bits: ``b_max`` of the recipe.
        max_staleness: of the recipe.
        seed: of the run; with ``client`` and ``round`` it makes the key of all random draws.
        num_params: length of the model.
        dtype: of the model, ``"float32"`` or ``"float64"``.
        incarnation: grows with every start of the server; orders are counted by it and ``round``.
        round: ``k``, counted from 1.
        client: the index ``m`` under which the server knows this client.
        movement: the scalar of `aqg.core.messages.Broadcast`.
        epoch: of the mirror that the server holds for this client.
        uploads: of that mirror.
        digest: of that mirror.
        evaluate: whether the loss of the model is wanted.
        layout: signature of the server's module (see `signature`); empty where it has none.
        constants: digest of what never travels of that module; empty where it has none.
        public: digest of the public model that the order is about; empty where the model itself
            comes with the order.
        log: the entries that lead there, as a frame.
        snapshot: where they start, as a frame; empty where they start from what the client holds.
        statistics: of the server's module, as a frame; empty where none have changed.
        noise: the scalar of `aqg.core.messages.Broadcast`.
        exact: whether updates are gradients over all of a client's samples, without noise.

    """

    run: str
    fingerprint: bytes
    recipe: str
    bits: int
    max_staleness: int
    seed: int
    num_params: int
    dtype: str
    incarnation: int
    round: int
    client: int
    movement: float
    epoch: int
    uploads: int
    digest: bytes
    evaluate: bool
    layout: bytes = b""
    constants: bytes = b""
    public: bytes = b""
    log: bytes = b""
    snapshot: bytes = b""
    statistics: bytes = b""
    noise: float = 1.0
    exact: bool = False

    def __post_init__(self) -> None:
        _require_state("digest", self.digest)
        _require_digest("fingerprint", self.fingerprint)
        if not 0 <= self.noise <= _MAX_NOISE:
            raise MessageError(f"noise is {self.noise}; it must be in 0..{_MAX_NOISE:g}")
        if self.public:
            _require_state("public", self.public)
        for name in ("incarnation", "round", "client", "epoch", "uploads", "seed", "num_params"):
            _require_range(name, getattr(self, name))
        if not self.run or not self.run.isalnum() or len(self.run) > 64:
            raise MessageError(f"run {self.run[:80]!r} is not 1 to 64 letters and digits")
        if self.dtype not in ("float32", "float64"):
            raise MessageError(f"dtype {self.dtype[:80]!r} is not float32 or float64")

    @property
    def stamp(self) -> Stamp:
        """The state of the mirror that the server holds."""
        return Stamp(self.epoch, self.uploads, self.digest)

    @property
    def serial(self) -> tuple[int, int]:
        """Orders of one run, in the order they were given."""
        return self.incarnation, self.round

    @property
    def parcel(self) -> Parcel | None:
        """What leads to the model; None where the model itself comes with the order."""
        if not self.public:
            return None
        return Parcel(self.round, self.public, self.log, self.snapshot)


@dataclass(frozen=True)
class Reply(_Fields):
    """What a client answers.

    Attributes:
        incarnation: of the order it answers.
        round: of the order it answers.
        stale: whether the order was an old one, and nothing was done.
        restarted: whether the client's mirror began again from zero before this frame.
        rolled_back: whether the client took back an upload that had not arrived.
        epoch: of the mirror that the frame is to be added to.
        uploads: of that mirror.
        base_digest: of that mirror.
        digest: of the mirror after the frame.
        frame: the message, encoded; empty where ``stale``.
        loss: ``f_m(θ)`` at the model of the order; NaN where it was not measured.
        num_samples: how many samples the client has.
        fault: why nothing could be sent, or empty.
        work_seconds: time the client spent on the order.
        statistics: of the client's model after training, encoded; empty where none changed.
        held_round: the round whose public model the client holds; 0 where it has none.
        held_digest: of that model; said where the client is ``lost``.
        held_start: digest of the client's own starting model; said where it is ``lost``.
        lost: why the client could not reach the model of the order, and did nothing; or empty.

    """

    incarnation: int
    round: int
    stale: bool
    restarted: bool
    rolled_back: bool
    epoch: int
    uploads: int
    base_digest: bytes
    digest: bytes
    frame: bytes
    loss: float
    num_samples: int
    fault: str
    work_seconds: float
    statistics: bytes = b""
    held_round: int = 0
    held_digest: bytes = bytes(STATE_DIGEST_BYTES)
    held_start: bytes = b""
    lost: str = ""

    def __post_init__(self) -> None:
        _require_state("base_digest", self.base_digest)
        _require_state("digest", self.digest)
        _require_state("held_digest", self.held_digest)
        if self.held_start:
            _require_digest("held_start", self.held_start)
        for name in ("incarnation", "round", "epoch", "uploads", "num_samples", "held_round"):
            _require_range(name, getattr(self, name))
        if not 0 <= self.work_seconds <= _MAX_SECONDS:
            raise MessageError(f"work_seconds is {self.work_seconds}; it must be 0 to 1e9")
        for name in ("fault", "lost"):
            length = len(getattr(self, name))
            if length > MAX_FAULT_LENGTH:
                raise MessageError(
                    f"{name} has {length} characters; at most {MAX_FAULT_LENGTH} are taken"
                )

    @property
    def base(self) -> Stamp:
        """The state of the mirror before the frame."""
        return Stamp(self.epoch, self.uploads, self.base_digest)

    @property
    def holding(self) -> Holding:
        """What the client says that it holds of the public model."""
        return Holding(self.held_round, self.held_digest, self.held_start)


def _require_digest(name: str, value: bytes, length: int = DIGEST_BYTES) -> None:
    if len(value) != length:
        raise MessageError(f"{name} has {len(value)} bytes; it must have {length}")


def _require_state(name: str, value: bytes) -> None:
    _require_digest(name, value, STATE_DIGEST_BYTES)


def _require_range(name: str, value: int) -> None:
    if not 0 <= value <= _MAX_INTEGER:
        raise MessageError(f"{name} is {value}; it must be 0 to {_MAX_INTEGER}")
