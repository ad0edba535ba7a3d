"""The context coder: round trips, sizes, and what it does with bytes it did not write."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqg.core.grids import num_levels
from aqg.core.track import direction_of
from aqg.errors import WireError
from aqg.wire.context import MAX_HINT, decode, encode, find_lags, make_hints

from tests.wire.samples import measured_entropy, uploads


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


@pytest.mark.parametrize("lags", ["0002", "0100", "0101", "0180", "ff7f02", "2102", "018001", "82"])
def test_lags_out_of_bounds_are_refused(lags):
    with pytest.raises(WireError):
        decode(bytes.fromhex(lags), 64, 3)


LEVELS = np.array([1, 7], np.uint8)


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        (encode, (LEVELS, 7), "level 7 is not below num_symbols 7"),
        (encode, (LEVELS[:0], 0), r"num_symbols is 0, outside 1\.\.65536"),
        (decode, (b"", 0, 65537), r"num_symbols is 65537, outside 1\.\.65536"),
        (decode, (b"", -1, 3), "count is -1; it must not be negative"),
        (partial(encode, hints=np.zeros(3, np.int8)), (LEVELS, 8), "3 hints do not fit 2 levels"),
        (decode, (b"\0", 5, 1), "has 1 bytes where 0 are needed"),
        (decode, (bytes([64, 2, 0]), 10, 3), r"64 and 64·2 are outside 1\.\.4096 .* up to 10"),
    ],
)
def test_messages_name_what_is_wrong(function, arguments, reason):
    with pytest.raises(WireError, match=reason):
        function(*arguments)
