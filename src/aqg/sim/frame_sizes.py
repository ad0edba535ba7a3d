"""The lengths of the frames that a simulated round would send, without building them."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from aqg.core.messages import AnyUpload, Skip, Upload
from aqg.core.space import map_messages
from aqg.protocol.log import Content, length
from aqg.sim.record import RoundRecord
from aqg.sim.statistics import StatisticsTraffic
from aqg.wire import Known, encoded_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aqg.core.links import Link
    from aqg.core.space import Space
    from aqg.core.types import IntArray

FrameSize = int | Future[int]
"""Bytes, or a promise of them."""
SKIP_BYTES = encoded_size(Skip())


def frame_sizes(
    space: Space,
    link: Link,
    clients: IntArray,
    uploads: Sequence[AnyUpload],
    pool: ThreadPoolExecutor | None,
) -> Sequence[FrameSize]:
    """Return the length of each client's frame, before the uploads have moved the link.

    With a ``pool`` they are sized in the background.
    """
    contexts: list[Known | None] = [None] * len(uploads)
    if link.mirror.shape[1] and any(isinstance(upload, Upload) for upload in uploads):
        mirrors = space.rows(link.mirror, clients)
        directions = link.direction[clients] if pool else [link.direction[m] for m in clients]
        contexts = [Known(*pair) for pair in zip(mirrors, directions, strict=True)]
    if pool is not None:
        pairs = zip(uploads, contexts, strict=True)
        return [pool.submit(encoded_size, upload, known=context) for upload, context in pairs]

    def size(index: int) -> int:
        return encoded_size(uploads[index], known=contexts[index])

    return map_messages(size, range(len(uploads)), sum(map(len, uploads)))


class OpenRound(NamedTuple):
    """A round that is over but for the sizes of some frames."""

    number: int
    loss: float | None
    widths: tuple[int, ...]
    faults: tuple[tuple[int, str], ...]
    frame_sizes: list[FrameSize]
    downloads: Sequence[tuple[int, Content]]
    statistics: StatisticsTraffic = StatisticsTraffic()

    def close(self) -> RoundRecord:
        """Wait for the sizes."""
        upload_bytes = self.statistics.upload_bytes
        for size in self.frame_sizes:
            upload_bytes += size if isinstance(size, int) else size.result()
        download_bytes = self.statistics.download_bytes
        for count, frame in self.downloads:
            download_bytes += count * length(frame)
        faults = (*self.faults, *self.statistics.faults)
        return RoundRecord(
            self.number,
            self.loss,
            self.widths,
            upload_bytes,
            faults,
            *self.statistics[:2],
            download_bytes,
        )
