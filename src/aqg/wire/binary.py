"""An adaptive binary range coder whose probabilities are learned and mixed in integers.

A decision is coded under three *estimates*, each the probability that it is 1 given another piece
of what is already known. Their log-odds are added up with weights, ``x = Σ w_i·ln(p_i/(1-p_i))``,
and the decision is coded with probability ``1/(1+e^-x)``. Then every estimate moves toward what
happened, and every weight against the gradient of the code length: ``w_i += rate·error·odds_i``.

Nothing here is floating point, so that both ends agree bit for bit on every machine. The same
function codes in both directions, so that they cannot drift apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aqg.jit import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

ODDS_LIMIT = 3071
"""Log-odds are in units of 1/256; the limit, 12, is a probability of 6e-6."""
LEAST_PROBABILITY = 4
"""Of 2^16: no decision costs more than 14 bits, and none less than 9e-5."""
UNKNOWN = 1 << 27
"""An estimate of one half that has seen nothing: 20 bits of probability, 8 bits of count."""
FAST_LIMIT = 127
SLOW_LIMIT = 255
"""How many decisions an estimate remembers: after more, the older ones fade."""
INITIAL_WEIGHT = 25000
"""Of 2^16: three estimates that say the same are believed a little more than each alone."""


class Model(NamedTuple):
    """All that is learned: estimates, and the weights ``(mixers, 3)`` that they are mixed with.

    A weight changes by less than 2^14 at a time, so that neither it nor the sum of three products
    with log-odds can leave the 64-bit range, whatever is decoded.
    """

    estimates: NDArray[np.int32]
    weights: NDArray[np.int64]


class Coder(NamedTuple):
    """The range coder between two decisions.

    The message so far is every 32-bit number from ``low`` to ``high``, after ``position`` bytes
    that are settled. ``window`` is the decoder's view of the 32 bits after those.

    Invariants: ``0 ≤ low ≤ window ≤ high < 2^32``, the middle in the decoder only; the top bytes
    of ``low`` and ``high`` differ, hence ``low < high``.
    """

    low: int
    high: int
    window: int
    position: int


def _logistic_table() -> NDArray[np.uint16]:
    """Return ``2^16 / (1 + e^(-x/256))`` for ``x`` in ``-ODDS_LIMIT..ODDS_LIMIT``."""
    one = 1 << 80
    decay = 1204212645616127843466583  # 2^80 · e^(-1/256)
    power, upper = one, [1 << 15]
    for _ in range(ODDS_LIMIT):
        power = power * decay >> 80
        upper.append(min((one << 16) // (one + power), (1 << 16) - LEAST_PROBABILITY))
    return np.array([(1 << 16) - p for p in upper[:0:-1]] + upper, np.uint16)


def _log_odds_table(logistic: NDArray[np.uint16]) -> NDArray[np.int16]:
    """Return the log-odds in the middle of each of 4096 equal intervals of probability."""
    middles = np.arange(8, 1 << 16, 16)
    return (np.searchsorted(logistic, middles) - ODDS_LIMIT).clip(max=ODDS_LIMIT).astype(np.int16)


LOGISTIC = _logistic_table()
LOG_ODDS = _log_odds_table(LOGISTIC)
# After n decisions an estimate moves 1/(n + 1.6) of the way: nearly a plain average.
RATES = np.array([655360 // (10 * n + 16) for n in range(SLOW_LIMIT + 1)], np.uint16)


@njit()
def start_coder(buffer: Any, decoding: Any) -> Any:
    """Return the coder before the first decision."""
    window = 0
    if decoding:
        for i in range(4):
            window = window << 8 | (int(buffer[i]) if i < len(buffer) else 0)
    return Coder(0, 0xFFFFFFFF, window, 0)


@njit(inline="always")
def code_bit(coder: Any, buffer: Any, decoding: Any, bit: Any, p: Any) -> Any:
    """Code a decision that is 1 with probability ``p / 2^16``, where ``0 < p < 2^16``.

    Return the decision (``bit`` itself when encoding) and the coder after it. Beyond the end of
    ``buffer`` the decoder reads zeros and the encoder only counts.
    """
    low, high, window, position = coder
    middle = low + ((high - low) * p >> 16)
    if decoding:
        bit = 1 if window <= middle else 0
    if bit:
        high = middle
    else:
        low = middle + 1
    while (low ^ high) >> 24 == 0:
        if decoding:
            ahead = position + 4
            window = (window & 0xFFFFFF) << 8 | (int(buffer[ahead]) if ahead < len(buffer) else 0)
        elif position < len(buffer):
            buffer[position] = low >> 24
        position += 1
        low = (low & 0xFFFFFF) << 8
        high = (high & 0xFFFFFF) << 8 | 0xFF
    return bit, Coder(low, high, window, position)


@njit()
def finish_coder(coder: Any, buffer: Any, decoding: Any) -> Any:
    """End the message with the fewest bytes that, followed by zeros, lie in the range.

    Return the number of bytes of the message. The decoder returns -1 instead if ``buffer`` is not
    exactly those bytes: together with the invariant ``low ≤ window ≤ high`` this makes every
    accepted buffer the very one that the encoder writes.
    """
    low, high, _, position = coder
    num_last = 0
    while (high >> (32 - 8 * num_last)) << (32 - 8 * num_last) < low:
        num_last += 1
    if decoding and position + num_last != len(buffer):
        return -1
    for i in range(num_last):
        byte = high >> (24 - 8 * i) & 0xFF
        if decoding:
            if buffer[position + i] != byte:
                return -1
        elif position + i < len(buffer):
            buffer[position + i] = byte
    return position + num_last


@njit()
def _learn(estimates: Any, slot: Any, bit: Any, limit: Any) -> None:
    state = int(estimates[slot])
    seen = state & 0xFF
    p = state >> 8
    p += ((0xFFFFF if bit else 0) - p) * int(RATES[seen]) >> 16
    estimates[slot] = p << 8 | min(seen + 1, limit)


@njit(inline="always")
def code_plain(coder: Any, buffer: Any, decoding: Any, bit: Any, model: Any, slot: Any) -> Any:
    """Code a decision under one estimate alone; return it and the coder after it."""
    p = min(max(int(model.estimates[slot]) >> 12, 4), 65532)
    bit, coder = code_bit(coder, buffer, decoding, bit, p)
    _learn(model.estimates, slot, bit, SLOW_LIMIT)
    return bit, coder


@njit(inline="always")
def code_mixed(
    coder: Any, buffer: Any, decoding: Any, bit: Any, model: Any, mixer: Any, slots: Any
) -> Any:
    """Code a decision under three estimates; return it and the coder after it."""
    estimates, weights = model
    a, b, c = slots
    odds_a = int(LOG_ODDS[estimates[a] >> 16 & 0xFFF])
    odds_b = int(LOG_ODDS[estimates[b] >> 16 & 0xFFF])
    odds_c = int(LOG_ODDS[estimates[c] >> 16 & 0xFFF])
    mixed = (
        odds_a * int(weights[mixer, 0])
        + odds_b * int(weights[mixer, 1])
        + odds_c * int(weights[mixer, 2])
    ) >> 16
    p = int(LOGISTIC[min(max(mixed, -ODDS_LIMIT), ODDS_LIMIT) + ODDS_LIMIT])
    bit, coder = code_bit(coder, buffer, decoding, bit, p)
    step = 14 * ((1 << 16 if bit else 0) - p)
    weights[mixer, 0] += (odds_a * step + (1 << 17)) >> 18
    weights[mixer, 1] += (odds_b * step + (1 << 17)) >> 18
    weights[mixer, 2] += (odds_c * step + (1 << 17)) >> 18
    _learn(estimates, a, bit, FAST_LIMIT)
    _learn(estimates, b, bit, FAST_LIMIT)
    _learn(estimates, c, bit, FAST_LIMIT)
    return bit, coder
