"""Threads over independent pieces of work, started when there is something to share."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aqg.errors import ConfigError

Item = TypeVar("Item")
Result = TypeVar("Result")


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
