"""Datasets from files: what is read, and what is refused in one line."""

import numpy as np
import pytest

from aqg.data import load_dataset, parse_partition
from aqg.data.datasets import Facts, peek, read_dataset
from aqg.errors import DataError

X, Y = np.arange(24.0).reshape(6, 4), np.array([0, 1, 2, 0, 1, 2])
OWNERS = np.array(["cyd", "ann", "bob", "ann", "ann", "bob"])


def write(path, **arrays):
    np.savez(path, **({"x_train": X, "y_train": Y} | arrays))
    return path


def test_a_file_is_read_with_its_clients(tmp_path):
    path = write(tmp_path / "own.npz", x_test=X[:2], y_test=Y[:2], client=OWNERS)
    assert peek(path) == Facts(num_samples=6, num_clients=3, has_classes=True)
    dataset = load_dataset(str(path))
    assert (dataset.name, dataset.num_classes, dataset.sample_shape) == ("own.npz", 3, (4,))
    assert dataset.client_names == ("ann", "bob", "cyd")
    parts = parse_partition("natural").split(dataset, 3, seed=0)
    assert [part.tolist() for part in parts] == [[1, 3, 4], [2, 5], [0]]
    with pytest.raises(DataError, match="has 3 clients of its own, and clients is 4"):
        parse_partition("natural").split(dataset, 4, seed=0)


def test_pixels_become_fractions_and_token_ids_stay(tmp_path):
    images = np.full((6, 2, 2, 3), 255, np.uint8)
    dataset = read_dataset(write(tmp_path / "images.npz", x_train=images))
    assert dataset.features.dtype == np.float32
    assert (dataset.features == 1).all()
    tokens = np.full((6, 5), 200, np.uint8)
    dataset = read_dataset(write(tmp_path / "tokens.npz", x_train=tokens, y_train=tokens))
    assert dataset.features.dtype == np.int64
    assert (dataset.num_classes, dataset.labels.shape) == (0, (6, 5))


def test_numbers_are_no_classes(tmp_path):
    dataset = read_dataset(write(tmp_path / "own.npz", y_train=Y + 0.5))
    assert dataset.num_classes == 0
    for spec in ("label", "dirichlet:0.3", "shards:1"):
        with pytest.raises(DataError, match="needs one class per sample"):
            parse_partition(spec).split(dataset, 3, seed=0)
    assert len(parse_partition("iid").split(dataset, 3, seed=0)) == 3
    with pytest.raises(DataError, match="does not say which client a sample belongs to"):
        parse_partition("natural").split(dataset, 3, seed=0)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y_train": Y[:4]}, r"features of shape \(6, 4\) and labels of shape \(4,\)"),
        ({"x_train": X[:0], "y_train": Y[:0]}, "N >= 1 are needed"),
        ({"x_train": X[:, :0]}, r"features of shape \(6, 0\)"),
        ({"x_test": X}, "has x_test and no y_test"),
        ({"y_test": Y}, "has y_test and no x_test"),
        (
            {"x_test": X[:, :3], "y_test": Y},
            r"features of shape \(6, 4\), and of shape \(6, 3\) in its test set",
        ),
        (
            {"x_test": X, "y_test": Y[:, None]},
            r"labels of shape \(6,\), and of shape \(6, 1\) in its test set",
        ),
        ({"x_train": np.where(X == 9, np.nan, X)}, r"'x_train' .* first at \[2, 1\]"),
        ({"y_train": np.array(list("abcdef"))}, "'y_train' .* is <U1; it must be numbers"),
        ({"x_train": X.astype(object)}, "'x_train' .* holds Python objects"),
        ({"client": OWNERS[:3]}, r"'client' .* of shape \(3,\)"),
        ({"client": X[:, 0]}, "'client' .* is float64"),
    ],
)
def test_bad_arrays_are_named(arrays, message, tmp_path):
    path = tmp_path / "own.npz"
    content = {"x_train": X, "y_train": Y} | arrays
    np.savez(path, **content)
    with pytest.raises(DataError, match=message) as caught:
        read_dataset(path)
    assert "\n" not in str(caught.value)
    assert "own.npz" in str(caught.value)


def test_bad_files_are_named(tmp_path):
    np.savez(tmp_path / "less.npz", x_train=X, labels=Y)
    np.save(tmp_path / "single.npy", X)
    (tmp_path / "single.npy").rename(tmp_path / "single.npz")
    (tmp_path / "text.npz").write_text("hello")
    whole = write(tmp_path / "whole.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    for name, message in {
        "less.npz": "has no array 'y_train'; it holds x_train, labels",
        "single.npz": "holds a single array",
        "text.npz": "is not a file that numpy.savez wrote",
        "cut.npz": "is not a file that numpy.savez wrote",
        "nowhere.npz": "cannot be read: No such file",
    }.items():
        with pytest.raises(DataError, match=message):
            read_dataset(tmp_path / name)
