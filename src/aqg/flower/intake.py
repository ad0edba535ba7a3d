"""Takes the replies of a round in: each is checked, used or refused, and written down."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqg.errors import WireError
from aqg.flower import records
from aqg.flower.client_metrics import mean_metrics, warn_of_nan
from aqg.flower.reports import Incident, RoundReport
from aqg.flower.settings import MOST_SAMPLES, cap_shares
from aqg.runs.directory import Line
from aqg.runs.stopping import has_diverged
from aqg.sim.record import DROPPED, RoundRecord

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping

    from aqg.core.types import Float64Array as Losses
    from aqg.flower.models import ServerModel
    from aqg.flower.presence import Presence
    from aqg.flower.records import Answer
    from aqg.flower.settings import Settings
    from aqg.protocol.book import MirrorBook
    from aqg.wire.statistics import StatisticsMessage

_logger = logging.getLogger("flwr.aqg")


class Answers(NamedTuple):
    """What a round brought in, and by client the bytes that went out."""

    replies: dict[int, Answer]
    downloads: Counter[int]
    incidents: list[Incident]
    seconds: float


class Intake:
    """Takes in what clients answer.

    Args:
        settings: of the run.
        book: the model and all mirrors.
        model: what the model is made of.
        presence: who is there, and who is who.
        incarnation: of this server.

    """

    def __init__(
        self,
        settings: Settings,
        book: MirrorBook,
        model: ServerModel,
        presence: Presence,
        incarnation: int,
    ) -> None:
        self._settings = settings
        self._book = book
        self._model = model
        self._presence = presence
        self._roster = presence.roster
        self._incarnation = incarnation
        self._capped: set[int] = set()

    def update_weights(self) -> None:
        """Let weights follow the clients' number of samples."""
        num_samples, share = self._roster.num_samples, self._settings.largest_share
        if self._settings.weighting != "samples" or not (num_samples > 0).any():
            return
        weights = self._settings.client_weights(num_samples)
        if not np.array_equal(weights, self._book.weights):
            self._book.reweigh(weights)
        capped = set(np.flatnonzero(num_samples > cap_shares(num_samples, share)).tolist())
        for client in sorted(capped - self._capped):
            text = f"reports {num_samples[client]:.0f} samples; it counts for {share:g} of all"
            self._presence.note(Incident(client, self._roster.nodes[client], "capped", text))
        self._capped = capped

    def take(
        self,
        answers: Answers,
        metrics: Mapping[str, float],
        evaluated: Mapping[str, float],
        num_asked: int,
    ) -> RoundReport:
        """Check and apply the replies in the order of clients, whatever order they came in.

        Args:
            answers: what came in.
            metrics: of the model on the server's own test data.
            evaluated: means of what clients measured of the model.
            num_asked: how many clients were asked.

        """
        number, num_clients = self._book.round, self._settings.num_clients
        widths = [DROPPED] * num_clients
        sent = [0] * num_clients
        losses = np.full(num_clients, np.nan)
        incidents = self._count_samples(answers)
        faults: list[tuple[int, str]] = []
        statistics: list[tuple[float, StatisticsMessage]] = []
        trained: list[tuple[float, Mapping[str, float]]] = []
        measured: list[tuple[float, Mapping[str, float]]] = []
        num_taken = statistics_bytes = 0
        for client, (reply, found, of_model, _) in sorted(answers.replies.items()):
            node = self._roster.node_of(client)
            sent[client] = len(reply.frame) + len(reply.statistics)
            statistics_bytes += len(reply.statistics)
            if reply.stale:
                incidents.append(Incident(client, node, "stale", f"round {reply.round}"))
                continue
            try:
                said = self._model.read(reply.statistics)
            except WireError as error:
                incidents.append(
                    Incident(client, node, "rejected", records.plain(f"statistics: {error}"))
                )
                continue
            verdict = self._book.accept(client, reply, self._incarnation)
            if verdict.message is None:
                text = records.plain(verdict.problem)
                incidents.append(Incident(client, node, "rejected", text))
                continue
            num_taken += 1
            statistics.append((float(self._book.weights[client]), said))
            trained.append((float(self._book.weights[client]), found))
            measured.append((float(self._book.weights[client]), of_model))
            warn_of_nan(client, node, {**found, **of_model})
            widths[client] = verdict.message.width
            losses[client] = reply.loss
            if reply.restarted:
                incidents.append(Incident(client, node, "resync", "its mirror began from zero"))
            if reply.rolled_back:
                incidents.append(Incident(client, node, "rollback", "its last upload was lost"))
            if reply.fault:
                faults.append((client, reply.fault))
                incidents.append(Incident(client, node, "fault", reply.fault))
        diverged = have_diverged(losses, num_asked)
        if not diverged:
            for client in leave_out_absurd(losses):
                node, reply = self._roster.node_of(client), answers.replies[client].reply
                incidents.append(Incident(client, node, "outlier", f"loss {reply.loss:g}"))
        record = RoundRecord(
            number,
            self.mean_loss(losses),
            tuple(widths),
            sum(sent),
            tuple(faults),
            statistics_bytes,
            len(self._model.broadcast()) * len(answers.downloads),
            sum(answers.downloads.values()),
            tuple(sent),
            tuple(answers.downloads.get(client, 0) for client in range(num_clients)),
        )
        replies = answers.replies.values()
        report = RoundReport(
            line=Line(record, metrics),
            staleness=tuple(number - entry.last_upload for entry in self._book.entries),
            incidents=tuple(incidents),
            stepped=num_taken >= self._settings.needed_clients,
            round_seconds=answers.seconds,
            work_seconds=max((answer.reply.work_seconds for answer in replies), default=0.0),
            diverged=diverged,
            trained=mean_metrics(trained),
            evaluated=mean_metrics(measured) | dict(evaluated),
        )
        if report.stepped:
            self._model.step(statistics)
        _log_round(report, self._settings)
        return report

    def _count_samples(self, answers: Answers) -> list[Incident]:
        """Take note of how many samples clients have that say so with their replies alone."""
        incidents = list(answers.incidents)
        if self._settings.weighting != "samples":
            return incidents
        for client, (reply, *_) in sorted(answers.replies.items()):
            node = self._roster.node_of(client)
            if reply.stale or not self._roster.is_plain(node):
                continue
            if not 1 <= reply.num_samples <= MOST_SAMPLES:
                text = (
                    f"its metrics have num-examples {reply.num_samples}; with weighting samples it "
                    f"must be 1 to {MOST_SAMPLES}"
                )
                incidents.append(Incident(client, node, "rejected", text))
                del answers.replies[client]
                continue
            self._roster.num_samples[client] = reply.num_samples
        self.update_weights()
        return incidents

    def mean_loss(self, losses: Losses) -> float | None:
        """Return the weighted mean over the clients that measured; None where none did."""
        weights = self._book.weights
        measured = ~np.isnan(losses)
        if not measured.any():
            return None
        if measured.all():
            return float(np.mean(weights * losses))
        if not weights[measured].any():  # none of them has said how many samples it has
            return float(np.mean(losses[measured]))
        return float(np.average(losses[measured], weights=weights[measured]))


def have_diverged(losses: Losses, num_asked: int) -> bool:
    """Tell whether more than half of the clients asked report a loss beyond all use.

    In a federation of several, one client is never enough.
    """
    num_diverged = sum(has_diverged(float(loss)) for loss in losses if not np.isnan(loss))
    return 2 * num_diverged > num_asked and num_diverged >= min(2, len(losses))


def leave_out_absurd(losses: Losses) -> list[int]:
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
