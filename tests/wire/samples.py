"""Messages of every kind, for the tests of the wire."""

import functools

import numpy as np
from hypothesis import strategies as st

from aqg.core.grids import MAX_RADIUS, MIN_STEP, Grid, level_dtype, num_levels, round_up_to_bfloat16
from aqg.core.messages import (
    BlockUpload,
    DenseUpload,
    HalfUpload,
    RotatedUpload,
    Skip,
    SparseUpload,
    Upload,
    quantize_blocks,
    quantize_rotated,
    to_halves,
)
from aqg.core.quantizers import Request, Rotated, largest
from aqg.wire.frame import Mode

FIELD_MODES = tuple(mode for mode in Mode if mode >= Mode.HALF)


def field_message(mode, vector, share=0.1, seed=1):
    """Return a message of ``mode`` that stands for ``vector``, more or less."""
    if mode is Mode.HALF:
        return HalfUpload(*to_halves(vector))
    if mode is Mode.BLOCKS:
        return BlockUpload(*quantize_blocks(vector))
    if mode is Mode.BUCKETS:
        block, uniform = 1 + seed % 600, np.random.default_rng(seed).random(len(vector))
        block += block == 256
        return BlockUpload(*quantize_blocks(vector, block, 7, uniform), block)
    if mode is Mode.TURNED:
        width = 2 if seed % 2 else 4
        codes, scales = quantize_rotated(vector, seed, True, width)
        return RotatedUpload(codes, scales, seed, len(vector), width)
    if mode is Mode.ROTATED:
        return RotatedUpload(*quantize_rotated(vector, seed, True), seed, len(vector))
    if mode is Mode.SAMPLED:
        return Rotated(share=share).quantize(vector, Request(1, key=(seed,)))
    indices = largest(vector, round(share * len(vector))) if len(vector) else np.arange(0)
    halves, exponent = to_halves(vector[indices])
    return SparseUpload(indices[halves != 0], halves[halves != 0], exponent, len(vector))


@functools.cache
def laplace_probabilities(num_symbols, entropy_bits, center=None):
    """Return ``p ∝ exp(-|i - center|/scale)`` with the scale that gives this entropy.

    The center is in the middle unless it is given; there, two symbols share it if their number is
    even, and the entropy is at least 1 bit.
    """
    low, high = 1e-3, 1e5
    center = (num_symbols - 1) / 2 if center is None else center
    distance = np.abs(np.arange(num_symbols) - center)
    for _ in range(60):
        scale = (low * high) ** 0.5
        p = np.exp(-(distance - distance.min()) / scale)
        p /= p.sum()
        if -(p * np.log2(np.maximum(p, 1e-300))).sum() < entropy_bits:
            low = scale
        else:
            high = scale
    return p


def laplace_upload(grid, width, length, entropy_bits, seed):
    num_symbols = num_levels(grid, width)
    p = laplace_probabilities(num_symbols, entropy_bits)
    levels = np.random.default_rng(seed).choice(num_symbols, length, p=p)
    return Upload(levels.astype(level_dtype(width)), 2.0**-7, width, grid)


def measured_entropy(levels):
    """Return the zero-order entropy H0 of the levels, in bits per level."""
    counts = np.unique(levels, return_counts=True)[1]
    return float(-(counts / len(levels) * np.log2(counts / len(levels))).sum())


@st.composite
def uploads(draw, max_length=600):
    """Any upload: every width, grid and length, and levels from constant to uniform."""
    grid = draw(st.sampled_from(Grid))
    width = draw(st.integers(1, 16))
    length = draw(st.integers(0, max_length))
    num_symbols = num_levels(grid, width)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["uniform", "peaked", "constant", "edges", "sorted", "periodic"]))
    levels = random.integers(0, num_symbols, length)
    if kind == "peaked":
        spread = draw(st.floats(0.05, 3.0))
        levels = np.rint(random.laplace((num_symbols - 1) / 2, spread, length))
        levels = np.clip(levels, 0, num_symbols - 1)
    elif kind == "constant":
        levels = np.full(length, random.integers(0, num_symbols))
    elif kind == "edges":
        levels = random.choice([0, num_symbols - 1], length)
    elif kind == "sorted":
        levels = np.sort(levels)
    elif kind == "periodic":
        levels = np.resize(levels[: draw(st.integers(1, 20))], length) if length else levels
    step = draw(st.sampled_from([0.0, MIN_STEP, 2 * MAX_RADIUS]) | st.floats(1e-30, 1e30))
    return Upload(levels.astype(level_dtype(width)), round_up_to_bfloat16(step), width, grid)


@st.composite
def dense_uploads(draw, max_length=300):
    """Any finite float32 vector, with some of them repetitive enough to be coded."""
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    values = draw(st.lists(finite, max_size=12) | st.just([0.0, -0.0, 1e-45]))
    length = draw(st.integers(0, max_length)) if values else 0
    return DenseUpload(np.resize(np.array(values, np.float32), length))


@st.composite
def field_messages(draw):
    """Vectors of every length and scale, smooth or not, mostly zero or not."""
    length = draw(st.integers(0, 700))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    vector = random.standard_t(2, length) * 10.0 ** draw(st.integers(-25, 25))
    vector[random.random(length) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0
    if draw(st.booleans()):
        vector = np.resize(np.repeat(vector, 9), length)
    share = draw(st.sampled_from([0.0, 0.01, 0.2, 1.0]))
    mode, seed = draw(st.sampled_from(FIELD_MODES)), draw(st.integers(0, 2**32 - 1))
    return field_message(mode, vector, share, seed)


def messages():
    return uploads() | dense_uploads() | field_messages() | st.just(Skip())
