"""A linear digest of a vector of integers: that of a sum is the sum of the digests.

``H(k) = Σ_i c_i·k_i`` modulo the prime ``2^61 - 1``, with coefficients ``c_i`` that are the bits of
SplitMix64 at ``i``. A vector that changes in few places has its digest brought up to date by these
alone. Two vectors that differ have different digests but for one in ``2^61`` cases; it is no
protection against someone who looks for one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aqg.core.types import IntArray

PRIME = (1 << 61) - 1
_PIECE = 1 << 14


def linear_digest(integers: IntArray, places: IntArray | None = None) -> int:
    """Return the digest of a vector, or of one that is zero but for some places.

    Integers lie between ``-2^54`` and ``2^54``.

    >>> whole = linear_digest(np.array([0, 5, 0, -3]))
    >>> whole == linear_digest(np.array([5, -3]), np.array([1, 3]))
    True
    >>> (whole + linear_digest(np.array([0, -5, 0, 3]))) % PRIME
    0
    """
    total = 0
    for start in range(0, len(integers), _PIECE):
        piece = integers[start : start + _PIECE]
        if places is None:
            where = np.arange(start, start + len(piece), dtype=np.uint64)
        else:
            where = places[start : start + _PIECE].astype(np.uint64)
        products = _products(_coefficients(where), np.abs(piece).astype(np.uint64))
        products = np.where(piece < 0, PRIME - products, products)
        total += (int((products >> 31).sum()) << 31) + int((products & (1 << 31) - 1).sum())
    return total % PRIME


def _coefficients(places: Any) -> Any:
    """Return SplitMix64 of the places, modulo ``2^64``, in 61 bits."""
    bits = (places + 1) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> 27)) * np.uint64(0x94D049BB133111EB)
    return (bits ^ (bits >> 31)) & PRIME


def _products(coefficients: Any, magnitudes: Any) -> Any:
    """Return the products modulo the prime; those of magnitudes' halves fit into 64 bits."""
    low = _short_products(coefficients, magnitudes & (1 << 27) - 1)
    high = _short_products(coefficients, magnitudes >> 27)
    return _reduced(low + _reduced(((high & (1 << 34) - 1) << 27) + (high >> 34)))


def _short_products(coefficients: Any, magnitudes: Any) -> Any:
    """Return the products with numbers of 27 bits."""
    upper = (coefficients >> 31) * magnitudes  # times 2^31, of which 61 bits are kept
    lower = (coefficients & (1 << 31) - 1) * magnitudes
    return _reduced((upper >> 30) + ((upper & (1 << 30) - 1) << 31) + lower)


def _reduced(number: Any) -> Any:
    number = (number & PRIME) + (number >> 61)
    return np.where(number >= PRIME, number - PRIME, number)
