"""Clients side by side in one array, so that one product serves many of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqg.core.types import FloatArray, IntArray
from aqg.sim.problem import Problem, Samples

STACK_BYTES = 1 << 20
"""Clients with more data than this gain nothing from a stack."""


class Stack(NamedTuple):
    """Clients ``first, first + 1, ...``: features ``(M, n, f)`` and labels ``(M, n)``."""

    first: int
    features: FloatArray
    labels: IntArray


def stack_small_clients(problem: Problem) -> dict[int, Stack]:
    """Stack neighbors with equally many samples; map each member to its stack."""
    stacks: dict[int, Stack] = {}
    if not problem.objective.stackable:
        return stacks
    clients = problem.clients
    start = 0
    while start < len(clients):
        stop = _end_of_run(clients, start)
        if stop - start > 1 and clients[start].features.nbytes <= STACK_BYTES:
            features = join([samples.features for samples in clients[start:stop]])
            labels = join([samples.labels for samples in clients[start:stop]])
            stack = Stack(start, features, labels)
            stacks.update(dict.fromkeys(range(start, stop), stack))
        start = stop
    return stacks


def _end_of_run(clients: Sequence[Samples], start: int) -> int:
    """Return the end of the clients like ``start`` that one stack can hold.

    Where a view of the clients' memory would have to jump back, a new stack begins: clients may
    share samples, and a stack must not multiply them.
    """
    size = len(clients[start].labels)
    last = _address(clients[start].features)
    stop = start + 1
    while stop < len(clients) and len(clients[stop].labels) == size:
        address = _address(clients[stop].features)
        if address <= last and clients[stop].features.base is clients[start].features.base:
            break
        last = address
        stop += 1
    return stop


def join(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return arrays of one shape as the rows of one: a view if they lie side by side in memory.

    >>> data = np.arange(12.0).reshape(3, 4)
    >>> bool(np.shares_memory(join([data[0], data[1], data[2]]), data))
    True
    >>> join([data[0], data[2].copy()]).shape
    (2, 4)
    """
    first = arrays[0]
    base = first.base
    adjacent = isinstance(base, np.ndarray) and all(
        array.base is base
        and array.flags.c_contiguous
        and array.dtype == first.dtype
        and array.shape == first.shape
        and _address(array) == _address(first) + index * first.nbytes
        for index, array in enumerate(arrays)
    )
    if not adjacent:
        return np.stack(arrays)
    view = np.lib.stride_tricks.as_strided(
        first, (len(arrays), *first.shape), (first.nbytes, *first.strides), writeable=False
    )
    return view


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
