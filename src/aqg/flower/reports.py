"""What a round of our own server was like: who answered, what it counts for, and what it cost."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Message, RecordDict

from aqg.channel.stepping import SteppingChannel
from aqg.core.messages import Skip
from aqg.core.types import Float64Array
from aqg.errors import MessageError
from aqg.flower.claims import Checks, CommonLoss, Roster, cap_shares, mean_metrics
from aqg.flower.envelope import EVALUATED, EXAMPLES, TRAINED, logger, loss_in, numbers_in, plain
from aqg.flower.grid import Counts, NodeCounts
from aqg.flower.settings import Settings
from aqg.runs.cost import DOWNLOADS, UPLOADS
from aqg.runs.directory import Line, finite_or_none, metric_fields
from aqg.sim.record import DROPPED, RoundRecord

INCIDENTS = {
    "resync": "resyncs",  # a mirror was started again from zero
    "rollback": "rollbacks",  # a client took back an upload that had not arrived
    # a reply was forged, damaged, oversized or for another state: nothing of it was used
    "rejected": "rejected",
    "fault": "fault_count",  # a client could not send: its gradient was not finite
    "error": "errors",  # Flower reports that a client failed
    "missing": "missing",  # a sampled client had not answered when the round ended
    # a node that is no client: too many, a partition taken already, absurd samples
    "refused": "refused",
    # a client's loss was beyond all use, and most others' was not: it was left out
    "outlier": "outliers",
    # a client reports so many samples that it counts only for the largest share
    "capped": "capped",
    # a client could not reach the model from what it holds; it was sent what it lacks
    "lost": "lost",
}
"""Every kind of incident, and the name of its count in ``rounds.jsonl``."""

_MOST_SAMPLES = 2**53
"""Whole numbers up to here are exact as floats."""
_MOST_CLIENTS_SHOWN = 32
"""Up to this many clients have curves of their own."""
_UNREACHABLE = (3, 4, 5)
"""Flower's codes: order expired, reply expired, node unavailable."""
_RAISED = 2
_LONGEST_ERROR = 200
_REFUSED = "aqg: "
"""Begins what the grid says of a reply that it refuses."""


class Incident(NamedTuple):
    """Something that should not happen, and does."""

    client: int
    node: int
    kind: str
    text: str = ""


@dataclass(frozen=True)
class RoundReport:
    # what the simulator would write; in its record, 0 bytes came from a client whose reply did not,
    # and those sent to a client count whether it answered or not
    line: Line
    staleness: tuple[int, ...]  # rounds since each client's last upload was taken
    incidents: tuple[Incident, ...]
    stepped: bool  # whether enough clients answered for the model to take a step
    work_seconds: float  # the slowest client's own work
    round_seconds: float = 0.0  # from the first message out to the last reply in
    # whether more than half of the sampled clients, and at least two where there are more than one,
    # report a loss beyond all use
    diverged: bool = False
    # means of what clients measured as they trained, by name; and of the model before the round
    trained: Mapping[str, float] = field(default_factory=dict)
    evaluated: Mapping[str, float] = field(default_factory=dict)

    @property
    def overhead_seconds(self) -> float:
        return max(0.0, self.round_seconds - self.work_seconds)

    def client_fields(self) -> dict[str, float]:
        """Return the clients' metrics under the names that they have in ``rounds.jsonl``."""
        return client_fields(TRAINED, self.trained) | client_fields(EVALUATED, self.evaluated)

    def counts(self) -> dict[str, int]:
        found = Counter(incident.kind for incident in self.incidents)
        return {name: found[kind] for kind, name in INCIDENTS.items()}

    def to_row(self) -> dict[str, Any]:
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
        return row

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

    def log(self, num_rounds: int) -> None:
        record = self.line.record
        metrics = {**self.line.metrics, **self.client_fields()}
        logger.info(
            "round %d/%d: loss %s%s, %d/%d answered, %d uploads, %d bytes up, %d down, %.2f s "
            "(%.2f s overhead)%s",
            record.round,
            num_rounds,
            "   -    " if record.loss is None else f"{record.loss:.6f}",
            "".join(f", {name} {value:.4g}" for name, value in metrics.items()),
            sum(width != DROPPED for width in record.widths),
            len(record.widths),
            record.num_uploads,
            record.upload_bytes,
            record.download_bytes,
            self.round_seconds,
            self.overhead_seconds,
            "" if self.stepped else "; too few, no step",
        )
        for incident in self.incidents:
            level = logging.INFO if incident.kind == "missing" else logging.WARNING
            text = "round %d: client %d (node %d): %s %s"
            logger.log(level, text, record.round, *incident)


class Accounts(Checks):
    """Keeps the books of a run's rounds."""

    def __init__(
        self, settings: Settings, roster: Roster, channel: SteppingChannel, counts: Counts
    ) -> None:
        self._settings = settings
        self._roster = roster
        self._channel = channel
        self._counts = counts
        self._seen = {node: _totals(found) for node, found in counts.nodes.items()}
        self._capped: set[int] = set()
        self._incidents: list[Incident] = []

    def check(self, content: RecordDict, is_train: bool) -> None:
        """Raise `MessageError` where a reply to a train message does not say what is needed."""
        if not is_train or self._settings.weighting != "samples":
            return
        found = (r[EXAMPLES] for r in content.metric_records.values() if EXAMPLES in r)
        number: Any = next(found, 0)
        is_whole = not isinstance(number, list) and float(number).is_integer()
        if not (is_whole and 1 <= number <= _MOST_SAMPLES):
            raise MessageError(
                f"its metrics have num-examples {number}; with weighting samples it must be 1 to "
                f"{_MOST_SAMPLES}"
            )

    def read(self, client: int, reply: Message | None) -> dict[str, float] | None:
        """Return the metrics of a client's reply; None where it does not count."""
        error = reply.error if reply is not None and reply.has_error() else None
        is_missing = reply is None or (error is not None and error.code in _UNREACHABLE)
        self._roster.note_answer(self._roster.node_of(client), answered=not is_missing)
        if reply is None:
            self._note(client, "missing")
            return None
        if error is None:
            return numbers_in(reply.content)
        reason = plain(error.reason or "", _LONGEST_ERROR)
        if "made nothing that can be sent" in reason:
            self._note(client, "fault", reason)
        elif reason.startswith(_REFUSED):
            self._note(client, "rejected", reason)
        else:
            never = client not in self._channel.holders and error.code == _RAISED
            advice = "; does its app have mods=[aqg_mod]?" if never else ""
            self._note(client, "error", f"code {error.code}: {reason}{advice}")
        return None

    def weights(self) -> Float64Array:
        """Return ``w_m``, of mean 1, by the numbers of samples that are known."""
        samples, share = self._roster.num_samples, self._settings.largest_share
        if self._settings.weighting == "equal":
            return np.ones(len(samples))
        has_said = samples > 0  # all others get the mean of these
        mean = samples[has_said].mean() if has_said.any() else 1.0
        known = np.where(has_said, samples, mean)
        counted = cap_shares(known, share)
        capped = set(np.flatnonzero(known > counted).tolist())
        for client in sorted(capped - self._capped):
            text = f"reports {samples[client]:.0f} samples; it counts for {share:g} of all"
            self._note(client, "capped", text)
        self._capped = capped
        weights: Float64Array = counted / counted.mean()
        return weights

    def report(self, found: Mapping[int, Mapping[str, float]], num_sampled: int) -> RoundReport:
        """Return what the round was like, before its step.

        ``found`` has the metrics of the clients whose replies count.
        """
        channel, num_clients = self._channel, self._settings.num_clients
        number, weights = channel.version, channel.book.weights
        widths, faults, work, taken = [DROPPED] * num_clients, [], 0.0, channel.taken
        for client in found:
            message, reply = taken[client].message, taken[client].reply
            widths[client] = message.width
            work = max(work, reply.work_seconds)
            if reply.restarted:
                self._note(client, "resync", "its mirror began from zero")
            if reply.rolled_back:
                self._note(client, "rollback", "its last upload was lost")
            if isinstance(message, Skip) and message.fault:
                faults.append((client, message.fault))
                self._note(client, "fault", message.fault)
        loss = CommonLoss.of(found, weights, num_sampled)
        for client in loss.absurd:
            self._note(client, "outlier", f"loss {loss_in(found[client]):g}")
        up, down = self._moved()
        record = RoundRecord(
            number,
            loss.mean,
            tuple(widths),
            sum(up),
            tuple(faults),
            download_bytes=sum(down),
            client_upload_bytes=tuple(up),
            client_download_bytes=tuple(down),
        )
        incidents, self._incidents = self._incidents, []
        incidents += [Incident(-1, n, "refused", why) for n, why in self._roster.take_refusals()]
        trained, evaluated = (
            mean_metrics([(float(weights[c]), _named(m, is_of)) for c, m in found.items()])
            for is_of in (False, True)
        )
        return RoundReport(
            line=Line(record),
            staleness=tuple(number - entry.last_upload for entry in channel.book.entries),
            incidents=tuple(incidents),
            stepped=len(found) >= self._settings.needed_clients,
            work_seconds=work,
            diverged=loss.has_diverged,
            trained=trained,
            evaluated=evaluated,
        )

    def _note(self, client: int, kind: str, text: str = "") -> None:
        self._incidents.append(Incident(client, self._roster.nodes[client], kind, text))

    def _moved(self) -> tuple[list[int], list[int]]:
        """Return what each client sent and received since the last round."""
        up, down = ([0] * self._settings.num_clients for _ in range(2))
        for node, found in self._counts.nodes.items():
            now, before = _totals(found), self._seen.get(node, (0, 0, 0))
            client, self._seen[node] = self._roster.client_of(node), now
            if client is None:
                continue
            up[client] += now[0] - before[0]
            down[client] += now[1] - before[1]
            for _ in range(now[2] - before[2]):
                self._note(client, "lost", "it was sent the whole model again")
        return up, down


def _totals(found: NodeCounts) -> tuple[int, int, int]:
    return found.whole.up, found.whole.down, found.lost


def _named(metrics: Mapping[str, float], is_of_model: bool) -> dict[str, float]:
    """Return the metrics of the model before training, or the others; no examples."""
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith(EVALUATED) is is_of_model and name != EXAMPLES
    }


def client_fields(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under the names of their fields in ``rounds.jsonl``.

    >>> client_fields(EVALUATED, {"top-5 accuracy": 0.9, "eval_loss": 0.1})
    {'eval_top_5_accuracy': 0.9, 'eval_loss': 0.1}
    """
    fields = {}
    for name, value in metrics.items():
        word = re.sub(r"\W", "_", name)
        fields[word if word.startswith(prefix) else prefix + word] = value
    return fields
