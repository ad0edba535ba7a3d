"""The server's state on disk: everything that a restart needs, written whole or not at all."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aqg.core.links import Link
from aqg.core.per_client import PerClient
from aqg.core.persistence import model_from_arrays, model_to_arrays
from aqg.core.server import Peer, ServerState
from aqg.errors import RunError
from aqg.flower.messages import DIGEST_BYTES, Stamp
from aqg.flower.protocol import Entry, MirrorBook, content_digest
from aqg.flower.store import read_arrays, write_arrays
from aqg.runs.directory import CHECKPOINT, ROUNDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from aqg.core.recipe import Recipe
    from aqg.core.types import Float64Array

_GROUP_BYTES = 64 << 20
"""Mirrors of many clients are written together, up to about this size."""


class Checkpoint(NamedTuple):
    """What the server goes on from.

    Attributes:
        run: names the run.
        fingerprint: of what server and clients agreed on.
        incarnation: of the server that wrote it.
        book: the model and all mirrors.
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
    """Write ``checkpoint.npz``, with mirrors in groups of about ``group_bytes``."""
    state, entries = checkpoint.book.state, checkpoint.book.entries
    links = [peer.link for peer in state.peers]
    row_bytes = links[0].mirror.nbytes + links[0].direction.nbytes
    group = max(1, group_bytes // max(1, row_bytes))
    arrays: dict[str, NDArray[Any]] = {
        "run": np.array(checkpoint.run),
        "fingerprint": _as_array(checkpoint.fingerprint),
        "incarnation": np.array(checkpoint.incarnation, np.int64),
        "nodes": np.array(checkpoint.nodes, np.uint64),
        "num_samples": checkpoint.num_samples,
        "terms": np.array(json.dumps(checkpoint.terms)),
        "weights": checkpoint.book.weights,
        **model_to_arrays(state.model),
        "epochs": np.array([entry.stamp.epoch for entry in entries], np.int64),
        "uploads": np.array([entry.stamp.uploads for entry in entries], np.int64),
        "last_uploads": np.array([entry.last_upload for entry in entries], np.int64),
        "digests": np.stack([_as_array(entry.stamp.digest) for entry in entries]),
        "lineages": np.stack([_as_array(entry.lineage) for entry in entries]),
        "group": np.array(group, np.int64),
    }
    for start in range(0, len(entries), group):
        stop = start + group
        arrays[f"mirrors-{start}"] = _rows([link.mirror for link in links[start:stop]])
        arrays[f"directions-{start}"] = _rows([link.direction for link in links[start:stop]])
    write_arrays(directory / CHECKPOINT, arrays)


def load_checkpoint(directory: Path, recipe: Recipe) -> Checkpoint | None:
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
        checkpoint = _checkpoint_of(arrays, recipe)
    except KeyError as error:
        raise RunError(f"checkpoint {str(file)!r} has no {error}; it is not a server's") from None
    peers, entries = checkpoint.book.state.peers, checkpoint.book.entries
    for client, (peer, entry) in enumerate(zip(peers, entries, strict=True)):
        if content_digest(entry.lineage, peer.link) != entry.stamp.digest:
            raise RunError(f"checkpoint {str(file)!r} is damaged: mirror {client} has changed")
    return checkpoint


def _checkpoint_of(arrays: dict[str, NDArray[Any]], recipe: Recipe) -> Checkpoint:
    num_clients = len(arrays["nodes"])
    starts = range(0, num_clients, int(arrays["group"]))
    mirrors = [row for start in starts for row in arrays[f"mirrors-{start}"]]
    directions = [row for start in starts for row in arrays[f"directions-{start}"]]
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
    links = [
        Link(mirror[None], direction[None], np.array([mirror.any()]))
        for mirror, direction in zip(mirrors, directions, strict=True)
    ]
    peers = PerClient(num_clients, Peer(links[0]))
    for client, link in enumerate(links):
        peers = peers.replaced(client, Peer(link))
    state = ServerState(model_from_arrays(arrays), peers)
    return Checkpoint(
        run=str(arrays["run"]),
        fingerprint=arrays["fingerprint"].tobytes(),
        incarnation=int(arrays["incarnation"]),
        book=MirrorBook(recipe, state, entries, arrays["weights"]),
        nodes=[int(node) for node in arrays["nodes"]],
        num_samples=arrays["num_samples"],
        terms=json.loads(str(arrays["terms"])),
    )


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
