"""Mode GAPS: three levels, nearly all zero."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqg.core.grids import Grid
from aqg.core.messages import Upload
from aqg.errors import WireError
from aqg.wire import decode, encode, encoded_size
from aqg.wire.frame import Mode
from aqg.wire.payloads import decode_gaps, encode_gaps, few_places

GOLDEN_PLACES = [46, 51, 79]
# Version 1, mode 5; 2 bits, midtread; step 0.5; 100 levels, 3 of them not zero; gaps
# 46, 4 and 27 with p = 4 and signs -, +, +; CRC-32.
GOLDEN = "2511003f640373681ba6d7a364"


def ternary(length, count, seed=0):
    rng = np.random.default_rng(seed)
    levels = np.ones(length, np.uint8)
    levels[rng.choice(length, count, replace=False)] = 2 * rng.integers(0, 2, count)
    return Upload(levels, 0.5, 2, Grid.MIDTREAD)


@given(st.integers(1, 5000), st.floats(0, 1), st.integers(0, 99))
def test_round_trip(length, share, seed):
    upload = ternary(length, int(share * length / 32), seed)
    frame = encode(upload)
    assert len(frame) == encoded_size(upload)
    assert decode(frame, length) == upload


@pytest.mark.parametrize(("length", "count"), [(159_010, 16), (7850, 16), (1_000_000, 40)])
def test_random_places_cost_little_more_than_they_must(length, count):
    sizes = []
    for seed in range(20):
        upload = ternary(length, count, seed)
        assert encode(upload)[0] & 0x1F == Mode.GAPS
        sizes.append(len(encode_gaps(upload, np.flatnonzero(upload.levels != 1))))
    choose = math.lgamma(length + 1) - math.lgamma(count + 1) - math.lgamma(length - count + 1)
    bound = (choose / math.log(2) + count) / 8
    assert bound <= np.mean(sizes) <= bound + 2.5 + 0.02 * count  # a count, half a byte of padding


def test_golden_bytes():
    upload = ternary(100, 3, seed=5)
    assert np.flatnonzero(upload.levels != 1).tolist() == GOLDEN_PLACES
    assert encode(upload).hex() == GOLDEN


def test_only_few_places_of_three_levels_qualify():
    assert few_places(ternary(320, 10)) is not None
    assert few_places(ternary(320, 11)) is None
    four_bits = Upload(np.full(99, 7, np.uint8), 0.5, 4, Grid.MIDTREAD)
    assert few_places(four_bits) is None
    two_levels_and_two = Upload(np.ones(99, np.uint8), 0.5, 2, Grid.MIDRISE)
    assert few_places(two_levels_and_two) is None


def payload(length=1000, count=9):
    upload = ternary(length, count)
    return encode_gaps(upload, np.flatnonzero(upload.levels != 1))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "ends inside the varint"),
        (b"\xe9\x07", "1001 levels of 1000"),
        (payload()[:-1], "end beyond the frame"),
        (payload() + b"\x00", "bits follow the last level"),
        (b"\x01" + b"\xff" * 9, "end beyond the frame"),
        (b"\x00\x01", "bits follow the last level"),
        (b"\x02\xff\x03\xff\x03\xff\x03", "end beyond"),
    ],
)
def test_refusals_say_why(data, message):
    with pytest.raises(WireError, match=message):
        decode_gaps(np.frombuffer(data, np.uint8), 1000)


@given(st.binary(max_size=40), st.integers(0, 300))
def test_any_bytes_are_read_or_refused(data, length):
    try:
        levels = decode_gaps(np.frombuffer(data, np.uint8), length)
    except WireError:
        return
    places = np.flatnonzero(levels != 1)
    if len(places):  # one vector has one encoding
        upload = Upload(levels, 0.5, 2, Grid.MIDTREAD)
        assert encode_gaps(upload, places) == data
