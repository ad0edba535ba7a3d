"""Where the arrays of the fast simulator live, and what is done to them there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from aqg.core.mirror import Memory, advance
from aqg.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqg.core.innovation import Innovation
    from aqg.core.messages import DenseUpload, Upload
    from aqg.core.quantizers import Quantizer
    from aqg.core.types import Float64Array, FloatArray, IntArray
    from aqg.sim.problem import Problem

Array = Any
"""An array of the backend's own kind."""

_STACK_BYTES = 1 << 20
"""Clients with less data than this are stacked into one product; larger ones gain nothing."""


class Backend(Protocol):
    """Arrays on one device. ``clients`` are always increasing indices."""

    def put(self, array: FloatArray) -> Array:
        """Copy an array to the device."""

    def get(self, array: Array) -> Any:
        """Return an array of the device as a NumPy array."""

    def losses(self, params: Array, clients: IntArray) -> Float64Array:
        """Return the loss of each of these clients."""

    def losses_and_gradients(self, params: Array, clients: IntArray) -> tuple[Float64Array, Array]:
        """Return the loss and the gradient of each of these clients."""

    def samples(self, client: int) -> tuple[Array, Array]:
        """Return a client's features and labels."""

    def stack(self, rows: list[Array]) -> Array:
        """Return vectors as the rows of one array."""

    def subtract(self, rows: Array, table: Array, clients: IntArray) -> Array:
        """Return ``rows - table[clients]``; may overwrite ``rows``."""

    def add(self, rows: Array, table: Array, clients: IntArray) -> Array:
        """Return ``rows + table[clients]``; may overwrite ``rows``."""

    def store(self, table: Array, clients: IntArray, rows: Array) -> None:
        """Set ``table[clients] = rows``."""

    def measure(self, quantizer: Quantizer, rows: Array) -> Innovation:
        """Return the statistics of every row, in NumPy."""

    def advance(
        self,
        memory: Memory,
        mirrors: Array,
        total: Array,
        client: int,
        upload: Upload | DenseUpload,
        weight: float,
    ) -> None:
        """Move a client's mirror by its upload, and the weighted sum with it, in place."""

    def descend(self, params: Array, update: Array, step_size: float) -> Array:
        """Return the parameters after the step."""

    def squared_norm(self, direction: Array) -> float:
        """Return ``‖direction‖²``."""


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
    from aqg.sim.torch_backend import TorchBackend

    return TorchBackend(problem, device.removeprefix("torch:"))


class NumpyBackend:
    """NumPy arrays, BLAS for the gradients, numba for the rest."""

    def __init__(self, problem: Problem) -> None:
        self._objective = problem.objective
        self._clients = problem.clients
        self._stacks = _stack_small_clients(problem)

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
        losses = np.empty(len(clients))
        gradients = np.empty((len(clients), len(params)), params.dtype)
        for positions, features, labels in self._groups(clients):
            losses[positions], gradients[positions] = self._objective.losses_and_gradients(
                params, features, labels
            )
        return losses, gradients

    def _groups(self, clients: IntArray) -> Iterator[tuple[slice | int, FloatArray, IntArray]]:
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
            start, features, labels = stack
            stop = position + int(np.searchsorted(clients[position:], start + len(features)))
            members = clients[position:stop] - start
            if len(members) == len(features):
                yield slice(position, stop), features, labels
            else:
                yield slice(position, stop), features[members], labels[members]
            position = stop

    def samples(self, client: int) -> tuple[FloatArray, IntArray]:
        """Return the very arrays of the problem."""
        return self._clients[client]

    def stack(self, rows: list[FloatArray]) -> FloatArray:
        """Copy into one array."""
        return np.stack(rows)

    def subtract(self, rows: FloatArray, table: FloatArray, clients: IntArray) -> FloatArray:
        """Subtract in place."""
        return np.subtract(rows, table[_as_slice(clients)], out=rows)

    def add(self, rows: FloatArray, table: FloatArray, clients: IntArray) -> FloatArray:
        """Add in place."""
        return np.add(rows, table[_as_slice(clients)], out=rows)

    def store(self, table: FloatArray, clients: IntArray, rows: FloatArray) -> None:
        """Set rows."""
        table[clients] = rows

    def measure(self, quantizer: Quantizer, rows: FloatArray) -> Innovation:
        """Ask the quantizer."""
        return quantizer.measure(rows)

    def advance(
        self,
        memory: Memory,
        mirrors: FloatArray,
        total: Float64Array,
        client: int,
        upload: Upload | DenseUpload,
        weight: float,
    ) -> None:
        """Take the same step as the state machines of client and server."""
        if not memory.keeps_mirror:
            total += weight * upload.values(np.float64)
            return
        old = mirrors[client]
        new = advance(memory, old, upload)
        total += weight * (new.astype(np.float64) - old)
        mirrors[client] = new

    def descend(self, params: FloatArray, update: Float64Array, step_size: float) -> FloatArray:
        """Take the step in the precision of the parameters."""
        with np.errstate(over="ignore", invalid="ignore"):  # a diverging run is a result
            return params - (step_size * update).astype(params.dtype)

    def squared_norm(self, direction: Float64Array) -> float:
        """Return ``‖direction‖²``."""
        with np.errstate(over="ignore", invalid="ignore"):
            return float(direction @ direction)


def _as_slice(clients: IntArray) -> slice | IntArray:
    """Return consecutive indices as a slice, which indexes without a copy."""
    if len(clients) and int(clients[-1]) - int(clients[0]) == len(clients) - 1:
        return slice(int(clients[0]), int(clients[-1]) + 1)
    return clients


def _stack_small_clients(problem: Problem) -> dict[int, tuple[int, FloatArray, IntArray]]:
    """Stack neighbors with equally many samples; map each member to its stack's first client."""
    stacks: dict[int, tuple[int, FloatArray, IntArray]] = {}
    if not problem.objective.stackable:
        return stacks
    clients = problem.clients
    start = 0
    while start < len(clients):
        size = len(clients[start].labels)
        stop = start
        while stop < len(clients) and len(clients[stop].labels) == size:
            stop += 1
        if stop - start > 1 and clients[start].features.nbytes <= _STACK_BYTES:
            features = np.stack([samples.features for samples in clients[start:stop]])
            labels = np.stack([samples.labels for samples in clients[start:stop]])
            stacks.update(dict.fromkeys(range(start, stop), (start, features, labels)))
        start = stop
    return stacks
