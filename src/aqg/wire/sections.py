"""Streams of small symbols, each written as one section in the way that makes it shortest.

A section is one byte that says how (`Method`, scale and precision of the frequency table), a table,
and coded symbols; a table with a single symbol is all there is. Wide numbers are written as planes
of bytes, and planes as sections. Levels are shifted so that those around zero, which are most of
them, have one value of the upper plane. The bits of a float are rotated: one byte has the exponent;
its plane is compressible, the others seldom are.

A plane of `BLOCKED_LENGTH` symbols or more is cut into blocks of `BLOCK_LENGTH`, sections of their
own, so that several threads can work on one message.
"""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from aqg.core.grids import Grid, num_levels
from aqg.core.messages import Upload
from aqg.core.space import map_threads
from aqg.core.types import ByteArray, IntArray, Levels
from aqg.errors import WireError
from aqg.jit import njit
from aqg.wire import rans
from aqg.wire.bitpack import pack, packed_size, read_only, unpack
from aqg.wire.varint import Reader, write_part

Unsigned = TypeVar("Unsigned", np.uint16, np.uint32, np.uint64)
Float = TypeVar("Float", np.float16, np.float32)

MANY_LANES_BYTES = 1 << 14
"""Coded size from which eight lanes are used: their seven more states cost 0.2 % there."""
SHORTEST_CODED_BYTES = 1 + 1 + rans.STATE_BYTES
"""Of a section with two symbols or more: its first byte, a table, a coder state."""
FEW_SYMBOLS = 1 << 10
"""So many are counted before a thousand counters are cleared and added up."""
GROUPED_LENGTH = 1 << 18
"""Number of symbols from which grouping is tried."""
GROUPED_COST = 1 + 1 / 256
"""Grouping is faster; it may cost this much in size."""
BLOCKED_LENGTH = 1 << 21
BLOCK_LENGTH = 1 << 20
THREADED_LENGTH = 1 << 15
"""Messages with fewer symbols in all planes are coded before a thread has started."""


class Method(enum.IntEnum):
    PACKED = 0
    ONE_LANE = 1
    LANES = 2
    GROUPED = 3


class Alphabet(NamedTuple):
    """Symbols of ``width`` bits, all below ``size``; ``width`` is at most 8."""

    width: int
    size: int

    @property
    def group_length(self) -> int:
        return 8 // self.width

    @property
    def num_groups(self) -> int:
        return 1 << self.width * self.group_length


BYTES = Alphabet(width=8, size=256)
_Plan: TypeAlias = tuple[Method, ByteArray, rans.Table]
"""How to code a plane, what is coded of it, and the table of that."""


def encode_section(symbols: ByteArray, alphabet: Alphabet) -> bytes:
    """Write ``symbols``, all below ``alphabet.size``, as one section."""
    plan = _make_plan(symbols, alphabet)
    if plan is not None:
        method, chosen, table = plan
        head = method | table.scale_bits - rans.MIN_SCALE_BITS << 2 | table.precision << 5
        coded = bytes([head]) + rans.write_table(table)
        if not table.is_constant:
            coded += rans.encode_symbols(chosen, table, _num_lanes(method))
        if len(coded) <= packed_size(len(symbols), alphabet.width):
            return coded
    packed = symbols if alphabet.width == 8 else pack(symbols, alphabet.width)
    return bytes([Method.PACKED]) + packed.tobytes()


def _num_lanes(method: Method) -> int:
    return 1 if method is Method.ONE_LANE else rans.MANY_LANES


def decode_section(data: ByteArray, alphabet: Alphabet, symbols: ByteArray) -> None:
    """Fill ``symbols`` from a section that takes up all of ``data``.

    Symbols of a packed or grouped section may reach up to ``2^width - 1``.
    """
    if len(data) == 0:
        raise WireError("the frame ends where a section should start")
    head = int(data[0])
    method = Method(head & 3)
    if method is Method.PACKED:
        if head:
            raise WireError(f"a packed section starts with byte {head}; it must be 0")
        symbols[:] = unpack(data[1:], alphabet.width, len(symbols))
        return
    table, table_bytes = rans.read_table(
        data[1:],
        alphabet.num_groups if method is Method.GROUPED else alphabet.size,
        scale_bits=(head >> 2 & 7) + rans.MIN_SCALE_BITS,
        precision=head >> 5,
    )
    payload, coded = data[1 + table_bytes :], symbols
    if method is Method.GROUPED:
        coded = np.empty(-(-len(symbols) // alphabet.group_length), np.uint8)
    if not table.is_constant:
        rans.decode_symbols(payload, table, _num_lanes(method), coded)
    elif len(payload):
        raise WireError(f"{len(payload)} bytes follow a table with a single symbol")
    else:
        coded.fill(table.peak)
    if method is Method.GROUPED:
        _ungroup(coded, alphabet, symbols)


def _make_plan(symbols: ByteArray, alphabet: Alphabet) -> _Plan | None:
    """Choose how to code ``symbols``, or ``None`` where packing is at least as short."""
    packed_bits = 8 * packed_size(len(symbols), alphabet.width)
    if packed_bits < 8 * SHORTEST_CODED_BYTES and np.count_nonzero(symbols != symbols[:1]):
        return None
    symbols = read_only(symbols)
    counts = _count(symbols, alphabet.size)
    is_long = len(symbols) >= GROUPED_LENGTH and alphabet.group_length > 1
    if not is_long and rans.least_bits(counts) > packed_bits:
        return None
    table, bits = rans.choose_table(counts)
    method = Method.LANES if bits >= 8 * MANY_LANES_BYTES else Method.ONE_LANE
    if is_long and not table.is_constant:
        groups = read_only(_group(symbols, alphabet))
        group_table, group_bits = rans.choose_table(_count(groups, alphabet.num_groups))
        if group_bits <= bits * GROUPED_COST:
            return (Method.GROUPED, groups, group_table) if group_bits < packed_bits else None
    return (method, symbols, table) if bits < packed_bits else None


def _group(symbols: ByteArray, alphabet: Alphabet) -> ByteArray:
    """Put ``group_length`` symbols into each byte, the first lowest; fill up with zeros."""
    if 8 % alphabet.width == 0:
        return pack(symbols, alphabet.width)
    groups = symbols[::2].copy()
    odd = symbols[1::2]
    groups[: len(odd)] |= odd << alphabet.width
    return groups


def _ungroup(groups: ByteArray, alphabet: Alphabet, symbols: ByteArray) -> None:
    if 8 % alphabet.width == 0:
        symbols[:] = unpack(groups, alphabet.width, len(symbols))
        return
    symbols[::2] = groups & ((1 << alphabet.width) - 1)
    symbols[1::2] = groups[: len(symbols) // 2] >> alphabet.width
    if len(symbols) % 2 and int(groups[-1]) >> alphabet.width:
        raise WireError(f"the last group is {int(groups[-1])}; its unused bits must be zero")


def _count(symbols: ByteArray, num_symbols: int) -> IntArray:
    if len(symbols) <= FEW_SYMBOLS:
        return np.bincount(symbols, minlength=num_symbols)
    # Four counters per symbol: runs of one symbol do not wait for one counter.
    counts = np.zeros((4, 256), np.int64)
    _count_into(symbols, counts)
    total: IntArray = counts.sum(axis=0)
    return total[:num_symbols]


@njit()
def _count_into(symbols: ByteArray, counts: IntArray) -> None:
    whole = len(symbols) // 4 * 4
    for i in range(0, whole, 4):
        counts[0, symbols[i]] += 1
        counts[1, symbols[i + 1]] += 1
        counts[2, symbols[i + 2]] += 1
        counts[3, symbols[i + 3]] += 1
    for i in range(whole, len(symbols)):
        counts[0, symbols[i]] += 1


class Plane(NamedTuple):
    """One symbol per coordinate, all below ``alphabet.size``."""

    symbols: ByteArray
    alphabet: Alphabet


def level_alphabets(grid: Grid, width: int) -> list[Alphabet]:
    if width <= 8:
        return [Alphabet(width, num_levels(grid, width))]
    return [BYTES, Alphabet(width - 8, 1 << (width - 8))]


def split_levels(upload: Upload) -> list[Plane]:
    alphabets = level_alphabets(upload.grid, upload.width)
    if len(alphabets) == 1:
        return [Plane(upload.levels.astype(np.uint8, copy=False), alphabets[0])]
    shifted = upload.levels - np.uint16((1 << (upload.width - 1)) - 128)
    return split_bytes(shifted & np.uint16((1 << upload.width) - 1), alphabets)


def join_levels(planes: list[ByteArray], width: int) -> Levels:
    if len(planes) == 1:
        return planes[0]
    shifted = join_bytes(planes, np.uint16) + np.uint16((1 << (width - 1)) - 128)
    return shifted & np.uint16((1 << width) - 1)


def split_bytes(numbers: NDArray[Any], alphabets: Sequence[Alphabet]) -> list[Plane]:
    """Return one plane per byte, the lowest first."""
    shifts = map(numbers.dtype.type, range(0, 8 * len(alphabets), 8))
    return list(map(Plane, ((numbers >> s).astype(np.uint8) for s in shifts), alphabets))


def join_bytes(planes: list[ByteArray], kind: type[Unsigned]) -> NDArray[Unsigned]:
    numbers = planes[-1].astype(kind)
    for plane in planes[-2::-1]:
        numbers <<= kind(8)
        numbers |= plane
    return numbers


def split_floats(values: NDArray[np.floating[Any]]) -> list[Plane]:
    """Return the planes of half or single precision, after the sign has gone to the lowest bit."""
    bits = np.ascontiguousarray(values).view(f"u{values.itemsize}")
    kind = bits.dtype.type
    rotated = bits << kind(1) | bits >> kind(8 * values.itemsize - 1)
    return split_bytes(rotated, [BYTES] * values.itemsize)


def decode_floats(
    payload: ByteArray, kind: type[Float], length: int, threads: int | None
) -> NDArray[Float]:
    """Undo `split_floats` and `encode_planes`."""
    size = np.dtype(kind).itemsize
    unsigned: Any = np.uint16 if size == 2 else np.uint32
    rotated = join_bytes(decode_planes(payload, [BYTES] * size, length, threads), unsigned)
    bits = rotated >> unsigned(1) | rotated << unsigned(8 * size - 1)
    return bits.view(kind)


def encode_planes(planes: list[Plane], threads: int | None = None) -> bytes:
    """Write all planes, block by block."""
    pieces = _pieces(planes)
    threads = _useful_threads(planes, threads)
    sections = map_threads(lambda piece: encode_section(*piece), pieces, threads)
    if len(sections) == 1:
        return sections[0]
    return b"".join(map(write_part, sections))


def decode_planes(
    payload: ByteArray, alphabets: list[Alphabet], length: int, threads: int | None = None
) -> list[ByteArray]:
    """Return one plane of ``length`` symbols per alphabet; they may reach up to ``2^width - 1``."""
    planes = [Plane(np.empty(length, np.uint8), alphabet) for alphabet in alphabets]
    pieces, sections = _pieces(planes), [payload]
    if len(pieces) > 1:
        reader = Reader(payload)
        sections = [reader.part(f"section {index}") for index in range(len(pieces))]
        reader.finish("the last section")
    map_threads(
        lambda i: decode_section(sections[i], pieces[i].alphabet, pieces[i].symbols),
        range(len(pieces)),
        _useful_threads(planes, threads),
    )
    return [plane.symbols for plane in planes]


def _useful_threads(planes: list[Plane], threads: int | None) -> int | None:
    if len(planes) * len(planes[0].symbols) >= THREADED_LENGTH:
        return threads
    return 1 if threads is None else min(threads, 1)


def _pieces(planes: list[Plane]) -> list[Plane]:
    length = len(planes[0].symbols)
    if length < BLOCKED_LENGTH:
        return planes
    return [
        Plane(symbols[start : start + BLOCK_LENGTH], alphabet)
        for symbols, alphabet in planes
        for start in range(0, length, BLOCK_LENGTH)
    ]
