"""The cross-entropy and its slopes in one kernel: on CUDA, where torch launches ten."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

if TYPE_CHECKING:
    from aqg.objectives.base import Array

_BLOCK = 128


def cross_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Compute `aqg.objectives.closed_form.cross_entropy`; the logits, ``(..., C, n)``, stay.

    The slopes are laid out with the classes of a sample side by side.
    """
    by_sample = logits.swapaxes(-1, -2).contiguous()
    num_classes = by_sample.shape[-1]
    count = labels.numel()
    losses = torch.empty(labels.shape, dtype=logits.dtype, device=logits.device)
    slopes = torch.empty_like(by_sample)
    _cross_entropy[(triton.cdiv(count, _BLOCK),)](
        by_sample,
        labels.contiguous(),
        losses,
        slopes,
        count,
        num_classes,
        triton.next_power_of_2(num_classes),
        _BLOCK,
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
