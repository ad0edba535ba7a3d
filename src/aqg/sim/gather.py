"""Samples from whatever holds them: arrays, tensors, or a `torch.utils.data.Dataset`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from aqg.errors import DataError
from aqg.sim.problem import Samples


def gather(source: Any, name: str = "the dataset", dtype: str = "float32") -> Samples:
    """Return the samples of a dataset as two arrays.

    Args:
        source: a torch dataset whose items are pairs of a sample and its target; a pair of arrays
            or tensors, samples first; or `Samples`.
        name: how messages call it.
        dtype: of samples and targets in floating point; whole numbers stay whole.

    >>> samples = gather(([[0.5, 1.0], [2.0, 4.0]], [0, 1]))
    >>> samples.features.dtype, samples.labels.tolist()
    (dtype('float32'), [0, 1])

    """
    features, labels = _columns(source, name)
    if not features.ndim or not labels.ndim or len(features) != len(labels):
        raise DataError(
            f"{name} has samples of shape {features.shape} and targets of shape {labels.shape}; "
            "both need one entry per sample"
        )
    if not len(labels):
        raise DataError(f"{name} has 0 samples; at least 1 is needed")
    return Samples(
        _numbers(features, f"samples of {name}", dtype),
        _numbers(labels, f"targets of {name}", dtype),
    )


def _columns(source: Any, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    if isinstance(source, tuple | list) and len(source) == 2:
        return _array(source[0], name), _array(source[1], name)
    tensors = getattr(source, "tensors", None)  # of a TensorDataset, without a copy per sample
    if isinstance(tensors, tuple) and len(tensors) == 2:
        return _array(tensors[0], name), _array(tensors[1], name)
    features, labels = [], []
    for number, item in enumerate(_items(source, name)):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"item {number} of {name} is a {type(item).__name__}; it must be a pair of a "
                "sample and its target"
            )
        features.append(_array(item[0], name))
        labels.append(_array(item[1], name))
    for what, column in (("sample", features), ("target", labels)):
        for number, array in enumerate(column):
            if array.shape != column[0].shape:
                raise DataError(
                    f"{what} {number} of {name} has shape {array.shape}, and {what} 0 has "
                    f"{column[0].shape}; pad them to one shape"
                )
    if not features:
        raise DataError(f"{name} has 0 samples; at least 1 is needed")
    return np.stack(features), np.stack(labels)


def _items(source: Any, name: str) -> Any:
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return (source[index] for index in range(len(source)))
    if hasattr(source, "__iter__"):
        return source
    raise DataError(f"{name} is a {type(source).__name__}; it must be a torch Dataset or a pair")


def _array(value: Any, name: str) -> NDArray[Any]:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if value.is_floating_point() and value.dtype.itemsize < 4:
            value = value.float()
        array: NDArray[Any] = value.numpy()
        return array
    try:
        return np.asarray(value)
    except ValueError as error:
        raise DataError(f"{name} holds what is no array of numbers: {error}") from None


def _numbers(array: NDArray[Any], what: str, dtype: str) -> NDArray[Any]:
    if array.dtype.kind == "f":
        return array.astype(dtype, copy=False)
    if array.dtype.kind in "iub":
        return array.astype(np.int64, copy=False)
    raise DataError(f"{what} are {array.dtype}; they must be numbers")
