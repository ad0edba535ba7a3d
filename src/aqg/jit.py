"""Kernels, compiled by numba when they are first called."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

numba: Any
try:
    import numba
    from numba.core import event
except ImportError:  # the fuzzers hide it: frames are coded in plain Python then, branch by branch
    numba = None

Function = TypeVar("Function", bound=Callable[..., Any])


def njit(**options: Any) -> Callable[[Function], Function]:
    """Compile a function when it is first called: without the interpreter lock, cached.

    Where nothing can be written, every process compiles for itself. Never decorate one function in
    two ways: numba's cache does not tell the results apart.
    """

    def decorate(function: Function) -> Function:
        if numba is None:
            return function
        compiled: Function
        try:
            compiled = numba.njit(cache=True, nogil=True, **options)(function)
        except RuntimeError:  # no directory for the cache
            compiled = numba.njit(nogil=True, **options)(function)
        return compiled

    return decorate


def part(**options: Any) -> Callable[[Function], Function]:
    """Compile a function that only compiled functions of the same file call.

    It becomes a part of each of its callers. Without a file in the cache and a way in from Python
    it compiles faster. Numba compiles it again for every literal argument: pass constants
    as ``np.int64(…)``.
    """
    if numba is None:
        return lambda function: function
    inner: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, **options}
    compiled: Callable[[Function], Function] = numba.njit(**inner)
    return compiled


@contextmanager
def when_compiling(notify: Callable[[], None]) -> Iterator[None]:
    """Call ``notify`` once, before the first kernel that is compiled and not found in the cache."""
    if numba is None:
        yield
        return

    class Listener(event.Listener):  # type: ignore[misc, unused-ignore]
        is_first = True

        def on_start(self, event: Any) -> None:  # noqa: ARG002
            if self.is_first:
                self.is_first = False
                notify()

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Listener()):
        yield
