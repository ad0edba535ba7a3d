"""What rounds cost: uploads, bits and bytes in both directions.

Every byte counts, for all recipes alike. Simulations measure frames; a `Meter` adds what a
deployment sends besides: the heads of orders and replies, and the first model of a client that is
new. What comes out of it is what progress, targets, summaries, curves and tables show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from aqg.core.types import IntArray
from aqg.sim.record import AT_WORK, DROPPED, RoundRecord
from aqg.sim.training import Training

BYTES = ("upload_bytes", "download_bytes", "total_bytes")
"""What is counted of rounds and runs, as it is called in files and tables."""


@dataclass(frozen=True)
class Cost:
    """What a number of rounds cost; without ``simulated_seconds`` where time is not simulated."""

    rounds: int = 0
    uploads: int = 0
    bits_per_param: int = 0
    upload_bytes: int = 0
    download_bytes: int = 0
    simulated_seconds: float | None = None

    @property
    def total_bytes(self) -> int:
        return self.upload_bytes + self.download_bytes

    def plus(self, record: RoundRecord) -> Cost:
        return Cost(
            self.rounds + 1,
            self.uploads + record.num_uploads,
            self.bits_per_param + record.bits_per_param,
            self.upload_bytes + record.upload_bytes,
            self.download_bytes + record.download_bytes,
            record.simulated_seconds,
        )

    def to_json(self) -> dict[str, Any]:
        row = vars(self) | {"total_bytes": self.total_bytes}
        return {name: value for name, value in row.items() if value is not None}


FIRST_ORDER_BYTES, ORDER_BYTES, REPLY_BYTES = 85, 21, 22
"""Of an order to a client that is new, with all that the two agree on; of any other; of a reply.

Without frames, and with numbers such as the round at a middling size, which changes them by a few
bytes; a test holds these lengths to those of real messages.
"""


class Meter:
    """Adds to records of rounds what travels besides the frames that a simulation measures.

    Each client receives the first model (`aqg.start`) in the first round that it takes part in, and
    in all others if it holds nothing between them; where whole models travel in every round, it is
    among them.
    """

    def __init__(self, first_model: int, training: Training) -> None:
        self._first_model = 0 if training.downlink.name == "full" else first_model
        self._forgets = training.memory == "none"
        self._known: set[int] = set()
        self._at_work: set[int] = set()

    def replay(self, record: RoundRecord) -> None:
        """Take note of who took part in a round that was charged before."""
        self._known |= _present(record)
        self._at_work = {m for m, width in enumerate(record.widths) if width == AT_WORK}

    def charge(self, record: RoundRecord) -> RoundRecord:
        """Return the record with all that was sent and received in the round."""
        present = _present(record)
        ordered = present - self._at_work
        new = ordered if self._forgets else ordered - self._known
        self.replay(record)
        up = dict.fromkeys(present - self._at_work, REPLY_BYTES)
        first = FIRST_ORDER_BYTES + self._first_model
        down = {client: first if client in new else ORDER_BYTES for client in ordered}
        return record._replace(
            upload_bytes=record.upload_bytes + sum(up.values()),
            download_bytes=record.download_bytes + sum(down.values()),
            client_upload_bytes=_added(record.client_upload_bytes, up),
            client_download_bytes=_added(record.client_download_bytes, down),
        )


def _present(record: RoundRecord) -> set[int]:
    return {client for client, width in enumerate(record.widths) if width != DROPPED}


def _added(sizes: tuple[int, ...], more: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(size + more.get(client, 0) for client, size in enumerate(sizes))


def running_totals(records: Iterable[RoundRecord]) -> list[int]:
    """Return what all clients have sent and received after 0, 1, 2, ... rounds."""
    return [0, *accumulate(record.total_bytes for record in records)]


UPLOADS, DOWNLOADS = "client_upload_bytes", "client_download_bytes"
"""Names in checkpoints, summaries and records."""


class ClientBytes:
    """Totals per client, which may go on from ``arrays`` of a checkpoint."""

    def __init__(self, num_clients: int, arrays: Mapping[str, IntArray] | None = None) -> None:
        names = (UPLOADS, DOWNLOADS)
        begun = arrays or {name: np.zeros(num_clients, np.int64) for name in names}
        self.arrays = {name: begun[name] for name in names}

    def add(self, record: RoundRecord) -> None:
        for name, totals in self.arrays.items():
            sizes = getattr(record, name)
            totals[: len(sizes)] += np.array(sizes, np.int64)

    def to_json(self) -> dict[str, list[int]]:
        return {name: totals.tolist() for name, totals in self.arrays.items()}
