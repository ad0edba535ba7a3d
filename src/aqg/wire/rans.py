"""Range asymmetric numeral systems (rANS): symbols as one big number per lane.

A lane's state ``x`` absorbs a symbol of frequency ``f`` out of ``M = 2^scale_bits`` by
``x ← (x div f)·M + start + (x mod f)``, where ``start`` is the sum of the frequencies before it.
That grows ``x`` by ``log2(M/f)`` bits, the information in the symbol. Decoding undoes it:
``x mod M`` falls into the range of exactly one symbol. Symbol ``i`` belongs to lane
``i mod lanes``; the lanes share one stream of 16-bit words and let a processor work on several
symbols at once.

Invariants, which bound every shift and product below, on hostile input too:

* between symbols ``LOW ≤ x < LOW·2^16 = 2^40``, so ``x`` is exact in int64 and in float64;
* ``1 ≤ f ≤ M ≤ 2^16 ≤ LOW``, so one word in or out always restores the first;
* the encoder starts every lane at ``LOW`` and walks backwards; the decoder walks forwards and must
  end with every lane at ``LOW`` and every word read.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aqg.errors import WireError
from aqg.jit import njit, part
from aqg.wire.tables import Table

MANY_LANES = 8
WORD_BITS = 16
LOW_BITS = 24
STATE_BITS = LOW_BITS + WORD_BITS
STATE_BYTES = STATE_BITS // 8
LOW = 1 << LOW_BITS


def encode_symbols(symbols: NDArray[np.uint8], table: Table, lanes: int) -> bytes:
    """Code ``symbols``: the lanes' final states of five bytes each, then the words."""
    size = len(table.frequencies)
    steps = (np.empty(size, np.int64), np.empty(size), np.empty(size, np.uint64))
    _fill_steps(table.scale_bits, table.frequencies, *steps)
    words = np.empty(len(symbols), np.uint16)  # a symbol gives at most one word
    states = np.empty(lanes, np.int64)
    num_words = _encode(symbols, *steps, states, words)
    used = words[len(words) - num_words :].astype("<u2", copy=False)
    return states.astype("<i8").view(np.uint8).reshape(lanes, 8)[:, :STATE_BYTES].tobytes() + (
        used.tobytes()
    )


def decode_symbols(
    data: NDArray[np.uint8], table: Table, lanes: int, symbols: NDArray[np.uint8]
) -> None:
    """Fill ``symbols`` with what `encode_symbols` coded into ``data``; refuse any other bytes."""
    num_state_bytes = lanes * STATE_BYTES
    if len(data) < num_state_bytes:
        raise WireError(f"{lanes} coder states take {num_state_bytes} bytes, not {len(data)}")
    padded = np.zeros((lanes, 8), np.uint8)
    padded[:, :STATE_BYTES] = data[:num_state_bytes].reshape(lanes, STATE_BYTES)
    states = padded.view("<i8").ravel().astype(np.int64)
    if int(states.min()) < LOW:
        raise WireError(f"a coder state is {int(states.min())}, below {LOW}")
    frequencies, words = table.frequencies, data[num_state_bytes:]
    slots = np.repeat(np.arange(len(frequencies), dtype=np.uint8), frequencies)
    starts = np.cumsum(frequencies) - frequencies
    num_read = _decode(words, table.scale_bits, frequencies, starts, slots, states, symbols)
    if num_read < 0:
        raise WireError(f"the coded symbols need more than the {len(words)} bytes of the payload")
    if num_read != len(words):
        raise WireError(f"the coded symbols end after {num_read} of {len(words)} bytes")
    if (states != LOW).any():
        raise WireError("the coder does not end in the state it began with")


@njit()
def _fill_steps(scale_bits: Any, frequencies: Any, limits: Any, inverses: Any, gains: Any) -> None:
    """Write what the encoder looks up for a symbol of frequency ``f``.

    ``limits`` are ``f·2^(40 - scale_bits)``: a state below it stays under ``2^40``. ``inverses``
    are ``1/f`` rounded up. For ``x < 2^40`` the float64 product ``x·inverse`` exceeds ``x/f`` by
    less than ``2^-11/f``, and ``x/f`` is at least ``1/f`` below the next integer, so the integer
    part of the product is ``x div f`` exactly: a division without dividing. It is less than
    ``2^31``, and so are ``M - f`` and ``start``, which ``gains`` hold in its lower and upper half:
    one load serves both, and the product with ``M - f`` is one of 32 bits, the fastest there is.
    """
    start = 0
    for i in range(len(frequencies)):
        limits[i] = frequencies[i] << (STATE_BITS - scale_bits)
        inverses[i] = np.nextafter(1.0 / max(frequencies[i], 1), 2.0)
        gains[i] = start << 32 | (1 << scale_bits) - frequencies[i]
        start += frequencies[i]


@part(forceinline=True)
def _put(
    symbol: Any, x: Any, position: Any, limits: Any, inverses: Any, gains: Any, words: Any
) -> Any:
    """Absorb one symbol; return the new state and the position of the next word.

    The word is always stored and kept only if the state was too full: no branch to mispredict.
    """
    words[np.uint64(position)] = x & 0xFFFF
    is_full = x >= limits[symbol]
    position -= int(is_full)
    x = x >> WORD_BITS if is_full else x
    quotient = np.uint64(np.uint32(int(x * inverses[symbol])))
    gain = gains[symbol]
    x += int(gain >> np.uint64(32))
    return x + int(quotient * (gain & np.uint64(0xFFFFFFFF))), position


@njit()
def _encode(symbols: Any, limits: Any, inverses: Any, gains: Any, states: Any, words: Any) -> Any:
    """Code backwards, filling ``words`` from its end; return how many."""
    last = len(symbols) - 1
    position = last
    t = (limits, inverses, gains, words)
    if len(states) == 1:
        x = LOW
        for i in range(last, -1, -1):
            x, position = _put(symbols[i], x, position, *t)
        states[0] = x
        return last - position
    states[:] = LOW
    whole = len(symbols) // 8 * 8
    for i in range(last, whole - 1, -1):
        states[i % 8], position = _put(symbols[i], int(states[i % 8]), position, *t)
    a, b, c, d = int(states[0]), int(states[1]), int(states[2]), int(states[3])
    e, f, g, h = int(states[4]), int(states[5]), int(states[6]), int(states[7])
    for i in range(whole - 8, -1, -8):
        at = np.uint64(i)  # unsigned: no index is checked for being negative
        h, position = _put(symbols[at + np.uint64(7)], h, position, *t)
        g, position = _put(symbols[at + np.uint64(6)], g, position, *t)
        f, position = _put(symbols[at + np.uint64(5)], f, position, *t)
        e, position = _put(symbols[at + np.uint64(4)], e, position, *t)
        d, position = _put(symbols[at + np.uint64(3)], d, position, *t)
        c, position = _put(symbols[at + np.uint64(2)], c, position, *t)
        b, position = _put(symbols[at + np.uint64(1)], b, position, *t)
        a, position = _put(symbols[at], a, position, *t)
    states[0], states[1], states[2], states[3] = a, b, c, d
    states[4], states[5], states[6], states[7] = e, f, g, h
    return last - position


@part(forceinline=True)
def _get(
    x: Any, position: Any, words: Any, scale_bits: Any, frequencies: Any, starts: Any, slots: Any
) -> Any:
    """Release one symbol; return it, the new state and the new position.

    The caller makes sure that two bytes can be read at ``position``, whether they are used or not.
    """
    slot = x & ((1 << scale_bits) - 1)
    symbol = slots[np.uint64(slot)]
    # f ≥ 1 and x ≥ 2^24 give x ≥ 2^8 here, and x ≥ 2^24 again once a word has come in.
    x = int(frequencies[symbol]) * (x >> scale_bits) + slot - int(starts[symbol])
    at = np.uint64(position)
    refilled = x << WORD_BITS | int(words[at]) | int(words[at + np.uint64(1)]) << 8
    is_low = x < LOW
    return symbol, refilled if is_low else x, position + 2 * int(is_low)


@njit()
def _decode(
    words: Any, scale: Any, frequencies: Any, starts: Any, slots: Any, states: Any, symbols: Any
) -> Any:
    """Fill ``symbols``; return the number of bytes read, or -1 where there are too few."""
    position = 0
    done = 0
    t = (words, scale, frequencies, starts, slots)
    if len(states) == 1:
        x = int(states[0])
        while done < len(symbols) and position + 2 <= len(words):
            symbols[done], x, position = _get(x, position, *t)
            done += 1
        states[0] = x
    while len(states) == 8 and done + 8 <= len(symbols) and position + 16 <= len(words):
        for lane in range(8):
            at = np.uint64(lane)
            symbols[done + lane], states[at], position = _get(int(states[at]), position, *t)
        done += 8
    # The last symbols, for which the words may run out: `end` stands in for what is not there.
    end = np.zeros(2, np.uint8)
    for i in range(done, len(symbols)):
        lane = i % len(states)
        x = int(states[lane])
        if position + 2 <= len(words):
            symbols[i], x, position = _get(x, position, *t)
        else:
            symbols[i], x, taken = _get(x, 0, end, scale, frequencies, starts, slots)
            if taken:
                return -1
        states[lane] = x
    return position
