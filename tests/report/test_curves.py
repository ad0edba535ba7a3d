"""Curves: medians and extremes over seeds, and thinning that a screen cannot see."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aqg.report.curves import Band, Points, combine, extra_points, run_points, thin, thin_indices
from aqg.report.runs import read_run


def points(x, y, ended=True):
    return Points(np.array(x, float), np.array(y, float), ended)


def test_one_run_is_its_own_median():
    band = combine([points([0, 1, 3], [5, 4, 2])])
    np.testing.assert_array_equal(band.x, [0, 1, 3])
    for values in (band.median, band.low, band.high):
        np.testing.assert_array_equal(values, [5, 4, 2])


def test_runs_are_compared_at_the_same_cost():
    band = combine([points([0, 2], [4, 0]), points([0, 1, 2], [4, 4, 4]), points([0, 2], [8, 8])])
    np.testing.assert_array_equal(band.x, [0, 1, 2])
    np.testing.assert_array_equal(band.median, [4, 4, 4])
    np.testing.assert_array_equal(band.low, [4, 2, 0])
    np.testing.assert_array_equal(band.high, [8, 8, 8])


def test_a_run_that_has_ended_keeps_its_value_and_the_curve_ends_at_the_median_cost():
    band = combine([points([0, 1], [9, 1]), points([0, 3], [9, 3]), points([0, 8], [9, 1])])
    assert band.x[-1] == 3
    assert band.low[-1] == 1
    assert band.high[-1] == 9 - 3  # the longest one is on its way from 9 to 1


def test_a_run_that_has_not_ended_counts_as_far_as_it_came():
    band = combine([points([0, 1], [9, 1], ended=False), points([0, 2], [5, 5], ended=False)])
    np.testing.assert_array_equal(band.x, [0, 1, 2])
    np.testing.assert_array_equal(band.median, [7, 3, 5])


def test_rounds_that_cost_nothing_leave_their_last_value():
    band = combine([points([0, 1, 1, 1, 2], [9, 8, 7, 6, 5])])
    np.testing.assert_array_equal(band.x, [0, 1, 2])
    np.testing.assert_array_equal(band.median, [9, 6, 5])


def test_nothing_to_combine():
    assert combine([]) is None
    assert combine([points([], [])]) is None


heights = hnp.arrays(np.float64, st.integers(1, 400), elements=st.floats(-1e6, 1e6))


@given(heights, st.integers(8, 100), st.floats(0.1, 1000))
def test_thinning_keeps_ends_and_extremes_in_bounds(y, limit, scale):
    x = np.arange(len(y)) * scale
    kept = thin_indices(x, y, limit)
    assert kept[0] == 0
    assert kept[-1] == len(y) - 1
    assert (np.diff(kept) > 0).all()
    assert y[kept].min() == y.min()
    assert y[kept].max() == y.max()
    assert len(kept) <= max(limit + 6, 8)


@given(heights, st.integers(8, 60))
def test_a_thinned_band_covers_the_whole_band(y, limit):
    x = np.arange(len(y), dtype=float)
    band = thin(Band(x, y, y - 1, y + 1), limit)
    assert band.low.min() == y.min() - 1
    assert band.high.max() == y.max() + 1
    assert (band.low <= band.median).all()
    assert (band.median <= band.high).all()


def test_thinning_leaves_short_curves_alone():
    band = Band(np.arange(5.0), np.arange(5.0), np.arange(5.0), np.arange(5.0))
    assert thin(band, 5) is band


def test_a_round_reports_the_model_it_starts_from(make_run, tmp_path):
    run = read_run(make_run(tmp_path / "run", rounds=6), "run")
    loss = run_points(run, "rounds", "loss")
    np.testing.assert_array_equal(loss.x, np.arange(7))
    np.testing.assert_array_equal(loss.y[:-1], run.losses)
    assert loss.y[-1] == run.summary["final_loss"]
    for name in ("upload_bytes", "total_bytes"):
        spent = run_points(run, name, "loss")
        assert spent.x[0] == 0
        assert spent.x[-1] == run.summary[name]
    residual = run_points(run, "uploads", "residual")
    assert residual.y[-1] == pytest.approx(run.summary["residual"])
    accuracy = run_points(run, "rounds", "accuracy")
    np.testing.assert_array_equal(accuracy.x, [0, 5, 6])
    assert len(extra_points(run, "latency").x) == 0
