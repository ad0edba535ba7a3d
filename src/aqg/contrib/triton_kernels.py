"""Kernels for CUDA, where torch launches dozens: statistics of innovations, and the cross-entropy.

`compare` is `aqg.sim.torch_backend.statistics` in three kernels. A row is cut into blocks. The
first kernel forms ``Δ`` and scans every block; the second finds the row's steps from what the first
left and adds up the errors of all widths; the third adds up the blocks. Blocks are added in a fixed
order, so that a result can be repeated.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from aqg.core.grids import MIN_STEP, Grid
from aqg.sim.torch_backend import Tensor

_BLOCK = 1024
_SAMPLES_PER_BLOCK = 128
_NUM_SCANS = 3
_MIN_STEP = tl.constexpr(MIN_STEP)
_BELOW_BFLOAT16 = tl.constexpr((1 << 45) - 1)
"""The bits of a float64 that a bfloat16 number does not have."""


def compare(
    grid: Grid, max_width: int, gradients: Tensor, mirrors: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return ``Δ`` of every client and the table of its statistics; ``max_width`` is not 0."""
    subtracts = mirrors is not None
    num_rows, length = gradients.shape
    num_blocks = triton.cdiv(length, _BLOCK)
    deltas = torch.empty_like(gradients) if subtracts else gradients
    scans = gradients.new_empty((num_rows, num_blocks, _NUM_SCANS), dtype=torch.float64)
    sums = gradients.new_empty((num_rows, num_blocks, 1 + max_width), dtype=torch.float64)
    table = gradients.new_empty((num_rows, 3 + 2 * max_width), dtype=torch.float64)
    num_parts = triton.next_power_of_2(num_blocks)
    # Products round before they are added to, as they do on the CPU.
    options = {"enable_fp_fusion": False}
    blocks = (num_rows, num_blocks)
    known = mirrors if subtracts else gradients
    _scan[blocks](gradients, known, deltas, scans, length, subtracts, _BLOCK, **options)
    _add_errors[blocks](
        deltas,
        scans,
        sums,
        table,
        length,
        max_width,
        grid is Grid.MIDRISE,
        _BLOCK,
        num_parts,
        **options,
    )
    _add_blocks[(num_rows,)](sums, table, num_blocks, max_width, num_parts, **options)
    return deltas, table


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _scan(  # type: ignore[no-untyped-def]
    gradients,
    mirrors,
    deltas,
    scans,
    length,
    SUBTRACTS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Form ``Δ``; write the maximum and the sum of ``|Δ|``, and the sum of ``Δ²``."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    places = block * BLOCK + tl.arange(0, BLOCK)
    inside = places < length
    delta = tl.load(gradients + row * length + places, mask=inside, other=0.0)
    if SUBTRACTS:
        delta = delta - tl.load(mirrors + row * length + places, mask=inside, other=0.0)
        tl.store(deltas + row * length + places, delta, mask=inside)
    size = tl.abs(delta).to(tl.float64)
    at = scans + (row * tl.num_programs(1) + block) * 3
    tl.store(at, tl.max(size, axis=0))
    tl.store(at + 1, tl.sum(size, axis=0))
    tl.store(at + 2, tl.sum(size * size, axis=0))


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _add_errors(  # type: ignore[no-untyped-def]
    deltas,
    scans,
    sums,
    table,
    length,
    MAX_WIDTH: tl.constexpr,  # noqa: N803
    MIDRISE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
):
    """Write a block's ``‖Q_bmax(Δ)‖²`` and ``‖ε_b‖²``; the first one writes the row's own."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    num_blocks = tl.num_programs(1)
    parts = tl.arange(0, PARTS)
    scan = scans + (row * num_blocks + parts) * 3
    radius = tl.max(tl.load(scan, mask=parts < num_blocks, other=0.0), axis=0)
    total = tl.sum(tl.load(scan + 1, mask=parts < num_blocks, other=0.0), axis=0)
    square = tl.sum(tl.load(scan + 2, mask=parts < num_blocks, other=0.0), axis=0)
    radius = tl.where(total < float("inf"), radius, float("nan"))  # a maximum passes over NaN

    places = block * BLOCK + tl.arange(0, BLOCK)
    inside = places < length
    delta = tl.load(deltas + row * length + places, mask=inside, other=0.0)
    result = sums + (row * num_blocks + block) * (1 + MAX_WIDTH)
    output = table + row * (3 + 2 * MAX_WIDTH)
    if block == 0:
        tl.store(output, radius)
        tl.store(output + 1, square)
    for b in tl.static_range(MAX_WIDTH):
        if MIDRISE:
            raw = 2 * radius / ((2 << b) - 1)
        elif b == 0:
            mean = total / length
            raw = tl.where(mean >= _MIN_STEP, mean, 0.0)
        else:
            raw = radius / ((1 << b) - 1)
        bits = (raw.to(tl.int64, bitcast=True) + _BELOW_BFLOAT16) & ~_BELOW_BFLOAT16
        step = tl.maximum(bits.to(tl.float64, bitcast=True), _MIN_STEP)
        step = tl.where(raw > 0, step, 0.0)
        if block == 0:
            tl.store(output + 3 + b, step)
        inverse = _inverse_below(step, delta)
        size = step.to(delta.dtype)
        if MIDRISE:
            value = (tl.floor(delta * inverse) + 0.5) * size
        elif b == 0:
            value = tl.where(delta >= 0, size, -size)
        else:
            value = _round(delta * inverse) * size
        error = tl.where(inside, value - delta, 0.0).to(tl.float64)
        tl.store(result + 1 + b, tl.sum(error * error, axis=0))
        if b == MAX_WIDTH - 1:
            value = tl.where(inside, value, 0.0).to(tl.float64)
            tl.store(result, tl.sum(value * value, axis=0))


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _inverse_below(step, like):  # type: ignore[no-untyped-def]
    """Compute `aqg.core.kernels._inverse_below` in the precision of ``like``."""
    inverse = tl.where(step > 0, 1.0 / step, 0.0).to(like.dtype)
    # The number before a positive one has the bits before its bits.
    if like.dtype == tl.float64:
        bits = inverse.to(tl.int64, bitcast=True)
    else:
        bits = inverse.to(tl.int32, bitcast=True)
    return tl.where(bits > 0, bits - 1, bits).to(like.dtype, bitcast=True)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _round(x):  # type: ignore[no-untyped-def]
    """Round to the nearest integer, ties to even, for ``|x|`` up to 2^21."""
    if x.dtype == tl.float64:
        rounded = (x + 6755399441055744.0) - 6755399441055744.0
    else:
        rounded = (x + 12582912.0) - 12582912.0
    return rounded


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _add_blocks(  # type: ignore[no-untyped-def]
    sums,
    table,
    num_blocks,
    MAX_WIDTH: tl.constexpr,  # noqa: N803
    PARTS: tl.constexpr,  # noqa: N803
):
    """Write a row's ``‖Q_bmax(Δ)‖²`` and ``‖ε_b‖²`` into the table."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    block = sums + (row * num_blocks + parts) * (1 + MAX_WIDTH)
    output = table + row * (3 + 2 * MAX_WIDTH)
    for column in tl.static_range(1 + MAX_WIDTH):
        total = tl.sum(tl.load(block + column, mask=parts < num_blocks, other=0.0), axis=0)
        tl.store(output + (2 if column == 0 else 2 + MAX_WIDTH + column), total)


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `aqg.objectives.closed_form.cross_entropy`; the logits, ``(..., C, n)``, stay.

    The slopes are laid out with the classes of a sample side by side.
    """
    by_sample = logits.swapaxes(-1, -2).contiguous()
    num_classes = by_sample.shape[-1]
    count = labels.numel()
    losses = torch.empty(labels.shape, dtype=logits.dtype, device=logits.device)
    slopes = torch.empty_like(by_sample)
    _cross_entropy[(triton.cdiv(count, _SAMPLES_PER_BLOCK),)](
        by_sample,
        labels.contiguous(),
        losses,
        slopes,
        count,
        num_classes,
        triton.next_power_of_2(num_classes),
        _SAMPLES_PER_BLOCK,
    )
    return losses, slopes.swapaxes(-1, -2)


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _cross_entropy(  # type: ignore[no-untyped-def]
    logits,
    labels,
    losses,
    slopes,
    count,
    num_classes,
    CLASSES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    samples = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    classes = tl.arange(0, CLASSES)
    is_sample = samples < count
    inside = is_sample[:, None] & (classes < num_classes)[None, :]
    places = samples[:, None] * num_classes + classes[None, :]
    z = tl.load(logits + places, mask=inside, other=-float("inf"))
    label = tl.load(labels + samples, mask=is_sample, other=0)
    is_label = label[:, None] == classes[None, :]
    z = z - tl.max(tl.where(is_sample[:, None], z, 0.0), axis=1)[:, None]
    exponentials = tl.where(inside, tl.exp(z), 0.0)
    total = tl.sum(exponentials, axis=1)
    label_logit = tl.sum(tl.where(is_label & inside, z, 0.0), axis=1)
    tl.store(losses + samples, tl.log(total) - label_logit, mask=is_sample)
    slope = exponentials / total[:, None] - tl.where(is_label, 1.0, 0.0)
    tl.store(slopes + places, slope, mask=inside)
