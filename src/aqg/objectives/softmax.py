"""Softmax regression: one linear layer and the cross-entropy loss."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.objectives.closed_form import ClosedForm, namespace, transpose
from aqg.objectives.products import NARROW, narrow_gradient, narrow_outputs

if TYPE_CHECKING:
    from aqg.objectives.base import Array, Scaling

_PIECES = (8, 6, 5, 4, 3, 2)
_PIECE_LENGTH = 512
"""On CUDA, few outputs keep few cores busy: clients are cut into pieces of this many samples."""


class Softmax(ClosedForm):
    """``loss(W, b; x, y) = log Σ_c exp(z_c) - z_y`` with the logits ``z = x W + b``.

    >>> objective = Softmax(num_features=784, num_classes=10, l2=0.01, scaling="mean")
    >>> objective.layout, objective.num_params
    ((('weight', (784, 10)), ('bias', (10,))), 7850)
    """

    def __init__(self, num_features: int, num_classes: int, l2: float, scaling: Scaling) -> None:
        layout = (("weight", (num_features, num_classes)), ("bias", (num_classes,)))
        super().__init__("softmax", layout, num_features, l2, scaling, convex=True)

    def _sample_losses(self, tensors: list[Array], features: Array, labels: Array) -> Array:
        losses, _ = cross_entropy(class_logits(features, *tensors), labels)
        return losses

    def _backpropagate(
        self,
        tensors: list[Array],
        features: Array,
        labels: Array,
        *,
        weight: Array,
        gradients: list[Array],
    ) -> Array:
        losses, slopes = cross_entropy(class_logits(features, *tensors), labels)
        slopes *= weight
        write_layer_gradients(features, transpose(slopes), *gradients)
        return losses

    def _predict(self, tensors: list[Array], features: Array) -> Array:
        return class_logits(features, *tensors).argmax(axis=-2)


def class_logits(inputs: Array, weight: Array, bias: Array) -> Array:
    """Return ``inputs @ weight + bias`` with classes before samples, shape ``(..., C, n)``.

    With few classes and many samples, this order makes sums over classes run along whole rows, and
    BLAS computes the product faster in single precision.
    """
    if _is_cuda(inputs) and weight.ndim == 2:  # faster there as one product of all samples
        flat = inputs.reshape(-1, inputs.shape[-1])
        together = namespace(inputs).addmm(bias, flat, weight)
        return transpose(together.reshape(*inputs.shape[:-1], -1))
    if namespace(inputs) is np:
        logits = narrow_outputs(inputs, weight)
    else:
        logits = transpose(weight) @ transpose(inputs)
    logits += bias[..., None]
    return logits


def cross_entropy(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Return the loss of each sample, ``(..., n)``, and its derivative in the logits.

    ``loss = log Σ_c exp(z_c) - z_y`` and ``∂loss/∂z_c = exp(z_c) / Σ exp(z) - [c = y]``. The
    logits, ``(..., C, n)``, are overwritten.
    """
    if _is_cuda(logits) and (fused := _fused_kernels()) is not None:
        losses, slopes = fused.cross_entropy(logits, labels)
        return losses, slopes
    xp = namespace(logits)
    classes = xp.arange(logits.shape[-2], device=labels.device)[:, None]
    is_label = labels[..., None, :] == classes
    logits -= xp.amax(logits, axis=-2, keepdims=True)  # the largest is 0: exp cannot overflow
    label_logits = xp.where(is_label, logits, 0).sum(axis=-2)
    slopes = xp.exp(logits, out=logits)
    totals = slopes.sum(axis=-2)
    slopes /= totals[..., None, :]
    return xp.log(totals) - label_logits, xp.where(is_label, slopes - 1, slopes)


def write_layer_gradients(
    inputs: Array, slopes: Array, weight_gradient: Array, bias_gradient: Array
) -> None:
    """Write the gradients of a layer ``inputs @ weight + bias`` whose outputs have these slopes."""
    xp = namespace(inputs)
    if xp is np and slopes.shape[-1] <= NARROW:
        narrow_gradient(inputs, slopes, weight_gradient)
    elif (num_pieces := _num_pieces(inputs, slopes)) > 1:
        shape = (*inputs.shape[:-2], num_pieces, inputs.shape[-2] // num_pieces, -1)
        products = transpose(inputs.reshape(shape)) @ slopes.reshape(shape)
        xp.sum(products, dim=-3, out=weight_gradient)
    else:
        xp.matmul(transpose(inputs), slopes, out=weight_gradient)
    bias_gradient[...] = slopes.sum(axis=-2)


def _num_pieces(inputs: Array, slopes: Array) -> int:
    """Return into how many pieces to cut each client's samples for the product with few slopes."""
    if not _is_cuda(inputs) or inputs.itemsize > 4 or slopes.shape[-1] > NARROW:
        return 1
    num_samples = inputs.shape[-2]
    fitting = (p for p in _PIECES if num_samples % p == 0 and num_samples // p >= _PIECE_LENGTH)
    return next(fitting, 1)


def _is_cuda(array: Array) -> bool:
    return getattr(array, "is_cuda", False)


@functools.cache
def _fused_kernels() -> Any:
    """Return the module with kernels for CUDA, or None where Triton is missing."""
    try:
        from aqg.contrib import triton_kernels
    except ImportError:
        return None
    return triton_kernels
