"""Numba where it is installed, plain Python where it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Function = TypeVar("Function", bound="Callable[..., Any]")

try:
    import numba
except ImportError:  # a machine with numpy alone still works, through the NumPy twins
    HAVE_NUMBA = False
else:
    HAVE_NUMBA = True


def njit(**options: Any) -> Callable[[Function], Function]:
    """Compile a function with numba: cached on disk, without the interpreter lock.

    Never decorate one function in two ways: numba's cache does not tell the results apart.
    """

    def decorate(function: Function) -> Function:
        if not HAVE_NUMBA:
            return function
        compiled: Function = numba.njit(cache=True, nogil=True, **options)(function)
        return compiled

    return decorate
