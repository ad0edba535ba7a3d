"""Products of a client's samples with few outputs, by the library that is fastest at them here.

NumPy's BLAS is slow on such products on x86, where torch brings MKL: with ten outputs they take
about half the time there. On Arm both call the same BLAS, and torch gains nothing. Which library is
used depends on the machine, on what is installed and on the size of one client's inputs, never on
what was imported or timed before: a run gives the same bits again.

Importing torch takes a second or two, so only clients that are too large to be stacked are worth
it. Each of them has a product of its own, whether it is computed alone or with others. MKL may
round differently where an operand starts at another offset within a cache line, so the small
operand is copied into torch's own memory, which always starts at the same one.
"""

from __future__ import annotations

import functools
import platform
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from aqg.core.types import FloatArray

NARROW = 32
"""Up to this many outputs a product counts as narrow."""
WIDE = 256
"""With fewer inputs a product is of a hidden layer: others of the same round stay with NumPy, and
two libraries whose threads take turns cost more than the faster product saves."""
LARGE_BYTES = 1 << 20
"""Clients with no more data than this are left to NumPy, which can stack them."""


def narrow_outputs(inputs: FloatArray, weight: FloatArray) -> FloatArray:
    """Return ``(inputs @ weight)ᵀ``, shape ``(..., C, n)``, for NumPy arrays.

    Args:
        inputs: ``(..., n, f)``.
        weight: ``(f, C)``, or ``(..., f, C)`` with one matrix per client.

    >>> narrow_outputs(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[1.0], [10.0]]))
    array([[21., 43.]])

    """
    torch = _library_for(inputs, weight.shape[-1])
    if torch is None:
        outputs: FloatArray = weight.swapaxes(-1, -2) @ inputs.swapaxes(-1, -2)
        return outputs
    *clients, num_samples, _ = inputs.shape
    outputs = np.empty((*clients, weight.shape[-1], num_samples), inputs.dtype)
    for client in np.ndindex(*clients):
        matrix = _copied(torch, weight[client] if weight.ndim > 2 else weight)
        outputs[client] = torch.mm(_shared(torch, inputs[client]), matrix).numpy().T
    return outputs


def narrow_gradient(inputs: FloatArray, slopes: FloatArray, gradient: FloatArray) -> None:
    """Write ``inputsᵀ @ slopes`` into ``gradient``, ``(..., f, C)``, for NumPy arrays.

    ``slopes`` are ``(..., n, C)``. With the outputs as rows the product is up to 1.6 times as fast.
    """
    torch = _library_for(inputs, slopes.shape[-1])
    if torch is None:
        gradient[...] = (slopes.swapaxes(-1, -2) @ inputs).swapaxes(-1, -2)
        return
    for client in np.ndindex(*inputs.shape[:-2]):
        rows = _copied(torch, slopes[client].T)
        gradient[client] = torch.mm(rows, _shared(torch, inputs[client])).numpy().T


def stay_with_numpy() -> None:
    """Never use torch in this process: for one that ends after a few products."""
    global _is_short_lived
    _is_short_lived = True


_is_short_lived = False


def _library_for(inputs: FloatArray, num_outputs: int) -> Any:
    """Return torch where it is faster for clients of this shape, else None."""
    num_samples, num_inputs = inputs.shape[-2:]
    client_bytes = num_samples * num_inputs * inputs.itemsize
    if num_outputs > NARROW or num_inputs < WIDE or client_bytes <= LARGE_BYTES or _is_short_lived:
        return None
    return _faster_torch() if inputs.dtype in (np.float32, np.float64) else None


@functools.cache
def _faster_torch() -> Any:
    """Return torch on a machine where its products are faster than NumPy's, else None."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    try:
        import torch
    except ImportError:
        return None
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return torch if has_mkl else None


class _Writable:
    """The memory of an array that may be read-only, of which torch would warn."""

    def __init__(self, array: FloatArray) -> None:
        address, _ = array.__array_interface__["data"]
        self.array = array  # keeps the memory
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def _shared(torch: Any, array: FloatArray) -> Any:
    """Return a tensor on the same memory, which nobody writes to."""
    return torch.from_numpy(np.asarray(_Writable(np.ascontiguousarray(array))))


def _copied(torch: Any, array: FloatArray) -> Any:
    """Return a contiguous copy in memory of torch's own."""
    copy = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name))
    copy.numpy()[...] = array
    return copy
