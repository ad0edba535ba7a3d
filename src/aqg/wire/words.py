"""Eight small integers at a time, inside one 64-bit word.

`close` functions squeeze the unused high bits out of the lanes of a word, `open` functions put
them back. Loads and stores are written byte by byte, which is right on every byte order, and the
compiler merges them into one instruction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aqg.jit import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Unsigned = NDArray[np.unsignedinteger]


@njit()
def load_bytes(source: Unsigned, start: int) -> np.uint64:
    """Read eight bytes, the first into the lowest lane."""
    at = np.uint64(start)
    word = np.uint64(source[at])
    for lane in range(1, 8):
        word |= np.uint64(source[at + np.uint64(lane)]) << np.uint64(8 * lane)
    return word


@njit()
def store_bytes(target: Unsigned, start: int, word: np.uint64) -> None:
    """Write eight bytes, the lowest lane first."""
    at = np.uint64(start)
    for lane in range(8):
        target[at + np.uint64(lane)] = np.uint8(word >> np.uint64(8 * lane) & np.uint64(255))


@njit()
def load_shorts(source: Unsigned, start: int) -> np.uint64:
    """Read four 16-bit integers, the first into the lowest lane."""
    at = np.uint64(start)
    word = np.uint64(source[at])
    for lane in range(1, 4):
        word |= np.uint64(source[at + np.uint64(lane)]) << np.uint64(16 * lane)
    return word


@njit()
def store_shorts(target: Unsigned, start: int, word: np.uint64) -> None:
    """Write four 16-bit integers, the lowest lane first."""
    at = np.uint64(start)
    for lane in range(4):
        target[at + np.uint64(lane)] = np.uint16(word >> np.uint64(16 * lane) & np.uint64(65535))


@njit()
def close_bytes(word: np.uint64, width: int) -> np.uint64:
    """Move eight integers of ``width`` bits, one per byte, into the low ``8·width`` bits."""
    even, odd = np.uint64(0x00FF00FF00FF00FF), np.uint64(0xFF00FF00FF00FF00)
    word = word & even | (word & odd) >> np.uint64(8 - width)
    return close_shorts(word, 2 * width)


@njit()
def close_shorts(word: np.uint64, width: int) -> np.uint64:
    """Move four integers of ``width`` bits, one per two bytes, into the low ``4·width`` bits."""
    even, odd = np.uint64(0x0000FFFF0000FFFF), np.uint64(0xFFFF0000FFFF0000)
    word = word & even | (word & odd) >> np.uint64(16 - width)
    return word & np.uint64(0xFFFFFFFF) | word >> np.uint64(32) << np.uint64(2 * width)


@njit()
def open_bytes(word: np.uint64, width: int) -> np.uint64:
    """Undo `close_bytes`; higher bits of ``word`` are ignored."""
    word = open_shorts(word, 2 * width)
    lane = np.uint64((1 << width) - 1)
    keep = lane | lane << np.uint64(16) | lane << np.uint64(32) | lane << np.uint64(48)
    return word & keep | (word >> np.uint64(width) & keep) << np.uint64(8)


@njit()
def open_shorts(word: np.uint64, width: int) -> np.uint64:
    """Undo `close_shorts`; higher bits of ``word`` are ignored."""
    half = np.uint64((1 << 2 * width) - 1)
    word = word & half | (word >> np.uint64(2 * width) & half) << np.uint64(32)
    lane = np.uint64((1 << width) - 1)
    keep = lane | lane << np.uint64(32)
    return word & keep | (word >> np.uint64(width) & keep) << np.uint64(16)
