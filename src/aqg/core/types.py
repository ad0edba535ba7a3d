"""The arrays that travel through the package: their names, and states as named arrays.

A state is a named tuple, or a mapping. `to_arrays` makes arrays of it, which any array format can
hold: fields are arrays of their names, those of a tuple inside it ``outer/inner``. None is left
out. Values are numbers, arrays, bytes, tuples of numbers or of bytes, and mappings of these.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from aqg.errors import RunError

FloatArray = NDArray[np.floating[Any]]
"""A vector or stack of vectors, float32 or float64; outputs keep the dtype of inputs."""
Float64Array = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
ByteArray = NDArray[np.uint8]
Int8Array = NDArray[np.int8]
Levels = NDArray[np.unsignedinteger[Any]]
"""Quantization levels: uint8 up to 8 bits, uint16 above."""


def is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:  # a finite one
    return isinstance(value, int | float | np.floating | np.integer) and math.isfinite(value)


class ByValue:
    """Equality of dataclasses that hold arrays: of one type, with all fields the same to the bit.

    What went in must come out, signed zeros and NaN payloads included.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._content() == other._content()

    __hash__ = None  # type: ignore[assignment]  # arrays do not hash

    def _content(self) -> list[Any]:
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        arrays = np.ndarray
        return [(v.dtype, v.shape, v.tobytes()) if isinstance(v, arrays) else v for v in values]


def to_numpy(value: Any) -> NDArray[Any]:
    """Return an array, or a torch tensor; half precision of torch is float32, which holds it."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if value.is_floating_point() and value.dtype.itemsize < 4:
            value = value.float()
        value = value.numpy()
    return np.asarray(value)


State = TypeVar("State")
Arrays = Mapping[str, NDArray[Any]]


def to_arrays(state: Any, prefix: str = "") -> dict[str, NDArray[Any]]:
    """Return a named tuple, or a mapping, as named arrays."""
    found: dict[str, NDArray[Any]] = {}
    for name, value in (state if isinstance(state, Mapping) else state._asdict()).items():
        own = f"{prefix}{name}"
        if isinstance(value, Mapping) or hasattr(value, "_fields"):
            found |= to_arrays(value, f"{own}/")
        elif isinstance(value, tuple) and value and isinstance(value[0], bytes):
            found[own] = np.frombuffer(b"".join(value), np.uint8)
            found[f"{own}/lengths"] = np.array([len(data) for data in value], np.int64)
        elif isinstance(value, bytes):
            found[own] = np.frombuffer(value, np.uint8)
        elif value is not None:
            found[own] = np.asarray(value)
    return found


def from_arrays(kind: type[State], arrays: Arrays, prefix: str = "") -> State:
    """Return the named tuple that `to_arrays` wrote; raise `KeyError` where an array is missing."""
    hints = get_type_hints(kind).items()
    return kind(**{name: _read(hint, arrays, f"{prefix}{name}") for name, hint in hints})


def map_arrays(function: Callable[..., Any], *states: Any) -> Any:
    """Return a state like the first, in which every array is a function of those of all."""
    first = states[0]
    if isinstance(first, Mapping):
        return {key: map_arrays(function, *(state[key] for state in states)) for key in first}
    if hasattr(first, "_fields"):
        return type(first)(*(map_arrays(function, *parts) for parts in zip(*states, strict=True)))
    return function(*states) if getattr(first, "ndim", 0) else first


def _read(hint: Any, arrays: Arrays, own: str) -> Any:
    choices = (hint, *get_args(hint))
    is_there = own in arrays or any(key.startswith(f"{own}/") for key in arrays)
    if NoneType in choices and not is_there:
        return None
    for choice in choices:
        if isinstance(choice, type) and hasattr(choice, "_fields"):
            return from_arrays(choice, arrays, f"{own}/")
        if get_origin(choice) is Mapping:
            return _nested(arrays, f"{own}/")
    if hint in (int, float, bool):
        return hint(arrays[own])
    if hint is bytes:
        return arrays[own].tobytes()
    if get_origin(hint) is not tuple:
        return np.array(arrays[own])
    if bytes not in choices:
        return tuple(arrays[own].tolist())
    joined, ends = arrays[own].tobytes(), np.cumsum(arrays.get(f"{own}/lengths", ())).tolist()
    if len(joined) != (ends[-1] if ends else 0):
        raise RunError(f"{own} has {len(joined)} bytes; its parts have {ends[-1:] or 0}")
    return tuple(joined[int(a) : int(b)] for a, b in zip([0, *ends], ends, strict=False))


def _nested(arrays: Arrays, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in arrays:
        if key.startswith(prefix):
            name, _, rest = key.removeprefix(prefix).partition("/")
            found[name] = _nested(arrays, f"{prefix}{name}/") if rest else np.array(arrays[key])
    return found
