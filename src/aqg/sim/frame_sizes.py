"""The lengths of the frames that a simulated round would send, without building them."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from aqg.core.messages import AnyUpload, Skip, Upload
from aqg.sim.record import RoundRecord
from aqg.sim.statistics import StatisticsTraffic
from aqg.wire import encoded_size
from aqg.wire.memory import known, next_direction

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aqg.core.types import FloatArray

FrameSize = int | Future[int]
"""Bytes, or a promise of them."""
SKIP_BYTES = encoded_size(Skip())


class FrameSizer:
    """Both ends of every client's link, as far as frames depend on what was sent before.

    Args:
        directions: which way each coordinate went in each client's last upload, ``(M, n)``, or
            ``(M, 0)`` where the recipe keeps no mirror.
        pool: sizes frames in the background; without one they are sized at once.

    """

    def __init__(
        self, directions: NDArray[np.int8], pool: ThreadPoolExecutor | None = None
    ) -> None:
        self.directions = directions
        self._pool = pool

    def size(self, client: int, mirror: FloatArray, upload: AnyUpload) -> FrameSize:
        """Return the length of the frame that client and server would exchange.

        ``mirror`` is ``ref_m`` before the upload.
        """
        context = None
        if isinstance(upload, Upload):
            direction = self.directions[client].copy()
            context = known(mirror, direction)
            self.directions[client] = next_direction(direction, upload)
        if self._pool is None:
            return encoded_size(upload, known=context)
        return self._pool.submit(encoded_size, upload, known=context)


class OpenRound(NamedTuple):
    """A round that is over but for the sizes of some frames."""

    number: int
    loss: float | None
    widths: tuple[int, ...]
    faults: tuple[tuple[int, str], ...]
    frame_sizes: list[FrameSize]
    statistics: StatisticsTraffic = StatisticsTraffic()

    def close(self) -> RoundRecord:
        """Wait for the sizes."""
        upload_bytes = self.statistics.upload_bytes
        for size in self.frame_sizes:
            upload_bytes += size if isinstance(size, int) else size.result()
        faults = (*self.faults, *self.statistics.faults)
        return RoundRecord(
            self.number, self.loss, self.widths, upload_bytes, faults, *self.statistics[:2]
        )
