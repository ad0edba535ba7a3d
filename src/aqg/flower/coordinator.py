"""The server's rounds: ask, wait, check, take in, step, write down."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from flwr.app import Message

from aqg.errors import MessageError, WireError
from aqg.flower import records
from aqg.flower.reports import Incident, RoundReport
from aqg.flower.sending import Sending
from aqg.flower.settings import cap_shares
from aqg.flower.statistics import max_statistics_bytes
from aqg.protocol.messages import Order, Reply
from aqg.protocol.mirrors import fingerprint, max_frame_bytes
from aqg.runs.directory import Line
from aqg.runs.stopping import has_diverged
from aqg.sim.record import DROPPED, RoundRecord

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping

    from aqg.core.types import Float64Array as Losses
    from aqg.flower.envelope import Payload
    from aqg.flower.exchange import Exchange
    from aqg.flower.presence import Presence
    from aqg.flower.settings import Settings
    from aqg.flower.statistics import ServerModel
    from aqg.protocol.book import MirrorBook
    from aqg.wire.statistics import StatisticsMessage

_logger = logging.getLogger("flwr.aqg")

_TRAIN, _EVALUATE = "train", "evaluate"


class _Answers(NamedTuple):
    """What a round brought in, and by client the bytes that went out."""

    replies: dict[int, Reply]
    downloads: Counter[int]
    incidents: list[Incident]
    seconds: float


class Coordinator:
    """Runs rounds with whoever is there.

    Args:
        settings: of the run.
        exchange: to the nodes.
        presence: who is there, and who is who.
        book: the model and all mirrors.
        run: names the run.
        incarnation: of this server.
        recipe_spec: what clients are told to make; empty where they bring their own.
        model: the server's module, where it has one.

    Attributes:
        evaluation_bytes: what the clients were sent to measure the final loss.

    """

    def __init__(
        self,
        settings: Settings,
        exchange: Exchange,
        presence: Presence,
        book: MirrorBook,
        run: str,
        incarnation: int,
        recipe_spec: str,
        model: ServerModel | None = None,
    ) -> None:
        self.settings = settings
        self.book = book
        self._exchange = exchange
        self._presence = presence
        self._roster = presence.roster
        self._run = run
        self._incarnation = incarnation
        self._recipe_spec = recipe_spec
        self._model = model
        self._capped: set[int] = set()
        self._training = settings.training()
        self.evaluation_bytes = 0
        parameters = book.parameters
        self._dtype = str(parameters.dtype)
        self.fingerprint = fingerprint(book.recipe, len(parameters), self._dtype, settings.seed)

    def run_round(self, metrics: Mapping[str, float] | None = None) -> RoundReport:
        """Run the next round to its end, and step if enough clients answered."""
        settings, book = self.settings, self.book
        number = book.round
        evaluate = (number - 1) % settings.eval_every == 0
        self._presence.require(settings.needed_clients)
        self._update_weights()
        away = self._training.unsampled(number, settings.num_clients, settings.seed)
        asked = [client for client in self._roster.present if not away[client]]
        answers = self._ask(asked, evaluate)
        report = self._take_in(answers, number, metrics or {}, len(asked))
        if report.stepped:
            sampled = self._training.num_sampled(settings.num_clients) / settings.num_clients
            book.step(settings.step_size, settings.dropout, sampled, self._training.optimizer)
        else:
            book.skip_step()
        return report

    def _update_weights(self) -> None:
        """Let weights follow the number of samples where another node became a client."""
        if self.settings.weighting == "samples":
            num_samples, share = self._roster.num_samples, self.settings.largest_share
            weights = self.settings.client_weights(num_samples)
            if not np.array_equal(weights, self.book.weights):
                self.book.reweigh(weights)
            capped = set(np.flatnonzero(num_samples > cap_shares(num_samples, share)).tolist())
            for client in sorted(capped - self._capped):
                text = f"reports {num_samples[client]:.0f} samples; it counts for {share:g} of all"
                self._presence.note(Incident(client, self._roster.nodes[client], "capped", text))
            self._capped = capped

    def final_loss(self) -> float | None:
        """Ask the clients for the loss of the current model; None where nobody can say."""
        self._presence.refresh()
        sending = self._start_sending(_EVALUATE)
        sending.send(self._roster.present)
        losses = np.full(self.settings.num_clients, np.nan)
        for arrival in self._exchange.collect(self.settings.round_timeout, _EVALUATE):
            client = self._roster.client_of(arrival.sent.node)
            if arrival.sent.kind != _EVALUATE or arrival.is_late or client is None:
                continue
            try:
                content = records.content_of(arrival.reply, arrival.problem)
                found = records.unpack_metrics(content)
                if not isinstance(found, Reply):
                    losses[client] = found.get("loss", np.nan)
                elif sending.is_sent_again(client, found):
                    _logger.info("client %d is sent the model: %s", client, found.lost)
                else:
                    _logger.warning("client %d could not evaluate: %s", client, found.lost)
            except (MessageError, WireError) as error:
                _logger.warning("client %d could not evaluate: %s", client, error)
        self._exchange.close(_EVALUATE)
        self.evaluation_bytes = sending.downloads.total()
        if not _have_diverged(losses, len(sending.downloads)):
            for client in _leave_out_absurd(losses):
                _logger.warning(
                    "the loss of client %d (node %d) is beyond all use, and left out",
                    client,
                    self._roster.node_of(client),
                )
        return self._mean_loss(losses)

    def _ask(self, clients: list[int], evaluate: bool) -> _Answers:
        """Send orders and gather replies until all are in, or the deadline passed."""
        started = time.monotonic()
        incidents: list[Incident] = []
        sending = self._start_sending(_TRAIN, evaluate)
        not_sent = sending.send(clients)
        self._exchange.send(self._presence.introductions())
        replies: dict[int, Reply] = {}
        finished = started
        for arrival in self._exchange.collect(self.settings.round_timeout, _TRAIN):
            client = self._roster.client_of(arrival.sent.node)
            if arrival.sent.kind != _TRAIN or arrival.is_late or client is None:
                self._presence.hear(arrival)
                continue
            finished = time.monotonic()
            self._roster.heard(arrival.sent.node, answered=True)
            try:
                content = records.content_of(arrival.reply, arrival.problem)
                reply = records.unpack_reply(
                    content,
                    max_frame_bytes(len(self.book.parameters)),
                    max_statistics_bytes(self._model.layout if self._model else None),
                )
            except records.ClientError as error:
                incidents.append(Incident(client, arrival.sent.node, "error", str(error)))
                self._roster.heard(arrival.sent.node, answered=not error.is_unreachable)
            except (MessageError, WireError) as error:
                text = records.plain(str(error))
                incidents.append(Incident(client, arrival.sent.node, "rejected", text))
            else:
                if reply.lost:
                    if not self.book.is_new(client):
                        incidents.append(Incident(client, arrival.sent.node, "lost", reply.lost))
                    sending.is_sent_again(client, reply)
                    continue
                self.book.note_holding(client, reply)
                replies[client] = reply
        for node in [*self._exchange.close(_TRAIN), *not_sent]:
            self._roster.heard(node, answered=False)
            client = self._roster.client_of(node)
            if client is not None:
                incidents.append(Incident(client, node, "missing"))
                finished = time.monotonic()
        incidents += self._presence.take_incidents()
        return _Answers(replies, sending.downloads, incidents, finished - started)

    def _start_sending(self, kind: str, evaluate: bool = False) -> Sending:
        return Sending(self, self._exchange, kind, evaluate, self.settings.round_timeout)

    def _broadcast(self) -> bytes:
        return b"" if self._model is None else self._model.broadcast()

    def _take_in(
        self, answers: _Answers, number: int, metrics: Mapping[str, float], num_asked: int
    ) -> RoundReport:
        """Check and apply the replies in the order of clients, whatever order they came in."""
        num_clients = self.settings.num_clients
        widths = [DROPPED] * num_clients
        sent = [0] * num_clients
        losses = np.full(num_clients, np.nan)
        incidents = list(answers.incidents)
        faults: list[tuple[int, str]] = []
        num_taken = 0
        statistics_bytes = 0
        statistics: list[tuple[float, StatisticsMessage]] = []
        for client, reply in sorted(answers.replies.items()):
            node = self._roster.node_of(client)
            sent[client] = len(reply.frame) + len(reply.statistics)
            statistics_bytes += len(reply.statistics)
            if reply.stale:
                incidents.append(Incident(client, node, "stale", f"round {reply.round}"))
                continue
            try:
                said = None if self._model is None else self._model.read(reply.statistics)
            except WireError as error:
                incidents.append(
                    Incident(client, node, "rejected", records.plain(f"statistics: {error}"))
                )
                continue
            verdict = self.book.accept(client, reply, self._incarnation)
            if verdict.message is None:
                text = records.plain(verdict.problem)
                incidents.append(Incident(client, node, "rejected", text))
                continue
            num_taken += 1
            if said is not None:
                statistics.append((float(self.book.weights[client]), said))
            widths[client] = verdict.message.width
            losses[client] = reply.loss
            if reply.restarted:
                incidents.append(Incident(client, node, "resync", "its mirror began from zero"))
            if reply.rolled_back:
                incidents.append(Incident(client, node, "rollback", "its last upload was lost"))
            if reply.fault:
                faults.append((client, reply.fault))
                incidents.append(Incident(client, node, "fault", reply.fault))
        diverged = _have_diverged(losses, num_asked)
        if not diverged:
            for client in _leave_out_absurd(losses):
                node, text = self._roster.node_of(client), f"loss {answers.replies[client].loss:g}"
                incidents.append(Incident(client, node, "outlier", text))
        loss = self._mean_loss(losses)
        record = RoundRecord(
            number,
            loss,
            tuple(widths),
            sum(sent),
            tuple(faults),
            statistics_bytes,
            len(self._broadcast()) * len(answers.downloads),
            sum(answers.downloads.values()),
            tuple(sent),
            tuple(answers.downloads.get(client, 0) for client in range(num_clients)),
        )
        work = max((reply.work_seconds for reply in answers.replies.values()), default=0.0)
        report = RoundReport(
            line=Line(record, metrics),
            staleness=tuple(number - entry.last_upload for entry in self.book.entries),
            incidents=tuple(incidents),
            stepped=num_taken >= self.settings.needed_clients,
            round_seconds=answers.seconds,
            work_seconds=work,
            diverged=diverged,
        )
        if report.stepped and self._model is not None:
            self._model.step(statistics)
        _log_round(report, self.settings)
        return report

    def _mean_loss(self, losses: Losses) -> float | None:
        """Return the weighted mean over the clients that measured; None where none did."""
        weights = self.book.weights
        measured = ~np.isnan(losses)
        if not measured.any():
            return None
        if measured.all():
            return float(np.mean(weights * losses))
        if not weights[measured].any():  # none of them has said how many samples it has
            return float(np.mean(losses[measured]))
        return float(np.average(losses[measured], weights=weights[measured]))

    def whole_model(self) -> Payload | None:
        """Return the model, where it travels whole."""
        whole = self.book.publisher is None
        return records.pack_model(self.book.parameters) if whole else None

    def message(
        self,
        client: int,
        kind: str,
        model: Payload | None,
        seconds: float,
        evaluate: bool = False,
    ) -> tuple[Message, int]:
        """Return an order that is good for so many seconds, and the bytes that it carries."""
        settings, book = self.settings, self.book
        stamp = book.entry(client).stamp
        parcel = book.parcel(client)
        order = Order(
            run=self._run,
            fingerprint=self.fingerprint,
            recipe=self._recipe_spec,
            bits=settings.bits,
            max_staleness=settings.max_staleness,
            seed=settings.seed,
            num_params=len(book.parameters),
            dtype=self._dtype,
            incarnation=self._incarnation,
            round=book.round,
            client=client,
            movement=book.movement,
            epoch=stamp.epoch,
            uploads=stamp.uploads,
            digest=stamp.digest,
            evaluate=evaluate,
            layout=b"" if self._model is None else self._model.signature,
            constants=b"" if self._model is None else self._model.constants,
            statistics=self._broadcast(),
            asked=settings.asked,
        )
        if parcel is not None:
            order = replace(
                order,
                optimizer=settings.optimizer,
                public=parcel.digest,
                log=parcel.log,
                snapshot=parcel.snapshot,
            )
        message = Message(
            records.pack_order(order, model),
            dst_node_id=self._roster.node_of(client),
            message_type=kind,
            ttl=seconds,  # an order that was not picked up dies with its round
            group_id=str(book.round),
        )
        return message, records.carried_bytes(order, model)


def _have_diverged(losses: Losses, num_asked: int) -> bool:
    """Tell whether more than half of the clients asked report a loss beyond all use.

    In a federation of several, one client is never enough.
    """
    num_diverged = sum(has_diverged(float(loss)) for loss in losses if not np.isnan(loss))
    return 2 * num_diverged > num_asked and num_diverged >= min(2, len(losses))


def _leave_out_absurd(losses: Losses) -> list[int]:
    """Strike the losses that are beyond all use, of either sign; return whose they were."""
    absurd = [int(c) for c in np.flatnonzero(~np.isnan(losses)) if has_diverged(abs(losses[c]))]
    losses[absurd] = np.nan
    return absurd


def _log_round(report: RoundReport, settings: Settings) -> None:
    record = report.line.record
    loss = "   -    " if record.loss is None else f"{record.loss:.6f}"
    answered = sum(width != DROPPED for width in record.widths)
    _logger.info(
        "round %d/%d: loss %s%s, %d/%d answered, %d uploads, %d bytes up, %d down, %.2f s "
        "(%.2f s overhead)%s",
        record.round,
        settings.rounds,
        loss,
        "".join(f", {name} {value:.4g}" for name, value in report.line.metrics.items()),
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
