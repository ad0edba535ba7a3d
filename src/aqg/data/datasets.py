"""The datasets: real data as arrays, loaded by name, or from a file ``FILE.npz`` of the user's own.

``docs/how-to/own-data.md`` says what such a file holds. Pixels, that is unsigned bytes with at
least two axes per sample, are divided by 255; other integers, such as token ids, stay integers.

Files from the network are kept in a data directory and verified on every read, by the SHA-256 of
the *decompressed* content: mirrors wrap the same file in different gzip streams.
"""

import contextlib
import gzip
import hashlib
import io
import logging
import math
import os
import secrets
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqg.core.types import IntArray
from aqg.errors import DataError
from aqg.settings import require_choice

ENVIRONMENT_VARIABLE = "AQG_DATA_DIR"
_ELSEWHERE = f"choose a data directory with --data-dir or {ENVIRONMENT_VARIABLE}"
_GZIP_MAGIC = b"\x1f\x8b"
_TIMEOUT_SECONDS = 30.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    path: str  # where it lives below the data directory, with forward slashes
    sha256: str  # hex digest of the content, after gzip decompression if ``path`` ends in ``.gz``
    urls: tuple[str, ...]  # where to get it, in the order to try


def data_directory(data_dir: Path | None = None) -> Path:
    """Return the data directory: the argument, else ``AQG_DATA_DIR``, else the user's cache."""
    return chosen_directory(data_dir, ENVIRONMENT_VARIABLE, "data")


def chosen_directory(given: Path | None, variable: str, folder: str) -> Path:
    """Return what is given, else what the environment says, else a folder of the user's cache."""
    chosen = given or os.environ.get(variable)
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs  # not needed where the environment says it

    return platformdirs.user_cache_path("aqg", appauthor=False) / folder


def read_content(file: RemoteFile, directory: Path) -> bytes:
    """Return the verified, decompressed content of ``file``, downloading it if it is missing.

    A file that is there is only ever read. One that is damaged is left alone: it may be the user's.
    """
    path = directory / file.path
    try:
        body = path.read_bytes()
    except FileNotFoundError:
        return _download(file, path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; {_ELSEWHERE}") from error
    try:
        return _verified(body, file)
    except DataError as error:
        raise DataError(
            f"{path} is damaged: {error}; delete it, and it is downloaded again"
        ) from error


def _verified(body: bytes, file: RemoteFile) -> bytes:
    # A server or proxy may undo the compression in transit, so the bytes decide, not the name.
    content = body
    if file.path.endswith(".gz") and body.startswith(_GZIP_MAGIC):
        try:
            content = gzip.decompress(body)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"not a valid gzip stream ({error}), expected content with SHA-256 {file.sha256}"
            ) from error
    found = hashlib.sha256(content).hexdigest()
    if found != file.sha256:
        raise DataError(f"SHA-256 of the content is {found}, expected {file.sha256}")
    return content


def _download(file: RemoteFile, path: Path) -> bytes:
    import pooch

    download = pooch.HTTPDownloader(timeout=_TIMEOUT_SECONDS)
    failures = []
    for url in file.urls:
        _logger.info("downloading %s", url)
        buffer = io.BytesIO()  # the largest file is 10 MB; only what is verified reaches the disk
        try:
            download(url, buffer, None)
            content = _verified(buffer.getvalue(), file)
        except DataError as error:
            failures.append(f"{url} ({error})")
        except OSError as error:  # the base of every error of the transport
            status = getattr(getattr(error, "response", None), "status_code", None)
            reason = type(error).__name__ if status is None else f"HTTP status {status}"
            failures.append(f"{url} ({reason})")
        else:
            write_whole(path, buffer.getvalue())
            return content
    raise DataError(
        f"cannot download {file.path}, tried {', '.join(failures)}; "
        f"put the file at {path} or {_ELSEWHERE}"
    )


def write_whole(path: Path, body: bytes) -> None:
    """Write a file so that it appears whole or not at all, making its directory first."""
    # Not `tempfile`, whose files only their owner may read: a data directory can be shared.
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("xb") as stream:
            stream.write(body)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; {_ELSEWHERE}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


NUM_SHARED_FEATURES = 34
"""Features kept of each heterogeneous set: as many as the smallest has."""


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    name: str  # the name it was loaded by
    features: NDArray[Any]  # ``(N, ...)``, floating point, or integers such as token ids
    # ``(N,)``, int64 in ``0..num_classes-1``; or targets of any shape ``(N, ...)``
    labels: NDArray[Any]
    num_classes: int  # the number of labels there are; 0 where the targets are not classes
    test_features: NDArray[Any] | None = None  # ``(N', ...)``, or None where there is no test set
    test_labels: NDArray[Any] | None = None  # ``(N', ...)``, or None where there is no test set
    # ``(N,)``, int64: which of several original sets a sample is from, or None
    sources: IntArray | None = None
    # ``(N,)``, int64 in ``0..M-1``: which client a sample belongs to, or None
    clients: IntArray | None = None
    client_names: tuple[str, ...] = ()  # what the data call the ``M`` clients

    def __post_init__(self) -> None:
        _check_samples(self.name, self.features, self.labels, self.num_classes)
        if (self.test_features is None) != (self.test_labels is None):
            raise DataError(f"dataset {self.name!r} has test features or test labels, not both")
        if self.test_features is not None and self.test_labels is not None:
            name = f"{self.name} (test)"
            _check_samples(name, self.test_features, self.test_labels, self.num_classes)
            features, labels = (self.features, self.test_features), (self.labels, self.test_labels)
            for what, (train, test) in (("features", features), ("labels", labels)):
                if train.shape[1:] != test.shape[1:]:
                    raise DataError(
                        f"dataset {self.name!r} has {what} of shape {train.shape}, and of shape "
                        f"{test.shape} in its test set; they must agree after the first axis"
                    )
        for what, column in (("sources", self.sources), ("clients", self.clients)):
            if column is not None and column.shape != self.labels.shape[:1]:
                raise DataError(
                    f"dataset {self.name!r} has {len(self.labels)} labels and {what} of shape "
                    f"{column.shape}"
                )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_features(self) -> int:
        return math.prod(self.sample_shape)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return self.features.shape[1:]


def _check_samples(
    name: str, features: NDArray[Any], labels: NDArray[Any], num_classes: int
) -> None:
    if features.ndim < 2 or labels.shape[:1] != features.shape[:1] or not features.size:
        raise DataError(
            f"dataset {name!r} has features of shape {features.shape} and labels of shape "
            f"{labels.shape}; (N, ...) and (N,) with N >= 1 are needed"
        )
    if not num_classes:
        return
    if labels.ndim != 1:
        raise DataError(f"dataset {name!r} has labels of shape {labels.shape}; (N,) is needed")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise DataError(
            f"dataset {name!r} has labels in {labels.min()}..{labels.max()}, "
            f"outside 0..{num_classes - 1}"
        )


def load_digits() -> Dataset:
    """Load scikit-learn's 8×8 digits, which need no download.

    In the order of the source, samples 5, 10, 15, ... of each digit are the test set, so every
    writer and every digit is in both parts and the split never changes.
    """
    from sklearn.datasets import load_digits as load_sklearn_digits

    bunch = load_sklearn_digits()
    features = bunch.data.astype(np.float64) / 16.0
    labels = bunch.target.astype(np.int64)
    in_test = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        in_test[np.flatnonzero(labels == digit)[4::5]] = True
    test = features[in_test], labels[in_test]
    return Dataset("digits", features[~in_test], labels[~in_test], 10, *test)


def _remote_files(
    folder: str, mirrors: Sequence[str], digests: Mapping[str, str]
) -> tuple[RemoteFile, ...]:
    return tuple(
        RemoteFile(f"{folder}/{name}", digest, tuple(f"{mirror}/{name}" for mirror in mirrors))
        for name, digest in digests.items()
    )


_MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
)
_MNIST_DIGESTS = {
    "train-images-idx3": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
MNIST_FILES = _remote_files(
    "mnist", _MNIST_MIRRORS, {f"{name}-ubyte.gz": sha for name, sha in _MNIST_DIGESTS.items()}
)


def load_mnist(data_dir: Path | None = None) -> Dataset:
    """Load MNIST with its official test set; pixels are divided by 255."""
    directory = data_directory(data_dir)
    x, y, x_test, y_test = (read_content(file, directory) for file in MNIST_FILES)

    def images(content: bytes) -> NDArray[np.floating]:
        return np.frombuffer(content, np.uint8, offset=16).reshape(-1, 784) / np.float32(255)

    def labels(content: bytes) -> IntArray:
        return np.frombuffer(content, np.uint8, offset=8).astype(np.int64)

    return Dataset("mnist", images(x), labels(y), 10, images(x_test), labels(y_test))


_LAG = "https://raw.githubusercontent.com/chentianyi1991/LAG-code"
_LAG_VERSIONS = ("master", "9a0b2b7c183ed07798fd71a6a8e8262b3fa019a0")
_LAG_DIGESTS = {
    "data9": (  # Adult
        "42e46316bcd20a2e98f2329f9cf8dde0852b55625dae606334247f22720e451c",
        "b7c12be0f3f242ecfd0101e50406a42821b6ebddaa261043473bdb2c5547cb81",
    ),
    "data2": (  # Ionosphere
        "7d068ff93ad4b682e179833dfdc3815b4fdbab1bb730b26290f8ff70d8c6e791",
        "3ef07f6bcee8b26650afb07c292e7453c0b4816c3908168bf6baa93bce701f10",
    ),
    "data11": (  # Derm
        "9f3aa984c6ac0698fb6b6351264250d6093cc263ad5a1d9a2ffde0f855e53271",
        "1a64111d6b8b6cdbea81267818646c9d1d7b7d71ee0e0a0597326c39e9a849a7",
    ),
}
HETEROGENEOUS_FILES = tuple(
    _remote_files(
        f"lag/{folder}",
        [f"{_LAG}/{version}/{folder}" for version in _LAG_VERSIONS],
        dict(zip(("data.txt", "y.txt"), digests, strict=True)),
    )
    for folder, digests in _LAG_DIGESTS.items()
)


def load_heterogeneous(data_dir: Path | None = None) -> Dataset:
    """Load the three sets of the paper's logistic regression, one after the other.

    Adult, Ionosphere and Derm as the LAG experiments use them: the first 34 features of each,
    labels 0 and 1 (in Derm -1 becomes 0), `Dataset.sources` 0, 1 and 2, samples in file order.
    """
    directory = data_directory(data_dir)
    features, labels = [], []
    for files in HETEROGENEOUS_FILES:
        table, column = (np.loadtxt(io.BytesIO(read_content(file, directory))) for file in files)
        features.append(table[:, :NUM_SHARED_FEATURES])
        labels.append((column > 0).astype(np.int64))
    sources = np.repeat(np.arange(len(labels)), [len(part) for part in labels])
    samples = np.concatenate(features), np.concatenate(labels)
    return Dataset("heterogeneous", *samples, num_classes=2, sources=sources)


DATASETS: dict[str, tuple[str, Callable[[Path | None], Dataset]]] = {
    "digits": (
        "1797 images of 8×8 pixels, 10 digits; comes with scikit-learn, no download",
        lambda _: load_digits(),
    ),
    "mnist": ("70000 images of 28×28 pixels, 10 digits; 11 MB from the usual mirrors", load_mnist),
    "heterogeneous": (
        "2314 samples of 34 features, 2 classes: Adult, Ionosphere and Derm, the paper's three "
        "sets; 2 MB from the LAG repository on GitHub",
        load_heterogeneous,
    ),
}
"""Of each a line about it, and what loads it from a data directory."""


def is_dataset_file(name: str) -> bool:
    return name.endswith(".npz")


def load_dataset(name: str, data_dir: Path | None = None) -> Dataset:
    if is_dataset_file(name):
        return read_dataset(Path(name).expanduser())
    require_choice("dataset", name, DATASETS, "or FILE.npz")
    return DATASETS[name][1](data_dir)


Arrays = dict[str, NDArray[Any]]

_MAX_CLASSES = 1 << 17
"""Whole numbers above this are taken as amounts, not classes."""


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
    arrays = read_arrays(path, ("x_train", "y_train"), ("x_test", "y_test", "client"))
    for name in arrays.keys() - {"client"}:
        _check_numbers(path, name, arrays[name])
    if ("x_test" in arrays) != ("y_test" in arrays):
        present, absent = ("x_test", "y_test") if "x_test" in arrays else ("y_test", "x_test")
        raise DataError(f"{str(path)!r} has {present} and no {absent}; it needs both, or neither")
    labels, test_labels = arrays["y_train"], arrays.get("y_test")
    num_classes = 0
    if _are_classes(labels) and (test_labels is None or _are_classes(test_labels)):
        num_classes = max(int(part.max()) for part in (labels, test_labels) if part is not None) + 1
        num_classes = max(2, num_classes)
    test: Any = ()
    if test_labels is not None:
        test = _features(arrays["x_test"]), _labels(test_labels)
    samples = _features(arrays["x_train"]), _labels(labels)
    names, clients = _clients(path, arrays)
    more: Any = {"clients": clients, "client_names": names}
    return Dataset(path.name, *samples, num_classes, *test, **more)


def read_arrays(path: Path, needed: Sequence[str], optional: Sequence[str] = ()) -> Arrays:
    """Return arrays of a file that `numpy.savez` wrote, by name; nothing in it is run."""
    try:
        with path.open("rb") as file:
            content: Any = np.load(file, allow_pickle=False)
            if not isinstance(content, np.lib.npyio.NpzFile):
                raise DataError(f"{str(path)!r} holds a single array; write it with numpy.savez")
            missing = [name for name in needed if name not in content]
            if missing:
                held = ", ".join(content.files) or "nothing"
                raise DataError(
                    f"{str(path)!r} has no array {missing[0]!r}; it holds {held}, and "
                    f"{' and '.join(needed)} are needed"
                )
            found: Arrays = {}
            for name in (*needed, *optional):
                if name in content:
                    try:
                        found[name] = content[name]
                    except ValueError:
                        raise DataError(
                            f"array {name!r} of {str(path)!r} holds Python objects, which are not "
                            "loaded; convert it to numbers or texts first"
                        ) from None
            return found
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"dataset {str(path)!r} cannot be read: {reason}") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{str(path)!r} is not a file that numpy.savez wrote: {error}") from None


def _check_numbers(path: Path, name: str, array: NDArray[Any]) -> None:
    if array.dtype.kind not in "fiub":
        raise DataError(f"array {name!r} of {str(path)!r} is {array.dtype}; it must be numbers")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        first = np.argwhere(~np.isfinite(array))[0].tolist()
        raise DataError(
            f"array {name!r} of {str(path)!r} holds NaN or infinity, first at {first}; "
            "fill it in or drop those samples"
        )


def _are_classes(labels: NDArray[Any]) -> bool:
    is_whole = labels.ndim == 1 and labels.dtype.kind in "iub"
    return is_whole and len(labels) > 0 and labels.min() >= 0 and labels.max() < _MAX_CLASSES


def _clients(path: Path, arrays: Arrays) -> tuple[tuple[str, ...], IntArray | None]:
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
