"""The server's book as named arrays that a file can hold, and back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.core.downlink import Downlink, Full
from aqg.core.per_client import PerClient
from aqg.core.persistence import model_from_arrays, model_to_arrays
from aqg.core.public import lies_on_grid
from aqg.core.server import Peer, ServerState
from aqg.core.step_sizes import Fixed
from aqg.core.track import Track, init_mirrors
from aqg.errors import RunError
from aqg.protocol.book import MirrorBook
from aqg.protocol.digests import DIGEST_BYTES, public_digest
from aqg.protocol.files import read_arrays, write_arrays
from aqg.protocol.messages import Stamp
from aqg.protocol.mirrors import Held, content_digest
from aqg.protocol.publisher import LogState, Publisher

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from aqg.core.recipe import Recipe
    from aqg.core.step_sizes import StepRule
    from aqg.core.types import FloatArray

_logger = logging.getLogger("aqg.protocol")

_FIXED = Fixed()
_START = "start.npz"
_CLIENTS = {"mirrors": "held", "directions": "moved"}
"""Where it is written whose rows there are."""
GROUP_BYTES = 64 << 20
"""Mirrors of many clients are written together, up to about this size."""


def book_to_arrays(book: MirrorBook, group_bytes: int = GROUP_BYTES) -> dict[str, NDArray[Any]]:
    """Return named arrays, with mirrors in groups of about ``group_bytes``.

    Mirrors and directions that are zero are left out.
    """
    state, entries = book.state, book.entries
    tracks = [peer.track for peer in state.peers]
    mirrors = [client for client, track in enumerate(tracks) if track.is_held[0]]
    directions = _moved(tracks)
    arrays: dict[str, NDArray[Any]] = {
        "weights": book.weights,
        **model_to_arrays(state.model),
        "epochs": np.array([entry.stamp.epoch for entry in entries], np.int64),
        "uploads": np.array([entry.stamp.uploads for entry in entries], np.int64),
        "last_uploads": np.array([entry.last_upload for entry in entries], np.int64),
        "digests": np.stack([as_array(entry.stamp.digest) for entry in entries]),
        "lineages": np.stack([as_array(entry.lineage) for entry in entries]),
        "held": np.array(mirrors, np.int64),
        "moved": np.array(directions, np.int64),
    }
    for name, group in _groups("mirrors", mirrors, tracks[0].position.nbytes, group_bytes):
        arrays[name] = _rows([tracks[client].position for client in group])
    for name, group in _groups("directions", directions, tracks[0].direction.nbytes, group_bytes):
        arrays[name] = _rows([tracks[client].direction for client in group])
    if book.publisher is not None:
        arrays |= book.publisher.state().to_arrays()
    return arrays


def book_from_arrays(
    arrays: dict[str, NDArray[Any]],
    recipe: Recipe,
    downlink: Downlink,
    directory: Path | None,
    rule: StepRule = _FIXED,
) -> MirrorBook:
    """Return the book that `book_to_arrays` wrote.

    ``directory`` has the starting model; None where no client has it.
    """
    entries = [
        Held(
            Stamp(int(epoch), int(uploads), digest.tobytes()),
            lineage.tobytes(),
            int(last_upload),
        )
        for epoch, uploads, digest, lineage, last_upload in zip(
            arrays["epochs"],
            arrays["uploads"],
            arrays["digests"],
            arrays["lineages"],
            arrays["last_uploads"],
            strict=True,
        )
    ]
    model = model_from_arrays(arrays)
    zero = init_mirrors(recipe.memory, len(model.parameters), model.parameters.dtype)
    mirrors, directions = _read_rows(arrays, "mirrors"), _read_rows(arrays, "directions")
    peers = PerClient(len(entries), Peer(zero))
    for client in sorted({*mirrors, *directions}):
        mirror, direction = mirrors.get(client), directions.get(client)
        track = Track(
            zero.position if mirror is None else mirror[None],
            zero.velocity,
            zero.direction if direction is None else direction[None],
            np.array([mirror is not None and bool(mirror.any())]),
        )
        peers = peers.replaced(client, Peer(track))
    publisher = None
    start = None if directory is None else _load_start(directory)
    if not isinstance(downlink, Full) and "log_first" in arrays:
        merges = lies_on_grid(recipe, downlink)
        publisher = Publisher(start, LogState.from_arrays(arrays), merges)
    state = ServerState(model, peers)
    return MirrorBook(recipe, state, entries, arrays["weights"], downlink, publisher, rule)


def check_book(book: MirrorBook, file: Path) -> None:
    """Raise `RunError` unless every mirror and the model have the digests that are noted."""
    zero: dict[bytes, bytes] = {}
    for client, (peer, entry) in enumerate(zip(book.state.peers, book.entries, strict=True)):
        digest = _digest_of(peer.track, entry.lineage, zero)
        if digest != entry.stamp.digest:
            raise RunError(f"checkpoint {str(file)!r} is damaged: mirror {client} has changed")
    publisher = book.publisher
    if publisher is not None and public_digest(book.public) != publisher.digest:
        raise RunError(f"checkpoint {str(file)!r} is damaged: the model has changed")


def _moved(tracks: list[Track]) -> list[int]:
    """Return the clients whose direction is not zero; many share one array of zeros."""
    zeros: set[int] = set()
    moved = []
    for client, track in enumerate(tracks):
        if id(track.direction) in zeros:
            continue
        if track.direction.any():
            moved.append(client)
        else:
            zeros.add(id(track.direction))
    return moved


def _groups(
    name: str, clients: list[int], row_bytes: int, group_bytes: int
) -> Iterator[tuple[str, list[int]]]:
    size = max(1, group_bytes // max(1, row_bytes))
    for start in range(0, len(clients), size):
        yield f"{name}-{start}", clients[start : start + size]


def _read_rows(arrays: dict[str, NDArray[Any]], name: str) -> dict[int, NDArray[Any]]:
    """Return the rows that `save_checkpoint` wrote, by client; once there was one for each."""
    starts = sorted(int(key.rpartition("-")[2]) for key in arrays if key.startswith(f"{name}-"))
    rows = [row for start in starts for row in arrays[f"{name}-{start}"]]
    if "format" not in arrays:
        return dict(enumerate(rows))
    clients = arrays[_CLIENTS[name]].tolist()
    return dict(zip(clients, rows, strict=True))


def _digest_of(track: Track, lineage: bytes, zero: dict[bytes, bytes]) -> bytes:
    """Return the digest of a link; those that are shared by many clients are looked at once."""
    if track.is_held[0] or track.direction.any():
        return content_digest(lineage, track)
    if lineage not in zero:
        zero[lineage] = content_digest(lineage, track)
    return zero[lineage]


def save_start(directory: Path, publisher: Publisher) -> None:
    """Write the starting model, once: snapshots are relative to it."""
    file = directory / _START
    is_first = publisher.round == 1 or not file.exists()
    if publisher.start is not None and is_first:
        write_arrays(file, {"parameters": publisher.start})


def _load_start(directory: Path) -> FloatArray | None:
    """Read the starting model; without it, snapshots stand alone."""
    try:
        return read_arrays(directory / _START)["parameters"]
    except (RunError, KeyError) as error:
        _logger.warning("snapshots will be longer, the starting model is not there: %s", error)
        return None


def as_array(digest: bytes) -> NDArray[np.uint8]:
    """Return a digest as an array."""
    return np.frombuffer(digest[:DIGEST_BYTES], np.uint8)


def _rows(vectors: Any) -> NDArray[Any]:
    """Put rows below each other; a single one is not copied."""
    return vectors[0] if len(vectors) == 1 else np.concatenate(vectors)
