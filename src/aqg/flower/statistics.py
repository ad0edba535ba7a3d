"""What a module has beside its parameters, on a deployment: agreed on, carried, averaged, saved.

Both ends describe their module by a `ModelLayout`. The server sends a short signature of its own,
by which a client finds out that its model is another one before it trains; then statistics, such
as those of batch normalization, go up and down beside the updates (`aqg.objectives.statistics`).
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ConfigRecord

from aqg.errors import ConfigError, GradientError, RunError
from aqg.objectives.layout import DIGEST_BYTES, Buffers, ModelLayout
from aqg.objectives.statistics import describe_change, receive
from aqg.protocol.files import read_arrays, write_arrays

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from flwr.app import RecordDict


_TENSOR_BYTES = 2
_KEPT = "aqg-statistics"
_FILE = "statistics.npz"


@dataclass(frozen=True)
class TaskModel:
    """A client's module: its layout, and its buffers.

    Attributes:
        layout: which tensors travel.
        constants: a digest of the tensors that must be alike on both sides.
        read: returns the buffers as they are.
        write: sets them.

    """

    layout: ModelLayout
    constants: bytes
    read: Callable[[], Buffers]
    write: Callable[[Buffers], None]


def signature(layout: ModelLayout) -> bytes:
    """Return the layout's fingerprint, and two bytes for each of its tensors."""
    return layout.fingerprint + b"".join(_short(spec) for spec in _specs(layout))


def check_agreement(model: TaskModel, theirs: bytes, constants: bytes) -> None:
    """Raise `ConfigError` where the server's model is another; the text names a tensor."""
    layout = model.layout
    if not theirs:
        if layout.carries_buffers and any(layout.tracked):
            name = next(s.name for s, t in zip(_carried(layout), layout.tracked, strict=True) if t)
            raise ConfigError(
                f"{layout.model} has statistics such as {name!r}, and the server was given a flat "
                "vector without them: give make_server_app the module"
            )
        return
    if theirs[:DIGEST_BYTES] != layout.fingerprint:
        raise ConfigError(f"the server's model is another: {_difference(layout, theirs)}")
    if len(constants) == DIGEST_BYTES and constants != model.constants:
        raise ConfigError(
            f"frozen parameters or constant buffers of {layout.model} differ from the server's; "
            "load the same checkpoint on both sides"
        )


def _difference(layout: ModelLayout, theirs: bytes) -> str:
    here = [_short(spec) for spec in _specs(layout)]
    rest = theirs[DIGEST_BYTES:]
    there = [rest[i : i + _TENSOR_BYTES] for i in range(0, len(rest), _TENSOR_BYTES)]
    for spec, mine, other in zip(_specs(layout), here, there, strict=False):
        if mine != other:
            return f"{spec} of {layout.model} has another name, shape or dtype there"
    if len(here) > len(there):
        return f"{_specs(layout)[len(there)]} of {layout.model} is only here"
    if len(there) > len(here):
        return f"it has {len(there)} tensors, and {layout.model} {len(here)}"
    return f"statistics are {layout.policy!r} here, or normalization layers differ"


def _specs(layout: ModelLayout) -> Sequence[Any]:
    return (*layout.parameters, *_carried(layout))


def _carried(layout: ModelLayout) -> Sequence[Any]:
    return (*layout.statistics, *layout.counters)


def _short(spec: Any) -> bytes:
    text = f"{spec.name}|{spec.shape}|{spec.dtype}"
    return hashlib.blake2b(text.encode(), digest_size=_TENSOR_BYTES).digest()


def max_statistics_bytes(layout: ModelLayout | None) -> int:
    """Return the length of the longest frame of statistics that can be valid."""
    if layout is None or not (layout.statistics or layout.counters):
        return 0
    num_tensors = len(layout.statistics) + len(layout.counters)
    return 64 + 3 * num_tensors + 9 * (layout.num_statistics + layout.num_counters)


class ClientStatistics:
    """A client's buffers around the training of one round.

    Args:
        model: the task's module; None where the task has none that we know of.
        frame: the server's statistics.
        keeper: where a client with statistics of its own keeps them.

    """

    def __init__(self, model: TaskModel | None, frame: bytes, keeper: Keeper) -> None:
        self._model = model
        self._keeper = keeper
        self._start: Buffers | None = None
        self._end: Buffers | None = None
        self._known = np.zeros(0, np.bool_)
        if model is None:
            return
        own = model.read()
        self._known = receive(model.layout, own, b"")[1]
        if model.layout.policy == "local":
            self._start = keeper.load(model.layout) or own
        elif model.layout.policy == "average" and frame:
            self._start, self._known = receive(model.layout, own, frame)
        else:
            self._start = own

    def load(self) -> None:
        """Put the buffers into the module from which the round starts."""
        if self._model is not None and self._start is not None:
            self._model.write(self._start)

    def take(self) -> None:
        """Remember the buffers that training left."""
        if self._model is not None:
            self._end = self._model.read()

    def finish(self) -> tuple[bytes, str]:
        """Put the module back; return the frame to send, and what was wrong.

        A task may serve many rounds in one process, so the module gets the buffers it came with.
        """
        if self._model is None or self._start is None or self._end is None:
            return b"", ""
        layout = self._model.layout
        self._model.write(self._start)
        try:
            frame = describe_change(layout, self._start, self._end, self._known)
        except GradientError as error:
            return b"", str(error)
        if layout.policy == "local":
            self._keeper.save(self._end)
        return (frame if layout.policy == "average" else b""), ""


class Keeper:
    """Keeps a client's own statistics in its state directory, or in Flower's context."""

    def __init__(self, directory: Path | None, records: RecordDict, key: str) -> None:
        self._file = None if directory is None else directory / key / _FILE
        self._records = records
        self._key = key

    def load(self, layout: ModelLayout) -> Buffers | None:
        """Return what was saved in this run; None where there is nothing that fits."""
        try:
            if self._file is not None:
                arrays = read_arrays(self._file) if self._file.exists() else {}
            else:
                record = self._records.get(_KEPT)
                arrays = {}
                if isinstance(record, ConfigRecord) and record.get("key") == self._key:
                    with np.load(io.BytesIO(bytes(record["bytes"]))) as stored:  # type: ignore[arg-type]
                        arrays = dict(stored)
            buffers = Buffers(arrays["values"], arrays["counts"])
        except (RunError, KeyError, ValueError, OSError):
            return None
        sizes = len(buffers.values), len(buffers.counts)
        return buffers if sizes == (layout.num_statistics, layout.num_counters) else None

    def save(self, buffers: Buffers) -> None:
        """Write a client's own statistics, whole or not at all."""
        arrays = {"values": buffers.values, "counts": buffers.counts}
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_arrays(self._file, arrays)
            return
        stream = io.BytesIO()
        np.savez(stream, allow_pickle=False, **arrays)
        self._records[_KEPT] = ConfigRecord({"key": self._key, "bytes": stream.getvalue()})
