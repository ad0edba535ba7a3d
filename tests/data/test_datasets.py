import numpy as np
import pytest
from sklearn.datasets import load_digits as load_sklearn_digits

from aqg.data.datasets import Dataset, load_dataset
from aqg.errors import ConfigError, DataError


def test_digits_has_a_fixed_stratified_split():
    dataset = load_dataset("digits")
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


def test_mnist(data_dir):
    dataset = load_dataset("mnist", data_dir)
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
    assert dataset.test_features is None
    assert dataset.features.shape == (2314, 34)
    assert dataset.features.dtype == np.float64
    assert np.bincount(dataset.sources).tolist() == [1605, 351, 358]
    assert np.all(np.diff(dataset.sources) >= 0)
    per_source = [np.bincount(dataset.labels[dataset.sources == s]).tolist() for s in range(3)]
    assert per_source == [[1210, 395], [225, 126], [111, 247]]
    first_of_each = [dataset.features[start, 2] for start in (0, 1605, 1956)]
    assert first_of_each == [1.969370, 0.995390, -1.744938]


def test_unknown_dataset_lists_the_choices():
    with pytest.raises(ConfigError, match="'cifar'; choose from digits, mnist, heterogeneous"):
        load_dataset("cifar")


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
