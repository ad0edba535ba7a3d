"""A JSON document with arrays in it, packed for a web page: small, and quick to open."""

from __future__ import annotations

import base64
import gzip
import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ALIGNMENT = 4


class Packer:
    """Collects arrays beside a document that refers to them.

    The packed form is gzip in base64 of: the header's length as a little-endian 32-bit number, the
    header (JSON, padded with spaces to a multiple of 4 bytes), and the arrays, each aligned to 4
    bytes. In the header an array is ``{"$": [type, offset, length]}`` with the type ``f4``, ``u1``,
    ``u2`` or ``u4`` and the offset in bytes from the header's end.

    >>> packer = Packer()
    >>> packer.floats([0.5, 2.0]), packer.counts([3, 300])
    ({'$': ['f4', 0, 2]}, {'$': ['u2', 8, 2]})
    """

    def __init__(self) -> None:
        self._body = bytearray()

    def floats(self, values: Any) -> dict[str, Any]:
        """Add numbers in single precision; what that cannot hold becomes NaN."""
        with np.errstate(over="ignore"):
            array = np.asarray(values, np.float64).astype("<f4").ravel()
        array[~np.isfinite(array)] = np.nan
        return self._add("f4", array)

    def counts(self, values: Any) -> dict[str, Any]:
        """Add whole numbers from 0 up, in as few bytes as the largest one needs."""
        array = np.asarray(values, np.int64).ravel()
        largest = int(array.max(initial=0))
        kind = "u1" if largest < 1 << 8 else "u2" if largest < 1 << 16 else "u4"
        return self._add(kind, np.minimum(array, (1 << 32) - 1).astype(f"<{kind}"))

    def _add(self, kind: str, array: NDArray[Any]) -> dict[str, Any]:
        offset = len(self._body)
        self._body += array.tobytes()
        self._body += bytes(-len(self._body) % _ALIGNMENT)
        return {"$": [kind, offset, array.size]}

    def pack(self, document: dict[str, Any]) -> str:
        """Return ``document`` and the arrays it refers to as text without any special character."""
        header = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
        header += b" " * (-len(header) % _ALIGNMENT)
        content = len(header).to_bytes(4, "little") + header + bytes(self._body)
        return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode("ascii")
