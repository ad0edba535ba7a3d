"""Files from the network, kept in a data directory and verified on every read.

What is verified is the SHA-256 of the *decompressed* content: mirrors wrap the same file in
different gzip streams. A file reaches its final name by one atomic rename after it was verified,
so whatever has that name is either whole or damaged by somebody else, which is an error.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import logging
import os
import secrets
import zlib
from dataclasses import dataclass
from pathlib import Path

from aqg.errors import DataError

ENVIRONMENT_VARIABLE = "AQG_DATA_DIR"
_ELSEWHERE = f"choose a data directory with --data-dir or {ENVIRONMENT_VARIABLE}"
_GZIP_MAGIC = b"\x1f\x8b"
_TIMEOUT_SECONDS = 30.0
_CHUNK_BYTES = 1 << 16

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A public file and how to know it."""

    path: str  # where it lives below the data directory, with forward slashes
    sha256: str  # hex digest of the content, after gzip decompression if ``path`` ends in ``.gz``
    urls: tuple[str, ...]  # where to get it, in the order to try


def data_directory(data_dir: Path | None = None) -> Path:
    """Return the data directory: the argument, else ``AQG_DATA_DIR``, else the user's cache.

    >>> data_directory(Path("somewhere")).name
    'somewhere'
    """
    chosen = data_dir or os.environ.get(ENVIRONMENT_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("aqg", appauthor=False) / "data"


def read_content(file: RemoteFile, directory: Path) -> bytes:
    """Return the verified, decompressed content of ``file``, downloading it if it is missing.

    A file that is there is only ever read, so a read-only directory works. One that is damaged
    is reported and left alone: it may be the user's own.
    """
    path = directory / file.path
    try:
        body = path.read_bytes()
    except FileNotFoundError:
        return _download(file, path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; {_ELSEWHERE}") from error
    try:
        return _verified_content(body, file)
    except _ContentError as error:
        raise DataError(
            f"{path} is damaged: {error}; delete it, and it is downloaded again"
        ) from error


class _ContentError(Exception):
    """Bytes that are not the file they should be."""


def _verified_content(body: bytes, file: RemoteFile) -> bytes:
    # A server or proxy may undo the compression in transit, so the bytes decide, not the name.
    content = body
    if file.path.endswith(".gz") and body.startswith(_GZIP_MAGIC):
        try:
            content = gzip.decompress(body)
        except (OSError, EOFError, zlib.error) as error:
            raise _ContentError(
                f"not a valid gzip stream ({error}), expected content with SHA-256 {file.sha256}"
            ) from error
    found = hashlib.sha256(content).hexdigest()
    if found != file.sha256:
        raise _ContentError(f"SHA-256 of the content is {found}, expected {file.sha256}")
    return content


def _download(file: RemoteFile, path: Path) -> bytes:
    failures = []
    for url in file.urls:
        _logger.info("downloading %s", url)
        try:
            body = _fetch(url)
            content = _verified_content(body, file)
        except OSError as error:  # the base of every error of the transport
            failures.append(f"{url} ({_reason(error)})")
        except _ContentError as error:
            failures.append(f"{url} ({error})")
        else:
            _place(body, path)
            return content
    raise DataError(
        f"cannot download {file.path}, tried {', '.join(failures)}; "
        f"put the file at {path} or {_ELSEWHERE}"
    )


def _fetch(url: str) -> bytes:
    import pooch

    # In memory: the largest file is 10 MB, and nothing touches the disk before it is verified.
    buffer = io.BytesIO()
    download = pooch.HTTPDownloader(chunk_size=_CHUNK_BYTES, timeout=_TIMEOUT_SECONDS)
    download(url, buffer, None)
    return buffer.getvalue()


def _reason(error: OSError) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return type(error).__name__ if status is None else f"HTTP status {status}"


def _place(body: bytes, path: Path) -> None:
    """Write ``body`` to ``path`` so that it appears whole or not at all."""
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
