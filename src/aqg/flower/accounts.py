"""What a round of our own server was like: who answered, what it counts for, and what it cost."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.core.messages import Skip
from aqg.errors import MessageError
from aqg.flower.metrics import (
    EVALUATED,
    EXAMPLES,
    loss_in,
    mean_metrics,
    numbers_in,
    plain,
)
from aqg.flower.reports import Incident, RoundReport
from aqg.flower.settings import MOST_SAMPLES, cap_shares, known_or_mean
from aqg.runs.directory import Line
from aqg.runs.stopping import has_diverged
from aqg.sim.record import DROPPED, RoundRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flwr.app import Message, RecordDict

    from aqg.channel.stepping import SteppingChannel
    from aqg.core.types import Float64Array
    from aqg.flower.grid import Counts
    from aqg.flower.roster import Roster
    from aqg.flower.settings import Settings

_logger = logging.getLogger("flwr.aqg")

_UNREACHABLE = (3, 4, 5)
"""Flower's codes: order expired, reply expired, node unavailable."""
_RAISED = 2
_LONGEST_ERROR = 200
_REFUSED = "aqg: "
"""Begins what the grid says of a reply that it refuses."""


class Accounts:
    """Keeps the books of a run's rounds.

    Args:
        settings: of the run.
        roster: which node is which client.
        channel: of the model.
        counts: of what passes through the grid.

    """

    def __init__(
        self, settings: Settings, roster: Roster, channel: SteppingChannel, counts: Counts
    ) -> None:
        self._settings = settings
        self._roster = roster
        self._channel = channel
        self._counts = counts
        self._seen = self._totals()
        self._capped: set[int] = set()
        self._incidents: list[Incident] = []

    def check(self, content: RecordDict) -> None:
        """Raise `MessageError` where a reply to a train message does not say what is needed."""
        if self._settings.weighting != "samples":
            return
        found = [r[EXAMPLES] for r in content.metric_records.values() if EXAMPLES in r]
        number = found[0] if found else 0
        is_whole = not isinstance(number, list) and float(number).is_integer()
        if not (is_whole and 1 <= number <= MOST_SAMPLES):  # type: ignore[operator]
            raise MessageError(
                f"its metrics have num-examples {number}; with weighting samples it must be 1 to "
                f"{MOST_SAMPLES}"
            )

    def hear(self, client: int, reply: Message | None) -> dict[str, float] | None:
        """Return the metrics of a client's reply; None where it does not count."""
        node = self._roster.node_of(client)
        if reply is None:
            self._roster.heard(node, answered=False)
            self._note(client, "missing")
            return None
        if not reply.has_error():
            self._roster.heard(node, answered=True)
            return numbers_in(reply.content)
        reason = plain(reply.error.reason or "", _LONGEST_ERROR)
        self._roster.heard(node, answered=reply.error.code not in _UNREACHABLE)
        if "made nothing that can be sent" in reason:
            self._note(client, "fault", reason)
        elif reason.startswith(_REFUSED):
            self._note(client, "rejected", reason)
        else:
            never = client not in self._channel.holders and reply.error.code == _RAISED
            advice = "; does its app have mods=[aqg_mod]?" if never else ""
            self._note(client, "error", f"code {reply.error.code}: {reason}{advice}")
        return None

    def weights(self) -> Float64Array:
        """Return ``w_m``, by the numbers of samples that are known."""
        settings, samples = self._settings, self._roster.num_samples
        if settings.weighting == "samples":
            share = settings.largest_share
            counted = known_or_mean(samples)
            capped = set(np.flatnonzero(counted > cap_shares(counted, share)).tolist())
            for client in sorted(capped - self._capped):
                text = f"reports {samples[client]:.0f} samples; it counts for {share:g} of all"
                self._note(client, "capped", text)
            self._capped = capped
        return settings.client_weights(samples)

    def report(
        self,
        found: Mapping[int, Mapping[str, float]],
        num_asked: int,
        metrics: Mapping[str, float],
        evaluated: Mapping[str, float],
        seconds: float,
    ) -> RoundReport:
        """Return what the round was like, before its step.

        Args:
            found: the metrics of the clients whose replies count.
            num_asked: how many clients were asked.
            metrics: of the model on the server's own test data.
            evaluated: means of what clients measured of the model.
            seconds: that the round took.

        """
        channel, num_clients = self._channel, self._settings.num_clients
        number, weights = channel.version, channel.book.weights
        widths, losses = [DROPPED] * num_clients, np.full(num_clients, np.nan)
        faults, work = [], 0.0
        for client in found:
            taken = channel.taken[client]
            message, reply = taken.message, taken.reply
            widths[client] = message.width
            losses[client] = loss_in(found[client])
            work = max(work, reply.work_seconds)
            if reply.restarted:
                self._note(client, "resync", "its mirror began from zero")
            if reply.rolled_back:
                self._note(client, "rollback", "its last upload was lost")
            if isinstance(message, Skip) and message.fault:
                faults.append((client, message.fault))
                self._note(client, "fault", message.fault)
        diverged = have_diverged(losses, num_asked)
        if not diverged:
            for client in leave_out_absurd(losses):
                self._note(client, "outlier", f"loss {loss_in(found[client]):g}")
        up, down = self._moved()
        measured = [(float(weights[c]), _named(m, EVALUATED)) for c, m in found.items()]
        trained = [(float(weights[c]), _named(m, EVALUATED, False)) for c, m in found.items()]
        record = RoundRecord(
            number,
            mean_loss(losses, weights),
            tuple(widths),
            sum(up),
            tuple(faults),
            download_bytes=sum(down),
            client_upload_bytes=tuple(up),
            client_download_bytes=tuple(down),
        )
        incidents, self._incidents = self._incidents, []
        incidents += [Incident(-1, n, "refused", why) for n, why in self._roster.take_refusals()]
        report = RoundReport(
            line=Line(record, metrics),
            staleness=tuple(number - entry.last_upload for entry in channel.book.entries),
            incidents=tuple(incidents),
            stepped=len(found) >= self._settings.needed_clients,
            round_seconds=seconds,
            work_seconds=work,
            diverged=diverged,
            trained=mean_metrics(trained),
            evaluated=mean_metrics(measured) | dict(evaluated),
        )
        _log_round(report, self._settings)
        return report

    def _note(self, client: int, kind: str, text: str = "") -> None:
        self._incidents.append(Incident(client, self._roster.nodes[client], kind, text))

    def _totals(self) -> dict[int, tuple[int, int, int]]:
        found = {}
        for node, counts in self._counts.nodes.items():
            whole = counts.train + counts.evaluate
            found[node] = whole.up, whole.down, counts.lost
        return found

    def _moved(self) -> tuple[list[int], list[int]]:
        """Return what each client sent and received since the last round."""
        num_clients = self._settings.num_clients
        up, down, totals = [0] * num_clients, [0] * num_clients, self._totals()
        for node, now in totals.items():
            before, client = self._seen.get(node, (0, 0, 0)), self._roster.client_of(node)
            if client is None:
                continue
            up[client] += now[0] - before[0]
            down[client] += now[1] - before[1]
            for _ in range(now[2] - before[2]):
                self._note(client, "lost", "it was sent the whole model again")
        self._seen = totals
        return up, down


def _named(metrics: Mapping[str, float], prefix: str, has: bool = True) -> dict[str, Any]:
    """Return the metrics whose names begin with a prefix, or the others; no examples."""
    return {
        name: value
        for name, value in metrics.items()
        if name.startswith(prefix) is has and name != EXAMPLES
    }


def mean_loss(losses: Float64Array, weights: Float64Array) -> float | None:
    """Return the weighted mean over the clients that measured; None where none did."""
    measured = ~np.isnan(losses)
    if not measured.any():
        return None
    if measured.all():
        return float(np.mean(weights * losses))
    if not weights[measured].any():  # none of them has said how many samples it has
        return float(np.mean(losses[measured]))
    return float(np.average(losses[measured], weights=weights[measured]))


def have_diverged(losses: Float64Array, num_asked: int) -> bool:
    """Tell whether more than half of the clients asked report a loss beyond all use.

    In a federation of several, one client is never enough.
    """
    num_diverged = sum(has_diverged(float(loss)) for loss in losses if not np.isnan(loss))
    return 2 * num_diverged > num_asked and num_diverged >= min(2, len(losses))


def leave_out_absurd(losses: Float64Array) -> list[int]:
    """Strike the losses that are beyond all use, of either sign; return whose they were."""
    absurd = [int(c) for c in np.flatnonzero(~np.isnan(losses)) if has_diverged(abs(losses[c]))]
    losses[absurd] = np.nan
    return absurd


def _log_round(report: RoundReport, settings: Settings) -> None:
    record = report.line.record
    loss = "   -    " if record.loss is None else f"{record.loss:.6f}"
    answered = sum(width != DROPPED for width in record.widths)
    metrics = {**report.line.metrics, **report.client_fields()}
    _logger.info(
        "round %d/%d: loss %s%s, %d/%d answered, %d uploads, %d bytes up, %d down, %.2f s "
        "(%.2f s overhead)%s",
        record.round,
        settings.rounds,
        loss,
        "".join(f", {name} {value:.4g}" for name, value in metrics.items()),
        answered,
        settings.num_clients,
        record.num_uploads,
        record.upload_bytes,
        record.download_bytes,
        report.round_seconds,
        report.overhead_seconds,
        "" if report.stepped else "; too few, no step",
    )
    for incident in report.incidents:
        level = logging.INFO if incident.kind == "missing" else logging.WARNING
        _logger.log(
            level,
            "round %d: client %d (node %d): %s %s",
            record.round,
            incident.client,
            incident.node,
            incident.kind,
            incident.text,
        )
