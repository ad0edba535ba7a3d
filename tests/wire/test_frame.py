"""Frames: round trips, exact sizes, bounds on size, golden bytes, refusals by name."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqg.core.grids import Grid, level_dtype
from aqg.core.messages import (
    BlockUpload,
    DenseUpload,
    HalfUpload,
    RotatedUpload,
    Skip,
    SparseUpload,
    Upload,
    block_lengths,
)
from aqg.errors import ConfigError, MessageError, WireError
from aqg.wire import Known, decode, encode
from aqg.wire.bitpack import pack, packed_size, unpack
from aqg.wire.frame import Mode
from aqg.wire.payloads import decode_gaps, encode_gaps, few_places
from aqg.wire.sections import BLOCK_LENGTH, BLOCKED_LENGTH
from aqg.wire.statistics import Section, StatisticsMessage, decode_statistics, encode_statistics
from aqg.wire.varint import MAX_BYTES, Reader, write_varint
from aqg.wire.varint import seal as sealed

from tests.wire.golden.make import content_crc32, golden_known, golden_messages
from tests.wire.samples import field_message, laplace_upload, measured_entropy, messages

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "frames.json").read_text())


def mode_of(frame):
    return Mode(frame[0] & 0x1F)


def size_of(message):
    return len(encode(message))


@given(messages(), st.integers(0, 2**32 - 1), st.booleans())
def test_messages_come_back(message, seed, keeps_direction):
    frame, length = encode(message), 0 if isinstance(message, Skip) else len(message)
    decoded = decode(frame, length)
    assert decoded == message
    random, step = np.random.default_rng(seed), getattr(message, "step", 0) or 1.0
    direction = random.integers(-3, 4, length).astype(np.int8) if keeps_direction else None
    known = Known((random.normal(size=length) * step).astype(np.float32), direction)
    again = encode(message, known=known)
    assert decode(again, length, known=known) == message
    if isinstance(message, Upload):
        assert isinstance(decoded, Upload)
        assert decoded.levels.dtype == message.levels.dtype
        assert len(frame) <= packed_size(length, message.width) + 14
    else:
        assert again == frame  # what both ends know is not used


@pytest.mark.parametrize("entropy_bits", [0.2, 0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("width", [2, 3, 4, 8, 16])
def test_total_size_is_within_one_percent_of_the_entropy(width, entropy_bits):
    if entropy_bits > width - 0.5:
        return
    upload = laplace_upload(Grid.MIDTREAD, width, 159_010, entropy_bits, seed=width)
    ideal = len(upload) * measured_entropy(upload.levels) / 8
    assert size_of(upload) <= 1.01 * ideal


@pytest.mark.parametrize("width", [1, 4, 12])
@pytest.mark.parametrize("length", [1, 7850, BLOCKED_LENGTH + 5])
def test_constant_uploads_are_tiny(width, length):
    levels = np.zeros(length, np.uint8 if width <= 8 else np.uint16)
    upload = Upload(levels, 0.0, width, Grid.MIDRISE)
    frame = encode(upload)
    assert len(frame) <= 48
    assert decode(frame, length) == upload


@pytest.mark.parametrize(
    "case", [(2, 0.3), (3, 1.0), (4, 1.0), (9, 2.0), Mode.HALF, Mode.SPARSE, Mode.BLOCKS], ids=str
)
def test_large_messages_are_coded_in_blocks(case):
    length = BLOCKED_LENGTH + BLOCK_LENGTH // 2 + 3
    if isinstance(case, tuple):
        message = laplace_upload(Grid.MIDTREAD, case[0], length, case[1], seed=0)
        most = 1.01 * length * measured_entropy(message.levels) / 8
    else:
        vector = np.random.default_rng(1).standard_normal(length).astype(np.float32)
        message, most = field_message(case, vector, share=0.001), 2 * length
    frame = encode(message, threads=2)
    assert mode_of(frame) is (Mode.CODED if isinstance(case, tuple) else case)
    assert frame == encode(message, threads=1)
    assert len(frame) <= most
    for threads in (1, 2):
        assert decode(frame, length, threads=threads) == message


@given(st.integers(1, 16), st.integers(0, 400), st.integers(0, 2**32 - 1), st.sampled_from([1, -1]))
def test_levels_are_packed_as_numpy_packs_bits(width, length, seed, stride):
    levels = np.random.default_rng(seed).integers(0, 1 << width, length)
    levels = levels.astype(level_dtype(width))[::stride]
    packed = pack(levels, width)
    bits = levels.astype(np.uint16)[:, None] >> np.arange(width, dtype=np.uint16) & np.uint16(1)
    by_numpy = np.packbits(bits.astype(np.uint8).ravel(), bitorder="little")
    np.testing.assert_array_equal(packed, by_numpy)
    np.testing.assert_array_equal(unpack(packed, width, length), levels)
    for wrong, reason in ((np.append(levels, 1 << width), "does not fit"), (levels, "width 17")):
        with pytest.raises(MessageError, match=reason):
            pack(wrong, 17 if wrong is levels else width)


def test_what_both_ends_know_makes_frames_shorter_and_is_checked():
    upload = laplace_upload(Grid.MIDTREAD, 4, 7850, 1.5, seed=0)
    noise = np.random.default_rng(1).normal(size=7850).astype(np.float32) * upload.step
    known = Known(noise - upload.values(np.float32))
    frame = encode(upload, known=known)
    assert mode_of(frame) is Mode.HINTED
    assert len(frame) < 0.9 * size_of(upload)
    with pytest.raises(WireError, match="which is not given here"):
        decode(frame, 7850)
    with pytest.raises(WireError, match="written with another reference"):
        decode(frame, 7850, known=Known(noise))
    with pytest.raises(WireError, match="the known reference has 9 values, the upload 7850"):
        decode(frame, 7850, known=Known(noise[:9]))
    with pytest.raises(MessageError, match="the known reference has 9 values"):
        encode(upload, known=Known(noise[:9]))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_bytes_like_frame_is_read(kind):
    upload = laplace_upload(Grid.MIDTREAD, 4, 1000, 1.0, seed=0)
    frame = kind(encode(upload))
    decoded = decode(frame, 1000)
    assert decoded == upload
    if isinstance(frame, bytearray):  # the message does not hang on the buffer
        frame[:] = bytes(len(frame))
        assert decoded == upload


def test_sparse_frames_reach_the_entropy_of_random_places_and_less_for_clusters():
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
        assert bound * 0.98 < size_of(message) < bound * 1.03 + 40
        levels = (np.sign(message.values(np.float64)) + 1).astype(np.uint8)
        ternary = Upload(levels, 1.0, 2, Grid.MIDTREAD)
        assert size_of(message) <= 20 + size_of(ternary)

    random = np.random.default_rng(3)
    scattered = np.sort(random.choice(20_000, 400, replace=False))
    starts = np.sort(random.choice(1000, 40, replace=False))
    clustered = (20 * starts[:, None] + np.arange(10)).ravel()
    uploads = (SparseUpload(i, np.ones(400, np.float16), 0, 20_000) for i in (scattered, clustered))
    sizes = [*map(size_of, uploads)]
    assert sizes[1] < 0.5 * sizes[0]


def test_rotated_frames_take_a_bit_per_coordinate_or_less():
    vector = np.random.default_rng(4).standard_normal(159_010)
    assert size_of(field_message(Mode.ROTATED, vector)) <= 159_010 / 8 + 60
    for share in (0.5, 0.25, 0.01):
        frame = encode(field_message(Mode.SAMPLED, vector, share))
        assert mode_of(frame) is Mode.SAMPLED
        assert len(frame) <= share * 159_010 / 8 + 60
    assert sum(block_lengths(159_010)) - 159_010 < 64


# Version 1, mode 5; 2 bits, midtread; step 0.5; 100 levels, 3 of them not zero; gaps
# 46, 4 and 27 with p = 4 and signs -, +, +; CRC-32.
GOLDEN_PLACES, GOLDEN_GAPS = [46, 51, 79], "2511003f640373681ba6d7a364"


def ternary(length, count, seed=0):
    rng = np.random.default_rng(seed)
    levels = np.ones(length, np.uint8)
    levels[rng.choice(length, count, replace=False)] = 2 * rng.integers(0, 2, count)
    return Upload(levels, 0.5, 2, Grid.MIDTREAD)


@given(st.integers(1, 5000), st.floats(0, 1), st.integers(0, 99))
def test_few_places_come_back(length, share, seed):
    upload = ternary(length, int(share * length / 32), seed)
    assert decode(encode(upload), length) == upload


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


def test_only_few_places_of_three_levels_qualify():
    assert few_places(ternary(320, 10)) is not None
    assert few_places(ternary(320, 11)) is None
    four_bits = Upload(np.full(99, 7, np.uint8), 0.5, 4, Grid.MIDTREAD)
    assert few_places(four_bits) is None
    two_levels_and_two = Upload(np.ones(99, np.uint8), 0.5, 2, Grid.MIDRISE)
    assert few_places(two_levels_and_two) is None


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


INDICES = np.array([1, 3])
HALVES = np.array([1, -1], np.float16)
ONE, FOUR = np.ones(1, np.float32), np.ones(4, np.uint8)
MANY = np.ones(300, np.uint8)


@pytest.mark.parametrize(
    ("kind", "parts", "reason"),
    [
        (Upload, (np.array([3], np.uint8), 1.0, 2, Grid.MIDTREAD), "level 3 is not below 3"),
        (DenseUpload, (ONE * np.float32(np.inf),), "NaN or infinity"),
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
        (RotatedUpload, (FOUR, ONE, 0, 3, 1, 3), "3 of 3 coordinates at 1 bits are rotated"),
        (RotatedUpload, (FOUR, ONE, 0, 3, 1, -2), "-2 of 3 coordinates"),
        (RotatedUpload, (FOUR, ONE, 0, 9, 2, 3), "3 of 9 coordinates at 2 bits"),
        (RotatedUpload, (FOUR, ONE, 0, 9, 1, 5), "they must be 8 uint8"),
    ],
)
def test_messages_check_their_parts(kind, parts, reason):
    with pytest.raises(MessageError, match=reason):
        encode(kind(*parts))


def framed(mode, length, payload):
    return sealed(bytes([0x20 | mode]) + write_varint(length) + payload)


def gaps(payload):
    """Return a frame of a thousand levels, few of them not zero."""
    return sealed(encode(ternary(1000, 9))[:6] + payload)


UPLOAD = encode(Upload(np.array([0, 1, 2, 1], np.uint8), 0.5, 2, Grid.MIDTREAD))[:-4]


GAPS = encode(ternary(1000, 9))[6:-4]
PLACES = b"\x00" + bytes([0b011001])  # packed: 1, 2, 1
"""One positive value among three."""
HALF_WHOLE = b"\x80\x00\x02" + PLACES + b"\x02\x00\x00\x02"
"""Such a frame up to its halves."""


@pytest.mark.parametrize(
    ("frame", "length", "reason"),
    [
        (b"", 0, "the frame is empty"),
        (b"\x20\x00", 0, "checksum"),
        (sealed(b"\x20"), 0, "a frame of mode SKIP cannot have 5 bytes"),
        (b"\x21", 0, "a frame of mode RAW cannot have 1 bytes"),
        (UPLOAD + b"\0\0\0\0", 4, "the checksum is"),
        (sealed(bytes([0x40 | UPLOAD[0] & 0x1F]) + UPLOAD[1:]), 4, "has version 2; this"),
        (b"\xe0", 4, "has version 7; this decoder reads version 1"),
        (sealed(b"\x01" + UPLOAD[1:]), 4, "has version 0"),
        (sealed(b"\x3f" + UPLOAD[1:]), 4, "mode 31 is unknown in version 1"),
        (sealed(UPLOAD[:3]), 4, "the head of the frame has 3 bytes"),
        (sealed(UPLOAD[:1] + b"\x31" + UPLOAD[2:]), 4, "unused bits of byte 1 are 1"),
        (sealed(UPLOAD[:2] + b"\xc0\x7f" + UPLOAD[4:]), 4, "step nan is not"),
        (sealed(UPLOAD[:2] + b"\x80\xbf" + UPLOAD[4:]), 4, "step -1.0 is not"),
        (sealed(UPLOAD[:2] + b"\x00\x80" + UPLOAD[4:]), 4, "step -0.0 is not"),
        (sealed(UPLOAD), 5, "holds 4 values where 5 are expected"),
        (sealed(UPLOAD), -1, "expected_length is -1"),
        (sealed(UPLOAD[:4] + b"\xff" * 20), 4, "longer than 9 bytes"),
        (sealed(UPLOAD[:4] + b"\x84\x00" + UPLOAD[5:]), 4, "not in its shortest form"),
        (sealed(UPLOAD[:4]), 4, "ends inside the varint"),
        (sealed(UPLOAD + b"\0"), 4, "take 1 bytes, not 2"),
        (sealed(UPLOAD[:5] + b"\xff"), 4, "level 3 is not below 3"),
        (sealed(b"\x28\x01\x00\x00\xc0\x7f"), 1, "NaN or infinity"),
        (sealed(b"\x28\x02\x00\x00\xc0\x7f"), 2, "take 8 bytes, not 4"),
        (framed(Mode.HALF, 2, b""), 2, "ends at byte 0, inside the exponent"),
        (framed(Mode.HALF, 0, b"\xff\x01\x00\x01\x00"), 0, "exponent 127 is outside"),
        (framed(Mode.SPARSE, 3, b"\x80"), 3, "inside the coder of the places"),
        (framed(Mode.SPARSE, 3, b"\x80\x02\x02" + PLACES), 3, "coded as 2; it must be 0 or 1"),
        (framed(Mode.SPARSE, 3, b"\x80\x00\x7f" + PLACES), 3, "places claims 127 bytes where"),
        (framed(Mode.SPARSE, 3, b"\x80\x00\x02\x00\x3f"), 3, "a place holds 3"),
        (framed(Mode.SPARSE, 3, b"\x80\x00\x02\x00\x15\x00"), 3, "1 bytes follow the places"),
        (framed(Mode.SPARSE, 3, b"\x80\x00\x02" + PLACES), 3, "ends inside the varint"),
        (framed(Mode.SPARSE, 3, HALF_WHOLE + b"\x00\x00"), 3, "NaN, infinity or zero"),
        (framed(Mode.SPARSE, 3, HALF_WHOLE + b"\x00\x7c"), 3, "NaN, infinity or zero"),
        (framed(Mode.BLOCKS, 3, b"\x09\x00"), 3, "steps claims 9 bytes where 1 are left"),
        (framed(Mode.ROTATED, 3, b"\x00" * 7), 3, "ends at byte 7, inside the scales"),
        (framed(Mode.ROTATED, 3, b"\x00" * 10), 3, "4 levels of 1 bits take 1 bytes, not 2"),
        (framed(Mode.ROTATED, 3, b"\x00" * 8 + b"\x10"), 3, "unused bits must be zero"),
        (framed(Mode.ROTATED, 3, b"\x00" * 6 + b"\xc0\x7f\x01"), 3, "NaN or infinite"),
        (framed(Mode.SAMPLED, 3, b""), 3, "ends inside the varint"),
        (framed(Mode.SAMPLED, 3, b"\x00" * 10), 3, "0 of 3 coordinates are not what mode SAMPLED"),
        (framed(Mode.SAMPLED, 4, b"\x04" + b"\x00" * 9), 4, "4 of 4 coordinates are not"),
        (framed(Mode.SAMPLED, 4, b"\xff" * 8 + b"\x7f"), 4, "of 4 coordinates are not"),
        (framed(Mode.SAMPLED, 900, b"\xbc\x05" + b"\x00" * 9), 900, "11, inside the scales"),
        (framed(Mode.SAMPLED, 4, b"\x03" + b"\x00" * 10), 4, "4 levels of 1 bits take 1 bytes"),
        (framed(Mode.SAMPLED, 4, b"\x03" + b"\x00" * 8 + b"\x10"), 4, "unused bits must be zero"),
        (framed(Mode.SAMPLED, 4, b"\x03" + b"\x00" * 6 + b"\xc0\x7f\x01"), 4, "NaN or infinite"),
        (gaps(b""), 1000, "ends inside the varint"),
        (gaps(b"\xe9\x07"), 1000, "1001 levels of 1000"),
        (gaps(GAPS[:-1]), 1000, "end beyond the frame"),
        (gaps(GAPS + b"\x00"), 1000, "bits follow the last level"),
        (gaps(b"\x01" + b"\xff" * 9), 1000, "end beyond the frame"),
        (gaps(b"\x00\x01"), 1000, "bits follow the last level"),
        (gaps(b"\x02\xff\x03\xff\x03\xff\x03"), 1000, "end beyond"),
    ],
)
def test_refusals_say_why(frame, length, reason):
    with pytest.raises(WireError, match=reason) as caught:
        decode(frame, length)
    assert "\n" not in str(caught.value)


def test_what_is_not_bytes_is_refused():
    with pytest.raises(WireError, match="contiguous bytes, not str"):
        decode("frame", 3)
    with pytest.raises(WireError, match="contiguous bytes, not memoryview"):
        decode(memoryview(bytes(20))[::2], 3)
    with pytest.raises(ConfigError, match="threads is 0"):
        encode(DenseUpload(ONE), threads=0)


@given(st.integers(0, 2 ** (7 * MAX_BYTES) - 1))
def test_varints_come_back(value):
    written = write_varint(value)
    assert len(written) == max(1, -(-value.bit_length() // 7))
    reader = Reader(written + b"\x05")
    assert (reader.varint(), reader.left) == (value, 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_frames_are_read_and_written_as_they_always_were(case):
    name, length = case["name"], int(case["length"])
    frame = (GOLDEN / f"{name}.bin").read_bytes()
    assert mode_of(frame).name == case["mode"]
    message = decode(frame, length, known=golden_known(length))
    assert content_crc32(message) == case["content_crc32"]
    if isinstance(message, Upload):
        found = (message.width, str(message.grid), message.step)
        assert found == (case["width"], case["grid"], case["step"])
    if name != "coded-one-lane":  # the context coder, which came later, makes it shorter
        message = golden_messages()[name]
        known = golden_known(1000) if name == "hinted-4-bit" else None
        assert encode(message, known=known) == frame


SECTIONS = (Section(3, "float32"), Section(2, "float64"), Section(2, "int"))


def message(sent=(True, True, True)):
    values = np.array([0.25, -3.0, 1e-3, np.pi, 1e300])
    return StatisticsMessage(values, np.array([5, -70000]), np.array(sent, np.bool_))


def test_golden_bytes_of_statistics_places_and_skips():
    small = StatisticsMessage(np.array([1.0, -0.5]), np.array([3]), np.array([True, True]))
    sections = (Section(2, "float32"), Section(1, "int"))
    assert encode_statistics(small, sections, "half").hex() == "510103020074" + "00f006d089282a"
    small = small._replace(short=np.array([True, True]))
    byte = encode_statistics(small, sections, "byte")
    assert byte[:-4].hex() == "51020301" + "0278f0" + "06"
    change = encode_statistics(small, sections, "change")
    assert change[:-4].hex() == "51030301" + "00e7" + "06"
    assert encode(Skip()) == encode(Skip("the gradient holds NaN")) == b"\x20"
    upload = ternary(100, 3, seed=5)
    assert np.flatnonzero(upload.levels != 1).tolist() == GOLDEN_PLACES
    assert encode(upload).hex() == GOLDEN_GAPS


@pytest.mark.parametrize("sent", [(True, True, True), (False, True, False), (False, False, True)])
def test_only_what_is_sent_comes_back(sent):
    original = message(sent)
    found = decode_statistics(encode_statistics(original, SECTIONS, "half"), SECTIONS)
    assert found.sent.tolist() == list(sent)
    expected = original.values * np.repeat(sent[:2], (3, 2))
    np.testing.assert_allclose(found.values[[0, 1, 2, 4]], expected[[0, 1, 2, 4]], rtol=2.0**-11)
    np.testing.assert_array_equal(found.counts, original.counts * sent[2])


@given(
    st.lists(
        st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300),
        min_size=1,
        max_size=30,
    )
)
def test_short_forms_keep_their_bounds_and_the_sign(numbers):
    values = np.array(numbers)
    every = np.ones(1, np.bool_)
    original = StatisticsMessage(values, np.zeros(0, np.int64), every, every)
    sections = (Section(len(values), "float64"),)
    bounds = {"half": (2.0**-11, 2.0**-39), "byte": (1 / 16, 2.0**-17), "change": (1 / 3, 2.0**-6)}
    for precision, (share, of_largest) in bounds.items():
        frame = encode_statistics(original, sections, precision)
        found = decode_statistics(frame, sections).values
        bound = share * np.abs(values) + of_largest * np.abs(values).max()
        assert (np.abs(found - values) <= bound * (1 + 1e-12)).all()
        assert (found * np.sign(values) >= 0).all()
        frame = encode_statistics(original._replace(values=found), sections, precision)
        again = decode_statistics(frame, sections).values  # the largest may be a power of two now
        assert (np.abs(again - found) <= of_largest * np.abs(found).max()).all()


def test_tensors_of_a_frame_may_be_short_or_half_but_not_without_end():
    original = message()._replace(short=np.array([True, False, True]))
    original.values[4] = 2.0
    for precision in "byte", "change":
        found = decode_statistics(encode_statistics(original, SECTIONS, precision), SECTIONS)
        assert found.short.tolist() == [True, False, False]  # integers have no short form
        assert found.is_change == (precision == "change")
        np.testing.assert_allclose(found.values[3:], original.values[3:], rtol=2.0**-11)
        np.testing.assert_array_equal(found.counts, original.counts)

    broken = message()
    broken.values[1] = np.nan
    with pytest.raises(WireError, match="NaN or infinity"):
        encode_statistics(broken, SECTIONS, "half")
    silent = broken._replace(sent=np.array([False, True, True]))
    assert encode_statistics(silent, SECTIONS, "half")
    with pytest.raises(WireError, match="precision 'double' is not one of half, byte, change"):
        encode_statistics(message(), SECTIONS, "double")
