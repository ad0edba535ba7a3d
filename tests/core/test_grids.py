"""The grids: exact steps, errors within half a step, contraction; statistics in one pass."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aqg.core.grids import (
    MAX_RADIUS,
    MIN_STEP,
    Grid,
    is_valid_step,
    measure,
    num_levels,
    quantize,
    round_up_to_bfloat16,
    value_table,
)

WIDTHS = st.integers(1, 16)


def grid_step(grid, width, radius, mean_abs):
    """Return the step a client sends for a vector with this radius and mean absolute value."""
    if grid is Grid.MIDRISE:
        return round_up_to_bfloat16(2 * radius / ((1 << width) - 1))
    if width == 1:
        return round_up_to_bfloat16(mean_abs) if mean_abs >= MIN_STEP else 0.0
    return round_up_to_bfloat16(radius / ((1 << (width - 1)) - 1))


def vectors(dtype):
    """Any finite vector within the grids' range, subnormals and zeros included."""
    bits = 32 if dtype is np.float32 else 64
    values = st.floats(-MAX_RADIUS, MAX_RADIUS, width=bits, allow_nan=False)
    return arrays(dtype, st.integers(1, 40), elements=values)


ANY_VECTOR = st.one_of(vectors(np.float32), vectors(np.float64))


def rounded(vector, grid, width, step):
    """Return what the levels of a vector stand for, in float64."""
    return value_table(grid, width, step, np.float64)[quantize(vector, grid, width, step)]


@given(st.floats(MIN_STEP, MAX_RADIUS))
def test_step_is_the_next_bfloat16_up(value):
    step = round_up_to_bfloat16(value)
    assert step >= value
    bits = np.float32(step).view(np.uint32)
    assert bits & 0xFFFF == 0
    below = np.uint32(bits - (1 << 16)).view(np.float32)
    assert float(below) < value
    assert step <= value * (1 + 2**-7)
    assert is_valid_step(step)


@pytest.mark.parametrize("step", [float("nan"), float("inf"), -1.0, 1.001, 2.0**110, 2.0**-130])
def test_steps_no_client_can_send(step):
    assert not is_valid_step(step)


@given(WIDTHS, st.sampled_from(list(Grid)), st.floats(MIN_STEP, MAX_RADIUS))
def test_values_are_exact_in_float32(width, grid, raw_step):
    step = round_up_to_bfloat16(raw_step)
    count = num_levels(grid, width)
    single = value_table(grid, width, step, np.float32)[:count]
    double = value_table(grid, width, step, np.float64)[:count]
    assert np.array_equal(single.astype(np.float64), double)
    assert np.array_equal(double, -double[::-1])
    assert np.all(np.diff(double) > 0)


@given(ANY_VECTOR, WIDTHS)
def test_midtread_never_increases_the_error(vector, width):
    step = measure(vector, Grid.MIDTREAD, width).steps[width - 1].item()
    exact = vector.astype(np.float64)
    error = rounded(vector, Grid.MIDTREAD, width, step) - exact
    largest = np.abs(exact).max() or 1.0  # scaled to it, squares do not underflow
    assert np.linalg.norm(error / largest) <= np.linalg.norm(exact / largest) * (1 + 1e-12)
    if width > 1:  # coordinate by coordinate, to the last bit
        assert np.all(np.abs(error) <= np.abs(exact))


@given(ANY_VECTOR, WIDTHS, st.sampled_from(list(Grid)))
def test_levels_are_the_nearest(vector, width, grid):
    """No other level is closer, up to the rounding of one division; steps are those of the grid."""
    step = measure(vector, grid, width).steps[width - 1].item()
    sizes = np.abs(vector)
    of_grid = grid_step(grid, width, float(sizes.max()), float(sizes.mean(dtype=np.float64)))
    is_mean = width == 1 and grid is Grid.MIDTREAD  # a sum may round in another order
    assert step == (pytest.approx(of_grid, rel=1 / 128) if is_mean else of_grid)
    levels = quantize(vector, grid, width, step)
    table = value_table(grid, width, step, np.float64)[: num_levels(grid, width)]
    distance = np.abs(table[:, None] - vector.astype(np.float64))
    best = distance.min(axis=0)
    chosen = distance[levels, np.arange(len(vector))]
    slack = 2.0 ** (width - 21) if vector.dtype == np.float32 else 2.0 ** (width - 50)
    assert np.all(chosen <= best + slack * step)


SCALES = st.sampled_from([1e-33, 1e-20, 1e-6, 1.0, 1e6, 1e25])


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
    errors = [  # ‖Q_b(Δ) − Δ‖²
        float(np.sum((rounded(vector, grid, width, step) - exact) ** 2))
        for width, step in enumerate(stats.steps.tolist(), start=1)
    ]
    approximately = pytest.approx(errors, rel=tolerance * 10, abs=tolerance * total * 1e-3)
    assert stats.errors.tolist() == approximately
    values = rounded(vector, grid, max_width, stats.steps[-1].item())
    assert stats.quantized_norm == pytest.approx(float(values @ values), rel=tolerance)


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
