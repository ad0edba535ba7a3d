import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqg.data.datasets import Dataset, load_dataset
from aqg.data.partitions import format_partition_table, parse_partition, partition_table
from aqg.errors import ConfigError, DataError

SPECS = ["iid", "label", "source", "source:shuffled", "dirichlet:0.3", "shards:2"]
COVERING = ["iid", "label", "dirichlet:0.001", "dirichlet:0.3", "dirichlet:1e9", "shards:2"]


def make_dataset(labels, num_classes, num_sources=3):
    return Dataset(
        name="made",
        features=np.zeros((len(labels), 1)),
        labels=labels,
        num_classes=num_classes,
        sources=np.arange(len(labels)) * num_sources // len(labels),
    )


def shuffled_dataset(num_samples, num_classes, seed=0):
    labels = np.random.default_rng(seed).permutation(np.arange(num_samples) % num_classes)
    return make_dataset(labels, num_classes)


@given(
    spec=st.sampled_from(COVERING),
    num_classes=st.integers(1, 5),
    num_clients=st.integers(5, 20),
    num_samples=st.integers(100, 200),
    seed=st.integers(0, 2**70),
)
def test_parts_are_sorted_disjoint_nonempty_and_cover_everything(
    spec, num_classes, num_clients, num_samples, seed
):
    dataset = shuffled_dataset(num_samples, num_classes)
    parts = parse_partition(spec).split(dataset, num_clients, seed)
    assert len(parts) == num_clients
    assert all(part.dtype == np.int64 and len(part) for part in parts)
    assert all(np.all(np.diff(part) > 0) for part in parts)
    assert np.sort(np.concatenate(parts)).tolist() == list(range(num_samples))


@pytest.mark.parametrize("spec", SPECS)
def test_a_seed_decides_and_others_differ(spec):
    dataset, partition = shuffled_dataset(300, 3), parse_partition(spec)
    first, second = (partition.split(dataset, 6, seed=7) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    seen = {tuple(partition.split(dataset, 6, seed)[0].tolist()) for seed in range(10)}
    assert len(seen) == (1 if spec in ("label", "source") else 10)


def test_iid_parts_are_of_one_size_and_mixed():
    dataset = make_dataset(np.repeat(np.arange(10), 100), 10)
    parts = parse_partition("iid").split(dataset, 7, seed=0)
    assert sorted(map(len, parts)) == [142] * 1 + [143] * 6
    assert all(len(np.unique(dataset.labels[part])) == 10 for part in parts)


@given(num_classes=st.integers(1, 6), extra=st.integers(0, 20))
def test_label_gives_each_client_its_label_in_near_equal_slices(num_classes, extra):
    num_clients = num_classes + extra
    dataset = shuffled_dataset(400, num_classes)
    parts = parse_partition("label").split(dataset, num_clients, seed=0)
    for client, part in enumerate(parts):
        assert set(dataset.labels[part].tolist()) == {client % num_classes}
    for label in range(num_classes):
        sizes = [len(part) for part in parts[label::num_classes]]
        assert max(sizes) - min(sizes) <= 1


def test_shuffled_slices_are_equal_and_of_one_source_each():
    dataset = make_dataset(np.zeros(22, np.int64), 1, num_sources=2)
    parts = parse_partition("source:shuffled").split(dataset, 4, seed=3)
    assert [(len(p), set(dataset.sources[p].tolist())) for p in parts] == [(5, {0})] * 2 + [
        (5, {1})
    ] * 2
    assert any(np.any(np.diff(part) != 1) for part in parts)


FIVES = [list(range(first, first + 5)) for first in (0, 5, 11, 16)]


@pytest.mark.parametrize(
    ("spec", "labels", "expected"),
    [("label", [0, 1, 0, 0, 1, 0, 0], [[0, 2, 3], [1, 4], [5, 6]]), ("source", [0] * 22, FIVES)],
)
def test_slices_are_consecutive_and_those_of_a_source_are_equal(spec, labels, expected):
    dataset = make_dataset(np.array(labels), max(labels) + 1, num_sources=2)
    parts = parse_partition(spec).split(dataset, len(expected), seed=0)
    assert [part.tolist() for part in parts] == expected


def test_source_on_the_papers_eighteen_clients(data_dir):
    dataset = load_dataset("heterogeneous", data_dir)
    parts = parse_partition("source").split(dataset, 18, seed=0)
    assert [len(part) for part in parts] == [267] * 6 + [58] * 6 + [59] * 6
    starts = [part[0] for part in parts[::6]]
    assert starts == [0, 1605, 1605 + 351]
    assert all(np.all(np.diff(part) == 1) for part in parts)


@pytest.mark.parametrize("concentration", [0.01, 0.5, 3.0, 100.0])
def test_dirichlet_shares_have_the_right_spread(concentration):
    # A share of Dirichlet(a, ..., a) over M clients has variance (M-1) / (M²(Ma + 1)).
    dataset = make_dataset(np.repeat(np.arange(2), 10_000), 2)
    partition = parse_partition(f"dirichlet:{concentration}")
    shares = np.array(
        [
            np.bincount(dataset.labels[part], minlength=2) / 10_000
            for seed in range(300)
            for part in partition.split(dataset, 4, seed)
        ]
    )
    assert shares.mean() == pytest.approx(1 / 4)
    assert shares.var() == pytest.approx(3 / (16 * (4 * concentration + 1)), rel=0.1)


@pytest.mark.parametrize("concentration", [5e-324, 1e-9, 0.05, 1.0])
def test_dirichlet_feeds_every_client_and_misses_no_absent_label(concentration):
    partition = parse_partition(f"dirichlet:{concentration}")
    parts = partition.split(shuffled_dataset(50, 3), 50, seed=3)
    assert [len(part) for part in parts] == [1] * 50
    dataset = make_dataset(np.array([0, 2] * 20), 3)
    assert sum(map(len, partition.split(dataset, 4, seed=0))) == 40


@given(num_clients=st.integers(1, 12), shards_per_client=st.integers(1, 4))
def test_shards_hold_few_labels_and_near_equal_sizes(num_clients, shards_per_client):
    dataset = shuffled_dataset(240, 4)
    parts = parse_partition(f"shards:{shards_per_client}").split(dataset, num_clients, seed=1)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= shards_per_client
    if num_clients * shards_per_client % 4 == 0 and 240 % (num_clients * shards_per_client) == 0:
        for part in parts:
            assert len(np.unique(dataset.labels[part])) <= shards_per_client


FORMS = "iid, label, source, natural, dirichlet, shards"


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["", "IID", "random", "shard:2", ":"], rf"unknown partition '\w*'; choose from {FORMS}$"),
        (["iid:1", "source:mixed", "shards:1:2", "dirichlet::"], r"'\w+' has no option '\w*'; it"),
        ([f"dirichlet:{a}" for a in ("0", "-1", "nan", "inf", "1e10")], "above 0 and at most 1e"),
        (["shards:0", "shards:-1"], "must be at least 1"),
        (["shards:1.5", "shards:a"], "whole number"),
    ],
)
def test_a_partition_that_there_is_not(specs, message):
    for spec in specs:
        with pytest.raises(ConfigError, match=message):
            parse_partition(spec)


@pytest.mark.parametrize(
    ("spec", "num_clients", "seed", "message"),
    [
        ("iid", 61, 0, "cannot split 60 samples of 'made' among 61 clients"),
        ("iid", 0, 0, "clients is 0; it must be at least 1"),
        ("iid", 6, -1, "seed is -1; it must be at least 0"),
        ("label", 2, 0, "needs at least 3 clients for the 3 labels of 'made', got 2"),
        ("label", 59, 0, "label 2 of 'made' has 18 samples, too few for the 19 of 59"),
        ("source", 4, 0, "4 clients cannot share the 3 sources of 'made' evenly; use a multiple"),
        ("source", 60, 0, "source 2 of 'made' has 18 samples, too few for 20 clients"),
        ("shards:7", 10, 0, "cannot cut 60 samples of 'made' into 70 shards"),
    ],
)
def test_split_that_does_not_fit_the_data(spec, num_clients, seed, message):
    labels = np.repeat(np.arange(3), [22, 20, 18])
    dataset = dataclasses.replace(make_dataset(labels, 3), sources=labels)
    with pytest.raises((ConfigError, DataError), match=message):
        parse_partition(spec).split(dataset, num_clients, seed)
    if spec == "source":
        with pytest.raises(DataError, match="'made' has a single source"):
            parse_partition(spec).split(dataclasses.replace(dataset, sources=None), 2, seed)


def test_table_counts_what_each_client_holds():
    dataset = make_dataset(np.array([0, 2, 2, 0, 1, 1]), 3)
    parts = (np.array([0, 1, 2]), np.array([4]))
    assert format_partition_table(partition_table(dataset, parts)).splitlines() == [
        "client  samples  label 0  label 1  label 2  source 0  source 1  source 2",
        "     0        3        1        .        2         2         1         .",
        "     1        1        .        1        .         .         .         1",
    ]
    rows = partition_table(dataclasses.replace(dataset, sources=None), parts)
    assert "source" not in format_partition_table(rows)
