"""What server and client say to each other in a deployment, as plain fields.

An `Order` goes out with the model, or with the log that leads to it, and a `Reply` comes back;
reading one checks every bound.

As bytes, what the reader knows already is left out. An order has *terms*, the same in every round:
run, recipe, model, client. The first order of a run says them, later ones leave them out, and a
client that lacks them says so. A reply leaves out the state of the mirror that its order named.
``docs/reference/frame-format.md`` describes each byte.

Both sides hold the same mirror ``ref_m``, or find out and start again. Every state of a mirror has
a `Stamp`: an epoch, a count of uploads, and a digest of its content and history. An order carries
the stamp the server holds, and the client looks for it among what it has:

* its current state: the last upload arrived (or there was none), go on;
* the state before its last answer: the upload was lost, roll back as a whole;
* neither: start again from zero under a new epoch, and say so. The server takes the old ``ref_m``
  out of its sum in the same step in which it takes the new upload in.

The server recomputes the digest after every frame and takes nothing from a reply that does not
give the same, so a mirror that differs from its client's cannot live past the next contact.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias, get_type_hints

import numpy as np

from aqg.core.downlink import DIGEST_BYTES, STATE_DIGEST_BYTES, xor
from aqg.core.messages import Message, Skip, Upload
from aqg.core.recipe import SAMPLED, Recipe
from aqg.core.round import ClientState, init_client, respond
from aqg.core.server import Peer
from aqg.core.track import Track, follow, init_mirrors
from aqg.core.types import FloatArray
from aqg.errors import MessageError, WireError
from aqg.protocol.log import Holding, Parcel
from aqg.wire import decode, encode, known
from aqg.wire.varint import CRC_BYTES, Reader, seal, write_part, write_varint, write_zigzag

NO_STATE = bytes(STATE_DIGEST_BYTES)
"""Stands for the digest of a state where there is none."""
MAX_FAULT_LENGTH = 500


class Stamp(NamedTuple):
    """Names one state of one client's mirror."""

    epoch: int  # grows whenever the mirror starts again from zero; 0 at the first start
    uploads: int  # how many there were since then
    digest: bytes  # of the mirror's content and of every upload that led to it


def _in(low: float, high: float) -> tuple[Callable[[Any], bool], str]:
    return lambda value: low <= value <= high, f"{low} to {high}"


def _long(*lengths: int) -> tuple[Callable[[Any], bool], str]:
    return lambda value: len(value) in lengths, f"{' or '.join(map(str, lengths))} bytes long"


_STATES = ("digest", "base_digest", "held_digest")
_COUNTS = ("incarnation", "round", "client", "epoch", "uploads", "seed", "num_params")
_BOUNDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys((*_COUNTS, "num_samples", "held_round"), _in(0, 2**63 - 1)),
    **dict.fromkeys(_STATES, _long(STATE_DIGEST_BYTES)),
    "public": _long(0, STATE_DIGEST_BYTES),
    "fingerprint": _long(DIGEST_BYTES),
    "held_start": _long(0, DIGEST_BYTES),
    "noise": _in(0, 1e12),
    "work_seconds": _in(0, 1e9),
    "run": (lambda run: run.isalnum() and len(run) <= 64, "1 to 64 letters and digits"),
    "dtype": (lambda dtype: dtype in ("float32", "float64"), "float32 or float64"),
    **dict.fromkeys(
        ("fault", "lost"),
        (lambda text: len(text) <= MAX_FAULT_LENGTH, f"at most {MAX_FAULT_LENGTH} characters"),
    ),
}
"""What fields may be; the others may be anything of their type."""


class _Checked:
    """A message whose fields are within their bounds, and how its kind is written."""

    marks: ClassVar[tuple[int, int]]
    """The first byte of one that stands alone, and of one that leaves out what the reader knows."""
    payload: ClassVar[str]
    """The field at the end."""
    terms: ClassVar[tuple[str, ...]] = ()
    """Fields that are the same in every round."""
    optional: ClassVar[tuple[str, ...]]
    """Fields that are left out where they have their default, the most frequent first."""
    round: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            fits, bound = _BOUNDS.get(name, (None, ""))
            if fits is not None and not fits(value):
                raise MessageError(f"{name} is {repr(value)[:80]}; it must be {bound}")

    def to_bytes(self, known: Order | Stamp | None = None) -> bytes:
        """Write an order or a reply.

        ``known`` is what the reader has: of an order, an earlier one; of a reply, the stamp in its
        order.
        """
        terms = _write(self, self.terms)
        is_short = isinstance(known, Stamp) or (
            known is not None and _write(known, known.terms) == terms
        )
        defaults = _defaults(type(self), known if is_short else None)
        told = [
            name for name, default in defaults.items() if not _is_equal(_told(self, name), default)
        ]
        which = sum(1 << place for place, name in enumerate(defaults) if name in told)
        body = bytes([self.marks[is_short]]) + write_varint(which)
        if not is_short:
            body += terms
        body += _write(self, (*_HEAD, *told)) + getattr(self, self.payload)
        return seal(body, terms if is_short else b"")


@dataclass(frozen=True)
class Order(_Checked):
    """What one client receives in a round, beside the model."""

    marks: ClassVar = 0x83, 0x84
    payload: ClassVar = "log"
    terms: ClassVar = (
        *("run", "fingerprint", "recipe", "bits", "max_staleness", "seed", "num_params", "dtype"),
        *("client", "layout", "constants", "updates"),
    )
    optional: ClassVar = (
        *("uploads", "digest", "public", "noise", "movement", "statistics", "evaluate", "epoch"),
        *("snapshot", "first"),
    )

    run: str  # names the training run, across restarts of the server
    fingerprint: bytes  # of everything both sides must agree on (see `fingerprint`)
    recipe: str  # the recipe's name and options; empty where the client must bring its own
    bits: int  # ``b_max`` of the recipe
    max_staleness: int  # of the recipe
    seed: int  # of the run; with ``client`` and ``round`` it makes the key of all random draws
    num_params: int  # length of the model
    dtype: str  # of the model, ``"float32"`` or ``"float64"``
    incarnation: int  # grows with every start of the server; orders are counted by it and ``round``
    round: int  # ``k``, counted from 1
    client: int  # the index ``m`` under which the server knows this client
    evaluate: bool = False  # whether the model is to be measured and not trained
    movement: float = 0.0  # the scalar of `aqg.core.messages.Broadcast`
    epoch: int = 0  # of the mirror that the server holds for this client
    uploads: int = 0  # of that mirror
    digest: bytes = NO_STATE  # of that mirror
    # signature of the server's module (see `signature`); empty where it has none
    layout: bytes = b""
    constants: bytes = b""  # digest of what never travels of that module; empty where it has none
    # digest of the public model that the order is about; empty where the model itself comes with
    # the order
    public: bytes = b""
    log: bytes = b""  # the entries that lead there, as a frame
    # where they start, as a frame; empty where they start from what the client holds
    snapshot: bytes = b""
    statistics: bytes = b""  # of the server's module, as a frame; empty where none have changed
    noise: float = 1.0  # the scalar of `aqg.core.messages.Broadcast`
    updates: str = SAMPLED  # their kind, by which the recipe chooses: see `aqg.core.recipe`
    # what a client starts from that holds nothing (`aqg.channel.tensors`); empty where it holds a
    # model, or receives it as a whole
    first: bytes = b""

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

    def terms_of_run(self) -> Order:
        """Return what a client keeps of it to read later ones."""
        return replace(self, **_defaults(Order, None), log=b"", incarnation=0, round=0)

    @staticmethod
    def from_bytes(data: bytes, known: Iterable[Order] = ()) -> Order:
        """Return the order that `to_bytes` wrote; raise `WireError` or `MessageError` otherwise.

        ``known`` are earlier orders; where the terms of none belong to one that leaves them out,
        `UnknownTermsError` is raised.
        """
        reader, is_short = _open(Order, data)
        if not is_short:
            return Order(**_read(Order, reader, None))
        for order in known:
            if seal(data[:-CRC_BYTES], _write(order, Order.terms)) == data:
                return Order(**_read(Order, reader, order))
        reader.varint()
        raise UnknownTermsError(reader.varint(), reader.varint())

    def idle_reply(self, **said: Any) -> Reply:
        """Return the answer of a client that has moved no mirror."""
        said |= {"base_digest": self.digest, **self.stamp._asdict()}
        return Reply(incarnation=self.incarnation, round=self.round, **said)

    def stale_reply(self) -> Reply:
        return self.idle_reply(stale=True)

    def lost_reply(self, holding: Holding, why: str) -> Reply:
        """Return the answer of a client that cannot reach the model, and has done nothing."""
        return self.idle_reply(
            held_round=holding.round,
            held_digest=holding.digest,
            held_start=holding.start,
            lost=why[:MAX_FAULT_LENGTH] or "no reason",
        )


@dataclass(frozen=True)
class Reply(_Checked):
    """What a client answers."""

    marks: ClassVar = 0x92, 0x93
    payload: ClassVar = "frame"
    optional: ClassVar = (
        *("digest", "held_round", "loss", "num_samples", "work_seconds", "statistics", "uploads"),
        *("base_digest", "epoch", "restarted", "rolled_back", "stale", "fault", "lost"),
        *("held_digest", "held_start"),
    )

    incarnation: int  # of the order it answers
    round: int  # of the order it answers
    stale: bool = False  # whether the order was an old one, and nothing was done
    restarted: bool = False  # whether the client's mirror began again from zero before this frame
    rolled_back: bool = False  # whether the client took back an upload that had not arrived
    epoch: int = 0  # of the mirror that the frame is to be added to
    uploads: int = 0  # of that mirror
    base_digest: bytes = NO_STATE  # of that mirror
    digest: bytes = NO_STATE  # of the mirror after the frame
    frame: bytes = b""  # the message, encoded; empty where ``stale``
    # ``f_m(θ)`` at the model of the order; NaN where it was not measured
    loss: float = float("nan")
    num_samples: int = 0  # how many samples the client has
    fault: str = ""  # why nothing could be sent, or empty
    work_seconds: float = 0.0  # time the client spent on the order
    # of the client's model after training, encoded; empty where none changed
    statistics: bytes = b""
    held_round: int = 0  # the round whose public model the client holds; 0 where it has none
    held_digest: bytes = NO_STATE  # of that model; said where the client is ``lost``
    held_start: bytes = b""  # digest of the client's own starting model; said where it is ``lost``
    # why the client could not reach the model of the order, and did nothing; or empty
    lost: str = ""

    @property
    def base(self) -> Stamp:
        """The state of the mirror before the frame."""
        return Stamp(self.epoch, self.uploads, self.base_digest)

    @property
    def holding(self) -> Holding:
        """What the client says that it holds of the public model."""
        return Holding(self.held_round, self.held_digest, self.held_start)

    @staticmethod
    def from_bytes(data: bytes, stamp: Stamp | None = None) -> Reply:
        """Return the reply that `to_bytes` wrote; raise `WireError` or `MessageError` otherwise.

        ``stamp`` is what the order named, for a reply that leaves it out.
        """
        reader, is_short = _open(Reply, data)
        if is_short and stamp is None:
            raise WireError(
                "the reply leaves out the state that its order named, which is not here"
            )
        return Reply(**_read(Reply, reader, stamp if is_short else None))


NO_TERMS = "the terms of the run are not known here"
"""Why a client is lost that cannot read an order without terms."""

_HEAD = ("incarnation", "round")


def _read_bytes(reader: Reader) -> bytes:
    return reader.part("a field").tobytes()


def _read_text(reader: Reader) -> str:
    try:
        return _read_bytes(reader).decode()
    except UnicodeDecodeError:
        raise WireError("a text is not UTF-8") from None


def _read_truth(reader: Reader) -> bool:
    byte = reader.byte("a truth value")
    if byte > 1:
        raise WireError(f"a truth value is {byte}; it must be 0 or 1")
    return bool(byte)


def _write_float(value: float) -> bytes:
    """Write a number in as few bytes as lose nothing: bfloat16, single or double precision."""
    whole = struct.pack(">d", value)
    with suppress(OverflowError):
        single = struct.pack(">f", value)
        if struct.pack(">d", *struct.unpack(">f", single)) == whole:
            return b"\x04" + single if any(single[2:]) else b"\x02" + single[:2]
    return b"\x08" + whole


def _read_float(reader: Reader) -> float:
    size = reader.varint()
    if size not in (2, 4, 8):
        raise WireError(f"a number of {size} bytes; it has 2, 4 or 8")
    data = reader.take(size, "a number").tobytes()
    (value,) = struct.unpack(">d", data) if size == 8 else struct.unpack(">f", data.ljust(4, b"\0"))
    return float(value)


_Codec: TypeAlias = "tuple[Callable[[Any], bytes], Callable[[Reader], Any]]"
_CODECS: dict[type[Any], _Codec] = {
    int: (write_varint, Reader.varint),
    bool: (lambda value: bytes([value]), _read_truth),
    float: (_write_float, _read_float),
    str: (lambda value: write_part(value.encode()), _read_text),
    bytes: (write_part, _read_bytes),
}
_OWN_CODECS: dict[str, _Codec] = {
    **dict.fromkeys(
        _STATES, (bytes, lambda reader: reader.take(STATE_DIGEST_BYTES, "a digest").tobytes())
    ),
    "held_round": (write_zigzag, Reader.zigzag),
}


_FIELDS: dict[type[Any], dict[str, _Codec]] = {
    kind: {n: _CODECS[hint] for n, hint in get_type_hints(kind).items() if hint in _CODECS}
    | _OWN_CODECS
    for kind in (Order, Reply)
}
"""What writes and reads each field."""


class UnknownTermsError(WireError):
    """An order leaves out terms that are not known here."""

    def __init__(self, incarnation: int, round_number: int) -> None:
        super().__init__(NO_TERMS)
        self._serial = incarnation, round_number

    def reply(self, start: bytes = b"") -> Reply:
        """Return the answer, so that the terms are sent; ``start`` is the digest of one's own."""
        return Reply(*self._serial, held_start=start, lost=NO_TERMS)


def _defaults(kind: type[_Checked], known: Order | Stamp | None) -> dict[str, Any]:
    """Return what stands for fields that are left out."""
    defaults = {name: getattr(kind, name) for name in kind.optional}
    if isinstance(known, Stamp):
        defaults |= known._asdict() | {"base_digest": known.digest}
    return defaults


def _told(message: _Checked, name: str) -> Any:
    """Return a field as it is written: the round held less that of the order, mostly 0."""
    value = getattr(message, name)
    return message.round - value if name == "held_round" else value


def _is_equal(value: Any, default: Any) -> bool:
    return bool(value == default or (value != value and default != default))  # NaN


def _write(message: _Checked, names: Iterable[str]) -> bytes:
    codecs = _FIELDS[type(message)]
    return b"".join(codecs[name][0](_told(message, name)) for name in names)


def _open(kind: type[Order | Reply], data: bytes) -> tuple[Reader, bool]:
    """Return what reads a message behind its first byte, and whether it leaves something out.

    The checksum of an order that does is left to those who know what.
    """
    name = kind.__name__.lower()
    if len(data) <= CRC_BYTES:
        raise WireError(f"{len(data)} bytes are too few for an {name} or a reply")
    if data[0] not in kind.marks:
        raise WireError(f"byte {data[0]:#04x} does not begin the {name} of this version of aqg")
    is_short = data[0] == kind.marks[1]
    if not (is_short and kind is Order) and seal(data[:-CRC_BYTES]) != data:
        raise WireError(f"the checksum of the {name} is wrong: it is damaged")
    return Reader(data[1:-CRC_BYTES], f"the {name}"), is_short


def _read(kind: type[Order | Reply], reader: Reader, known: Order | Stamp | None) -> dict[str, Any]:
    """Return the fields of a message."""
    codecs, values, which = _FIELDS[kind], _defaults(kind, known), reader.varint()
    if which >> len(kind.optional):
        raise WireError(f"the {kind.__name__.lower()} has fields that this version does not know")
    told = [name for place, name in enumerate(kind.optional) if which >> place & 1]
    if isinstance(known, Order):
        values |= {name: getattr(known, name) for name in kind.terms}
    said = (*(() if known else kind.terms), *_HEAD, *told)
    values |= {name: codecs[name][1](reader) for name in said}
    if kind is Reply:
        values["held_round"] = values["round"] - values["held_round"]
    return {**values, kind.payload: reader.rest().tobytes()}


PROTOCOL_VERSION = 1
NO_LAYOUT = bytes(DIGEST_BYTES)
EPOCH_DRAWS = 2**32
"""How many epochs a client that starts again chooses from, beginning with the server's next."""
_FRAME_MARGIN = 1024
"""More than any frame needs around its payload."""


def fingerprint(
    recipe: Recipe, num_params: int, dtype: str, seed: int, layout: bytes = NO_LAYOUT
) -> bytes:
    """Return a digest of everything both sides must have alike, one of the tensors included."""
    text = f"{PROTOCOL_VERSION}|{recipe!r}|{num_params}|{dtype}|{seed}"
    return xor(hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest(), layout)


def max_frame_bytes(num_params: int) -> int:
    """Return the length of the longest frame that can be valid: 32 bits per parameter, raw."""
    return 4 * num_params + _FRAME_MARGIN


def content_digest(lineage: bytes, track: Track) -> bytes:
    """Return the digest of a link: of how it came to be, and of every bit it consists of."""
    digest = hashlib.blake2b(key=lineage, digest_size=STATE_DIGEST_BYTES)
    mirror = track.position
    digest.update(np.ascontiguousarray(mirror, mirror.dtype.newbyteorder("<")).data)
    digest.update(np.ascontiguousarray(track.direction).data)
    return digest.digest()


def first_stamp(epoch: int, track: Track) -> tuple[Stamp, bytes]:
    """Return stamp and lineage of a link that begins with an epoch."""
    lineage = hashlib.blake2b(b"zero %d" % epoch, digest_size=DIGEST_BYTES).digest()
    return Stamp(epoch, 0, content_digest(lineage, track)), lineage


def after_upload(stamp: Stamp, frame: bytes, track: Track) -> tuple[Stamp, bytes]:
    """Return stamp and lineage of a link that a frame has moved, the same on both sides."""
    lineage = hashlib.blake2b(frame, key=stamp.digest, digest_size=DIGEST_BYTES).digest()
    return Stamp(stamp.epoch, stamp.uploads + 1, content_digest(lineage, track)), lineage


class Snapshot(NamedTuple):
    """All that a client carries from round to round, at one moment."""

    state: ClientState  # the client's state, with its end of the link
    lineage: bytes  # of the mirror
    stamp: Stamp  # of the mirror

    @staticmethod
    def zero(recipe: Recipe, num_params: int, dtype: str, epoch: int = 0) -> Snapshot:
        state = init_client(recipe, num_params, np.dtype(dtype))
        stamp, lineage = first_stamp(epoch, state.track)
        return Snapshot(state, lineage, stamp)

    @property
    def is_intact(self) -> bool:
        return content_digest(self.lineage, self.state.track) == self.stamp.digest


class ClientMirror(NamedTuple):
    """A client's memory: where it is, where it was before its last answer, and which that was."""

    current: Snapshot  # the state after the last answer
    before: Snapshot | None = None  # the state before it; None before the first
    answered: tuple[int, int] = (0, 0)  # `Order.serial` of the last order answered

    @staticmethod
    def first(recipe: Recipe, num_params: int, dtype: str) -> ClientMirror:
        return ClientMirror(Snapshot.zero(recipe, num_params, dtype))


class Base(NamedTuple):
    """The state from which an order is answered, and how it was found."""

    snapshot: Snapshot
    restarted: bool = False
    rolled_back: bool = False

    def answer(
        self, recipe: Recipe, order: Order, gradient: FloatArray, loss: float = float("nan")
    ) -> tuple[ClientMirror, Reply]:
        """Take the client's step from here and return its memory and the reply.

        The ``loss`` is for a recipe's schedule; what the reply only reports is left to the caller.
        """
        old = self.snapshot
        key = (order.seed, order.client, order.round)
        state, message = respond(
            recipe, old.state, gradient, order.movement, key, loss, noise=order.noise
        )
        frame = encode(message, known=known(old.state.track))
        if isinstance(message, Skip):
            new = old._replace(state=state)
        else:
            stamp, lineage = after_upload(old.stamp, frame, state.track)
            new = Snapshot(state, lineage, stamp)
        fault = (message.fault or "") if isinstance(message, Skip) else ""
        reply = Reply(
            *order.serial,
            restarted=self.restarted,
            rolled_back=self.rolled_back,
            epoch=old.stamp.epoch,
            uploads=old.stamp.uploads,
            base_digest=old.stamp.digest,
            digest=new.stamp.digest,
            frame=frame,
            fault=fault[:MAX_FAULT_LENGTH],
            held_round=order.round if order.public else 0,
        )
        return ClientMirror(new, old, order.serial), reply


def find_base(recipe: Recipe, mirror: ClientMirror, order: Order, draw: int) -> Base | None:
    """Return the state that matches the server's; None where the order is an old one.

    ``draw`` is a random number below `EPOCH_DRAWS`, by which a new epoch is beyond the server's
    next: later than every epoch the server knew, and unlike any that it may have forgotten.
    """
    if order.serial <= mirror.answered:
        return None
    # The same round again, by a restarted server: undo also an answer that moved no mirror.
    repeated = order.round == mirror.answered[1]
    if mirror.before is not None and repeated and mirror.before.stamp == order.stamp:
        return Base(mirror.before, rolled_back=mirror.current.stamp != order.stamp)
    if mirror.current.stamp == order.stamp:
        return Base(mirror.current)
    if mirror.before is not None and mirror.before.stamp == order.stamp:
        return Base(mirror.before, rolled_back=True)
    zero = Snapshot.zero(recipe, order.num_params, order.dtype, order.epoch + 1 + draw)
    return Base(zero, restarted=True)


class Held(NamedTuple):
    """What the server holds of one client beside its end of the link."""

    stamp: Stamp  # of the mirror
    lineage: bytes  # of the mirror
    last_upload: int = 0  # the round in which the last upload was taken; 0 before the first


def first_peer(recipe: Recipe, num_params: int, dtype: str, epoch: int = 0) -> Peer:
    track = init_mirrors(recipe.memory, num_params, np.dtype(dtype))
    return Peer(track, held=Held(*first_stamp(epoch, track)))


def take_reply(
    recipe: Recipe, peer: Peer, reply: Reply, num_params: int, dtype: str
) -> tuple[Peer, Message]:
    """Return the peer after a reply, and its message; raise where it does not fit the mirror."""
    most = max_frame_bytes(num_params)
    if len(reply.frame) > most:
        raise MessageError(
            f"the frame has {len(reply.frame)} bytes; {most} are the most for "
            f"{num_params} parameters"
        )
    if reply.restarted:
        epoch = peer.held.stamp.epoch
        if reply.uploads != 0 or not epoch < reply.epoch <= epoch + EPOCH_DRAWS:
            raise MessageError(
                f"a restart at upload {reply.uploads} of epoch {reply.epoch}; it must be at "
                f"upload 0 of an epoch after {epoch}, {epoch + EPOCH_DRAWS} at the most"
            )
        peer = first_peer(recipe, num_params, dtype, reply.epoch)
    stamp = peer.held.stamp
    if reply.base != stamp:
        raise MessageError(
            f"the frame is for upload {reply.uploads} of epoch {reply.epoch}, digest "
            f"{reply.base_digest.hex()}; the mirror is at {stamp.uploads} of {stamp.epoch}, "
            f"{stamp.digest.hex()}"
        )
    message = decode(reply.frame, num_params, known=known(peer.track))
    if not isinstance(message, Skip):
        message.validate()
        with np.errstate(over="ignore", invalid="ignore"):  # looked at below
            track = follow(peer.track, message, memory=recipe.memory)
        if not np.isfinite(track.position).all():
            raise MessageError("the mirror would hold NaN or infinity after the frame")
        stamp, lineage = after_upload(stamp, reply.frame, track)
        peer = peer._replace(track=track, held=peer.held._replace(stamp=stamp, lineage=lineage))
    if reply.digest != peer.held.stamp.digest:
        raise MessageError(
            f"the mirror after the frame has digest {peer.held.stamp.digest.hex()}; "
            f"the client says {reply.digest.hex()}"
        )
    return peer, message


def update_of(recipe: Recipe, peer: Peer, message: Message, num_params: int) -> FloatArray | Upload:
    """Return the update that a reply stands for: what was sent, or the mirror."""
    mirror = peer.track.position
    if recipe.memory.keeps_mirror:
        return mirror[0]
    if isinstance(message, Skip):
        return np.zeros(num_params, mirror.dtype)
    return message if isinstance(message, Upload) else message.values(mirror.dtype.type)
