"""Entries, logs and snapshots: golden bytes, round trips, refusals, hostile input."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from aqg.core.downlink import Entry, Public, advance
from aqg.core.grids import Grid
from aqg.core.messages import Upload
from aqg.core.recipes import make_recipe
from aqg.errors import MessageError, WireError
from aqg.wire.entry import (
    decode_snapshot,
    encode_entry,
    encode_log,
    encode_snapshot,
    follow_log,
    known_velocity,
    log_overhead,
    log_rounds,
)
from aqg.wire.vectors import decode_vector, encode_vector

from tests.wire.logs import (
    LENGTH,
    MOVEMENT,
    entries,
    of_position,
    of_velocity,
    same,
    start,
)


def test_golden_bytes():
    assert encode_entry(Entry(5), None).hex() == "00"
    assert encode_entry(Entry(5, is_step=False), None).hex() == "10"
    assert encode_entry(Entry(5, movement=1.5, is_rounded=True), None).hex() == "04c03f"
    assert encode_entry(Entry(5, quantum=2.0**-20), None).hex() == "2027"
    short = Entry(5, None, of_position(0), 2.0)
    assert encode_entry(short, None).hex() == "0e0000000000000040" + GOLDEN_POSITION
    assert encode_log(300, [b"\0", b"\x10"]).hex() == GOLDEN_LOG
    snapshot = encode_snapshot(start(), np.linspace(-1, 1, LENGTH, dtype=np.float32))
    assert snapshot.hex() == GOLDEN_SNAPSHOT


GOLDEN_POSITION = "090311003f0502cc55dd"
GOLDEN_LOG = "62ac02020010e47113f5"
GOLDEN_SNAPSHOT = "730101000004000501000400050100023de3b4e89f8a"


@pytest.mark.parametrize("recipe", ["lean", "auto"])
def test_a_log_leads_to_the_same_model(recipe):
    written, expected = entries(start(recipe))
    log = encode_log(1, written)
    assert len(log) == log_overhead(1, len(written)) + sum(map(len, written))
    assert log_rounds(log) == range(1, 13)
    assert same(follow_log(log, start(recipe), MOVEMENT), expected)
    # In parts, as a client reads it that takes part in some rounds only.
    public = start(recipe)
    for first, stop in ((0, 1), (1, 7), (7, 7), (7, 12)):
        public = follow_log(encode_log(first + 1, written[first:stop]), public, MOVEMENT)
    assert same(public, expected)


@pytest.mark.parametrize(
    ("recipe", "is_relative"), [("lean", True), ("lean", False), ("auto", True)]
)
def test_a_snapshot_is_lossless(recipe, is_relative):
    first = start(recipe)
    public = first
    for number in range(5):
        velocity = of_velocity(number) if recipe == "lean" else None
        entry = Entry(public.round, velocity, of_position(number), 1.0)
        public = advance(public, entry, MOVEMENT)
    base = first.parameters if is_relative else None
    data = encode_snapshot(public, base)
    assert same(decode_snapshot(data, first, base), public)
    if is_relative:
        with pytest.raises(WireError, match="relative to a starting model"):
            decode_snapshot(data, first, None)


def test_what_is_out_of_order_is_named():
    written, after = entries(start())
    log = encode_log(1, written)
    with pytest.raises(WireError, match="begins with round 1; the model here is at 13"):
        follow_log(log, after, MOVEMENT)
    with pytest.raises(WireError, match="begins with round 4; the model here is at 1"):
        follow_log(encode_log(4, written[3:]), start(), MOVEMENT)
    with pytest.raises(WireError, match="changes a velocity; this model has none"):
        follow_log(log, start("auto"), MOVEMENT)
    with pytest.raises(MessageError, match="changes a velocity; the model of this recipe"):
        advance(start("auto"), Entry(1, of_velocity(0)), MOVEMENT)
    with pytest.raises(MessageError, match="entry 3 cannot follow"):
        advance(start(), Entry(3), MOVEMENT)


def test_the_head_of_an_entry_is_checked():
    for entry, message in (
        ("04c0", "inside a number"),
        ("04c0bf", "the movement in entry 1 is -1.5"),
        ("08", "flags of entry 1 are 08"),
        ("14c03f", "flags of entry 1 are 14"),
        ("40", "flags of entry 1 are 40"),
        ("30", "flags of entry 1 are 30"),
        ("20fe01", r"a quantum of 2\^127; exponents go from -126 to 101"),
    ):
        with pytest.raises(WireError, match=message):
            follow_log(encode_log(1, [bytes.fromhex(entry)]), start(), MOVEMENT)


def test_entries_of_another_run_are_refused():
    """An entry that was coded with another sum as context does not decode to something else."""
    rng = np.random.default_rng(0)
    rows = rng.integers(-1, 2, 4000)
    first = Public.first(make_recipe("lean"), np.zeros(4000, np.float32))
    track = first.track._replace(velocity=rows[None] / 8.0, direction=rows[None].astype(np.int8))
    big = first._replace(track=track)
    levels = (3 - 2 * rows).astype(np.uint8)
    entry = Entry(1, Upload(levels, 0.125, 3, Grid.MIDTREAD), None, 1.0)
    log = encode_log(1, [encode_entry(entry, known_velocity(big))])
    assert follow_log(log, big, MOVEMENT).round == 2
    changed = big._replace(track=track._replace(velocity=np.roll(track.velocity, 1)))
    with pytest.raises(WireError, match="another reference"):
        follow_log(log, changed, MOVEMENT)


NUMBERS = st.one_of(
    st.sampled_from([0.0, -0.0, 0.5, -0.25, 3.0, 1e-300, 1e300]),
    st.floats(allow_nan=False, width=64),
)
PAIRS = st.integers(1, 60).flatmap(lambda n: arrays.arrays(np.float64, (2, n), elements=NUMBERS))


@given(PAIRS, st.sampled_from(["float32", "float64"]))
def test_vectors_come_back_to_the_bit(pair, dtype):
    with np.errstate(over="ignore"):
        new, old = pair.astype(dtype)
    data = encode_vector(new, old)
    assert decode_vector(np.frombuffer(data, np.uint8), old).tobytes() == new.tobytes()


def test_sums_of_quantized_vectors_cost_about_what_their_frames_do():
    """Ten sparse ternary uploads: their sum takes no more than they did."""
    from aqg.wire import encode

    rng = np.random.default_rng(1)
    total, frames = np.zeros(100_000), 0
    for _ in range(10):
        levels = np.ones(len(total), np.uint8)
        levels[rng.choice(len(total), 40, replace=False)] = rng.choice([0, 2], 40)
        upload = Upload(levels, float(1 + rng.integers(128) / 128) / 512, 2, Grid.MIDTREAD)
        total += upload.values(np.float64)
        frames += len(encode(upload))
    assert len(encode_vector(total, np.zeros_like(total))) < frames
