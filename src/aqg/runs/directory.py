"""A run's directory, in the one place that reads and writes it.

``docs/reference/files.md`` says what is in it.
A crash or a power cut at any moment leaves the directory usable. A checkpoint names the run it
belongs to and the bytes of ``rounds.jsonl`` it counts on, which are on disk before it is; lines
beyond these are dropped when a run goes on. Anything else that does not fit is damage: it is named,
and nothing is changed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from numpy.typing import NDArray

from aqg.errors import RunError
from aqg.runs import files
from aqg.runs.cost import BYTES, DOWNLOADS, UPLOADS
from aqg.sim.record import RoundRecord

CONFIG = "config.toml"
ROUNDS = "rounds.jsonl"
CHECKPOINT = "checkpoint.npz"
SUMMARY = "summary.json"
STATISTICS = ("statistics_upload_bytes", "statistics_download_bytes")
"""Fields of records and summaries where there are such bytes."""


@dataclass(frozen=True)
class Line:
    """One line of ``rounds.jsonl``: the record, and metrics on the test set where measured."""

    record: RoundRecord
    metrics: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """Write as one line; a loss beyond all numbers becomes null.

        What each client sent and received is in the summary alone: it would be most of the file.
        """
        record = self.record
        row: dict[str, Any] = {
            "round": record.round,
            "loss": finite_or_none(record.loss),
            "uploads": record.num_uploads,
            **{name: getattr(record, name) for name in ("bits_per_param", *BYTES)},
            "widths": list(record.widths),
        }
        if record.simulated_seconds is not None:
            row["simulated_seconds"] = record.simulated_seconds
        row |= metric_fields(self.metrics) | statistics_bytes([record])
        if record.faults:
            row["faults"] = [list(fault) for fault in record.faults]
        return json.dumps(row, allow_nan=False)

    @staticmethod
    def of(row: Mapping[str, Any]) -> Line:
        record = RoundRecord(
            row["round"],
            row["loss"],
            tuple(row["widths"]),
            row["upload_bytes"],
            tuple((client, fault) for client, fault in row.get("faults", ())),
            row.get("statistics_upload_bytes", 0),
            row.get("statistics_download_bytes", 0),
            row["download_bytes"],
            tuple(row.get(UPLOADS, ())),
            tuple(row.get(DOWNLOADS, ())),
            row.get("simulated_seconds"),
        )
        return Line(record, read_metrics(row))


METRIC_PREFIX = "test_"
"""Begins the name of every field that holds a metric."""
VALIDATION = "validation"
"""What was measured on the validation set; a field of its own, not a metric of the test set."""


def metric_fields(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics as fields of a record; one beyond all numbers becomes null.

    >>> metric_fields({"accuracy": 0.9, "perplexity": float("inf")})
    {'test_accuracy': 0.9, 'test_perplexity': None}
    """
    return {
        name if name == VALIDATION else METRIC_PREFIX + name: finite_or_none(value)
        for name, value in metrics.items()
    }


def read_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        key.removeprefix(METRIC_PREFIX): float(value)
        for key, value in row.items()
        if (key.startswith(METRIC_PREFIX) or key == VALIDATION) and isinstance(value, int | float)
    }


def statistics_bytes(records: Sequence[RoundRecord]) -> dict[str, int]:
    """Return what statistics took in these rounds, where there were any."""
    sums = {name: sum(getattr(record, name) for record in records) for name in STATISTICS}
    return sums if any(sums.values()) else {}


def finite_or_none(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def create_directory(path: Path) -> None:
    """Make a new run directory; an existing one must be empty."""
    with files.explained(f"output directory {str(path)!r} cannot be made"):
        path.mkdir(parents=True, exist_ok=True)
        occupied = any(path.iterdir())
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
    stem = f"{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    with files.explained(f"output directory {str(Path('runs') / stem)!r} cannot be made"):
        for number in itertools.count(1):
            directory = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
            with suppress(FileExistsError):
                directory.mkdir(parents=True)
                break
    try:
        yield directory
    finally:
        with suppress(OSError):  # not empty
            directory.rmdir()
            directory.parent.rmdir()


_START_AGAIN = f"delete {CHECKPOINT} to start this run again"


def read_config(path: Path) -> dict[str, Any]:
    """Return the settings in a run's directory as they are stored; no file they name is opened."""
    if not (path / CONFIG).exists():
        raise RunError(f"{str(path)!r} is not a run directory: it has no {CONFIG}")
    return read_toml(path / CONFIG)


def read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise RunError(f"{str(file)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RunError(f"{str(file)!r} is not valid TOML: {error}") from None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rounds of a run, whichever program wrote it; the last line may be cut."""
    return files.parse_lines(path / ROUNDS, files.whole_lines(path / ROUNDS))


def read_lines(path: Path, before_round: int | None = None) -> list[Line]:
    """Read the rounds of a run, up to but not including ``before_round``."""
    lines = files.whole_lines(path / ROUNDS)
    if before_round is None:
        return _as_lines(path / ROUNDS, lines)
    return _as_lines(path / ROUNDS, lines[: before_round - 1], before_round - 1)


def _as_lines(file: Path, lines: list[bytes], needed: int = 0) -> list[Line]:
    """Parse rounds; damage is named, and so are too few for a checkpoint after ``needed``."""
    found = []
    for number, row in enumerate(files.parse_lines(file, lines), start=1):
        damaged = f"{str(file)!r} is damaged: line {number}"
        try:
            found.append(Line.of(row))
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{damaged}: it has no usable {error}") from None
        if row["round"] != number:
            raise RunError(f"{damaged} is of round {row['round']}")
    if len(found) < needed:
        what = f"holds {len(found)} rounds" if file.exists() else "is missing"
        raise RunError(
            f"{str(file)!r} {what}, but the checkpoint is at round {needed}; {_START_AGAIN}"
        )
    return found


def read_summary(path: Path) -> dict[str, Any] | None:
    return files.read_json(path / SUMMARY, "delete it and resume the run")


class RunFiles:
    """The files of one run, for who holds its lock; those of another identity are refused."""

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        self._identity = identity
        self._rounds: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def restore(self) -> tuple[dict[str, NDArray[Any]] | None, list[Line]]:
        """Return the arrays of the checkpoint, if there is one, and the rounds before it.

        What ``rounds.jsonl`` holds beyond them is removed; lines are added to it from now on.
        """
        file, rounds = self.path / CHECKPOINT, self.path / ROUNDS
        arrays, about = files.read_arrays(file, _START_AGAIN) or (None, {"bytes": 0})
        if arrays is not None and about["run"] != self._identity:
            raise RunError(
                f"{str(file)!r} belongs to another run (settings {about['run'][:12]}, and here "
                f"{self._identity[:12]}); {_START_AGAIN}"
            )
        content = (files.read(rounds) or b"")[: about["bytes"]]
        lines = _as_lines(rounds, content.split(b"\n")[:-1], about.get("rounds", 0))
        self._digest, self._num_bytes = hashlib.sha256(content), len(content)
        if arrays is not None and self._digest.hexdigest() != about["sha256"]:
            raise RunError(
                f"{str(rounds)!r} does not hold the rounds that {CHECKPOINT} counts on; "
                f"{_START_AGAIN}"
            )
        with files.explained(f"{str(rounds)!r} cannot be written"):
            self._rounds = rounds.open("ab")
            self._rounds.truncate(len(content))
        return arrays, lines

    def add(self, line: Line) -> None:
        """Add a round; it is on disk once a checkpoint is."""
        assert self._rounds is not None
        text = (files.seal(line.to_json()) + "\n").encode()
        self._rounds.write(text)
        self._digest.update(text)
        self._num_bytes += len(text)

    def checkpoint(self, arrays: Mapping[str, NDArray[Any]], num_rounds: int) -> None:
        """Save where the run stands after ``num_rounds`` rounds, which are put on disk first."""
        assert self._rounds is not None
        with files.explained(f"{str(self.path / ROUNDS)!r} cannot be written"):
            self._rounds.flush()
            os.fsync(self._rounds.fileno())
        about = {"run": self._identity, "rounds": num_rounds, "bytes": self._num_bytes}
        about["sha256"] = self._digest.hexdigest()
        files.write_arrays(self.path / CHECKPOINT, arrays, about)

    def finish(self, summary: Mapping[str, Any]) -> None:
        files.write_atomically(self.path / SUMMARY, files.to_json(summary).encode())

    def close(self) -> None:
        """Let go of ``rounds.jsonl``; what was not put on disk by a checkpoint may be lost."""
        if self._rounds is not None:
            with suppress(OSError):
                self._rounds.close()
            self._rounds = None
