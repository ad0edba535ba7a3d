"""The frame of statistics: golden bytes, round trip, bounds of short forms, hostile input."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqg.errors import WireError
from aqg.wire.statistics import Section, StatisticsMessage, decode_statistics, encode_statistics

SECTIONS = (Section(3, "float32"), Section(2, "float64"), Section(2, "int"))


def message(sent=(True, True, True)):
    values = np.array([0.25, -3.0, 1e-3, np.pi, 1e300])
    return StatisticsMessage(
        np.float64(values), np.array([5, -70000], np.int64), np.array(sent, np.bool_)
    )


def test_golden_bytes():
    small = StatisticsMessage(np.array([1.0, -0.5]), np.array([3]), np.array([True, True]))
    sections = (Section(2, "float32"), Section(1, "int"))
    assert encode_statistics(small, sections, "half").hex() == "510103020074" + "00f006d089282a"
    small = small._replace(short=np.array([True, True]))
    byte = encode_statistics(small, sections, "byte")
    assert byte[:-4].hex() == "51020301" + "0278f0" + "06"
    change = encode_statistics(small, sections, "change")
    assert change[:-4].hex() == "51030301" + "00e7" + "06"


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


def test_tensors_of_a_frame_may_be_short_or_half():
    original = message()._replace(short=np.array([True, False, True]))
    original.values[4] = 2.0
    for precision in "byte", "change":
        found = decode_statistics(encode_statistics(original, SECTIONS, precision), SECTIONS)
        assert found.short.tolist() == [True, False, False]  # integers have no short form
        assert found.is_change == (precision == "change")
        np.testing.assert_allclose(found.values[3:], original.values[3:], rtol=2.0**-11)
        np.testing.assert_array_equal(found.counts, original.counts)


def test_non_finite_values_are_not_written():
    broken = message()
    broken.values[1] = np.nan
    with pytest.raises(WireError, match="NaN or infinity"):
        encode_statistics(broken, SECTIONS, "half")
    silent = broken._replace(sent=np.array([False, True, True]))
    assert encode_statistics(silent, SECTIONS, "half")
    with pytest.raises(WireError, match="precision 'double' is not one of half, byte, change"):
        encode_statistics(message(), SECTIONS, "double")
