"""What a simulator reports after a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aqg.core.messages import AnyUpload, Skip, Upload
from aqg.core.space import Space
from aqg.core.track import Track
from aqg.core.types import IntArray
from aqg.wire import Known, encode

DROPPED = -1
"""In ``widths``: the client dropped out, or was not sampled."""
AT_WORK = -2
"""In ``widths``: the client trains, and replies in a later round."""


class RoundRecord(NamedTuple):
    """One round, in numbers.

    Attributes:
        round: ``k``, counted from 1.
        loss: ``(1/M) Σ_m w_m f_m(θ^k)`` at the model that was broadcast, before the round's step,
            with client weights ``w_m`` of mean 1; None in rounds where it was not measured.
        widths: bits per parameter of what came from each client: 0 for a skip, `DROPPED` if it was
            absent, `AT_WORK` if it has not replied yet.
        upload_bytes: length of all frames the clients sent in the round, those of statistics too.
        faults: what went wrong, as ``(client, text)``.
        statistics_upload_bytes: length of the frames that carry statistics beside the updates.
        statistics_download_bytes: length of such frames to the clients.
        download_bytes: length of all frames that the clients received in the round, those of
            statistics too.
        client_upload_bytes: of ``upload_bytes``, what each client sent; empty where it is not on
            record.
        client_download_bytes: of ``download_bytes``, what each client received; likewise.
        simulated_seconds: when the round ended, since the first began, where time is simulated.
    """

    round: int
    loss: float | None
    widths: tuple[int, ...]
    upload_bytes: int
    faults: tuple[tuple[int, str], ...] = ()
    statistics_upload_bytes: int = 0
    statistics_download_bytes: int = 0
    download_bytes: int = 0
    client_upload_bytes: tuple[int, ...] = ()
    client_download_bytes: tuple[int, ...] = ()
    simulated_seconds: float | None = None

    @property
    def total_bytes(self) -> int:
        """What the clients sent and received."""
        return self.upload_bytes + self.download_bytes

    def without_clients(self) -> RoundRecord:
        return self._replace(client_upload_bytes=(), client_download_bytes=())

    @property
    def num_uploads(self) -> int:
        return sum(width > 0 for width in self.widths)

    @property
    def bits_per_param(self) -> int:
        """Paper-style cost: the sum of the widths."""
        return sum(width for width in self.widths if width > 0)


SKIP_BYTES = len(encode(Skip()))


class StatisticsTraffic(NamedTuple):
    """What the statistics of a round cost, and what was wrong with them."""

    uploads: tuple[tuple[int, int], ...] = ()  # clients that sent some, and the frame's length
    download_bytes: int = 0  # length of the frame to each client that takes part
    faults: tuple[tuple[int, str], ...] = ()  # as ``(client, text)``


def frame_sizes(
    space: Space, track: Track, clients: IntArray, uploads: Sequence[AnyUpload]
) -> Sequence[int]:
    contexts: list[Known | None] = [None] * len(uploads)
    if track.position.shape[1] and any(isinstance(upload, Upload) for upload in uploads):
        mirrors = space.rows(track.position, clients)
        directions = [track.direction[m] for m in clients]
        contexts = [Known(*pair) for pair in zip(mirrors, directions, strict=True)]

    def size(index: int) -> int:
        return len(encode(uploads[index], known=contexts[index], threads=1))

    return space.map(size, range(len(uploads)), sum(map(len, uploads)))
