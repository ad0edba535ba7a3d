"""What rounds cost: uploads, bits and bytes in both directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aqg.sim.record import RoundRecord


def add_bytes(*sizes: int | None) -> int | None:
    """Add up sizes; None, which is unknown, where one of them is.

    >>> add_bytes(3, 4), add_bytes(3, None)
    (7, None)
    """
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


@dataclass(frozen=True)
class Cost:
    """What a number of rounds cost; ``download_bytes`` is None where it is not on record."""

    rounds: int
    uploads: int
    bits_per_param: int
    upload_bytes: int
    download_bytes: int | None = None

    @property
    def total_bytes(self) -> int | None:
        """What the clients sent and received."""
        return add_bytes(self.upload_bytes, self.download_bytes)

    def plus(self, record: RoundRecord) -> Cost:
        """Return the cost with one more round."""
        return Cost(
            self.rounds + 1,
            self.uploads + record.num_uploads,
            self.bits_per_param + record.bits_per_param,
            self.upload_bytes + record.upload_bytes,
            add_bytes(self.download_bytes, record.download_bytes),
        )
