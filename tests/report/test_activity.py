"""Binned counts of what clients sent."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aqg.report.curves import bin_edges, count_widths, watch_clients

widths_of_runs = hnp.arrays(
    np.int16, st.tuples(st.integers(0, 50), st.integers(1, 12)), elements=st.integers(-1, 4)
)


@given(st.integers(0, 1000), st.integers(1, 100))
def test_bins_are_whole_and_nearly_equal(length, max_bins):
    edges = bin_edges(length, max_bins)
    assert edges[0] == 0
    assert edges[-1] == length
    assert len(edges) - 1 == min(length, max_bins)
    sizes = np.diff(edges)
    assert sizes.max(initial=0) - sizes.min(initial=10**6) <= 1


@given(widths_of_runs, st.integers(1, 20))
def test_every_upload_is_counted_once(widths, max_bins):
    histogram = count_widths(widths, max_bins)
    assert set(histogram.widths) == set(widths[widths > 0].tolist())
    for width, counts in zip(histogram.widths, histogram.counts, strict=True):
        assert counts.sum() == (widths == width).sum()


@given(widths_of_runs, st.integers(1, 20), st.integers(1, 5))
def test_every_client_is_counted_in_its_row(widths, max_bins, max_rows):
    activity = watch_clients(widths, max_bins, max_rows)
    assert activity.uploads.shape == (len(activity.client_edges) - 1, len(activity.edges) - 1)
    for row, (first, end) in enumerate(
        zip(activity.client_edges[:-1], activity.client_edges[1:], strict=True)
    ):
        part = widths[:, first:end]
        assert activity.uploads[row].sum() == (part > 0).sum()
        assert activity.bits[row].sum() == part[part > 0].sum()
        assert activity.away[row].sum() == (part == -1).sum()


def test_bins_hold_their_own_rounds():
    widths = np.array([[4, -1], [0, 0], [2, 2], [2, -1]], np.int16)
    activity = watch_clients(widths, max_bins=2, max_rows=10)
    assert activity.uploads.tolist() == [[1, 2], [0, 1]]
    assert activity.bits.tolist() == [[4, 4], [0, 2]]
    assert activity.away.tolist() == [[0, 0], [1, 1]]
    histogram = count_widths(widths, max_bins=4)
    assert histogram.widths == (2, 4)
    assert histogram.counts.tolist() == [[0, 0, 2, 1], [1, 0, 0, 0]]
