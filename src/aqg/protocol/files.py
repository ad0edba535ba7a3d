"""Files that are whole or absent."""

from __future__ import annotations

import os
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Vector = NDArray[Any]


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; it is on disk when this returns."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"{str(path)!r} cannot be written: {error.strerror}") from None


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
    """Save named arrays, whole or not at all, without a copy of them in memory."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"{str(path)!r} cannot be written: {error.strerror}") from None


def read_arrays(path: Path) -> dict[str, Vector]:
    """Load the arrays that `write_arrays` saved."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise RunError(f"{str(path)!r} is missing or damaged: {error}") from None
