"""Files that tell the truth: whole or absent, with a checksum, one writer at a time.

A JSON object ends with the field ``"crc32"``, the CRC-32 of all bytes before it; a file of arrays
is a plain ``.npz``, in which every array has one. What does not fit its checksum raises `RunError`
with the file, the place and what is wrong there. Nothing is guessed.
"""

import json
import os
import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aqg.errors import RunError
from aqg.protocol import store
from aqg.protocol.store import write_atomically as write_atomically
from aqg.spec import in_words

_SEAL = re.compile(rb',\s*"crc32": "([0-9a-f]{8})"\s*\}\s*$')
_ABOUT = "about"
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
    """Read an object with a checksum; raise `ValueError` if there is none, or it is not right."""
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
    content = read(path)
    if content is None:
        return None
    try:
        return unseal(content)
    except ValueError as error:
        raise RunError(f"{str(path)!r} is damaged ({error}); {advice}") from None


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Say what an error of the system is about."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{what}: {error.strerror}") from None


def read(path: Path) -> bytes | None:
    with explained(f"{str(path)!r} cannot be read"), suppress(FileNotFoundError):
        return path.read_bytes()
    return None


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file; a last one that is still being written is left out."""
    return (read(path) or b"").split(b"\n")[:-1]


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
    """Objects in a file, on disk when `add` returns; one process writes, others may read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        return parse_lines(self.path, whole_lines(self.path))

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a record whole or not at all; what an earlier kill cut short is removed."""
        line = seal(json.dumps(row, allow_nan=False)).encode() + b"\n"
        with explained(f"{str(self.path)!r} cannot be written"), self.path.open("ab") as file:
            start = self.path.read_bytes().rfind(b"\n") + 1
            file.truncate(start)
            try:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.truncate(self.path, start)
                raise

    def replace(self, rows: Sequence[Mapping[str, Any]]) -> None:
        text = "".join(seal(json.dumps(row, allow_nan=False)) + "\n" for row in rows)
        write_atomically(self.path, text.encode())


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> None:
    """Save named arrays as ``.npz``, and facts about them; equal content makes equal files."""
    facts = np.frombuffer(json.dumps(about).encode(), np.uint8)
    store.write_arrays(path, {**arrays, _ABOUT: facts})
    store.sync_directory(path.parent)


def read_arrays(path: Path, advice: str) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
    """Return what `write_arrays` wrote; None where there is no such file."""
    if not path.exists():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = dict(archive)
        return arrays, json.loads(arrays.pop(_ABOUT).tobytes())
    except Exception as error:  # whatever the bytes make NumPy and zipfile raise
        raise RunError(f"{str(path)!r} is damaged ({in_words(error)}); {advice}") from None


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
