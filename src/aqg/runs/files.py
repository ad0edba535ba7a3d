"""Files that tell the truth: whole or absent, with a checksum, one writer at a time.

A JSON object ends with the field ``"crc32"``, the CRC-32 of all bytes before it; an array file is a
plain ``.npz`` whose comment holds a SHA-256. What does not fit its checksum raises `RunError` with
the file, the place and what is wrong there. Nothing is guessed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aqg.errors import RunError
from aqg.protocol.store import write_atomically as write_atomically

_SEAL = re.compile(rb',\s*"crc32": "([0-9a-f]{8})"\s*\}\s*$')
_COMMENT = b"aqg "
_COMMENT_LENGTH = 2
"""Bytes of a zip file's last field before its comment, which say how long the comment is."""
_SECONDS_BETWEEN_TRIES = 0.1


def seal(text: str) -> str:
    """Add a checksum to the text of a JSON object, as its last field.

    >>> seal('{"round": 1}')
    '{"round": 1, "crc32": "2d338db2"}'
    """
    body = text.rstrip().removesuffix("}").rstrip()
    checksum = f'"crc32": "{zlib.crc32(body.encode()):08x}"'
    return f"{body},\n  {checksum}\n}}\n" if "\n" in body else f"{body}, {checksum}}}"


def unseal(content: bytes) -> dict[str, Any]:
    """Read an object with a checksum; raise `ValueError` if there is none, or it is not right.

    >>> unseal(seal('{"round": 1}').encode())
    {'round': 1}
    """
    found = _SEAL.search(content)
    if found is None:
        raise ValueError("it has no checksum")
    if zlib.crc32(content[: found.start()]) != int(found[1], 16):
        raise ValueError("it does not fit its checksum")
    row: dict[str, Any] = json.loads(content)
    del row["crc32"]
    return row


def to_json(row: Mapping[str, Any]) -> str:
    """Write an object with its checksum, to be read by people as well."""
    return seal(json.dumps(row, indent=2, allow_nan=False))


def read_json(path: Path, advice: str) -> dict[str, Any] | None:
    """Read an object, whose checksum is left out; None where there is no such file."""
    content = _read(path)
    if content is None:
        return None
    try:
        return unseal(content)
    except ValueError as error:
        raise RunError(f"{str(path)!r} is damaged ({error}); {advice}") from None


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{str(path)!r} cannot be read: {error.strerror}") from None


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file; a last one that is still being written is left out."""
    return (_read(path) or b"").split(b"\n")[:-1]


def parse_lines(path: Path, lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Parse lines of a file, an object each; the first damaged one is named."""
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(unseal(line))
        except ValueError as error:
            raise RunError(f"{str(path)!r} is damaged: line {number}: {error}") from None
    return rows


class Records:
    """Objects in a file, a line each, that grows; every line is on disk when `add` returns.

    One process writes, under the lock of the directory; others may read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        return parse_lines(self.path, whole_lines(self.path))

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a record whole or not at all; what an earlier kill cut short is removed."""
        line = seal(json.dumps(row, allow_nan=False)).encode() + b"\n"
        try:
            with self.path.open("ab") as file:
                start = self.path.read_bytes().rfind(b"\n") + 1
                file.truncate(start)
                try:
                    file.write(line)
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    os.truncate(self.path, start)
                    raise
        except OSError as error:
            raise RunError(f"{str(self.path)!r} cannot be written: {error.strerror}") from None

    def replace(self, rows: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(seal(json.dumps(row, allow_nan=False)) + "\n" for row in rows)
        write_atomically(self.path, text.encode())


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> None:
    """Save named arrays as ``.npz``, and facts about them; equal content makes equal files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy")  # without the time of writing
            with archive.open(member, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)
    length = buffer.tell() - _COMMENT_LENGTH
    facts = json.dumps(about)
    digest = hashlib.sha256(buffer.getbuffer()[:length])
    digest.update(facts.encode())
    comment = _COMMENT + f"{digest.hexdigest()} {facts}".encode()
    buffer.seek(length)
    buffer.write(len(comment).to_bytes(_COMMENT_LENGTH, "little") + comment)
    write_atomically(path, buffer.getvalue())


def read_arrays(path: Path, advice: str) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
    """Return what `write_arrays` wrote; None where there is no such file."""
    content = _read(path)
    if content is None:
        return None
    start = content.rfind(_COMMENT)
    body, length = content[: max(0, start - _COMMENT_LENGTH)], len(content) - start
    checksum, _, facts = content[start + len(_COMMENT) :].partition(b" ")
    expected = hashlib.sha256(body + facts).hexdigest().encode()
    stated = content[len(body) : max(0, start)]
    if checksum != expected or int.from_bytes(stated, "little") != length:
        what = "it is empty" if not content else "it does not fit its checksum"
        raise RunError(f"{str(path)!r} is damaged ({what}); {advice}")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return dict(arrays), json.loads(facts)


@contextmanager
def locked(directory: Path, wait_seconds: float = 0.0) -> Iterator[None]:
    """Keep other processes from writing into a directory, after waiting for one that does."""
    try:
        import fcntl
    except ImportError:  # a system without such locks
        yield
        return
    deadline = time.monotonic() + wait_seconds
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    raise RunError(
                        f"{str(directory)!r} is in use by another process; wait until it has ended"
                    ) from None
                time.sleep(_SECONDS_BETWEEN_TRIES)
        yield
    finally:
        os.close(descriptor)
