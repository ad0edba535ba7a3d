"""The grids: exact steps, errors within half a step, contraction."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aqg.core.grids import (
    MAX_RADIUS,
    MIN_STEP,
    Grid,
    is_valid_step,
    num_levels,
    round_up_to_bfloat16,
    value_table,
)
from aqg.core.kernels import add_levels, measure, quantize

settings.register_profile("jit", deadline=None)
settings.load_profile("jit")

WIDTHS = st.integers(1, 16)


def vectors(dtype):
    """Any finite vector within the grids' range, subnormals and zeros included."""
    bits = 32 if dtype is np.float32 else 64
    values = st.floats(-MAX_RADIUS, MAX_RADIUS, width=bits, allow_nan=False)
    return arrays(dtype, st.integers(1, 40), elements=values)


ANY_VECTOR = st.one_of(vectors(np.float32), vectors(np.float64))


def as_bfloat16_bits(value):
    bits = int(np.float32(value).view(np.uint32))
    assert bits & 0xFFFF == 0
    return bits >> 16


@given(st.floats(MIN_STEP, MAX_RADIUS))
def test_step_is_the_next_bfloat16_up(value):
    step = round_up_to_bfloat16(value)
    assert step >= value
    below = np.uint32((as_bfloat16_bits(step) - 1) << 16).view(np.float32)
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
    stats = measure(vector, Grid.MIDTREAD, width)
    step = stats.steps[width - 1].item()
    levels = quantize(vector, Grid.MIDTREAD, width, step)
    exact = vector.astype(np.float64)
    error = value_table(Grid.MIDTREAD, width, step, np.float64)[levels] - exact
    largest = np.abs(exact).max() or 1.0  # scaled to it, squares do not underflow
    assert np.linalg.norm(error / largest) <= np.linalg.norm(exact / largest) * (1 + 1e-12)
    if width > 1:  # coordinate by coordinate, to the last bit
        assert np.all(np.abs(error) <= np.abs(exact))


@given(ANY_VECTOR, WIDTHS, st.sampled_from(list(Grid)))
def test_levels_are_the_nearest(vector, width, grid):
    """No other level is closer, up to the rounding of one division."""
    step = measure(vector, grid, width).steps[width - 1].item()
    levels = quantize(vector, grid, width, step)
    table = value_table(grid, width, step, np.float64)[: num_levels(grid, width)]
    distance = np.abs(table[:, None] - vector.astype(np.float64))
    best = distance.min(axis=0)
    chosen = distance[levels, np.arange(len(vector))]
    slack = 2.0 ** (width - 21) if vector.dtype == np.float32 else 2.0 ** (width - 50)
    assert np.all(chosen <= best + slack * step)


@given(ANY_VECTOR, WIDTHS, st.sampled_from(list(Grid)))
def test_adding_levels_rounds_once(vector, width, grid):
    step = measure(vector, grid, width).steps[width - 1].item()
    levels = quantize(vector, grid, width, step)
    dtype = vector.dtype.type
    result = add_levels(vector, levels, value_table(grid, width, step, dtype))
    value = value_table(grid, width, step, np.float64)[levels]
    assert result.dtype == vector.dtype
    assert np.array_equal(value.astype(dtype), value)  # exact, so that the sum alone rounds
    assert np.array_equal(result, vector + value.astype(dtype))


def test_all_zero_vector_stays_zero():
    zeros = np.zeros(5, np.float32)
    for grid in Grid:
        stats = measure(zeros, grid, 4)
        assert stats.steps.tolist() == [0.0] * 4
        for width in range(1, 5):
            levels = quantize(zeros, grid, width, 0.0)
            assert np.array_equal(value_table(grid, width, 0.0, np.float32)[levels], zeros)
