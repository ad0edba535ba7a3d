"""Where the arrays of the fast simulator live, and what is done to them there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from aqg.core.client import blend, own_movement
from aqg.core.grids import affine
from aqg.core.innovation import Innovation
from aqg.core.kernels import move_mirror
from aqg.core.messages import Upload
from aqg.core.mirror import Memory, advance
from aqg.errors import ConfigError
from aqg.jit import HAVE_NUMBA, njit
from aqg.sim.stacks import stack_small_clients
from aqg.wire.parallel import map_threads

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aqg.core.messages import AnyUpload
    from aqg.core.quantizers import Quantizer
    from aqg.core.types import Float64Array, FloatArray, IntArray
    from aqg.sim.local import LocalTraining
    from aqg.sim.problem import Problem

    Group = tuple[slice | int, FloatArray, IntArray]

Array = Any
"""An array of the backend's own kind."""

_THREAD_BYTES = 1 << 20
"""Work on less than this is done before a thread has started."""
_PIECE_BYTES = 1 << 21
"""Rows handed to a thread at a time: few enough to stay near it from one step to the next."""


class Backend(Protocol):
    """Arrays on one device. ``clients`` are always increasing indices.

    Attributes:
        is_asynchronous: whether the device works on its own while Python goes on.

    """

    is_asynchronous: bool

    def put(self, array: FloatArray) -> Array:
        """Copy an array to the device."""

    def get(self, array: Array) -> Any:
        """Return an array of the device as a NumPy array."""

    def losses(self, params: Array, clients: IntArray) -> Float64Array:
        """Return the loss of each of these clients."""

    def losses_and_gradients(self, params: Array, clients: IntArray) -> tuple[Array, Array]:
        """Return the loss and the gradient of each of these clients, both on the device."""

    def local_updates(
        self,
        local: LocalTraining,
        params: Array,
        clients: IntArray,
        keys: Sequence[Sequence[int]],
    ) -> tuple[Array, Array]:
        """Return what `LocalTraining.update` gives for each client: losses and updates."""

    def stack(self, rows: tuple[Array, ...]) -> Array:
        """Return arrays of one shape as the rows of another."""

    def innovations(
        self,
        memory: Memory,
        quantizer: Quantizer,
        gradients: Array,
        held: Array,
        clients: IntArray,
    ) -> tuple[Array, Innovation]:
        """Return the vectors to quantize, and their statistics in NumPy.

        ``held`` has a row per client: ``ref_m``, which `Memory.INNOVATION` subtracts, or the
        residual, which `Memory.FEEDBACK` adds. ``gradients`` may be overwritten.
        """

    def blend(self, gradients: Array, averages: Array, clients: IntArray, weight: float) -> Array:
        """Return the clients' new running averages: `aqg.core.client.blend`, row by row."""

    def own_movements(self, vectors: Array, averages: Array, clients: IntArray) -> Float64Array:
        """Return how far each client's vector moved: `aqg.core.client.own_movement`."""

    def rows(self, table: Array, indices: IntArray) -> Sequence[FloatArray]:
        """Return some rows as NumPy vectors."""

    def store(self, table: Array, clients: IntArray, rows: Array) -> None:
        """Set ``table[clients] = rows``."""

    def advance(
        self,
        memory: Memory,
        mirrors: Array,
        total: Array,
        clients: IntArray,
        uploads: Sequence[AnyUpload],
        weights: Float64Array,
    ) -> None:
        """Move the clients' mirrors by their uploads, and the weighted sum with them, in place."""

    def forget(
        self, mirrors: Array, total: Array, clients: IntArray, weights: Float64Array
    ) -> None:
        """Set the clients' mirrors to zero, and take them out of the weighted sum, in place."""

    def take_step(
        self, params: Array, update: Array, direction: Array, step_size: float
    ) -> tuple[Array, Array]:
        """Return the parameters after the step, and ``‖direction‖²``, still on its way."""

    def number(self, scalar: Array) -> float:
        """Wait for the scalar that `take_step` returned."""

    def foresee(self, params: Array, memory: Memory, quantizer: Quantizer, held: Array) -> None:
        """Begin with what the next round asks if all clients take part; wait for nothing."""


def check_device(device: str) -> None:
    """Raise `ConfigError` if ``device`` is not one that `make_backend` can use here."""
    if device == "cpu":
        return
    try:
        import torch
    except ImportError:
        raise ConfigError(
            f"device {device!r} needs torch; install with: pip install 'aqg[torch]'"
        ) from None
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {device!r}, but torch sees no GPU here; use cpu")
    try:
        torch.empty(1, device=device.removeprefix("torch:"))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device {device!r} cannot be used: {reason}") from None


def make_backend(problem: Problem, device: str) -> Backend:
    """Return the backend for ``"cpu"`` (NumPy), ``"cuda"``, or ``"torch:DEVICE"``."""
    if device == "cpu":
        return NumpyBackend(problem)
    check_device(device)
    if device.startswith("cuda"):
        from aqg.sim.cuda_backend import CudaBackend

        return CudaBackend(problem, device)
    from aqg.sim.torch_backend import TorchBackend

    return TorchBackend(problem, device.removeprefix("torch:"))


class NumpyBackend:
    """NumPy arrays, BLAS for the gradients, numba for the rest."""

    is_asynchronous = False

    def __init__(self, problem: Problem) -> None:
        self._objective = problem.objective
        self._clients = problem.clients
        self._stacks = stack_small_clients(problem)
        self._grouped: tuple[IntArray, list[Group]] = np.empty(0, np.int64), []

    def put(self, array: FloatArray) -> FloatArray:
        """Copy."""
        return np.array(array)

    def get(self, array: FloatArray) -> Any:
        """Return the array itself."""
        return array

    def losses(self, params: FloatArray, clients: IntArray) -> Float64Array:
        """Return the loss of each of these clients."""
        result = np.empty(len(clients))
        for positions, features, labels in self._groups(clients):
            result[positions] = self._objective.losses(params, features, labels)
        return result

    def losses_and_gradients(
        self, params: FloatArray, clients: IntArray
    ) -> tuple[Float64Array, FloatArray]:
        """Return the loss and the gradient of each of these clients."""
        if clients is not self._grouped[0]:  # the same again in every round where all take part
            self._grouped = clients, list(self._groups(clients))
        groups = self._grouped[1]
        if len(groups) == 1 and len(clients) > 1:  # the results as they are, without a copy
            alone, gradients = self._objective.losses_and_gradients(params, *groups[0][1:])
            return alone.astype(np.float64, copy=False), gradients
        losses = np.empty(len(clients))
        gradients = np.empty((len(clients), len(params)), params.dtype)
        for positions, features, labels in groups:
            losses[positions], gradients[positions] = self._objective.losses_and_gradients(
                params, features, labels
            )
        return losses, gradients

    def _groups(self, clients: IntArray) -> Iterator[Group]:
        """Split clients into stacks of equal size, and single ones where stacking gains nothing."""
        position = 0
        while position < len(clients):
            first = int(clients[position])
            stack = self._stacks.get(first)
            if stack is None:
                samples = self._clients[first]
                yield position, samples.features, samples.labels
                position += 1
                continue
            end = stack.first + len(stack.features)
            stop = len(clients)
            if clients[-1] >= end:
                stop = position + int(np.searchsorted(clients[position:], end))
            members = as_index(clients[position:stop] - stack.first)
            yield slice(position, stop), stack.features[members], stack.labels[members]
            position = stop

    def local_updates(
        self,
        local: LocalTraining,
        params: FloatArray,
        clients: IntArray,
        keys: Sequence[Sequence[int]],
    ) -> tuple[FloatArray, FloatArray]:
        """Train one client after the other, on the very arrays of the problem."""
        results = [
            local.update(self._objective, params, *self._clients[int(client)], key)
            for client, key in zip(clients.tolist(), keys, strict=True)
        ]
        losses, updates = zip(*results, strict=True)
        return np.stack(losses), np.stack(updates)

    def stack(self, rows: tuple[FloatArray, ...]) -> FloatArray:
        """Copy into one array."""
        return np.stack(rows)

    def innovations(
        self,
        memory: Memory,
        quantizer: Quantizer,
        gradients: FloatArray,
        held: FloatArray,
        clients: IntArray,
    ) -> tuple[FloatArray, Innovation]:
        """Work in place; large blocks piece by piece, on all cores."""

        def innovate(rows: FloatArray, clients: IntArray) -> Innovation:
            if memory is Memory.INNOVATION:
                np.subtract(rows, held[as_index(clients)], out=rows)
            elif memory is Memory.FEEDBACK:
                np.add(rows, held[as_index(clients)], out=rows)
            return quantizer.measure(rows)

        num_rows = len(gradients)
        if gradients.nbytes < _THREAD_BYTES or num_rows == 1:
            return gradients, innovate(gradients, clients)
        size = max(1, _PIECE_BYTES * num_rows // gradients.nbytes)
        pieces = [slice(start, start + size) for start in range(0, num_rows, size)]
        parts = map_threads(
            lambda piece: innovate(gradients[piece], clients[piece]), pieces, num_threads()
        )
        return gradients, Innovation(*map(np.concatenate, zip(*parts, strict=True)))

    def blend(
        self, gradients: FloatArray, averages: FloatArray, clients: IntArray, weight: float
    ) -> FloatArray:
        """Take the client's own step for each."""
        pairs = zip(clients, gradients, strict=True)
        return np.stack([blend(averages[client], row, weight) for client, row in pairs])

    def own_movements(
        self, vectors: FloatArray, averages: FloatArray, clients: IntArray
    ) -> Float64Array:
        """Take the client's own step for each."""
        pairs = zip(clients, vectors, strict=True)
        return np.array([own_movement(row, averages[client]) for client, row in pairs])

    def rows(self, table: FloatArray, indices: IntArray) -> Sequence[FloatArray]:
        """Return views."""
        return [table[index] for index in indices]

    def store(self, table: FloatArray, clients: IntArray, rows: FloatArray) -> None:
        """Set rows."""
        table[clients] = rows

    def forget(
        self, mirrors: FloatArray, total: Float64Array, clients: IntArray, weights: Float64Array
    ) -> None:
        """Subtract one mirror after the other, as the server does."""
        for client, weight in zip(clients.tolist(), weights.tolist(), strict=True):
            total += weight * (0.0 - mirrors[client].astype(np.float64))
            mirrors[client] = 0.0

    def advance(
        self,
        memory: Memory,
        mirrors: FloatArray,
        total: Float64Array,
        clients: IntArray,
        uploads: Sequence[AnyUpload],
        weights: Float64Array,
    ) -> None:
        """Take the same steps as the state machines of client and server, in the same order."""
        for client, upload, weight in zip(clients, uploads, weights.tolist(), strict=True):
            if not memory.keeps_mirror:
                total += weight * upload.values(np.float64)
                continue
            old = mirrors[client]
            if memory is Memory.INNOVATION and isinstance(upload, Upload):
                values = affine(upload.grid, upload.width, upload.step)
                move_mirror(old, upload.levels, values, total, weight)
                continue
            new = advance(memory, old, upload)
            total += weight * (new.astype(np.float64) - old)
            mirrors[client] = new

    def take_step(
        self, params: FloatArray, update: Float64Array, direction: Float64Array, step_size: float
    ) -> tuple[FloatArray, Any]:
        """Take the step in the precision of the parameters; a diverging run is a result."""
        squared_norm = np.vdot(direction, direction)  # unlike `@`, silent where it overflows
        if HAVE_NUMBA:
            stepped = np.empty_like(params)
            _take_step(params, update, step_size, stepped)
            return stepped, squared_norm
        with np.errstate(over="ignore", invalid="ignore"):
            return params - (step_size * update).astype(params.dtype), squared_norm

    def number(self, scalar: Any) -> float:
        """Return a Python number."""
        return float(scalar)

    def foresee(self, *_: object) -> None:
        """Do nothing: all is done when it is asked for."""


@njit()
def _take_step(params: Any, update: Any, step_size: Any, stepped: Any) -> None:
    for i in range(len(params)):
        stepped[i] = params[i] - params.dtype.type(step_size * update[i])


def as_index(clients: IntArray) -> slice | IntArray:
    """Return consecutive indices as a slice, which indexes without a copy."""
    if not len(clients):
        return clients
    first, last = clients.item(0), clients.item(-1)
    return slice(first, last + 1) if last - first == len(clients) - 1 else clients


def num_threads() -> int:
    """Return how many threads to use: ``OMP_NUM_THREADS``, as for BLAS, or one per core."""
    try:
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    except (KeyError, ValueError):
        return os.cpu_count() or 1
