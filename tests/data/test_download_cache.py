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


def test_no_server_at_all(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:
        url = f"http://127.0.0.1:{closed.server_port}/good.gz"
    file = RemoteFile("set/file.gz", DIGEST, (url, "no-scheme"))
    refused(file, tmp_path, "ConnectionError", "no-scheme (MissingSchema")


@pytest.mark.parametrize("damaged", [gzip.compress(b"other"), GOOD[:-12], b"", b"<html>login"])
def test_damaged_file_is_reported_and_left_alone(damaged, server, tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(damaged)
    refused(remote(server, "/good.gz", name="file.gz"), tmp_path, str(path), DIGEST, "delete it")
    assert path.read_bytes() == damaged
    assert server.requested == []


def test_places_that_cannot_be_read_or_written(server, tmp_path):
    file = remote(server, "/good.gz", name="file.gz")
    server.meanwhile = (tmp_path / "file.gz").mkdir  # somebody takes the name during the download
    with pytest.raises(DataError, match=r"cannot write .*AQG_DATA_DIR"):
        read_content(file, tmp_path)
    assert files_below(tmp_path) == ["file.gz"]
    (tmp_path / "a-file").touch()
    for directory in ("a-file", "."):
        with pytest.raises(DataError, match="cannot read"):
            read_content(file, tmp_path / directory)


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
