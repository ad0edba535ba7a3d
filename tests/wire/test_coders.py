"""The entropy coders: round trips, sizes against the information content, and hostile bytes."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqg.core.grids import num_levels
from aqg.core.track import direction_of
from aqg.errors import WireError
from aqg.wire import rans
from aqg.wire.bitpack import packed_size
from aqg.wire.context import MAX_HINT, decode, encode, find_lags, make_hints
from aqg.wire.sections import (
    GROUPED_LENGTH,
    SHORTEST_CODED_BYTES,
    Alphabet,
    Method,
    decode_section,
    encode_section,
)

from tests.wire.samples import laplace_probabilities, measured_entropy, uploads


def smooth_levels(num_symbols, rows=784, columns=10, seed=0):
    """Levels of a field that varies slowly along rows, 28 of them to a picture line."""
    rng = np.random.default_rng(seed)
    field = rng.normal(size=(rows // 28, 28, columns))
    for axis in (0, 1):
        for _ in range(3):
            field = (field + np.roll(field, 1, axis) + np.roll(field, -1, axis)) / 3
    top = (num_symbols - 1) / 2
    levels = np.rint(field / np.abs(field).max() * top + top)
    return levels.ravel().astype(np.uint8 if num_symbols <= 256 else np.uint16)


@given(uploads(max_length=400), st.booleans())
def test_decodes_what_it_encodes(upload, with_hints):
    levels, num_symbols = upload.levels, num_levels(upload.grid, upload.width)
    hints = None
    if with_hints:
        hints = np.random.default_rng(0).integers(-128, 128, len(levels)).astype(np.int8)
    payload = encode(levels, num_symbols, hints=hints)
    decoded = decode(payload, len(levels), num_symbols, hints=hints)
    assert decoded.dtype == levels.dtype
    np.testing.assert_array_equal(decoded, levels)


@pytest.mark.parametrize(
    ("num_symbols", "share"),
    [(2, 0.55), (3, 0.55), (4, 0.55), (7, 0.55), (15, 0.65), (16, 0.65), (255, 0.9)],
)
def test_uses_structure_that_frequencies_do_not_show(num_symbols, share):
    levels = smooth_levels(num_symbols)
    size = len(encode(levels, num_symbols))
    assert size < share * measured_entropy(levels) * len(levels) / 8


def test_hints_pay_when_they_tell_something_and_cost_little_when_not():
    rng = np.random.default_rng(2)
    levels = rng.integers(0, 2, 20_000).astype(np.uint8)
    plain = len(encode(levels, 2))
    telling = direction_of(levels, 2) * rng.choice(np.array([1, 1, 1, -1], np.int8), len(levels))
    assert len(encode(levels, 2, hints=telling)) < 0.83 * plain  # H(1/4) = 0.811
    useless = rng.integers(-MAX_HINT, MAX_HINT + 1, len(levels)).astype(np.int8)
    assert len(encode(levels, 2, hints=useless)) < 1.02 * plain


def test_hints_are_antisymmetric_and_within_bounds():
    reference = np.concatenate([np.logspace(-3, 3, 100), [0.0, np.finfo(np.float32).max]])
    direction = np.resize(np.arange(-3, 4, dtype=np.int8), len(reference))
    hints = make_hints(reference, 0.25, direction)
    np.testing.assert_array_equal(make_hints(-reference, 0.25, -direction), -hints)
    assert int(np.abs(hints).max()) <= MAX_HINT
    np.testing.assert_array_equal(make_hints(reference, 0.0), 0)
    with pytest.raises(WireError, match="2 directions do not fit 3 coordinates"):
        make_hints(np.zeros(3), 1.0, np.zeros(2, np.int8))


@pytest.mark.parametrize(("columns", "num_symbols"), [(10, 3), (10, 16), (37, 7), (200, 15)])
def test_finds_the_lags_of_a_picture(columns, num_symbols):
    levels = smooth_levels(num_symbols, columns=columns)
    near, ratio = find_lags(levels, num_symbols)
    assert near == columns
    assert ratio in (27, 28, 29)


def test_takes_read_only_and_strided_arrays_and_views_of_bytes():
    levels = smooth_levels(7)
    frozen = np.frombuffer(levels.tobytes(), np.uint8)
    payload = encode(frozen, 7)
    assert payload == encode(np.repeat(levels, 2)[::2], 7)
    for data in (bytearray(payload), memoryview(payload), np.frombuffer(payload, np.uint8)):
        np.testing.assert_array_equal(decode(data, len(levels), 7), levels)


@pytest.mark.parametrize("seed", range(20))
def test_a_padded_payload_is_refused_and_a_shortened_one_is_another_message(seed):
    levels = smooth_levels(15, seed=seed)[:600]
    payload = encode(levels, 15)
    for num_zeros in (1, 4):
        with pytest.raises(WireError):
            decode(payload + bytes(num_zeros), len(levels), 15)
    for length in range(len(payload)):
        try:
            decoded = decode(payload[:length], len(levels), 15)
        except WireError:
            continue
        assert not np.array_equal(decoded, levels)


LEVELS = np.array([1, 7], np.uint8)
LAGS = ["0002", "0100", "0101", "0180", "ff7f02", "2102", "018001", "82"]


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        (encode, (LEVELS, 7), "level 7 is not below num_symbols 7"),
        (encode, (LEVELS[:0], 0), r"num_symbols is 0, outside 1\.\.65536"),
        (decode, (b"", 0, 65537), r"num_symbols is 65537, outside 1\.\.65536"),
        (decode, (b"", -1, 3), "count is -1; it must not be negative"),
        (partial(encode, hints=np.zeros(3, np.int8)), (LEVELS, 8), "3 hints do not fit 2 levels"),
        *((decode, (bytes.fromhex(lags), 64, 3), "lags|inside the varint") for lags in LAGS),
        (decode, (b"\0", 5, 1), "has 1 bytes where 0 are needed"),
        (decode, (bytes([64, 2, 0]), 10, 3), r"64 and 64·2 are outside 1\.\.4096 .* up to 10"),
    ],
)
def test_messages_name_what_is_wrong(function, arguments, reason):
    with pytest.raises(WireError, match=reason):
        function(*arguments)


def as_array(data):
    return np.frombuffer(data, np.uint8)


counts_lists = st.lists(st.integers(0, 3) | st.integers(0, 10**6), min_size=1, max_size=256).map(
    lambda counts: np.array(counts, np.int64)
)


@settings(deadline=None)
@given(counts_lists)
def test_tables_cover_what_was_counted_and_survive_the_wire(counts):
    table, _ = rans.choose_table(counts)
    assert table.frequencies.sum() == 1 << table.scale_bits
    assert (table.frequencies[counts > 0] > 0).all()
    written = rans.write_table(table)
    data, scale = as_array(written + b"\xff"), (table.scale_bits, table.precision)
    again, num_bytes = rans.read_table(data, len(counts), *scale)
    assert num_bytes == len(written)
    assert again.peak == table.peak
    np.testing.assert_array_equal(again.frequencies, table.frequencies)


@pytest.mark.parametrize("lanes", [1, 8])
@pytest.mark.parametrize("entropy_bits", [0.05, 0.2, 1.0, 3.0, 7.0])
def test_size_is_the_information_content(lanes, entropy_bits):
    random = np.random.default_rng(7)
    p = laplace_probabilities(256, entropy_bits)
    symbols = random.choice(256, 200_000, p=p).astype(np.uint8)
    table, _ = rans.choose_table(np.bincount(symbols, minlength=256))
    # Under the table, no coder can do better.
    information = -np.log2(table.frequencies[symbols] / 2.0**table.scale_bits).sum() / 8
    size = len(rans.encode_symbols(symbols, table, lanes))
    # The states hold the last bits; a word is 2 bytes. Nothing else may be lost.
    assert information - 1 <= size <= information * 1.0002 + lanes * rans.STATE_BYTES + 2
    # And the table itself must be near the best one there is.
    best = len(symbols) * measured_entropy(symbols) / 8
    assert information + len(rans.write_table(table)) <= 1.002 * best + 40


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("length", [0, 1, 1000, GROUPED_LENGTH + 1])
def test_sections_come_back(width, length):
    alphabet = Alphabet(width, 1 << width)
    random = np.random.default_rng(width)
    out = np.empty(length, np.uint8)
    methods = set()
    for entropy_bits in (0.0, 0.2, 0.5 * width, 0.97 * width, width):
        p = laplace_probabilities(alphabet.size, entropy_bits, center=0)
        symbols = random.choice(alphabet.size, length, p=p).astype(np.uint8)
        section = encode_section(symbols, alphabet)
        decode_section(as_array(section), alphabet, out)
        np.testing.assert_array_equal(out, symbols)
        methods.add(Method(section[0] & 3))
    if length > GROUPED_LENGTH and width in (1, 2, 3, 4):
        assert Method.GROUPED in methods
    if length > GROUPED_LENGTH and width > 4:
        assert Method.LANES in methods


def coded(lanes):
    p = laplace_probabilities(15, 1.5)
    symbols = np.random.default_rng(1).choice(15, 1000, p=p).astype(np.uint8)
    table, _ = rans.choose_table(np.bincount(symbols, minlength=15))
    return rans.encode_symbols(symbols, table, lanes), table, symbols


@pytest.mark.parametrize("lanes", [1, 8])
def test_every_way_to_end_wrongly_is_named(lanes):
    data, table, symbols = coded(lanes)
    for damaged, length, reason in (
        (data[: 5 * lanes - 1], 1000, "coder states take"),
        (bytes(5) + data[5:], 1000, "below 16777216"),
        (data[:-2], 1000, "need more than"),
        (data + b"\0\0", 1000, "end after"),
        (data, 999, r"begin|need more|end after|began"),
    ):
        with pytest.raises(WireError, match=reason):
            rans.decode_symbols(as_array(damaged), table, lanes, symbols[:length].copy())


def test_bad_tables_are_refused_and_a_single_symbol_costs_nothing_else():
    good = rans.write_table(rans.Table(np.array([6, 458, 48]), peak=1, scale_bits=9, precision=1))
    for data in (b"", good[:1], b"\xff\xff", b"\0" * 40):
        with pytest.raises(WireError, match="table for 3 symbols is damaged"):
            rans.read_table(as_array(data), 3, 9, 1)
    # Frequencies that leave nothing for the peak.
    full = rans.write_table(rans.Table(np.array([256, 0, 256]), peak=1, scale_bits=9, precision=1))
    with pytest.raises(WireError, match="damaged"):
        rans.read_table(as_array(full), 3, 9, 1)
    with pytest.raises(WireError, match="unused bits"):
        rans.read_table(as_array(good[:-1] + bytes([good[-1] | 0x80])), 3, 9, 1)

    symbols = np.full(1_000_000, 7, np.uint8)
    section = encode_section(symbols, Alphabet(4, 15))
    assert len(section) == 3
    with pytest.raises(WireError, match="2 bytes follow a table with a single symbol"):
        decode_section(as_array(section + b"\0\0"), Alphabet(4, 15), symbols.copy())


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
def test_short_sections_are_packed_unless_one_symbol_is_all(width):
    """No table and state are shorter than `SHORTEST_CODED_BYTES`, which decides without a try."""
    longest = 8 * (SHORTEST_CODED_BYTES - 1) // width
    for length in range(2, longest + 1):
        constant, packed = np.ones(length, np.uint8), 1 + packed_size(length, width)
        assert len(encode_section(constant, Alphabet(width, 1 << width))) <= packed
        for place in range(length):
            symbols = constant.copy()
            symbols[place] = 0
            section = encode_section(symbols, Alphabet(width, 1 << width))
            assert (section[0], len(section)) == (Method.PACKED, packed)
            table, _ = rans.choose_table(np.array([1, length - 1]))
            coded = rans.write_table(table) + rans.encode_symbols(symbols, table, lanes=1)
            assert 1 + len(coded) >= SHORTEST_CODED_BYTES


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), min_size=2, max_size=256).filter(any))
def test_no_table_needs_fewer_than_the_least_bits(counts):
    array = np.array(counts)
    assert rans.least_bits(array) <= rans.choose_table(array)[1] + 1e-6
