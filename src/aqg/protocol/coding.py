"""Orders and replies as bytes: what the reader knows already is left out.

An order has *terms*, the same in every round: run, recipe, model, client. The first order of a run
says them, later ones leave them out, and a client that lacks them says so. A reply leaves out the
state of the mirror that its order named.

====================== =====================================================================
byte 0                 0x83 order, 0x84 order without terms, 0x92 reply, 0x93 reply to a stamp
which                  a varint: bit ``i`` says that optional field ``i`` follows
fields                 terms, incarnation, round, and those optional fields: integers as varints,
                       truths as a byte, numbers as 2, 4 or 8 bytes behind their count, texts
                       (UTF-8) and bytes behind their length, digests of states without
payload                the log or the frame: the rest
last four bytes        CRC-32 of all before, in an order without terms of these and all before
====================== =====================================================================
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_type_hints

from aqg.errors import WireError
from aqg.protocol.digests import STATE_DIGEST_BYTES
from aqg.protocol.messages import Order, Reply, Stamp
from aqg.wire.varint import read_varint, write_varint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_Message = TypeVar("_Message", Order, Reply)

NO_TERMS = "the terms of the run are not known here"
"""Why a client is lost that cannot read an order without terms."""

_CRC_BYTES = 4
_HEAD = ("incarnation", "round")
_TERMS = (
    "run",
    "fingerprint",
    "recipe",
    "bits",
    "max_staleness",
    "seed",
    "num_params",
    "dtype",
    "client",
    "evaluate",
    "layout",
    "constants",
    "exact",
)


class _Form(NamedTuple):
    """How a kind of message is written: marks, optional fields, most frequent first, and payload.

    Attributes:
        full: the first byte of one that stands alone.
        short: of one that leaves out what the reader knows.
        optional: fields and their defaults.
        payload: the field at the end.

    """

    full: int
    short: int
    optional: dict[str, Any]
    payload: str


_ZERO = bytes(STATE_DIGEST_BYTES)
_NAN = float("nan")
_FORMS: dict[type[Any], _Form] = {
    Order: _Form(
        0x83,
        0x84,
        {
            "uploads": 0,
            "digest": _ZERO,
            "public": b"",
            "noise": 1.0,
            "movement": 0.0,
            "epoch": 0,
            "snapshot": b"",
            "statistics": b"",
        },
        "log",
    ),
    Reply: _Form(
        0x92,
        0x93,
        {
            "digest": _ZERO,
            "held_round": 0,
            "loss": _NAN,
            "num_samples": 0,
            "work_seconds": 0.0,
            "statistics": b"",
            "uploads": 0,
            "base_digest": _ZERO,
            "epoch": 0,
            "restarted": False,
            "rolled_back": False,
            "stale": False,
            "fault": "",
            "lost": "",
            "held_digest": _ZERO,
            "held_start": b"",
        },
        "frame",
    ),
}
_STATES = ("digest", "base_digest", "held_digest")


class UnknownTermsError(WireError):
    """An order leaves out terms that are not known here."""

    def __init__(self, incarnation: int, round_number: int) -> None:
        super().__init__(NO_TERMS)
        self._serial = incarnation, round_number

    def reply(self, start: bytes = b"") -> Reply:
        """Return the answer, so that the terms are sent; ``start`` is the digest of one's own."""
        return Reply(
            *self._serial, False, False, False, 0, 0, _ZERO, _ZERO, b"", _NAN, 0, "", 0.0,
            held_start=start, lost=NO_TERMS,
        )  # fmt: skip


def terms_of_run(order: Order) -> Order:
    """Return what a client keeps of an order to read later ones."""
    form = _FORMS[Order]
    blank: dict[str, Any] = {**form.optional, form.payload: b"", "incarnation": 0, "round": 0}
    return replace(order, **blank)


def to_bytes(message: Order | Reply, known: Order | Stamp | None = None) -> bytes:
    """Write an order or a reply.

    Args:
        message: to write.
        known: what the reader has: of an order, an earlier one; of a reply, the stamp in its order.

    """
    form, types = _FORMS[type(message)], get_type_hints(type(message))
    terms = _write(message, _TERMS, types) if isinstance(message, Order) else b""
    is_short = known is not None and (
        isinstance(known, Stamp) or _write(known, _TERMS, types) == terms
    )
    defaults = _defaults(form, known if is_short else None)
    told = [
        name for name, default in defaults.items() if not _is_equal(_told(message, name), default)
    ]
    which = sum(1 << place for place, name in enumerate(defaults) if name in told)
    body = bytes([form.short if is_short else form.full]) + write_varint(which)
    if not is_short:
        body += terms
    head = b"".join(write_varint(getattr(message, name)) for name in _HEAD)
    rest = b"".join(_field(types, name)[0](_told(message, name)) for name in told)
    payload: bytes = getattr(message, form.payload)
    body += head + rest + payload
    key = zlib.crc32(terms) if is_short else 0
    return body + zlib.crc32(body, key).to_bytes(_CRC_BYTES, "little")


def order_from_bytes(data: bytes, known: Iterable[Order] = ()) -> Order:
    """Return the order that `to_bytes` wrote; raise `WireError` or `MessageError` otherwise.

    ``known`` are earlier orders; where the terms of none belong to one that leaves them out,
    `UnknownTermsError` is raised.
    """
    body, is_short = _open(Order, data, is_checked=False)
    if not is_short:
        _check(Order, data)
        return _read(Order, body, None)
    types = get_type_hints(Order)
    crc = int.from_bytes(data[-_CRC_BYTES:], "little")
    for order in known:
        if zlib.crc32(body, zlib.crc32(_write(order, _TERMS, types))) == crc:
            return _read(Order, body, order)
    _, position = read_varint(body, 1)
    incarnation, position = read_varint(body, position)
    raise UnknownTermsError(incarnation, read_varint(body, position)[0])


def reply_from_bytes(data: bytes, stamp: Stamp | None = None) -> Reply:
    """Return the reply that `to_bytes` wrote; raise `WireError` or `MessageError` otherwise.

    ``stamp`` is what the order named, for a reply that leaves it out.
    """
    body, is_short = _open(Reply, data)
    if is_short and stamp is None:
        raise WireError("the reply leaves out the state that its order named, which is not here")
    return _read(Reply, body, stamp if is_short else None)


def _defaults(form: _Form, known: Order | Stamp | None) -> dict[str, Any]:
    if not isinstance(known, Stamp):
        return form.optional
    stamp = {"epoch": known.epoch, "uploads": known.uploads, "base_digest": known.digest}
    return form.optional | stamp | {"digest": known.digest}


def _told(message: Order | Reply, name: str) -> Any:
    """Return a field as it is written: the round held less that of the order, mostly 0."""
    value = getattr(message, name)
    if name != "held_round":
        return value
    ahead = message.round - value
    return 0 if value == message.round else 2 * ahead if ahead > 0 else -2 * ahead - 1


def _is_equal(value: Any, default: Any) -> bool:
    return bool(value == default or (value != value and default != default))  # NaN


def _write(message: Any, names: Iterable[str], types: dict[str, Any]) -> bytes:
    return b"".join(_WRITERS[types[name]](getattr(message, name)) for name in names)


def _field(types: dict[str, Any], name: str) -> tuple[Callable[[Any], bytes], Callable[..., Any]]:
    if name in _STATES:
        return (lambda value: value), _read_state
    return _WRITERS[types[name]], _READERS[types[name]]


def _open(kind: type[Any], data: bytes, is_checked: bool = True) -> tuple[bytes, bool]:
    form, name = _FORMS[kind], kind.__name__.lower()
    if len(data) <= _CRC_BYTES:
        raise WireError(f"{len(data)} bytes are too few for an {name} or a reply")
    if data[0] not in (form.full, form.short):
        raise WireError(f"byte {data[0]:#04x} does not begin the {name} of this version of aqg")
    if is_checked:
        _check(kind, data)
    return data[:-_CRC_BYTES], data[0] == form.short


def _check(kind: type[Any], data: bytes) -> None:
    if zlib.crc32(data[:-_CRC_BYTES]).to_bytes(_CRC_BYTES, "little") != data[-_CRC_BYTES:]:
        raise WireError(f"the checksum of the {kind.__name__.lower()} is wrong: it is damaged")


def _read(kind: type[_Message], body: bytes, known: Order | Stamp | None) -> _Message:
    form, types = _FORMS[kind], get_type_hints(kind)
    defaults = _defaults(form, known)
    which, position = read_varint(body, 1)
    if which >> len(defaults):
        raise WireError(f"the {kind.__name__.lower()} has fields that this version does not know")
    values: dict[str, Any] = dict(defaults)
    if kind is Order and known is None:
        for name in _TERMS:
            values[name], position = _READERS[types[name]](body, position)
    elif kind is Order:
        values |= {name: getattr(known, name) for name in _TERMS}
    for name in _HEAD:
        values[name], position = read_varint(body, position)
    for place, name in enumerate(defaults):
        if which >> place & 1:
            values[name], position = _field(types, name)[1](body, position)
    if kind is Reply:
        code = values["held_round"]
        values["held_round"] = values["round"] - (code // 2 if code % 2 == 0 else -(code + 1) // 2)
    values[form.payload] = body[position:]
    return kind.from_fields({field.name: values[field.name] for field in fields(kind)})


def _write_bytes(value: bytes) -> bytes:
    return write_varint(len(value)) + value


def _read_bytes(body: bytes, position: int) -> tuple[bytes, int]:
    length, position = read_varint(body, position)
    return _take(body, position, length)


def _read_state(body: bytes, position: int) -> tuple[bytes, int]:
    return _take(body, position, STATE_DIGEST_BYTES)


def _take(body: bytes, position: int, length: int) -> tuple[bytes, int]:
    if length > len(body) - position:
        raise WireError(f"a field claims {length} bytes; {len(body) - position} are left")
    return body[position : position + length], position + length


def _read_text(body: bytes, position: int) -> tuple[str, int]:
    data, position = _read_bytes(body, position)
    try:
        return data.decode(), position
    except UnicodeDecodeError:
        raise WireError(f"the text that ends at byte {position} is not UTF-8") from None


def _read_truth(body: bytes, position: int) -> tuple[bool, int]:
    if position >= len(body) or body[position] > 1:
        raise WireError(f"byte {position} is not 0 or 1")
    return bool(body[position]), position + 1


def _write_float(value: float) -> bytes:
    """Write a number in as few bytes as lose nothing: bfloat16, single or double precision."""
    whole = struct.pack(">d", value)
    try:
        single = struct.pack(">f", value)
    except OverflowError:
        return b"\x08" + whole
    if struct.pack(">d", *struct.unpack(">f", single)) != whole:
        return b"\x08" + whole
    return b"\x04" + single if any(single[2:]) else b"\x02" + single[:2]


def _read_float(body: bytes, position: int) -> tuple[float, int]:
    size, position = read_varint(body, position)
    if size not in (2, 4, 8):
        raise WireError(f"a number of {size} bytes; it has 2, 4 or 8")
    data, position = _take(body, position, size)
    (value,) = struct.unpack(">d", data) if size == 8 else struct.unpack(">f", data.ljust(4, b"\0"))
    return value, position


_WRITERS: dict[type[Any], Callable[[Any], bytes]] = {
    int: write_varint,
    bool: lambda value: bytes([value]),
    float: _write_float,
    str: lambda value: _write_bytes(value.encode()),
    bytes: _write_bytes,
}
_READERS: dict[type[Any], Callable[[bytes, int], tuple[Any, int]]] = {
    int: read_varint,
    bool: _read_truth,
    float: _read_float,
    str: _read_text,
    bytes: _read_bytes,
}
