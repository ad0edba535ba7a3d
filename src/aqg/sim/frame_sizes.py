"""The lengths of the frames that a simulated round would send, without building them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqg.core.messages import AnyUpload, Skip, Upload
from aqg.core.space import map_messages
from aqg.protocol.log import Content, length
from aqg.sim.record import DROPPED, RoundRecord
from aqg.sim.statistics import StatisticsTraffic
from aqg.wire import Known, encoded_size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future, ThreadPoolExecutor

    from aqg.core.space import Space
    from aqg.core.track import Track
    from aqg.core.types import IntArray

SKIP_BYTES = encoded_size(Skip())


class ClientFrame(NamedTuple):
    """The length of one client's frame in bytes, or a promise of it."""

    client: int
    size: int | Future[int]


FrameSize = int | ClientFrame
"""The length of a frame, or of all that say that a client skips."""


def frame_sizes(
    space: Space,
    track: Track,
    clients: IntArray,
    uploads: Sequence[AnyUpload],
    pool: ThreadPoolExecutor | None,
) -> Sequence[FrameSize]:
    """Size each client's frame, before the uploads have moved the link.

    With a ``pool`` they are sized in the background.
    """
    contexts: list[Known | None] = [None] * len(uploads)
    if track.position.shape[1] and any(isinstance(upload, Upload) for upload in uploads):
        mirrors = space.rows(track.position, clients)
        directions = track.direction[clients] if pool else [track.direction[m] for m in clients]
        contexts = [Known(*pair) for pair in zip(mirrors, directions, strict=True)]
    if pool is not None:
        pairs = zip(uploads, contexts, strict=True)
        sizes = [pool.submit(encoded_size, upload, known=context) for upload, context in pairs]
        return list(map(ClientFrame, clients.tolist(), sizes))

    def size(index: int) -> int:
        return encoded_size(uploads[index], known=contexts[index])

    lengths = map_messages(size, range(len(uploads)), sum(map(len, uploads)))
    return list(map(ClientFrame, clients.tolist(), lengths))


class OpenRound(NamedTuple):
    """A round that is over but for the sizes of some frames.

    Attributes:
        number: of the round.
        loss: as in `RoundRecord`, and so are ``widths`` and ``faults``.
        widths: see there.
        faults: see there, but for those of statistics.
        frame_sizes: of all frames that clients sent, those of statistics excepted.
        downloads: frames, or their lengths, and the clients that received each; statistics
            excepted.
        statistics: what these cost.

    """

    number: int
    loss: float | None
    widths: tuple[int, ...]
    faults: tuple[tuple[int, str], ...]
    frame_sizes: list[FrameSize]
    downloads: Sequence[tuple[IntArray, Content]]
    statistics: StatisticsTraffic = StatisticsTraffic()

    def close(self) -> RoundRecord:
        """Wait for the sizes."""
        sent = [0 if width == DROPPED else SKIP_BYTES for width in self.widths]
        for frame in self.frame_sizes:
            if isinstance(frame, ClientFrame):
                sent[frame.client] = length(frame.size)
        statistics = self.statistics
        for client, size in statistics.client_uploads:
            sent[client] += size
        received, download_bytes = self._received()
        return RoundRecord(
            self.number,
            self.loss,
            self.widths,
            sum(sent),
            (*self.faults, *statistics.faults),
            statistics.upload_bytes,
            statistics.download_bytes,
            download_bytes,
            tuple(sent),
            received,
        )

    def _received(self) -> tuple[tuple[int, ...], int]:
        """Return what each client received, and all together."""
        num_clients, each = len(self.widths), self.statistics.client_download_bytes
        if all(len(clients) == num_clients for clients, _ in self.downloads):
            same = each + sum(length(content) for _, content in self.downloads)
            return (same,) * num_clients, same * num_clients
        received = np.where(np.array(self.widths) != DROPPED, each, 0)
        for clients, content in self.downloads:
            received[clients] += length(content)
        return tuple(received.tolist()), int(received.sum())
