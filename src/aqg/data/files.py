"""Datasets of the user's own, from files that NumPy writes.

A file ``FILE.npz`` holds these arrays:

=========== ====================================================================================
``x_train`` samples, ``(N, ...)``: numbers of any kind
``y_train`` what is to be learned of them: classes from 0 as integers ``(N,)``, numbers, or
            targets of any shape ``(N, ...)``
``x_test``  and ``y_test``, the same for the test set; optional
``client``  ``(N,)``: whose sample it is, as a number or a text; optional. With it the partition is
            ``natural`` unless another is named
=========== ====================================================================================

Pixels, that is unsigned bytes with at least two axes per sample, are divided by 255. Other
integers, such as token ids, stay integers.
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqg.data.datasets import Dataset
from aqg.errors import DataError

Arrays = dict[str, NDArray[Any]]

_MAX_CLASSES = 1 << 17
"""Whole numbers above this are taken as amounts, not classes."""
_NEEDED = ("x_train", "y_train")
_OPTIONAL = ("x_test", "y_test", "client")


class Facts(NamedTuple):
    """What the defaults of a run depend on."""

    num_samples: int  # of all clients
    num_clients: int | None  # that the file names, None where it names none
    has_classes: bool  # whether the targets are classes


def peek(path: Path) -> Facts:
    arrays = read_arrays(path, ("y_train",), ("client",))
    labels, clients = arrays["y_train"], arrays.get("client")
    num_clients = None if clients is None else len(np.unique(clients))
    return Facts(len(labels), num_clients, _are_classes(labels))


def read_dataset(path: Path) -> Dataset:
    arrays = read_arrays(path, _NEEDED, _OPTIONAL)
    for name in ("x_train", "y_train", "x_test", "y_test"):
        if name in arrays:
            _check_numbers(path, name, arrays[name])
    if ("x_test" in arrays) != ("y_test" in arrays):
        present, absent = ("x_test", "y_test") if "x_test" in arrays else ("y_test", "x_test")
        raise DataError(f"{str(path)!r} has {present} and no {absent}; it needs both, or neither")
    for part in ("train", "test"):
        _check_pair(path, arrays, part)
    _check_test(path, arrays)
    labels, test_labels = arrays["y_train"], arrays.get("y_test")
    num_classes = 0
    if _are_classes(labels) and (test_labels is None or _are_classes(test_labels)):
        num_classes = max(int(part.max()) for part in (labels, test_labels) if part is not None) + 1
    names, clients = _clients(path, arrays)
    return Dataset(
        name=path.name,
        features=_features(arrays["x_train"]),
        labels=_labels(labels),
        num_classes=max(2, num_classes) if num_classes else 0,
        test_features=_features(arrays["x_test"]) if "x_test" in arrays else None,
        test_labels=None if test_labels is None else _labels(test_labels),
        clients=clients,
        client_names=names,
    )


def read_arrays(path: Path, needed: Sequence[str], optional: Sequence[str] = ()) -> Arrays:
    """Return arrays of a file that `numpy.savez` wrote, by name; nothing in it is run."""
    try:
        with path.open("rb") as file:
            content: Any = np.load(file, allow_pickle=False)
            if not isinstance(content, np.lib.npyio.NpzFile):
                raise DataError(f"{str(path)!r} holds a single array; write it with numpy.savez")
            missing = [name for name in needed if name not in content]
            if missing:
                found = ", ".join(content.files) or "nothing"
                raise DataError(
                    f"{str(path)!r} has no array {missing[0]!r}; it holds {found}, and "
                    f"{' and '.join(needed)} are needed"
                )
            names = (name for name in (*needed, *optional) if name in content)
            return {name: _array(path, content, name) for name in names}
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"dataset {str(path)!r} cannot be read: {reason}") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{str(path)!r} is not a file that numpy.savez wrote: {error}") from None


def _array(path: Path, content: Any, name: str) -> NDArray[Any]:
    try:
        array: NDArray[Any] = content[name]
    except ValueError:
        raise DataError(
            f"array {name!r} of {str(path)!r} holds Python objects, which are not loaded; "
            "convert it to numbers or texts first"
        ) from None
    return array


def _check_numbers(path: Path, name: str, array: NDArray[Any]) -> None:
    if array.dtype.kind not in "fiub":
        raise DataError(f"array {name!r} of {str(path)!r} is {array.dtype}; it must be numbers")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        first = np.argwhere(~np.isfinite(array))[0].tolist()
        raise DataError(
            f"array {name!r} of {str(path)!r} holds NaN or infinity, first at {first}; "
            "fill it in or drop those samples"
        )


def _check_pair(path: Path, arrays: Arrays, part: str) -> None:
    x, y = arrays.get(f"x_{part}"), arrays.get(f"y_{part}")
    if x is None or y is None:
        return
    if not x.ndim or not y.ndim or len(x) != len(y) or not len(x) or not x.size:
        raise DataError(
            f"{str(path)!r} has x_{part} of shape {x.shape} and y_{part} of shape {y.shape}; "
            "both must have the same number of samples, at least 1"
        )


def _check_test(path: Path, arrays: Arrays) -> None:
    for name in ("x", "y"):
        train, test = arrays[f"{name}_train"], arrays.get(f"{name}_test")
        if test is not None and test.shape[1:] != train.shape[1:]:
            raise DataError(
                f"{str(path)!r} has {name}_train of shape {train.shape} and {name}_test of shape "
                f"{test.shape}; they must agree after the first axis"
            )


def _are_classes(labels: NDArray[Any]) -> bool:
    is_whole = labels.ndim == 1 and labels.dtype.kind in "iub"
    return is_whole and len(labels) > 0 and labels.min() >= 0 and labels.max() < _MAX_CLASSES


def _clients(path: Path, arrays: Arrays) -> tuple[tuple[str, ...], NDArray[np.int64] | None]:
    ids = arrays.get("client")
    if ids is None:
        return (), None
    if ids.shape != arrays["y_train"].shape[:1] or ids.dtype.kind not in "iuUS":
        raise DataError(
            f"array 'client' of {str(path)!r} is {ids.dtype} of shape {ids.shape}; it must be one "
            f"whole number or text for each of the {len(arrays['y_train'])} samples"
        )
    names, clients = np.unique(ids, return_inverse=True)
    return tuple(map(str, names.tolist())), clients.astype(np.int64)


def _features(array: NDArray[Any]) -> NDArray[Any]:
    if array.ndim == 1:
        array = array[:, np.newaxis]
    if array.dtype == np.uint8 and array.ndim > 2:
        return array / np.float32(255)
    if array.dtype.kind == "f":
        return array.astype(np.float32) if array.dtype.itemsize < 4 else array
    return array.astype(np.int64)


def _labels(array: NDArray[Any]) -> NDArray[Any]:
    return array if array.dtype.kind == "f" else array.astype(np.int64)
