"""Where a client keeps its memory between messages: a directory, memory, or a place of one's own.

A memory is two snapshots of the mirror and a public model, whose vectors may be large and are often
the same. A vector is written once, under a number, and never changed; one of zeros is not written.
A small index says which numbers count. Replacing the index is the commit: a crash at any moment
leaves the old memory or the new one, and the protocol copes with either.
"""

import json
import logging
import os
import re
import shutil
import time
import weakref
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aqg.core.downlink import Public, is_zero
from aqg.core.round import Clients
from aqg.core.track import Track
from aqg.core.types import from_arrays, to_arrays
from aqg.errors import RunError
from aqg.protocol.messages import ClientMirror, Snapshot, Stamp

Vector = NDArray[Any]


@contextmanager
def _replacing(path: Path, is_named: bool = False) -> Iterator[IO[bytes]]:
    """Open a file that takes another's place, whole or not at all, and is on disk then.

    With ``is_named`` its name is on disk as well.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        if is_named:
            sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"{str(path)!r} cannot be written: {error.strerror}") from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; it is on disk when this returns, and so is its name."""
    with _replacing(path, is_named=True) as file:
        file.write(content)


def make_directory(path: Path, what: str = "") -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{what}{str(path)!r} cannot be made: {error.strerror}") from None


def sync_directory(path: Path) -> None:
    """Put the names in a directory on disk, where the system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # a system that does not open directories
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_arrays(path: Path, arrays: Mapping[str, Vector]) -> None:
    """Save named arrays, whole or not at all."""
    with _replacing(path) as file:
        np.savez(file, **dict[str, Any](arrays))


def read_arrays(path: Path) -> dict[str, Vector]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise RunError(f"{str(path)!r} is missing or damaged: {error}") from None


_logger = logging.getLogger("aqg.protocol")

_INLINE_BYTES = 4096
"""Arrays up to this size are written into the index itself."""


class Vault(Protocol):
    """Holds an index, which is replaced whole or not at all, and numbered vectors.

    Vectors that are read may be written to. Those that are missing or damaged raise `RunError`.
    """

    def read_index(self) -> str | None: ...
    def write_index(self, text: str) -> None: ...
    def read_vector(self, number: int) -> Vector: ...
    def write_vector(self, number: int, vector: Vector) -> None: ...
    def keep_only(self, numbers: set[int]) -> None: ...


class ArrayStore:
    """Reads and writes arrays in a vault, each once, beside the index that names them."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self._stored: dict[int, weakref.ref[Vector]] = {}
        self._last = 0

    def read(self, cell: dict[str, Any]) -> Vector:
        if "number" in cell:
            vector = self._vault.read_vector(int(cell["number"]))
            self.remember(cell, vector)
            return vector
        if "zeros" in cell:
            return np.zeros(cell["zeros"], np.dtype(cell["dtype"]))
        data = np.frombuffer(bytes.fromhex(cell["bytes"]), np.dtype(cell["dtype"]))
        return data.reshape(cell["shape"])

    def remember(self, cell: dict[str, Any], array: Vector) -> None:
        if "number" in cell:
            number = int(cell["number"])
            self._last = max(self._last, number)
            self._stored[number] = weakref.ref(array)

    def reserve(self, index: Any) -> None:
        """Use no number again that an index names."""
        self._last = max({self._last, *_numbers_in(index)})

    def write(self, array: Vector) -> dict[str, Any]:
        """Write an array, unless it is there already, and return its cell."""
        if array.nbytes <= _INLINE_BYTES:
            return {"dtype": array.dtype.str, "shape": array.shape, "bytes": array.tobytes().hex()}
        number = next((n for n, vector in self._stored.items() if vector() is array), None)
        if number is None:
            if is_zero(array):
                return {"dtype": array.dtype.str, "zeros": array.shape}
            self._last = number = self._last + 1
            self._vault.write_vector(number, array)
            self._stored[number] = weakref.ref(array)
        return {"number": number}

    def commit(self, index: dict[str, Any]) -> None:
        """Replace the index, and drop all arrays that it does not name."""
        self._vault.write_index(json.dumps(index))
        numbers = _numbers_in(index)
        self._stored = {number: ref for number, ref in self._stored.items() if number in numbers}
        self._vault.keep_only(numbers)

    def write_public(self, public: Public) -> dict[str, Any]:
        """Write the vectors of a public model, and return its row."""
        return {
            "round": public.round,
            "history": list(public.history),
            "quantum": public.quantum,
            "mark": public.mark,
            "vectors": [self.write(vector) for vector in public.vectors],
        }

    def read_public(self, row: dict[str, Any]) -> Public:
        position, velocity, direction = (self.read(cell)[None] for cell in row["vectors"])
        track = Track(position, velocity, direction, np.ones(1, np.bool_))
        history, quantum = tuple(map(float, row["history"])), float(row["quantum"])
        return Public(int(row["round"]), track, history, quantum, row["mark"])


class KeyedStore:
    """Reads and writes what lies in a vault under a key; under another one it is not found."""

    def __init__(self, vault: Vault, key: str) -> None:
        self._vault = vault
        self._key = key
        self._arrays = ArrayStore(vault)

    def _read_index(self) -> dict[str, Any]:
        """Return the index, without any entry where there is none of this key."""
        index: dict[str, Any] = json.loads(self._vault.read_index() or "{}")
        return index if index.get("key") == self._key else {}

    @contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        """Warn of what is read and turns out to be damaged, and leave it at that."""
        try:
            yield
        except (RunError, ValueError, KeyError, TypeError, AttributeError) as error:
            _logger.warning("the client's %s cannot be used: %r", what, error)


class ClientStore(KeyedStore):
    """Reads and writes a client's memory in a vault: its mirror, and its copy of the public model.

    Both are part of one index, so that they change together. Where something cannot be read, the
    server finds out from the stamp or the reply.
    """

    def __init__(self, vault: Vault, key: str) -> None:
        super().__init__(vault, key)
        empty = dict.fromkeys(("current", "before", "public", "reply"))
        self._index: dict[str, Any] = {"key": key, "answered": [0, 0], **empty}
        with self._readable("saved state"):
            if found := self._read_index():
                incarnation, round_number = found["answered"]
                self._index |= {**found, "answered": [int(incarnation), int(round_number)]}
        self._arrays.reserve(self._index)

    @property
    def answered(self) -> tuple[int, int]:
        incarnation, round_number = self._index["answered"]
        return incarnation, round_number

    def load(self) -> ClientMirror | None:
        """Return the memory of the mirror; None where there is none, or none that can be read."""
        index = self._index
        mirror = None
        with self._readable("saved state"):
            if index["current"] is not None:
                current = self._read(index["current"])
                before = None if index["before"] is None else self._read(index["before"])
                mirror = ClientMirror(current, before, self.answered)
        return mirror

    def load_public(self) -> Public | None:
        """Return the public model; None where there is none, or none that can be read."""
        row, public = self._index["public"], None
        with self._readable("saved model"):
            if row is not None:
                found = self._arrays.read_public(row)
                public = found if isinstance(self._vault, MemoryVault) else found.marked()
        return public

    def put_public(self, public: Public) -> None:
        """Write the vectors of a public model, which takes its place with the next `save`."""
        self._index = {**self._index, "public": self._arrays.write_public(public)}

    def last_reply(self) -> bytes:
        """Return the reply that was saved with the mirror; empty where there is none."""
        row, reply = self._index["reply"], b""
        with self._readable("last reply"):
            reply = b"" if row is None else self._arrays.read(row).tobytes()
        return reply

    def save(self, mirror: ClientMirror | None = None, reply: bytes = b"") -> None:
        """Commit the memory, whole or not at all; without a mirror, that of before stays.

        The reply is kept to be sent again, should its order come again.
        """
        if mirror is not None:
            before = None if mirror.before is None else self._write(mirror.before)
            current, answered = self._write(mirror.current), list(mirror.answered)
            row = {"answered": answered, "current": current, "before": before, "reply": None}
            self._index = {**self._index, **row}
        if reply:
            cell = self._arrays.write(np.frombuffer(reply, np.uint8))
            self._index = {**self._index, "reply": cell}
        self._arrays.commit(self._index)

    def _read(self, row: dict[str, Any]) -> Snapshot:
        arrays = {name: self._arrays.read(cell) for name, cell in row["arrays"].items()}
        state = from_arrays(Clients, arrays)
        stamp = Stamp(int(row["epoch"]), int(row["uploads"]), bytes.fromhex(row["digest"]))
        snapshot = Snapshot(state, bytes.fromhex(row["lineage"]), stamp)
        for name, array in to_arrays(state).items():
            self._arrays.remember(row["arrays"][name], array)
        return snapshot

    def _write(self, snapshot: Snapshot) -> dict[str, Any]:
        return {
            "arrays": {n: self._arrays.write(a) for n, a in to_arrays(snapshot.state).items()},
            "lineage": snapshot.lineage.hex(),
            "epoch": snapshot.stamp.epoch,
            "uploads": snapshot.stamp.uploads,
            "digest": snapshot.stamp.digest.hex(),
        }


def _numbers_in(index: Any) -> set[int]:
    """Return the numbers of all arrays that an index names."""
    if isinstance(index, dict):
        if isinstance(number := index.get("number"), int):
            return {number}
        index = list(index.values())
    return set().union(*map(_numbers_in, index)) if isinstance(index, list) else set()


class DirectoryVault:
    """A directory of files, for memory that outlives the node's process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        make_directory(path, "state directory ")

    def read_index(self) -> str | None:
        try:
            return (self._path / "state.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"{str(self._path)!r} cannot be read: {error}") from None

    def write_index(self, text: str) -> None:
        write_atomically(self._path / "state.json", text.encode())

    def read_vector(self, number: int) -> Vector:
        return read_arrays(self._path / f"vector-{number}.npz")["vector"]

    def write_vector(self, number: int, vector: Vector) -> None:
        write_arrays(self._path / f"vector-{number}.npz", {"vector": vector})

    def keep_only(self, numbers: set[int]) -> None:
        for file in self._path.glob("vector-*.npz"):
            found = re.fullmatch(r"vector-(\d+)\.npz", file.name)
            if found and int(found[1]) not in numbers:
                file.unlink(missing_ok=True)


class MemoryVault:
    """A memory that ends with the process."""

    def __init__(self) -> None:
        self._index: str | None = None
        self._vectors: dict[int, Vector] = {}

    def read_index(self) -> str | None:
        return self._index

    def write_index(self, text: str) -> None:
        self._index = text

    def read_vector(self, number: int) -> Vector:
        if number not in self._vectors:
            raise RunError(f"there is no vector {number}")
        return self._vectors[number].copy()

    def write_vector(self, number: int, vector: Vector) -> None:
        self._vectors[number] = vector.copy()

    def keep_only(self, numbers: set[int]) -> None:
        self._vectors = {n: v for n, v in self._vectors.items() if n in numbers}


def forget_old_runs(directory: Path, days: float) -> None:
    """Delete the memories of runs that no one has gone on with for so many days.

    Should such a run go on after all, the server finds out from the stamp, and both sides start
    again from zero. Whatever else lies in the directory stays.
    """
    oldest = time.time() - days * 86_400
    for index in directory.glob("*/state.json"):
        try:
            is_ours = json.loads(index.read_text(encoding="utf-8"))["key"] == index.parent.name
            if is_ours and index.stat().st_mtime < oldest:
                shutil.rmtree(index.parent)
                _logger.info("state of run %s, unused for %g days: deleted", index.parent, days)
        except (OSError, ValueError, KeyError, TypeError):  # not ours, or not ours to delete
            continue
