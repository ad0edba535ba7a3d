import gzip
import hashlib
import struct

import numpy as np
import pytest
from sklearn.datasets import load_digits as load_sklearn_digits

from aqg.data.datasets import (
    DATASETS,
    HETEROGENEOUS_SOURCES,
    MNIST_FILES,
    Dataset,
    MnistFiles,
    RemoteFile,
    SourceFiles,
    load_dataset,
    load_heterogeneous,
    load_mnist,
    parse_idx,
)
from aqg.errors import ConfigError, DataError


def local_file(directory, name, content):
    """Write a file whose digest is known and which nothing can download."""
    body = gzip.compress(content) if name.endswith(".gz") else content
    (directory / name).write_bytes(body)
    return RemoteFile(name, hashlib.sha256(content).hexdigest(), ())


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def test_digits_has_a_fixed_stratified_split():
    dataset = load_dataset("digits")
    assert dataset.test_features is not None
    assert dataset.test_labels is not None
    assert dataset.features.dtype == np.float64
    assert dataset.labels.dtype == dataset.test_labels.dtype == np.int64
    assert len(dataset) + len(dataset.test_labels) == 1797
    assert dataset.features.min() == 0.0
    assert dataset.features.max() == 1.0
    for digit in range(10):
        in_train = int((dataset.labels == digit).sum())
        in_test = int((dataset.test_labels == digit).sum())
        assert in_test == (in_train + in_test) // 5
    rows = np.concatenate([dataset.features, dataset.test_features])
    original = load_sklearn_digits().data / 16
    assert sorted(map(bytes, rows)) == sorted(map(bytes, original))
    again = load_dataset("digits")
    assert np.array_equal(again.features, dataset.features)


def test_mnist(data_dir):
    dataset = load_dataset("mnist", data_dir)
    assert dataset.test_features is not None
    assert dataset.test_labels is not None
    assert dataset.features.shape == (60000, 784)
    assert dataset.test_features.shape == (10000, 784)
    assert dataset.features.dtype == dataset.test_features.dtype == np.float32
    assert dataset.features.min() == 0.0
    assert dataset.features.max() == 1.0
    assert dataset.labels[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert dataset.test_labels[:8].tolist() == [7, 2, 1, 0, 4, 1, 4, 9]
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(dataset.labels).tolist() == counts
    assert dataset.features.mean(dtype=np.float64) == pytest.approx(0.1307, abs=5e-5)


def test_heterogeneous(data_dir):
    dataset = load_dataset("heterogeneous", data_dir)
    assert dataset.sources is not None
    assert dataset.test_features is None
    assert dataset.features.shape == (2314, 34)
    assert dataset.features.dtype == np.float64
    assert np.bincount(dataset.sources).tolist() == [1605, 351, 358]
    assert np.all(np.diff(dataset.sources) >= 0)
    per_source = [np.bincount(dataset.labels[dataset.sources == s]).tolist() for s in range(3)]
    assert per_source == [[1210, 395], [225, 126], [111, 247]]
    first_of_each = [dataset.features[start, 2] for start in (0, 1605, 1956)]
    assert first_of_each == [1.969370, 0.995390, -1.744938]


def test_mnist_from_small_files(tmp_path):
    images = np.arange(24).reshape(2, 3, 4) * 10
    files = MnistFiles(
        local_file(tmp_path, "a.gz", idx(images)),
        local_file(tmp_path, "b.gz", idx(np.array([3, 9]))),
        local_file(tmp_path, "c.gz", idx(images[:1])),
        local_file(tmp_path, "d.gz", idx(np.array([0]))),
    )
    dataset = load_mnist(tmp_path, files)
    np.testing.assert_array_equal(
        dataset.features, images.reshape(2, 12).astype(np.float32) / np.float32(255)
    )
    assert dataset.labels.tolist() == [3, 9]


def test_mnist_with_more_labels_than_images_is_refused(tmp_path):
    image = local_file(tmp_path, "a.gz", idx(np.zeros((1, 2, 2))))
    labels = local_file(tmp_path, "b.gz", idx(np.array([3, 9])))
    with pytest.raises(DataError, match=r"\(1, 4\).*\(2,\)"):
        load_mnist(tmp_path, MnistFiles(image, labels, image, labels))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with ''"),
        (b"\x00\x00\x08", "starts with '000008'"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x00", "starts with '00000d01', expected '00000801'"),
        (b"\x00\x00\x08\x03" + bytes(12), "starts with '00000803'"),
        (b"\x00\x00\x08\x01\x00\x00", "has 6 bytes, its header alone 8"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x02a", "has 9 bytes, its header says 10"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x02abc", "has 11 bytes, its header says 10"),
        (b"\x00\x00\x08\x01\xff\xff\xff\xff", "header says 4294967303"),
    ],
)
def test_malformed_idx(content, message):
    with pytest.raises(DataError, match=message):
        parse_idx(content, 1)


def test_idx_sizes_do_not_overflow():
    with pytest.raises(DataError, match="header says"):
        parse_idx(b"\x00\x00\x08\x02" + b"\x80\x00\x00\x00" * 2, 2)


def table(num_rows, num_columns):
    row = " ".join(f"{column}.5" for column in range(num_columns))
    return (f"{row} \n" * num_rows).encode()


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (table(2, 33), b"0\n1\n", "33 columns, at least 34"),
        (table(2, 34), b"0\n", r"\(1, 1\), \(2, 1\) is needed"),
        (table(2, 34), b"0\n2\n", "other than -1, 0 and 1"),
        (table(2, 34), b"0\nyes\n", "not a table of numbers"),
        (table(1, 34) + table(1, 35), b"0\n1\n", "not a table of numbers"),
    ],
)
def test_malformed_tables(features, labels, message, tmp_path):
    source = SourceFiles(
        local_file(tmp_path, "data.txt", features), local_file(tmp_path, "y.txt", labels)
    )
    with pytest.raises(DataError, match=message) as caught:
        load_heterogeneous(tmp_path, (source,))
    assert "\n" not in str(caught.value)


def test_labels_of_either_kind_become_zero_and_one(tmp_path):
    features = local_file(tmp_path, "data.txt", table(2, 40))
    sources = tuple(
        SourceFiles(features, local_file(tmp_path, name, labels))
        for name, labels in (("y1.txt", b"0 \n1 \n"), ("y2.txt", b"1 \n-1 \n"))
    )
    dataset = load_heterogeneous(tmp_path, sources)
    assert dataset.labels.tolist() == [0, 1, 1, 0]
    assert dataset.sources is not None
    assert dataset.sources.tolist() == [0, 0, 1, 1]
    assert dataset.features[3].tolist() == [column + 0.5 for column in range(34)]


def test_unknown_dataset_lists_the_choices():
    with pytest.raises(ConfigError, match="'cifar'; choose one of digits, mnist, heterogeneous"):
        load_dataset("cifar")


def test_every_dataset_has_a_line():
    for name, info in DATASETS.items():
        assert info.name == name
        assert info.summary
        assert "\n" not in info.summary


def test_every_file_has_a_digest_and_two_places_to_come_from():
    files = [*MNIST_FILES, *(file for source in HETEROGENEOUS_SOURCES for file in source)]
    assert len({file.path for file in files}) == len(files) == 10
    for file in files:
        assert len(bytes.fromhex(file.sha256)) == 32
        assert len(set(file.urls)) == 2
        assert all(url.startswith("https://") for url in file.urls)
        assert all(url.endswith(file.path.split("/")[-1]) for url in file.urls)


FEATURES = np.zeros((3, 2))
LABELS = np.array([0, 1, 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": np.zeros(3)}, r"shape \(3,\)"),
        ({"labels": LABELS[:2]}, r"labels of shape \(2,\)"),
        ({"features": FEATURES[:0], "labels": LABELS[:0]}, "N >= 1"),
        ({"num_classes": 1}, r"labels in 0\.\.1, outside 0\.\.0"),
        ({"labels": LABELS - 1}, r"labels in -1\.\.0"),
        ({"test_features": FEATURES}, "not both"),
        (
            {"test_features": np.zeros((3, 5)), "test_labels": LABELS},
            r"shape \(3, 2\), and of shape \(3, 5\)",
        ),
        ({"test_features": FEATURES, "test_labels": LABELS + 1}, r"'set \(test\)'"),
        ({"sources": LABELS[:2]}, r"sources of shape \(2,\)"),
    ],
)
def test_inconsistent_dataset_is_refused(changes, message):
    fields = {"name": "set", "features": FEATURES, "labels": LABELS, "num_classes": 2}
    with pytest.raises(DataError, match=message):
        Dataset(**(fields | changes))
