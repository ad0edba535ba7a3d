"""The cache against a real web server on this machine."""

from __future__ import annotations

import gzip
import hashlib
import stat
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import pytest

from aqg.data.datasets import RemoteFile, data_directory, read_content
from aqg.errors import DataError

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


def test_downloads_once_and_then_reads_the_file(server, tmp_path):
    file = remote(server, "/good.gz")
    assert read_content(file, tmp_path) == read_content(file, tmp_path) == CONTENT
    assert (tmp_path / "set/file.gz").read_bytes() == GOOD
    assert server.requested == ["/good.gz"]
    assert files_below(tmp_path) == ["set", "set/file.gz"]
    (tmp_path / "plain").touch()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "set/file.gz")}
    assert len(modes) == 1


@pytest.mark.parametrize(
    ("path", "name"),
    [("/other-wrapping.gz", "a.gz"), ("/encoded.gz", "a.gz"), ("/plain.txt", "a.txt")],
)
def test_the_content_counts_not_its_wrapping(path, name, server, tmp_path):
    file = remote(server, path, name=name)
    assert read_content(file, tmp_path) == read_content(file, tmp_path) == CONTENT
    assert len(server.requested) == 1


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
    with pytest.raises(DataError) as caught:
        read_content(remote(server, path, name=name), tmp_path)
    for part in (server.url(path), reason, "AQG_DATA_DIR"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert files_below(tmp_path) == []


@pytest.mark.parametrize("first", ["/missing.gz", "/other-content.gz", "/cut.gz"])
def test_second_mirror_helps(first, server, tmp_path):
    assert read_content(remote(server, first, "/good.gz"), tmp_path) == CONTENT
    assert server.requested == [first, "/good.gz"]
    assert files_below(tmp_path) == ["set", "set/file.gz"]


def test_no_server_at_all(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:
        url = f"http://127.0.0.1:{closed.server_port}/good.gz"
    with pytest.raises(DataError, match=r"ConnectionError.*no-scheme \(MissingSchema"):
        read_content(RemoteFile("set/file.gz", DIGEST, (url, "no-scheme")), tmp_path)
    assert files_below(tmp_path) == []


@pytest.mark.parametrize("damaged", [gzip.compress(b"other"), GOOD[:-12], b"", b"<html>login"])
def test_damaged_file_is_reported_and_left_alone(damaged, server, tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(damaged)
    with pytest.raises(DataError) as caught:
        read_content(remote(server, "/good.gz", name="file.gz"), tmp_path)
    for part in (str(path), DIGEST, "delete it"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == damaged
    assert server.requested == []


def test_read_only_directory_with_good_files_works(tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(GOOD)
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        assert read_content(RemoteFile("file.gz", DIGEST, ()), tmp_path) == CONTENT
    finally:
        tmp_path.chmod(0o755)
    assert files_below(tmp_path) == ["file.gz"]


def test_a_place_that_cannot_be_written_is_reported_and_nothing_is_left(server, tmp_path):
    server.meanwhile = (tmp_path / "file.gz").mkdir  # somebody takes the name during the download
    with pytest.raises(DataError, match=r"cannot write .*AQG_DATA_DIR"):
        read_content(remote(server, "/good.gz", name="file.gz"), tmp_path)
    assert files_below(tmp_path) == ["file.gz"]


def test_file_placed_meanwhile_by_another_process_is_no_problem(server, tmp_path):
    path = tmp_path / "file.gz"
    server.meanwhile = lambda: path.write_bytes(OTHER_WRAPPING) and None
    assert read_content(remote(server, "/good.gz", name="file.gz"), tmp_path) == CONTENT
    assert files_below(tmp_path) == ["file.gz"]


@pytest.mark.parametrize("directory", ["a-file", "."])
def test_unreadable_path_is_reported(directory, tmp_path):
    (tmp_path / "a-file").touch()
    (tmp_path / "file.gz").mkdir()
    with pytest.raises(DataError, match="cannot read"):
        read_content(RemoteFile("file.gz", DIGEST, ()), tmp_path / directory)


def test_data_directory_prefers_argument_then_environment_then_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("AQG_DATA_DIR", str(tmp_path / "environment"))
    assert data_directory(tmp_path / "argument") == tmp_path / "argument"
    assert data_directory(None) == tmp_path / "environment"
    monkeypatch.setenv("AQG_DATA_DIR", "")
    assert data_directory(None).parts[-2:] == ("aqg", "data")
    assert data_directory(Path("~/somewhere")) == Path.home() / "somewhere"
