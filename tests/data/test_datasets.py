"""Datasets, built-in and from files, downloads, and partitions: what comes, and what is refused."""

import dataclasses
import gzip
import hashlib
import stat
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits as load_sklearn_digits

from aqg.data.datasets import (
    Dataset,
    Facts,
    RemoteFile,
    data_directory,
    load_dataset,
    peek,
    read_content,
    read_dataset,
)
from aqg.data.partitions import format_partition_table, parse_partition, partition_table
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


def test_mnist_and_heterogeneous(data_dir):
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
        ({"x_test": X[:, :3], "y_test": Y}, r"\(6, 4\), and of shape \(6, 3\) in its test set"),
        ({"x_test": X, "y_test": Y[:, None]}, r"\(6,\), and of shape \(6, 1\) in its test set"),
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


CONTENT = b"forty-two samples\n" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
GOOD = gzip.compress(CONTENT)
OTHER_WRAPPING = gzip.compress(CONTENT, compresslevel=1, mtime=12345)


class Reply(NamedTuple):
    body: bytes
    status: int = 200
    missing_bytes: int = 0
    content_encoding: str | None = None


REPLIES = {
    "/good.gz": Reply(GOOD),
    "/plain.txt": Reply(CONTENT),
    "/other-wrapping.gz": Reply(OTHER_WRAPPING),
    "/encoded.gz": Reply(GOOD, content_encoding="gzip"),
    "/other-content.gz": Reply(gzip.compress(b"something else")),
    "/corrupted.gz": Reply(GOOD[:30] + bytes([GOOD[30] ^ 0xFF]) + GOOD[31:]),
    "/cut.gz": Reply(GOOD[:-12]),
    "/broken-off.gz": Reply(GOOD, missing_bytes=12),
}


class Server(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requested = []
        self.meanwhile = lambda: None

    def url(self, path):
        return f"http://127.0.0.1:{self.server_port}{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        self.server.requested.append(self.path)
        self.server.meanwhile()
        reply = REPLIES.get(self.path, Reply(b"not here", status=404))
        self.send_response(reply.status)
        self.send_header("Content-Length", str(len(reply.body)))
        if reply.content_encoding:
            self.send_header("Content-Encoding", reply.content_encoding)
        self.end_headers()
        self.wfile.write(reply.body[: len(reply.body) - reply.missing_bytes])

    def log_message(self, format, *args):  # noqa: A002
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Server() as running:
        thread = Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def remote(server, *paths, name="set/file.gz"):
    return RemoteFile(name, DIGEST, tuple(server.url(path) for path in paths))


def files_below(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.parametrize(
    ("paths", "name"),
    [
        (["/good.gz"], "a.gz"),
        (["/other-wrapping.gz"], "a.gz"),  # the content counts
        (["/encoded.gz"], "a.gz"),
        (["/plain.txt"], "a.txt"),
        *(([first, "/good.gz"], "a.gz") for first in ("/missing.gz", "/other-content.gz")),
        (["/cut.gz", "/good.gz"], "a.gz"),
    ],
)
def test_downloads_once_and_then_reads_the_file(paths, name, server, tmp_path):
    file = remote(server, *paths, name=f"set/{name}")
    assert read_content(file, tmp_path) == read_content(file, tmp_path) == CONTENT
    assert server.requested == paths
    assert files_below(tmp_path) == ["set", f"set/{name}"]
    (tmp_path / "plain").touch()
    modes = {stat.S_IMODE((tmp_path / file).stat().st_mode) for file in ("plain", f"set/{name}")}
    assert len(modes) == 1  # others may read it, too


def refused(file, directory, *parts):
    """Check that the error has these parts, in one line."""
    before = files_below(directory)
    with pytest.raises(DataError) as caught:
        read_content(file, directory)
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files_below(directory) == before


@pytest.mark.parametrize(
    ("path", "name", "reason"),
    [
        ("/missing.gz", "file.gz", "HTTP status 404"),
        ("/other-content.gz", "file.gz", hashlib.sha256(b"something else").hexdigest()),
        ("/corrupted.gz", "file.gz", DIGEST),
        ("/cut.gz", "file.gz", "not a valid gzip stream"),
        ("/broken-off.gz", "file.gz", "Error"),
        ("/good.gz", "file.txt", DIGEST),  # gzip where a plain file is expected
    ],
)
def test_bad_download_is_one_line_and_leaves_nothing(path, name, reason, server, tmp_path):
    refused(remote(server, path, name=name), tmp_path, server.url(path), reason, "AQG_DATA_DIR")


@pytest.mark.parametrize("damaged", [gzip.compress(b"other"), GOOD[:-12], b"", b"<html>login"])
def test_damaged_file_is_reported_and_left_alone(damaged, server, tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(damaged)
    refused(remote(server, "/good.gz", name="file.gz"), tmp_path, str(path), DIGEST, "delete it")
    assert path.read_bytes() == damaged
    assert server.requested == []


def test_places_that_cannot_be_read_or_written_and_no_server_at_all(server, tmp_path):
    file = remote(server, "/good.gz", name="file.gz")
    server.meanwhile = (tmp_path / "file.gz").mkdir  # somebody takes the name during the download
    with pytest.raises(DataError, match=r"cannot write .*AQG_DATA_DIR"):
        read_content(file, tmp_path)
    assert files_below(tmp_path) == ["file.gz"]
    (tmp_path / "a-file").touch()
    for directory in ("a-file", "."):
        with pytest.raises(DataError, match="cannot read"):
            read_content(file, tmp_path / directory)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:
        url = f"http://127.0.0.1:{closed.server_port}/good.gz"
    file = RemoteFile("set/file.gz", DIGEST, (url, "no-scheme"))
    refused(file, tmp_path, "ConnectionError", "no-scheme (MissingSchema")


def test_a_good_file_is_enough_whoever_put_it_there(server, tmp_path):
    path = tmp_path / "file.gz"
    server.meanwhile = lambda: path.write_bytes(OTHER_WRAPPING) and None
    assert read_content(remote(server, "/good.gz", name="file.gz"), tmp_path) == CONTENT
    assert files_below(tmp_path) == ["file.gz"]
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        assert read_content(RemoteFile("file.gz", DIGEST, ()), tmp_path) == CONTENT
    finally:
        tmp_path.chmod(0o755)


def test_data_directory_prefers_argument_then_environment_then_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("AQG_DATA_DIR", str(tmp_path / "environment"))
    assert data_directory(tmp_path / "argument") == tmp_path / "argument"
    assert data_directory(None) == tmp_path / "environment"
    monkeypatch.setenv("AQG_DATA_DIR", "")
    assert data_directory(None).parts[-2:] == ("aqg", "data")
    assert data_directory(Path("~/somewhere")) == Path.home() / "somewhere"


SPECS = ["iid", "label", "source", "source:shuffled", "dirichlet:0.3", "shards:2"]
COVERING = ["iid", "label", "dirichlet:0.001", "dirichlet:0.3", "dirichlet:1e9", "shards:2"]


def make_dataset(labels, num_classes, num_sources=3):
    sources = np.arange(len(labels)) * num_sources // len(labels)
    return Dataset("made", np.zeros((len(labels), 1)), labels, num_classes, sources=sources)


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


def test_iid_parts_are_mixed_and_shuffled_slices_of_one_source_each():
    dataset = make_dataset(np.repeat(np.arange(10), 100), 10)
    parts = parse_partition("iid").split(dataset, 7, seed=0)
    assert sorted(map(len, parts)) == [142] * 1 + [143] * 6
    assert all(len(np.unique(dataset.labels[part])) == 10 for part in parts)

    dataset = make_dataset(np.zeros(22, np.int64), 1, num_sources=2)
    parts = parse_partition("source:shuffled").split(dataset, 4, seed=3)
    found = [(len(part), set(dataset.sources[part].tolist())) for part in parts]
    assert found == [(5, {0})] * 2 + [(5, {1})] * 2
    assert any(np.any(np.diff(part) != 1) for part in parts)


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


FIVES = [list(range(first, first + 5)) for first in (0, 5, 11, 16)]


@pytest.mark.parametrize(
    ("spec", "labels", "expected"),
    [("label", [0, 1, 0, 0, 1, 0, 0], [[0, 2, 3], [1, 4], [5, 6]]), ("source", [0] * 22, FIVES)],
)
def test_slices_are_consecutive_and_those_of_a_source_are_equal(spec, labels, expected):
    dataset = make_dataset(np.array(labels), max(labels) + 1, num_sources=2)
    parts = parse_partition(spec).split(dataset, len(expected), seed=0)
    assert [part.tolist() for part in parts] == expected


@pytest.mark.parametrize("concentration", [0.01, 0.5, 3.0, 100.0])
def test_dirichlet_shares_have_the_right_spread(concentration):
    # A share of Dirichlet(a, ..., a) over M clients has variance (M-1) / (M²(Ma + 1)).
    dataset = make_dataset(np.repeat(np.arange(2), 10_000), 2)
    partition = parse_partition(f"dirichlet:{concentration}")
    parts = (part for seed in range(300) for part in partition.split(dataset, 4, seed))
    counts = [np.bincount(dataset.labels[part], minlength=2) for part in parts]
    shares = np.array(counts) / 10_000
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
