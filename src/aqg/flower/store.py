"""A vault in Flower's context: a client's memory for as long as its node lives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord

from aqg.errors import RunError

if TYPE_CHECKING:
    from flwr.app import RecordDict
    from numpy.typing import NDArray

    Vector = NDArray[Any]


class ContextVault:
    """The state of a Flower context: in memory, for as long as node and run live."""

    def __init__(self, records: RecordDict, prefix: str = "aqg") -> None:
        self._records = records
        self._index_name = f"{prefix}-index"
        self._prefix = f"{prefix}-vector-"

    def read_index(self) -> str | None:
        """Return the text in the index record."""
        record = self._records.get(self._index_name)
        return str(record["json"]) if isinstance(record, ConfigRecord) else None

    def write_index(self, text: str) -> None:
        """Replace the index record."""
        self._records[self._index_name] = ConfigRecord({"json": text})

    def read_vector(self, number: int) -> Vector:
        """Return the array of one record."""
        record = self._records.get(f"{self._prefix}{number}")
        if not isinstance(record, ArrayRecord):
            raise RunError(f"the context has no vector {number}")
        return record["vector"].numpy()

    def write_vector(self, number: int, vector: Vector) -> None:
        """Add a record with one array."""
        array = Array(np.ascontiguousarray(vector))
        self._records[f"{self._prefix}{number}"] = ArrayRecord({"vector": array})

    def keep_only(self, numbers: set[int]) -> None:
        """Delete the records of other numbers."""
        kept = {f"{self._prefix}{number}" for number in numbers}
        for name in list(self._records):
            if name.startswith(self._prefix) and name not in kept:
                del self._records[name]
