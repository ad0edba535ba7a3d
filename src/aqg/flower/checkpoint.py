"""The server's state on disk: everything that a restart needs, written whole or not at all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aqg.core.downlink import Downlink, Full
from aqg.core.step_sizes import Fixed
from aqg.errors import RunError
from aqg.protocol.checkpoint import (
    GROUP_BYTES,
    as_array,
    book_from_arrays,
    book_to_arrays,
    check_book,
    save_start,
)
from aqg.protocol.files import read_arrays, write_arrays
from aqg.runs.directory import CHECKPOINT, ROUNDS

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from aqg.core.recipe import Recipe
    from aqg.core.step_sizes import StepRule
    from aqg.core.types import Float64Array
    from aqg.protocol.book import MirrorBook

_FORMAT = 3
_FULL = Full()
_FIXED = Fixed()


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
    directory: Path, checkpoint: Checkpoint, group_bytes: int = GROUP_BYTES
) -> None:
    """Write ``checkpoint.npz``, with mirrors in groups of about ``group_bytes``.

    Mirrors and directions that are zero are not written.
    """
    book = checkpoint.book
    arrays: dict[str, NDArray[Any]] = {
        "format": np.array(_FORMAT, np.int64),
        "run": np.array(checkpoint.run),
        "fingerprint": as_array(checkpoint.fingerprint),
        "incarnation": np.array(checkpoint.incarnation, np.int64),
        "nodes": np.array(checkpoint.nodes, np.uint64),
        "num_samples": checkpoint.num_samples,
        "terms": np.array(json.dumps(checkpoint.terms)),
        **book_to_arrays(book, group_bytes),
    }
    if book.publisher is not None:
        save_start(directory, book.publisher)
    write_arrays(directory / CHECKPOINT, arrays)


def load_checkpoint(
    directory: Path, recipe: Recipe, downlink: Downlink = _FULL, rule: StepRule = _FIXED
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
        if int(arrays["format"]) != _FORMAT:
            raise RunError(
                f"checkpoint {str(file)!r} has format {int(arrays['format'])}; this version of "
                f"aqg reads {_FORMAT}"
            )
        checkpoint = _checkpoint_of(arrays, recipe, downlink, directory, rule)
    except KeyError as error:
        raise RunError(f"checkpoint {str(file)!r} has no {error}; it is not a server's") from None
    check_book(checkpoint.book, file)
    return checkpoint


def _checkpoint_of(
    arrays: dict[str, NDArray[Any]],
    recipe: Recipe,
    downlink: Downlink,
    directory: Path,
    rule: StepRule,
) -> Checkpoint:
    return Checkpoint(
        run=str(arrays["run"]),
        fingerprint=arrays["fingerprint"].tobytes(),
        incarnation=int(arrays["incarnation"]),
        book=book_from_arrays(arrays, recipe, downlink, directory, rule),
        nodes=[int(node) for node in arrays["nodes"]],
        num_samples=arrays["num_samples"],
        terms=json.loads(str(arrays["terms"])),
    )
