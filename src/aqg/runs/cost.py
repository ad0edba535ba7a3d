"""What rounds cost: uploads, bits and bytes in both directions.

A `Cost` counts frames. `count_every_byte` counts what a deployment sends besides: the head of each
order and reply, and the model that a client starts from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aqg.core.downlink import Downlink
from aqg.core.types import IntArray
from aqg.protocol.coding import to_bytes
from aqg.protocol.digests import DIGEST_BYTES
from aqg.protocol.messages import Order, Reply
from aqg.sim.record import AT_WORK, DROPPED, RoundRecord

_BYTES_PER_NUMBER = 4


def add_bytes(*sizes: int | None) -> int | None:
    """Add up sizes; None, which is unknown, where one of them is.

    >>> add_bytes(3, 4), add_bytes(3, None)
    (7, None)
    """
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


@dataclass(frozen=True)
class Cost:
    """What a number of rounds cost; ``download_bytes`` is None where it is not on record.

    ``simulated_seconds`` is None where time is not simulated.
    """

    rounds: int
    uploads: int
    bits_per_param: int
    upload_bytes: int
    download_bytes: int | None = None
    simulated_seconds: float | None = None

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
            record.simulated_seconds,
        )


@cache
def head_bytes() -> int:
    """Return the length of an order and its reply without any frames, the same for all recipes.

    Numbers that grow, such as the round, are of a middling size; they change it by a few bytes.

    >>> head_bytes()
    207
    """
    digest = bytes(DIGEST_BYTES)
    order = Order(
        run="0" * 16,
        fingerprint=digest,
        recipe="auto",
        bits=4,
        max_staleness=100,
        seed=0,
        num_params=100_000,
        dtype="float32",
        incarnation=1,
        round=100,
        client=10,
        movement=0.0,
        epoch=0,
        uploads=100,
        digest=digest,
        evaluate=False,
        public=digest,
    )
    reply = Reply(
        incarnation=1,
        round=100,
        stale=False,
        restarted=False,
        rolled_back=False,
        epoch=0,
        uploads=100,
        base_digest=digest,
        digest=digest,
        frame=b"",
        loss=0.0,
        num_samples=1000,
        fault="",
        work_seconds=0.0,
        held_round=99,
    )
    return len(to_bytes(order)) + len(to_bytes(reply))


def first_model_bytes(downlink: Downlink, num_params: int) -> int:
    """Return what a client receives before it can follow a log: the model, with 32 bits a number.

    Where whole models travel in every round, the first one is among them.
    """
    return 0 if downlink.name == "full" else _BYTES_PER_NUMBER * num_params


def count_every_byte(records: Iterable[RoundRecord], first_model: int) -> list[int]:
    """Return what all clients have sent and received after 0, 1, 2, ... rounds.

    Args:
        records: of the rounds, from the first one on.
        first_model: bytes that a client receives once, in the first round it takes part in.

    >>> from aqg.sim.record import RoundRecord
    >>> rounds = [RoundRecord(k, None, (4, DROPPED), 9, download_bytes=11) for k in (1, 2)]
    >>> [size - k * head_bytes() for k, size in enumerate(count_every_byte(rounds, 1000))]
    [0, 1020, 1040]

    """
    totals, begun = [0], set[int]()
    for record in records:
        present = {client for client, width in enumerate(record.widths) if width != DROPPED}
        num_replies = len(present) - record.widths.count(AT_WORK)
        frames = record.upload_bytes + (record.download_bytes or 0)
        first = first_model * len(present - begun)
        begun |= present
        totals.append(totals[-1] + frames + first + head_bytes() * num_replies)
    return totals


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
