"""Where the vectors of clients live, and the arithmetic that is done on them there.

The round of a client and of a server (`aqg.core.round`, `aqg.core.server`) is written once, over a
leading axis of clients, in terms of these operations. `NumpySpace` says what they are, for a single
client and for the simulator on a CPU; the simulator's torch backends replace each, and a parity
test holds them to the ones here. No operation decides anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from aqg.core.grids import MAX_RADIUS, Grid, Innovation, affine, measure, move_mirror
from aqg.core.messages import AnyUpload, Upload
from aqg.core.quantizers import Quantizer
from aqg.core.track import Memory, advance
from aqg.core.types import Float64Array, FloatArray, IntArray
from aqg.errors import ConfigError
from aqg.jit import njit

Array = Any
"""An array of the space's own kind."""

Item = TypeVar("Item")
Result = TypeVar("Result")

_PIECE_BYTES = 1 << 21
"""Rows handed to a thread at a time: few enough to stay near it from one step to the next."""
_THREAD_LENGTH = 1 << 15
"""Messages with fewer coordinates are made before a thread has started."""


class NumpySpace:
    """Vectors as NumPy arrays, numba for the loops.

    ``clients`` are always increasing indices of rows.

    With ``in_place``, arrays that come in belong to the space, to be written to. Otherwise every
    input is left as it is.
    """

    host: NumpySpace  # the space of the small numbers that stay with Python

    def __init__(self, in_place: bool = False) -> None:
        self.in_place = in_place
        self.host = self

    def get(self, array: Array) -> Any:
        return array

    def put(self, array: Any) -> Array:
        return np.array(array)

    def own(self, array: Array) -> Array:
        """Return an array that may be written to: the same one, or a copy of the caller's."""
        return array if self.in_place else array.copy()

    def zeros_like(self, array: Array) -> Array:
        return np.zeros_like(array)

    def take(self, table: Array, clients: IntArray) -> Array:
        """Return some rows; consecutive ones without a copy."""
        return table if len(clients) == len(table) else table[as_index(clients)]

    def rows(self, table: Array, clients: IntArray) -> Sequence[FloatArray]:
        return [table[client] for client in clients]

    def store(self, table: Array, clients: IntArray, rows: Any) -> Array:
        """Return the table with ``table[clients] = rows``; one replaced whole is not copied."""
        if len(clients) == len(table):
            return np.asarray(rows, table.dtype)
        table = self.own(table)
        table[clients] = rows
        return table

    def apart(self, rows: Array, vectors: Array) -> Array:
        """Return ``rows``, or a copy where they lie in the memory of ``vectors``."""
        return rows.copy() if np.may_share_memory(rows, vectors) else rows

    def measure(
        self, quantizer: Quantizer, vectors: Array, mirrors: Array | None, clients: IntArray
    ) -> tuple[Array, Innovation]:
        """Return the vectors to quantize and their statistics in NumPy.

        With ``mirrors``, a row for every client, these are the innovations ``g - ref_m``;
        ``vectors`` may be overwritten by them if they are the space's own. Large blocks are worked
        on piece by piece, on all cores.
        """
        deltas, num_rows = vectors, len(vectors)
        if mirrors is not None and not self.in_place:
            deltas = np.empty_like(vectors)

        def innovate(piece: slice) -> Innovation:
            if mirrors is not None:
                np.subtract(vectors[piece], mirrors[as_index(clients[piece])], out=deltas[piece])
            return quantizer.measure(deltas[piece])

        size = max(1, _PIECE_BYTES * num_rows // vectors.nbytes)
        if size >= num_rows:
            return deltas, innovate(slice(num_rows))
        pieces = [slice(start, start + size) for start in range(0, num_rows, size)]
        parts = map_threads(innovate, pieces, num_threads())
        return deltas, Innovation(*map(np.concatenate, zip(*parts, strict=True)))

    def add(self, vectors: Array, rows: Array) -> Array:
        """Return ``vectors + rows``; may overwrite ``vectors`` if they are the space's own."""
        return np.add(vectors, rows, out=vectors if self.in_place else None)

    def blend(self, averages: Array, vectors: Array, weight: float) -> Array:
        """Return ``(1 - weight)·average + weight·vector``, row by row, rounded in this order.

        Where an average is zero everywhere, or a vector is not finite and within what a grid
        accepts, it is the vector itself.
        """
        if weight == 1.0:
            return vectors.copy()
        kind = averages.dtype.type
        blended = averages * kind(1.0 - weight)
        is_usable = np.abs(vectors).max(axis=1, initial=0) <= MAX_RADIUS
        is_blended = averages.any(axis=1) & is_usable
        with np.errstate(over="ignore", invalid="ignore"):  # such rows are replaced below
            blended += vectors * kind(weight)
        blended[~is_blended] = vectors[~is_blended]
        return blended

    def distances(self, vectors: Array, earlier: Array) -> Float64Array:
        """Return ``‖vector - earlier‖²`` of each row; zero where ``earlier`` is zero everywhere."""
        with np.errstate(over="ignore", invalid="ignore"):  # such vectors are refused later
            moved = energies(vectors - earlier)
        return np.where(earlier.any(axis=1), moved, 0.0)

    def move(
        self,
        memory: Memory,
        mirrors: Array,
        total: Array,
        clients: IntArray,
        uploads: Sequence[AnyUpload],
        weights: Float64Array,
    ) -> None:
        """Move mirrors by their uploads, and the weighted sum with them, in place."""
        for client, upload, weight in zip(clients, uploads, weights.tolist(), strict=True):
            old = mirrors[client]
            if memory is Memory.INNOVATION and isinstance(upload, Upload):
                values = affine(upload.grid, upload.width, upload.step)
                move_mirror(old, upload.levels, *values, total, weight)
                continue
            new = advance(memory, old, upload)
            total += weight * (new.astype(np.float64) - old)
            mirrors[client] = new

    def add_values(self, total: Array, uploads: Sequence[AnyUpload], weights: Float64Array) -> None:
        for upload, weight in zip(uploads, weights.tolist(), strict=True):
            total += weight * upload.values(np.float64)

    def cast(self, vector: Array, like: Array) -> Array:
        return vector.astype(like.dtype, copy=False)

    def take_step(
        self, params: Array, update: Array, direction: Array, step_size: float
    ) -> tuple[Array, Array]:
        """Return the parameters after the step, and ``‖direction‖²``, maybe still on its way."""
        squared_norm = np.vdot(direction, direction)  # no warning where it overflows, unlike `@`
        stepped = np.empty_like(params)
        _take_step(params, update, step_size, stepped)
        return stepped, squared_norm

    def number(self, scalar: Array) -> float:
        """Wait for the scalar that `take_step` returned."""
        return float(scalar)

    def squared_norm(self, vector: Array) -> float:
        wide = vector.astype(np.float64, copy=False)
        return float(np.vdot(wide, wide))  # no warning where it overflows, unlike `@`

    def root(self, vector: Array) -> Array:
        """Return the root of every coordinate, rounded to the nearest number."""
        return np.sqrt(vector)

    def map(
        self, function: Callable[[Item], Result], items: Sequence[Item], num_values: int
    ) -> list[Result]:
        """Apply a function to items of so many values in all, on several threads where it pays."""
        if num_values < _THREAD_LENGTH:
            return [function(item) for item in items]
        return map_threads(function, items, num_threads())


Space = NumpySpace
"""A space of any kind: all are made from this one."""


def map_threads(
    function: Callable[[Item], Result], items: Sequence[Item], threads: int | None
) -> list[Result]:
    """Apply ``function`` to every item on up to ``threads`` threads (``None``: one per core).

    The results come in order. No thread is started for a single item or a single thread; the
    kernels behind ``function`` release the interpreter lock.
    """
    if threads is not None and threads < 1:
        raise ConfigError(f"threads is {threads}; it must be at least 1, or None for one per core")
    workers = min(len(items), threads or os.cpu_count() or 1)
    if workers <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(workers, thread_name_prefix="aqg") as pool:
        return list(pool.map(function, items))


def num_threads() -> int:
    """Return how many threads to use: ``OMP_NUM_THREADS``, as for BLAS, or one per core."""
    try:
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    except (KeyError, ValueError):
        return os.cpu_count() or 1


def as_index(clients: IntArray) -> slice | IntArray:
    if not len(clients):
        return clients
    first, last = clients.item(0), clients.item(-1)
    return slice(first, last + 1) if last - first == len(clients) - 1 else clients


with_rows = NumpySpace().store
"""See there; the table is left as it was."""


def energies(vectors: FloatArray) -> Float64Array:
    return measure(vectors, Grid.MIDTREAD, max_width=0).squared_norm


@njit()
def _take_step(params: Any, update: Any, step_size: Any, stepped: Any) -> None:
    for i in range(len(params)):
        stepped[i] = params[i] - params.dtype.type(step_size * update[i])
