"""What a round of a deployment was like, in numbers and incidents."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from aqg.flower.metrics import EVALUATED, TRAINED
from aqg.flower.metrics import metric_fields as client_fields
from aqg.runs.cost import DOWNLOADS, UPLOADS
from aqg.runs.directory import finite_or_none, metric_fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aqg.runs.directory import Line

INCIDENTS = {
    "resync": "resyncs",
    "rollback": "rollbacks",
    "rejected": "rejected",
    "fault": "fault_count",
    "error": "errors",
    "missing": "missing",
    "refused": "refused",
    "outlier": "outliers",
    "capped": "capped",
    "lost": "lost",
}
"""Every kind of incident, and the name of its count in ``rounds.jsonl``.

=========== ================================================================================
resync      a mirror was started again from zero
rollback    a client took back an upload that had not arrived
rejected    a reply was forged, damaged, oversized or for another state: nothing of it was used
fault       a client could not send: its gradient was not finite
error       Flower reports that a client failed
missing     a client that was asked had not answered when the round ended
refused     a node that is no client: too many, a partition taken already, absurd samples
outlier     a client's loss was beyond all use, and most others' was not: it was left out
capped      a client reports so many samples that it counts only for the largest share
lost        a client could not reach the model from what it holds; it was sent what it lacks
=========== ================================================================================
"""

_MOST_CLIENTS_SHOWN = 32
"""Up to this many clients have curves of their own."""


class Incident(NamedTuple):
    """Something that should not happen, and does."""

    client: int
    node: int
    kind: str
    text: str = ""


@dataclass(frozen=True)
class RoundReport:
    """One round.

    Attributes:
        line: what the simulator would write; in its record, 0 bytes came from a client whose reply
            did not, and those sent to a client count whether it answered or not.
        staleness: rounds since each client's last upload was taken.
        incidents: what went wrong.
        stepped: whether enough clients answered for the model to take a step.
        round_seconds: from the first message out to the last reply in.
        work_seconds: the slowest client's own work.
        diverged: whether more than half of the clients asked, and at least two where there are
            more than one, report a loss beyond all use.
        trained: what clients measured as they trained, by name: the means.
        evaluated: what they measured of the model before the round, where they were asked.

    """

    line: Line
    staleness: tuple[int, ...]
    incidents: tuple[Incident, ...]
    stepped: bool
    round_seconds: float
    work_seconds: float
    diverged: bool = False
    trained: Mapping[str, float] = field(default_factory=dict)
    evaluated: Mapping[str, float] = field(default_factory=dict)

    @property
    def overhead_seconds(self) -> float:
        """What the round took beyond the slowest client's own work."""
        return max(0.0, self.round_seconds - self.work_seconds)

    def client_fields(self) -> dict[str, float]:
        """Return the clients' metrics under the names that they have in ``rounds.jsonl``."""
        return client_fields(TRAINED, self.trained) | client_fields(EVALUATED, self.evaluated)

    def counts(self) -> dict[str, int]:
        """Return how many incidents there were of each kind."""
        found = Counter(incident.kind for incident in self.incidents)
        return {name: found[kind] for kind, name in INCIDENTS.items()}

    def to_json(self) -> str:
        """Return the line of ``rounds.jsonl``: the simulator's, and more."""
        row: dict[str, Any] = json.loads(self.line.to_json())
        row |= {
            UPLOADS: list(self.line.record.client_upload_bytes),
            DOWNLOADS: list(self.line.record.client_download_bytes),
            "staleness": list(self.staleness),
            "stepped": self.stepped,
            "round_seconds": round(self.round_seconds, 4),
            "work_seconds": round(self.work_seconds, 4),
            "overhead_seconds": round(self.overhead_seconds, 4),
            **{name: finite_or_none(value) for name, value in self.client_fields().items()},
            **self.counts(),
        }
        if self.incidents:
            row["incidents"] = [incident._asdict() for incident in self.incidents]
        return json.dumps(row, allow_nan=False)

    def scalars(self) -> dict[str, float]:
        """Return the numbers to plot over rounds; what was measured as NaN is NaN."""
        record = self.line.record
        widths = [width for width in record.widths if width > 0]
        values: dict[str, float | None] = {
            "loss": record.loss,
            **{next(iter(metric_fields({name: v}))): v for name, v in self.line.metrics.items()},
            **self.client_fields(),
            "uploads": record.num_uploads,
            "upload_bytes": record.upload_bytes,
            "download_bytes": record.download_bytes,
            "total_bytes": record.total_bytes,
            "mean_width": sum(widths) / len(widths) if widths else 0.0,
            "max_staleness": max(self.staleness, default=0),
            "round_seconds": self.round_seconds,
            "overhead_seconds": self.overhead_seconds,
            **{f"incidents/{name}": count for name, count in self.counts().items()},
        }
        if len(record.widths) <= _MOST_CLIENTS_SHOWN:
            for client, width in enumerate(record.widths):
                values[f"client-{client}/width"] = width
                values[f"client-{client}/upload_bytes"] = record.client_upload_bytes[client]
                values[f"client-{client}/download_bytes"] = record.client_download_bytes[client]
                values[f"client-{client}/staleness"] = self.staleness[client]
        return {name: float(value) for name, value in values.items() if value is not None}


def summarize_reports(reports: Sequence[RoundReport]) -> dict[str, Any]:
    """Return how the rounds since the server's last start went, in a few numbers."""
    counts: Counter[str] = Counter()
    for report in reports:
        counts.update(report.counts())
    return {
        "rounds": len(reports),
        "median_round_seconds": _median([report.round_seconds for report in reports]),
        "median_overhead_seconds": _median([report.overhead_seconds for report in reports]),
        "incidents": dict(counts),
    }


def _median(seconds: list[float]) -> float | None:
    return round(statistics.median(seconds), 4) if seconds else None
