"""Flower's arrays as NumPy's, and back, with fewer copies than Flower makes of them."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Array, ArrayRecord

from aqg.channel.tensors import bits_of
from aqg.errors import MessageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aqg.channel.tensors import Tensor

_NUMPY = "numpy.ndarray"


def tensor_of(array: Array) -> Tensor:
    """Return the tensor of an array; it lies in the array's own bytes, and cannot be written to."""
    if array.stype != _NUMPY:
        raise MessageError(f"an array is {array.stype!r}; {_NUMPY!r} can be read")
    stream = BytesIO(array.data)
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0}
    reader = readers.get(version, np.lib.format.read_array_header_2_0)
    shape, is_fortran, dtype = reader(stream)
    if dtype.hasobject:
        raise MessageError("an array holds Python objects; numbers can be read")
    size = int(np.prod(shape, dtype=np.int64))
    if not size:
        return np.zeros(shape, dtype)
    flat = np.frombuffer(array.data, dtype, size, stream.tell())
    return flat.reshape(shape, order="F" if is_fortran else "C")


def array_of(tensor: Tensor) -> Array:
    """Return the array of a tensor, as `flwr.app.Array` makes it, with a single copy of it."""
    tensor = np.asarray(tensor, order="C")
    head = BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(tensor))
    data = b"".join([head.getvalue(), bits_of(tensor).data])
    return Array(str(tensor.dtype), tuple(tensor.shape), _NUMPY, data)


def is_readable(record: ArrayRecord) -> bool:
    return all(array.stype == _NUMPY for array in record.values())


def values_of(record: ArrayRecord) -> dict[str, Tensor]:
    """Return the tensors of a record, without a copy (`tensor_of`)."""
    return {name: tensor_of(array) for name, array in record.items()}


def record_of(values: Iterable[tuple[str, Tensor]]) -> ArrayRecord:
    return ArrayRecord({name: array_of(tensor) for name, tensor in values})
