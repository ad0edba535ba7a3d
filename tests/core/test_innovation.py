"""The one-pass statistics equal the plain formulas."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aqg.core.grids import Grid, value_table
from aqg.core.kernels import measure, quantize

SCALES = st.sampled_from([1e-33, 1e-20, 1e-6, 1.0, 1e6, 1e25])


def plain_errors(vector, grid, steps):
    """‖Q_b(Δ) − Δ‖² from the levels themselves, in float64."""
    errors = []
    for width, step in enumerate(steps.tolist(), start=1):
        levels = quantize(vector, grid, width, step)
        values = value_table(grid, width, step, np.float64)[levels]
        errors.append(float(np.sum((values - vector.astype(np.float64)) ** 2)))
    return errors


@settings(deadline=None)
@given(
    st.integers(1, 3000),
    st.integers(0, 2**32 - 1),
    SCALES,
    st.sampled_from([np.float32, np.float64]),
    st.sampled_from(list(Grid)),
    st.integers(1, 8),
)
def test_all_widths_in_one_pass(size, seed, scale, dtype, grid, max_width):
    vector = (np.random.default_rng(seed).standard_normal(size) * scale).astype(dtype)
    stats = measure(vector, grid, max_width)
    exact = vector.astype(np.float64)
    total = float(exact @ exact)
    tolerance = 1e-5 if dtype is np.float32 else 1e-12
    assert stats.in_range
    assert stats.squared_norm == pytest.approx(total, rel=tolerance)
    assert stats.errors.tolist() == pytest.approx(
        plain_errors(vector, grid, stats.steps), rel=tolerance * 10, abs=tolerance * total * 1e-3
    )
    levels = quantize(vector, grid, max_width, stats.steps[-1].item())
    values = value_table(grid, max_width, stats.steps[-1].item(), np.float64)[levels]
    assert stats.quantized_norm == pytest.approx(float(values @ values), rel=tolerance)


@settings(deadline=None)
@given(
    arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 50)), elements=st.floats(-9, 9)),
    st.sampled_from(list(Grid)),
)
def test_leading_axes_equal_single_rows(rows, grid):
    together = measure(rows[None], grid, 4)
    assert together.errors.shape == (1, len(rows), 4)
    for index, row in enumerate(rows):
        alone = measure(row, grid, 4)
        for field, single in zip(together, alone, strict=True):
            assert np.array_equal(field[0, index], single)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e31])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bad_values_are_seen_and_do_not_spread(bad, dtype):
    rows = np.ones((3, 5000), dtype)
    rows[1, 4321] = bad
    stats = measure(rows, Grid.MIDTREAD, 4)
    assert stats.in_range.tolist() == [True, False, True]
    assert stats.squared_norm[[0, 2]].tolist() == [5000.0, 5000.0]
