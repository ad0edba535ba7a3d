"""Where the vectors of the fast simulator live, and how its clients compute there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from aqg.core.space import NumpySpace, as_index
from aqg.core.types import Float64Array, FloatArray, IntArray
from aqg.errors import ConfigError
from aqg.sim.local import LocalTraining
from aqg.sim.problem import Problem
from aqg.sim.stacks import stack_small_clients
from aqg.sim.torch_backend import TorchBackend

Backend: TypeAlias = "NumpyBackend | TorchBackend"
"""The space of a simulation's vectors, and what clients compute there."""

Group = tuple[slice | int, FloatArray, IntArray]


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
        from aqg.contrib.cuda import CudaBackend

        return CudaBackend(problem, device)
    from aqg.sim.torch_backend import TorchBackend

    return TorchBackend(problem, device.removeprefix("torch:"))


class NumpyBackend(NumpySpace):
    """NumPy arrays, BLAS for the gradients, numba for the rest."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(in_place=True)
        self._objective = problem.objective
        self._clients = problem.clients
        self._stacks = stack_small_clients(problem)
        self._grouped: tuple[IntArray, list[Group]] = np.empty(0, np.int64), []

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
        """Return what `LocalTraining.update` gives for each client: losses and updates."""
        results = [
            local.update(self._objective, params, *self._clients[int(client)], key)
            for client, key in zip(clients.tolist(), keys, strict=True)
        ]
        losses, updates = zip(*results, strict=True)
        return np.stack(losses), np.stack(updates)
