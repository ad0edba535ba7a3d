"""What each client of a run has sent and received, as totals over its rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from aqg.core.types import IntArray
    from aqg.sim.record import RoundRecord

UPLOADS, DOWNLOADS = "client_upload_bytes", "client_download_bytes"
"""Names in checkpoints, summaries and records."""


@dataclass
class ClientBytes:
    """Totals per client; None where some round has them not on record.

    >>> from aqg.sim.record import RoundRecord
    >>> totals = ClientBytes.first(2)
    >>> for number in (1, 2):
    ...     totals.add(RoundRecord(number, None, (4, 0), 9, (), 0, 0, 24, (8, 1), (12, 12)))
    >>> totals.to_json()
    {'client_upload_bytes': [16, 2], 'client_download_bytes': [24, 24]}
    """

    uploads: IntArray | None
    downloads: IntArray | None

    @staticmethod
    def first(num_clients: int) -> ClientBytes:
        """Return the totals before the first round."""
        return ClientBytes(np.zeros(num_clients, np.int64), np.zeros(num_clients, np.int64))

    def add(self, record: RoundRecord) -> None:
        """Count one more round."""
        self.uploads = _sum(self.uploads, record.client_upload_bytes)
        self.downloads = _sum(self.downloads, record.client_download_bytes)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return named arrays for a checkpoint."""
        pairs = ((UPLOADS, self.uploads), (DOWNLOADS, self.downloads))
        return {name: totals for name, totals in pairs if totals is not None}

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> ClientBytes:
        """Return the totals in a checkpoint; an older one has none."""
        return ClientBytes(arrays.get(UPLOADS), arrays.get(DOWNLOADS))

    def to_json(self) -> dict[str, list[int]]:
        """Return the fields of a summary; what is unknown is left out."""
        return {name: totals.tolist() for name, totals in self.to_arrays().items()}


def _sum(totals: IntArray | None, sizes: tuple[int, ...]) -> IntArray | None:
    return None if totals is None or len(sizes) != len(totals) else totals + np.array(sizes)
