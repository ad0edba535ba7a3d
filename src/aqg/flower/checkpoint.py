"""The server's state on disk: everything that a restart needs, written whole or not at all."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aqg.core.downlink import Downlink, Full
from aqg.core.links import Link, init_link
from aqg.core.per_client import PerClient
from aqg.core.persistence import model_from_arrays, model_to_arrays
from aqg.core.server import Peer, ServerState
from aqg.errors import RunError
from aqg.flower.messages import Stamp
from aqg.flower.protocol import Entry, MirrorBook, content_digest
from aqg.flower.store import read_arrays, write_arrays
from aqg.protocol.digests import DIGEST_BYTES, public_digest
from aqg.protocol.publisher import LogState, Publisher, public_of
from aqg.runs.directory import CHECKPOINT, ROUNDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from aqg.core.recipe import Recipe
    from aqg.core.types import Float64Array, FloatArray

_logger = logging.getLogger("flwr.aqg")

_FORMAT = 2
_OLDEST = 1
"""Format 1 had no number, a row for every mirror, and no log: its clients received whole models."""
_START = "start.npz"
_CLIENTS = {"mirrors": "held", "directions": "moved"}
"""Where it is written whose rows there are."""
_FULL = Full()
_GROUP_BYTES = 64 << 20
"""Mirrors of many clients are written together, up to about this size."""


class Checkpoint(NamedTuple):
    """What the server goes on from.

    Attributes:
        run: names the run.
        fingerprint: of what server and clients agreed on.
        incarnation: of the server that wrote it.
        book: the model and its log, and all mirrors.
        nodes: the node of each client, 0 for none.
        num_samples: of each client, 0 where unknown.
        terms: settings that a run keeps as they are, by name.

    """

    run: str
    fingerprint: bytes
    incarnation: int
    book: MirrorBook
    nodes: list[int]
    num_samples: Float64Array
    terms: dict[str, Any]


def save_checkpoint(
    directory: Path, checkpoint: Checkpoint, group_bytes: int = _GROUP_BYTES
) -> None:
    """Write ``checkpoint.npz``, with mirrors in groups of about ``group_bytes``.

    Mirrors and directions that are zero are not written.
    """
    book = checkpoint.book
    state, entries = book.state, book.entries
    links = [peer.link for peer in state.peers]
    mirrors = [client for client, link in enumerate(links) if link.is_held[0]]
    directions = _moved(links)
    arrays: dict[str, NDArray[Any]] = {
        "format": np.array(_FORMAT, np.int64),
        "run": np.array(checkpoint.run),
        "fingerprint": _as_array(checkpoint.fingerprint),
        "incarnation": np.array(checkpoint.incarnation, np.int64),
        "nodes": np.array(checkpoint.nodes, np.uint64),
        "num_samples": checkpoint.num_samples,
        "terms": np.array(json.dumps(checkpoint.terms)),
        "weights": book.weights,
        **model_to_arrays(state.model),
        "epochs": np.array([entry.stamp.epoch for entry in entries], np.int64),
        "uploads": np.array([entry.stamp.uploads for entry in entries], np.int64),
        "last_uploads": np.array([entry.last_upload for entry in entries], np.int64),
        "digests": np.stack([_as_array(entry.stamp.digest) for entry in entries]),
        "lineages": np.stack([_as_array(entry.lineage) for entry in entries]),
        "held": np.array(mirrors, np.int64),
        "moved": np.array(directions, np.int64),
    }
    for name, group in _groups("mirrors", mirrors, links[0].mirror.nbytes, group_bytes):
        arrays[name] = _rows([links[client].mirror for client in group])
    for name, group in _groups("directions", directions, links[0].direction.nbytes, group_bytes):
        arrays[name] = _rows([links[client].direction for client in group])
    if book.publisher is not None:
        _save_start(directory, book.publisher)
        arrays |= book.publisher.state().to_arrays()
    write_arrays(directory / CHECKPOINT, arrays)


def load_checkpoint(
    directory: Path, recipe: Recipe, downlink: Downlink = _FULL
) -> Checkpoint | None:
    """Read ``checkpoint.npz``; None where there is none. Every mirror must have its digest."""
    file = directory / CHECKPOINT
    if not file.exists():
        lines = directory / ROUNDS
        if lines.exists() and lines.stat().st_size:
            raise RunError(
                f"run-dir {str(directory)!r} holds rounds but no checkpoint to go on from; "
                "name another directory"
            )
        return None
    arrays = read_arrays(file)
    try:
        if int(arrays.get("format", _OLDEST)) > _FORMAT:
            raise RunError(
                f"checkpoint {str(file)!r} has format {int(arrays['format'])}; this version of "
                f"aqg reads up to {_FORMAT}"
            )
        checkpoint = _checkpoint_of(arrays, recipe, downlink, directory)
    except KeyError as error:
        raise RunError(f"checkpoint {str(file)!r} has no {error}; it is not a server's") from None
    book = checkpoint.book
    zero: dict[bytes, bytes] = {}
    for client, (peer, entry) in enumerate(zip(book.state.peers, book.entries, strict=True)):
        digest = _digest_of(peer.link, entry.lineage, zero)
        if digest != entry.stamp.digest:
            raise RunError(f"checkpoint {str(file)!r} is damaged: mirror {client} has changed")
    publisher = book.publisher
    if publisher is not None and public_digest(public_of(book.state.model)) != publisher.digest:
        raise RunError(f"checkpoint {str(file)!r} is damaged: the model has changed")
    return checkpoint


def _checkpoint_of(
    arrays: dict[str, NDArray[Any]], recipe: Recipe, downlink: Downlink, directory: Path
) -> Checkpoint:
    num_clients = len(arrays["nodes"])
    entries = [
        Entry(
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
    zero = init_link(recipe.memory, len(model.parameters), model.parameters.dtype)
    mirrors, directions = _read_rows(arrays, "mirrors"), _read_rows(arrays, "directions")
    peers = PerClient(num_clients, Peer(zero))
    for client in sorted({*mirrors, *directions}):
        mirror, direction = mirrors.get(client), directions.get(client)
        link = Link(
            zero.mirror if mirror is None else mirror[None],
            zero.direction if direction is None else direction[None],
            np.array([mirror is not None and bool(mirror.any())]),
        )
        peers = peers.replaced(client, Peer(link))
    publisher = None
    if model.downlink is not None:
        publisher = Publisher(_load_start(directory), LogState.from_arrays(arrays))
    return Checkpoint(
        run=str(arrays["run"]),
        fingerprint=arrays["fingerprint"].tobytes(),
        incarnation=int(arrays["incarnation"]),
        book=MirrorBook(
            recipe, ServerState(model, peers), entries, arrays["weights"], downlink, publisher
        ),
        nodes=[int(node) for node in arrays["nodes"]],
        num_samples=arrays["num_samples"],
        terms={"downlink": Full.name} | json.loads(str(arrays["terms"])),
    )


def _moved(links: list[Link]) -> list[int]:
    """Return the clients whose direction is not zero; many share one array of zeros."""
    zeros: set[int] = set()
    moved = []
    for client, link in enumerate(links):
        if id(link.direction) in zeros:
            continue
        if link.direction.any():
            moved.append(client)
        else:
            zeros.add(id(link.direction))
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


def _digest_of(link: Link, lineage: bytes, zero: dict[bytes, bytes]) -> bytes:
    """Return the digest of a link; those that are shared by many clients are looked at once."""
    if link.is_held[0] or link.direction.any():
        return content_digest(lineage, link)
    if lineage not in zero:
        zero[lineage] = content_digest(lineage, link)
    return zero[lineage]


def _save_start(directory: Path, publisher: Publisher) -> None:
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


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make sure that no other server writes into a run directory."""
    try:
        import fcntl
    except ImportError:  # a system without such locks
        yield
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / ".lock").open("w")
    except OSError as error:
        raise RunError(f"run-dir {str(directory)!r} cannot be used: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(
                f"run-dir {str(directory)!r} is in use by another server; wait, or name another"
            ) from None
        yield


def _as_array(digest: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(digest[:DIGEST_BYTES], np.uint8)


def _rows(vectors: Any) -> NDArray[Any]:
    """Put rows below each other; a single one is not copied."""
    return vectors[0] if len(vectors) == 1 else np.concatenate(vectors)
