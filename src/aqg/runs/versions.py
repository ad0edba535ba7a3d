"""What a run was made with."""

from __future__ import annotations

import platform
from importlib import metadata

from aqg import __version__

_LIBRARIES = ("numpy", "numba", "scipy", "torch")


def installed_versions() -> dict[str, str]:
    """Return the versions of aqg, Python and the libraries that compute, and the kind of processor.

    Libraries that are not installed are left out.

    >>> installed_versions()["numpy"].split(".")[0]
    '2'
    """
    versions = {
        "aqg": __version__,
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # an optional one
            continue
    return versions
