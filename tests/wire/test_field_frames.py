"""Frames of half, sparse, blockwise and rotated messages."""

import math

import numpy as np
import pytest
from hypothesis import given

from aqg.core.grids import Grid
from aqg.core.messages import (
    BlockUpload,
    HalfUpload,
    RotatedUpload,
    Skip,
    SparseUpload,
    Upload,
    block_lengths,
)
from aqg.errors import MessageError, WireError
from aqg.wire import Known, decode, encode, encoded_size
from aqg.wire.frame import Mode
from aqg.wire.varint import write_varint

from tests.wire.hostile import sealed
from tests.wire.samples import FIELD_MODES, field_message, field_messages


@given(field_messages())
def test_what_both_ends_know_is_not_used_and_does_no_harm(message):
    frame = encode(message)
    known = Known(np.ones(len(message)))
    assert encode(message, known=known) == frame
    assert decode(frame, len(message), known=known) == message


@pytest.mark.parametrize("mode", FIELD_MODES)
def test_every_message_has_its_mode(mode):
    message = field_message(mode, np.random.default_rng(0).standard_normal(500))
    frame = encode(message)
    assert Mode(frame[0] & 0x1F) is mode
    assert message != Skip()
    with pytest.raises(WireError, match="holds 500 values where 501 are expected"):
        decode(frame, 501)


def test_long_messages_are_cut_into_blocks():
    vector = np.random.default_rng(1).standard_normal((1 << 21) + 5).astype(np.float32)
    for mode in (Mode.HALF, Mode.SPARSE, Mode.BLOCKS):
        message = field_message(mode, vector, share=0.001)
        frame = encode(message)
        assert encode(message, threads=1) == frame
        assert decode(frame, len(vector)) == message


def test_sparse_frames_reach_the_entropy_of_random_places():
    """``log2(n choose k)`` bits for places, ``k`` for signs, 11 or so per magnitude."""
    random = np.random.default_rng(2)
    for length, count in ((159_010, 1590), (159_010, 80), (7850, 78)):
        indices = np.sort(random.choice(length, count, replace=False))
        signs = random.choice([-1.0, 1.0], count).astype(np.float16)
        message = SparseUpload(indices, signs, 0, length)
        places_bits = (
            math.lgamma(length + 1) - math.lgamma(count + 1) - math.lgamma(length - count + 1)
        ) / math.log(2)
        bound = (places_bits + count) / 8
        assert bound * 0.98 < encoded_size(message) < bound * 1.03 + 40
        levels = (np.sign(message.values(np.float64)) + 1).astype(np.uint8)
        ternary = Upload(levels, 1.0, 2, Grid.MIDTREAD)
        assert encoded_size(message) <= 20 + encoded_size(ternary)


def test_clustered_places_take_less():
    random = np.random.default_rng(3)
    scattered = np.sort(random.choice(20_000, 400, replace=False))
    starts = np.sort(random.choice(1000, 40, replace=False))
    clustered = (20 * starts[:, None] + np.arange(10)).ravel()
    sizes = [
        encoded_size(SparseUpload(indices, np.ones(400, np.float16), 0, 20_000))
        for indices in (scattered, clustered)
    ]
    assert sizes[1] < 0.5 * sizes[0]


def test_rotated_frames_take_a_bit_per_coordinate():
    message = field_message(Mode.ROTATED, np.random.default_rng(4).standard_normal(159_010))
    assert encoded_size(message) <= 159_010 / 8 + 60
    assert sum(block_lengths(159_010)) - 159_010 < 64


INDICES = np.array([1, 3])
HALVES = np.array([1, -1], np.float16)
ONE, FOUR = np.ones(1, np.float32), np.ones(4, np.uint8)
MANY = np.ones(300, np.uint8)


@pytest.mark.parametrize(
    ("kind", "parts", "reason"),
    [
        (HalfUpload, (np.ones(2), 0), "values are float64 .*; they must be float16"),
        (HalfUpload, (HALVES, 101), "exponent 101 is outside -100..100"),
        (HalfUpload, (HALVES * np.float16("inf"), 0), "NaN or infinity"),
        (SparseUpload, (INDICES[:1], HALVES, 0, 5), "indices .*; they must be 2 int64"),
        (SparseUpload, (INDICES, HALVES, 0, 3), "indices 1..3 do not lie in 0..2"),
        (SparseUpload, (INDICES[::-1], HALVES, 0, 5), "do not increase"),
        (SparseUpload, (INDICES, HALVES * 0, 0, 5), "NaN, infinity or zero"),
        (BlockUpload, (MANY, ONE), "must be 2 float32"),
        (BlockUpload, (MANY, ONE, 100), "must be 3 float32"),
        (BlockUpload, (FOUR, ONE, 0), "not 1..1048576"),
        (BlockUpload, (np.ones(3), ONE), "levels are float64"),
        (BlockUpload, (FOUR + np.uint8(254), ONE), "level 255 is above 254"),
        (BlockUpload, (FOUR, ONE * np.float32(0.3)), "step 0.30.* of a block is not a bfloat16"),
        (RotatedUpload, (FOUR, ONE, 0, 3, 3), "has 3 bits, not one of"),
        (RotatedUpload, (FOUR * np.uint8(4), ONE, 0, 3, 2), "code 4 is not of 2 bits"),
        (RotatedUpload, (FOUR * np.uint8(2), ONE, 0, 3), "code 2 is not of 1 bits"),
        (RotatedUpload, (FOUR[:3], ONE, 0, 3), "signs .*; they must be 4 uint8"),
        (RotatedUpload, (np.ones(4), ONE, 0, 3), "signs are float64"),
        (RotatedUpload, (FOUR, np.ones(1), 0, 3), "scales are float64"),
        (RotatedUpload, (FOUR, ONE, 1 << 32, 3), "seed 4294967296"),
        (RotatedUpload, (FOUR, -ONE, 0, 3), "negative, NaN or infinite"),
    ],
)
def test_messages_check_their_parts(kind, parts, reason):
    with pytest.raises(MessageError, match=reason):
        encode(kind(*parts))


def framed(mode, length, payload):
    return sealed(bytes([0x20 | mode]) + write_varint(length) + payload, length)


PLACES = b"\x00" + bytes([0b011001])  # packed: 1, 2, 1
"""One positive value among three."""


@pytest.mark.parametrize(
    ("frame", "length", "reason"),
    [
        (framed(Mode.HALF, 2, b""), 2, "ends at byte 0, inside the exponent"),
        (framed(Mode.HALF, 0, b"\xff\x01\x00\x01\x00"), 0, "exponent 127 is outside"),
        (framed(Mode.SPARSE, 3, b"\x80"), 3, "inside the coder of the places"),
        (framed(Mode.SPARSE, 3, b"\x80\x02\x02" + PLACES), 3, "coded as 2; it must be 0 or 1"),
        (
            framed(Mode.SPARSE, 3, b"\x80\x00\x7f" + PLACES),
            3,
            "places claims 127 bytes where 2 are left",
        ),
        (framed(Mode.SPARSE, 3, b"\x80\x00\x02\x00\x3f"), 3, "a place holds 3"),
        (framed(Mode.SPARSE, 3, b"\x80\x00\x02\x00\x15\x00"), 3, "1 bytes follow the places"),
        (framed(Mode.SPARSE, 3, b"\x80\x00\x02" + PLACES), 3, "ends inside the varint"),
        (
            framed(Mode.SPARSE, 3, b"\x80\x00\x02" + PLACES + b"\x02\x00\x00\x02\x00\x00"),
            3,
            "NaN, infinity or zero",
        ),
        (
            framed(Mode.SPARSE, 3, b"\x80\x00\x02" + PLACES + b"\x02\x00\x00\x02\x00\x7c"),
            3,
            "NaN, infinity or zero",
        ),
        (framed(Mode.BLOCKS, 3, b"\x09\x00"), 3, "steps claims 9 bytes where 1 are left"),
        (framed(Mode.ROTATED, 3, b"\x00" * 7), 3, "ends at byte 7, inside the scales"),
        (framed(Mode.ROTATED, 3, b"\x00" * 10), 3, "4 levels of 1 bits take 1 bytes, not 2"),
        (framed(Mode.ROTATED, 3, b"\x00" * 8 + b"\x10"), 3, "unused bits must be zero"),
        (framed(Mode.ROTATED, 3, b"\x00" * 6 + b"\xc0\x7f\x01"), 3, "NaN or infinite"),
    ],
)
def test_refusals_say_why(frame, length, reason):
    with pytest.raises(WireError, match=reason) as caught:
        decode(frame, length)
    assert "\n" not in str(caught.value)
