"""A run's directory: what is in it, written so that a crash at any moment leaves it usable.

=================== =======================================================================
``config.toml``     the resolved settings; ``aqg run --config`` on it repeats the run
``rounds.jsonl``    one JSON object per round
``checkpoint.npz``  everything needed to go on after the last saved round
``summary.json``    the results, once the run is complete
=================== =======================================================================

Files appear whole or not at all: they are written beside their place and moved into it. Lines of
``rounds.jsonl`` beyond the checkpoint are dropped when a run goes on.
"""

from __future__ import annotations

import json
import os
import zipfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.errors import RunError
from aqg.sim.record import RoundRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

CONFIG = "config.toml"
ROUNDS = "rounds.jsonl"
CHECKPOINT = "checkpoint.npz"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Line:
    """One line of ``rounds.jsonl``: the record, and metrics on the test set where measured."""

    record: RoundRecord
    metrics: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """Write as one line; a loss beyond all numbers becomes null, and so do unknown downloads.

        What each client sent and received is not in it: over thousands of rounds with thousands of
        clients that would be most of the file, and the run's totals are in the summary.
        """
        record = self.record
        row: dict[str, Any] = {
            "round": record.round,
            "loss": finite_or_none(record.loss),
            "uploads": record.num_uploads,
            "bits_per_param": record.bits_per_param,
            "upload_bytes": record.upload_bytes,
            "download_bytes": record.download_bytes,
            "total_bytes": record.total_bytes,
            "widths": list(record.widths),
        }
        row |= metric_fields(self.metrics)
        if record.statistics_upload_bytes or record.statistics_download_bytes:
            row["statistics_upload_bytes"] = record.statistics_upload_bytes
            row["statistics_download_bytes"] = record.statistics_download_bytes
        if record.faults:
            row["faults"] = [list(fault) for fault in record.faults]
        return json.dumps(row, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Line:
        """Read a line that `to_json` wrote."""
        row = json.loads(text)
        faults = tuple((int(client), str(fault)) for client, fault in row.get("faults", ()))
        record = RoundRecord(
            row["round"],
            row["loss"],
            tuple(row["widths"]),
            row["upload_bytes"],
            faults,
            row.get("statistics_upload_bytes", 0),
            row.get("statistics_download_bytes", 0),
            row.get("download_bytes"),
            tuple(row.get("client_upload_bytes", row.get("client_bytes", ()))),  # the older name
            tuple(row.get("client_download_bytes", ())),
        )
        return Line(record, read_metrics(row))


METRIC_PREFIX = "test_"
"""Begins the name of every field that holds a metric."""


def metric_fields(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics as fields of a record; one beyond all numbers becomes null.

    >>> metric_fields({"accuracy": 0.9, "perplexity": float("inf")})
    {'test_accuracy': 0.9, 'test_perplexity': None}
    """
    return {METRIC_PREFIX + name: finite_or_none(value) for name, value in metrics.items()}


def read_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics among the fields of a record."""
    return {
        key.removeprefix(METRIC_PREFIX): float(value)
        for key, value in row.items()
        if key.startswith(METRIC_PREFIX) and isinstance(value, int | float)
    }


def finite_or_none(value: float | None) -> float | None:
    """Return ``value``, or None where it is no number that JSON can hold."""
    return value if value is not None and np.isfinite(value) else None


def create_directory(path: Path) -> None:
    """Make a new run directory; an existing one must be empty."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        occupied = any(path.iterdir())
    except OSError as error:
        raise RunError(f"output directory {str(path)!r} cannot be made: {error.strerror}") from None
    if occupied:
        raise RunError(
            f"output directory {str(path)!r} is not empty; name another with --out, "
            f"or go on with --resume {path}"
        )
    if not os.access(path, os.W_OK):
        raise RunError(f"output directory {str(path)!r} is not writable")


@contextmanager
def output_directory(out: Path | None, stem: str) -> Iterator[Path]:
    """Give a place for results: ``out``, or a new directory below ``runs``.

    An occupied ``out`` is refused at once, not after long preparations. A new directory is named
    after ``stem`` and the time, and numbered where another process took the same name in the same
    second. If nothing was put there in the end, it is taken away again.
    """
    if out is not None:
        if out.exists():
            create_directory(out)
        yield out
        return
    directory = _claim(Path("runs") / f"{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    try:
        yield directory
    finally:
        with suppress(OSError):  # not empty
            directory.rmdir()
            directory.parent.rmdir()


def _claim(path: Path) -> Path:
    """Make a directory that did not exist: ``path``, or ``path`` with a number after it."""
    candidate, number = path, 1
    while True:
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")
        except OSError as error:
            reason = error.strerror
            raise RunError(f"output directory {str(path)!r} cannot be made: {reason}") from None
        else:
            return candidate


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"{str(path)!r} cannot be written: {error.strerror}") from None


def write_checkpoint(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Save named arrays, whole or not at all."""
    import io

    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    write_atomically(path / CHECKPOINT, buffer.getvalue())


def read_checkpoint(path: Path) -> dict[str, NDArray[Any]] | None:
    """Load the arrays of the last checkpoint; None where there is none yet."""
    file = path / CHECKPOINT
    if not file.exists():
        return None
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise RunError(
            f"checkpoint {str(file)!r} is damaged ({error}); delete it to start this run again"
        ) from None


def read_lines(path: Path, before_round: int | None = None) -> list[Line]:
    """Read the rounds of a run, up to but not including ``before_round``."""
    file = path / ROUNDS
    if not file.exists():
        return []
    lines = []
    for text in file.read_text(encoding="utf-8").splitlines():
        try:
            line = Line.from_json(text)
        except (ValueError, KeyError, TypeError):
            break  # a line cut short by a crash; what follows a checkpoint is run again
        if before_round is not None and line.record.round >= before_round:
            break
        lines.append(line)
    if before_round is not None and len(lines) < before_round - 1:
        raise RunError(
            f"{str(file)!r} holds {len(lines)} rounds, but the checkpoint is at round "
            f"{before_round - 1}; the run cannot go on from here"
        )
    return lines


def rewrite_lines(path: Path, lines: Iterable[Line]) -> None:
    """Replace ``rounds.jsonl`` by these lines."""
    text = "".join(line.to_json() + "\n" for line in lines)
    write_atomically(path / ROUNDS, text.encode())
