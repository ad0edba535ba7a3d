"""The lengths of the frames that a simulated round sends, without building them; its record."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aqg.core.messages import AnyUpload, Skip, Upload
from aqg.core.space import Space, map_messages
from aqg.core.track import Track
from aqg.core.types import IntArray
from aqg.protocol.log import Content, length
from aqg.sim.record import DROPPED, RoundRecord
from aqg.sim.statistics import StatisticsTraffic
from aqg.wire import Known, encoded_size

SKIP_BYTES = encoded_size(Skip())


def frame_sizes(
    space: Space, track: Track, clients: IntArray, uploads: Sequence[AnyUpload]
) -> Sequence[int]:
    """Size each client's frame, before the uploads have moved the link."""
    contexts: list[Known | None] = [None] * len(uploads)
    if track.position.shape[1] and any(isinstance(upload, Upload) for upload in uploads):
        mirrors = space.rows(track.position, clients)
        directions = [track.direction[m] for m in clients]
        contexts = [Known(*pair) for pair in zip(mirrors, directions, strict=True)]

    def size(index: int) -> int:
        return encoded_size(uploads[index], known=contexts[index])

    return map_messages(size, range(len(uploads)), sum(map(len, uploads)))


def make_record(
    number: int,  # of the round
    loss: float | None,  # as in `RoundRecord`, and so are ``widths``
    widths: IntArray,  # see there
    faults: Sequence[tuple[int, str]],  # see there, but for those of statistics
    sent: IntArray,  # the length of each client's frame, that of statistics excepted
    received: IntArray,  # what each client received, likewise
    statistics: StatisticsTraffic,  # what these cost
    seconds: float | None = None,  # see there
) -> RoundRecord:
    """Return the record of a round."""
    for client, size in statistics.client_uploads:
        sent[client] += size
    received = received + np.where(widths != DROPPED, statistics.client_download_bytes, 0)
    return RoundRecord(
        number,
        loss,
        tuple(widths.tolist()),
        int(sent.sum()),
        (*faults, *statistics.faults),
        statistics.upload_bytes,
        statistics.download_bytes,
        int(received.sum()),
        tuple(sent.tolist()),
        tuple(received.tolist()),
        seconds,
    )


def received_bytes(downloads: Sequence[tuple[IntArray, Content]], num_clients: int) -> IntArray:
    """Return what each client received, given who received which frame, or one of which length."""
    received = np.zeros(num_clients, np.int64)
    for clients, content in downloads:
        received[clients] += length(content)
    return received
