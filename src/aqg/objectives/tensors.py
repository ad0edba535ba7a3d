"""One tensor of a module, and the way between tensors and flat vectors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from torch import Tensor, nn


class TensorSpec(NamedTuple):
    """One tensor of a module.

    Attributes:
        name: as in ``named_parameters`` or ``named_buffers``.
        shape: of the tensor.
        dtype: of the module's own tensor, such as ``"float32"``.
        offset: where its first value lies in the flat vector.

    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def size(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    @property
    def place(self) -> slice:
        """Where its values lie in the flat vector."""
        return slice(self.offset, self.offset + self.size)

    def __str__(self) -> str:
        return f"{self.name!r} {self.shape} {self.dtype}"


def lay_out(tensors: Iterable[tuple[str, Tensor]]) -> tuple[TensorSpec, ...]:
    """Give tensors their places in the flat vector, one after the other."""
    specs: list[TensorSpec] = []
    offset = 0
    for name, tensor in tensors:
        specs.append(TensorSpec(name, tuple(tensor.shape), dtype_name(tensor), offset))
        offset += specs[-1].size
    return tuple(specs)


def read_specs(rows: Iterable[Any]) -> tuple[TensorSpec, ...]:
    """Do what `lay_out` does from names, shapes and dtypes as they were stored."""
    specs: list[TensorSpec] = []
    offset = 0
    for name, shape, dtype in rows:
        if not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(f"shape {shape!r} of {name!r}")
        specs.append(TensorSpec(str(name), tuple(shape), str(dtype), offset))
        offset += specs[-1].size
    return tuple(specs)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of a module by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def dtype_name(tensor: Tensor) -> str:
    """Return a tensor's dtype without the name of its library."""
    return str(tensor.dtype).removeprefix("torch.")


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor's values; half precision becomes float32, which holds them all."""
    found = tensor.detach().cpu()
    if dtype_name(found) in ("float16", "bfloat16"):
        found = found.float()
    values: NDArray[Any] = found.numpy()
    return values


def write_tensors(module: nn.Module, specs: Iterable[TensorSpec], flat: NDArray[Any]) -> None:
    """Write parts of a flat vector into the tensors that they belong to."""
    import torch

    tensors = tensors_of(module)
    with torch.no_grad():
        for spec in specs:
            part = np.array(flat[spec.place]).reshape(spec.shape)  # torch wants it writable
            tensors[spec.name].copy_(torch.from_numpy(part))
