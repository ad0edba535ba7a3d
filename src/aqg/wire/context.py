"""Context coding: below the zero-order entropy, by what is known of the neighbors.

Gradients have structure that a table of symbol frequencies cannot see: a weight changes much like
the weight of the same output for the next input, and like the one a picture row above. Both are
*lags* in the flat vector, which the encoder finds by autocorrelation and writes in front:

::

    near        varint: one neighbor is ``near`` symbols back (10 for the weights of a 784→10 layer)
    ratio       varint: another is ``far = near·ratio`` symbols back (ratio 28: rows of 28 pixels)
    then        the bytes of the range coder

Drawn as a picture whose columns are ``near`` apart and whose rows are ``far`` apart, a symbol ``x``
is coded knowing these, and the four symbols before it in the flat vector:

::

                north-west   north   north-east
    west-west   west         x

A level ``q`` stands for ``v = 2q - (num_symbols - 1)``: it has the magnitude ``|v| >> 1``, coded
first, in unary, and a sign. Magnitudes of 8 and more share buckets, two to the octave, and the bits
within a bucket follow one by one. No table is sent: a short message pays only for what the model
learns from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aqg.errors import WireError
from aqg.wire.context_model import code_symbols, fresh_model
from aqg.wire.lags import MAX_NEAR, MAX_RATIO, find_lags
from aqg.wire.varint import read_varint, varint_size, write_varint

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Levels = NDArray[np.uint8] | NDArray[np.uint16]

MAX_SYMBOLS = 1 << 16
LONGEST = 1 << 20
"""No frame has more levels than this in context coding: it is thorough, and slow."""


def require_short(count: int) -> None:
    """Refuse a frame that claims more levels in context coding than any encoder writes."""
    if count > LONGEST:
        raise WireError(f"{count} levels in context coding; {LONGEST} are the most")


def encode(levels: Levels, num_symbols: int, *, hints: NDArray[np.int8] | None = None) -> bytes:
    """Code ``levels``, each below ``num_symbols``; their number is not part of the payload.

    ``hints``, one per level, tell what both ends know beforehand: any classes from ``-MAX_HINT``
    to ``MAX_HINT``, such that ``-h`` means the mirror image of what ``h`` means.

    >>> levels = np.tile(np.array([3, 3, 3, 4, 2, 3], np.uint8), 100)
    >>> len(encode(levels, num_symbols=7)) < 40
    True
    """
    symbols, hints = _checked(levels, num_symbols, hints)
    if len(symbols) == 0 or num_symbols == 1:
        return b""
    near, ratio = find_lags(symbols, num_symbols)
    buffer = np.empty(len(symbols) * (num_symbols - 1).bit_length() // 8 + 16, np.uint8)
    size = _run(symbols, num_symbols, near, ratio, hints, buffer, decoding=False)
    if size > len(buffer):  # it did not compress; now the length is known
        buffer = np.empty(size, np.uint8)
        _run(symbols, num_symbols, near, ratio, hints, buffer, decoding=False)
    return write_varint(near) + write_varint(ratio) + buffer[:size].tobytes()


def encoded_size(levels: Levels, num_symbols: int, *, hints: NDArray[np.int8] | None = None) -> int:
    """Return ``len(encode(levels, num_symbols))`` without building the bytes.

    >>> encoded_size(np.ones(100_000, np.uint8), num_symbols=3) < 10
    True
    """
    symbols, hints = _checked(levels, num_symbols, hints)
    if len(symbols) == 0 or num_symbols == 1:
        return 0
    near, ratio = find_lags(symbols, num_symbols)
    nothing = np.empty(0, np.uint8)
    size = _run(symbols, num_symbols, near, ratio, hints, nothing, decoding=False)
    return varint_size(near) + varint_size(ratio) + size


def decode(
    payload: bytes | bytearray | memoryview | NDArray[np.uint8],
    count: int,
    num_symbols: int,
    *,
    hints: NDArray[np.int8] | None = None,
) -> Levels:
    """Undo `encode`: return ``count`` levels below ``num_symbols``, or raise `WireError`.

    Time and memory are bounded by ``count`` and ``len(payload)``: it ends where the payload does,
    and a byte holds at most 91,000 decisions. For given lags there is one payload per message, and
    no other is accepted.

    >>> levels = np.array([1, 0, 2, 1, 1, 1], np.uint8)
    >>> decode(encode(levels, 3), count=6, num_symbols=3)
    array([1, 0, 2, 1, 1, 1], dtype=uint8)
    """
    if count < 0:
        raise WireError(f"count is {count}; it must not be negative")
    symbols, hints = _checked(np.zeros(count, np.uint8), num_symbols, hints)
    data = np.array(np.frombuffer(payload, np.uint8))  # writable, as the kernel wants it
    if count == 0 or num_symbols == 1:
        if len(data):
            raise WireError(f"the context payload has {len(data)} bytes where 0 are needed")
        return symbols
    near, start = read_varint(data, 0)
    ratio, start = read_varint(data, start)
    if not (1 <= near <= MAX_NEAR and 2 <= ratio <= MAX_RATIO and near * ratio <= max(count, 2)):
        raise WireError(
            f"context lags {near} and {near}·{ratio} are outside 1..{MAX_NEAR} and "
            f"2..{MAX_RATIO} times that, up to {max(count, 2)}"
        )
    if _run(symbols, num_symbols, near, ratio, hints, data[start:], decoding=True) < 0:
        raise WireError(f"the {len(data)} bytes of the context payload are no coded message")
    return symbols


def _checked(
    levels: Levels, num_symbols: int, hints: NDArray[np.int8] | None
) -> tuple[Levels, NDArray[np.int8]]:
    """Return writable copies, which one compiled kernel serves in both directions."""
    if not 1 <= num_symbols <= MAX_SYMBOLS:
        raise WireError(f"num_symbols is {num_symbols}, outside 1..{MAX_SYMBOLS}")
    if len(levels) and int(levels.max()) >= num_symbols:
        raise WireError(f"level {int(levels.max())} is not below num_symbols {num_symbols}")
    symbols: Levels = levels.astype(np.uint8)
    if num_symbols > 256:
        symbols = levels.astype(np.uint16)
    if hints is None:
        return symbols, np.empty(0, np.int8)
    if len(hints) != len(levels):
        raise WireError(f"{len(hints)} hints do not fit {len(levels)} levels")
    return symbols, hints.astype(np.int8)


def _run(
    symbols: Levels,
    num_symbols: int,
    near: int,
    ratio: int,
    hints: NDArray[np.int8],
    buffer: NDArray[np.uint8],
    *,
    decoding: bool,
) -> int:
    far = near * ratio
    size = near + far + 4 + len(symbols)
    coded = (np.zeros(size, np.uint8), np.zeros(size, np.int8))
    return int(
        code_symbols(
            symbols, num_symbols, near, far, hints, fresh_model(), *coded, buffer, decoding
        )
    )
