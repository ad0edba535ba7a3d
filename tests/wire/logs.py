"""Logs and snapshots to damage: entries of every kind, and what readers of any frame keep to."""

import numpy as np

from aqg.core.downlink import Entry, Public, advance
from aqg.core.grids import Grid
from aqg.core.messages import Upload
from aqg.core.recipe import Movement
from aqg.core.recipes import make_recipe
from aqg.core.track import Change
from aqg.errors import WireError
from aqg.wire.entry import (
    LOG_MARK,
    MERGED_MARK,
    decode_snapshot,
    encode_entry,
    encode_snapshot,
    follow_log,
    known_velocity,
    log_since,
)

MOVEMENT = Movement((0.5, 0.5))
LENGTH = 40


def start(recipe="lean"):
    parameters = np.linspace(-1, 1, LENGTH, dtype=np.float32)
    return Public.first(make_recipe(recipe), parameters)


def of_velocity(seed):
    levels = np.random.default_rng(seed).integers(0, 7, LENGTH).astype(np.uint8)
    return Upload(levels, 0.125, 3, Grid.MIDTREAD)


def of_position(seed):
    levels = np.ones(LENGTH, np.uint8)
    places = np.random.default_rng(seed).integers(0, LENGTH, 3)
    levels[places] = [0, 2, 2]
    return Upload(levels, 0.5, 2, Grid.MIDTREAD)


def entries(public, count=12):
    """Return entries of every kind that a model follows, and the model that they lead to."""
    written = []
    moves, spikes = len(public.velocity) > 0, np.where(np.arange(LENGTH) % 7 == 0, 0.375, 0.0)
    for number in range(count):
        round_number = public.round
        old = public.velocity if moves else public.parameters
        change = Change(old, (old + spikes - (0 if number % 2 else 0.3)).astype(old.dtype))
        quantized = of_velocity(number) if moves else of_position(number)
        exact_parts = (change, None) if moves else (None, change)
        parts = (quantized, None) if moves else (None, quantized)
        named = None if moves else 2.0 ** (number % 3 - 20)
        both = (quantized if moves else None, of_position(number))
        kinds = (
            Entry(round_number, *parts, 3.0, is_rounded=True, quantum=named),
            Entry(round_number),
            Entry(round_number, *parts, 0.5, is_rounded=True),
            Entry(round_number, is_step=False),
            Entry(round_number, *exact_parts, 0.1),
            Entry(round_number, *exact_parts, 1e-3),
            Entry(round_number, *both, 0.5, is_rounded=True),
        )
        entry = kinds[number % len(kinds)]
        known = known_velocity(public)
        data = encode_entry(entry, known)
        written.append(data)
        public = advance(public, entry, MOVEMENT)
    return written, public


def same(one, other):
    return (
        [v.tobytes() for v in one.vectors] == [v.tobytes() for v in other.vectors]
        and (one.round, one.quantum) == (other.round, other.quantum)
        and np.array_equal(one.history, other.history, equal_nan=True)  # of a run that diverges
    )


def accepts_log(data, recipe="lean"):
    """Tell whether a client that holds the start reads a log or a snapshot; it is whole then."""
    held = start(recipe)
    is_log = data[:1] in (bytes([LOG_MARK]), bytes([MERGED_MARK]))
    try:
        if is_log:
            after = follow_log(data, held, MOVEMENT)
        else:
            after = decode_snapshot(data, held, held.parameters)
    except WireError:
        return False
    for mine, theirs in zip(after.vectors, held.vectors, strict=True):
        assert mine.shape == theirs.shape
    try:
        if is_log:
            assert after.round >= held.round
            assert same(after, follow_log(log_since(data, 1), held, MOVEMENT))
        else:
            assert same(after, decode_snapshot(encode_snapshot(after, None), held, None))
    except WireError as error:
        raise AssertionError(f"what {data.hex()} leads to does not survive the wire") from error
    return True
