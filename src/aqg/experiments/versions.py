"""What a run was made with."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from aqg import __version__

_LIBRARIES = ("numpy", "numba", "scipy", "torch", "flwr")


def installed_versions() -> dict[str, str]:
    """Return the versions of aqg, Python and those libraries that the process has loaded.

    >>> installed_versions()["numpy"].split(".")[0]
    '2'
    """
    versions = {"aqg": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        if name in sys.modules:
            versions[name] = metadata.version(name)
    return versions
