"""The server's rounds: ask, wait, check, take in, step."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aqg.errors import ConfigError, MessageError, WireError
from aqg.flower import records
from aqg.flower.client_metrics import EXAMPLES, loss_in, mean_metrics, warn_of_nan
from aqg.flower.desk import EVALUATE, TRAIN
from aqg.flower.exchange import Arrival, Sent
from aqg.flower.intake import Answers, have_diverged, leave_out_absurd
from aqg.flower.reports import Incident
from aqg.flower.sending import Sending
from aqg.flower.settings import cap_shares
from aqg.flower.statistics import max_statistics_bytes
from aqg.protocol.mirrors import max_frame_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from flwr.app import Message

    from aqg.flower.desk import Desk
    from aqg.flower.exchange import Exchange
    from aqg.flower.intake import Intake
    from aqg.flower.models import ServerModel
    from aqg.flower.presence import Presence
    from aqg.flower.records import Answer
    from aqg.flower.reports import RoundReport
    from aqg.flower.settings import Settings

_logger = logging.getLogger("flwr.aqg")

_NO_HANDLER = "No evaluate function registered"
"""What Flower says of an app that does not evaluate."""


@dataclass(frozen=True)
class Evaluation:
    """What clients measured of a model.

    Attributes:
        loss: the mean; None where nobody can say.
        metrics: the mean of each, weighted as the updates are.
        downloads: what the clients were sent for it, by client.

    """

    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    downloads: Counter[int] = field(default_factory=Counter)


class _Open(NamedTuple):
    """A round in progress."""

    asked: list[int]
    sending: Sending
    evaluation: Evaluation
    messages: list[Message]
    replies: dict[int, Answer]
    incidents: list[Incident]


class _Measuring(NamedTuple):
    """An evaluation in progress."""

    sending: Sending
    messages: list[Message]
    found: dict[int, Mapping[str, float]]


class Coordinator:
    """Runs rounds with whoever is there.

    Args:
        settings: of the run.
        exchange: to the nodes.
        presence: who is there, and who is who.
        desk: writes orders, from the book of the run.
        intake: takes replies in.
        model: what the model is made of.

    """

    def __init__(
        self,
        settings: Settings,
        exchange: Exchange,
        presence: Presence,
        desk: Desk,
        intake: Intake,
        model: ServerModel,
    ) -> None:
        self.settings = settings
        self.book = desk.book
        self._exchange = exchange
        self._presence = presence
        self._roster = presence.roster
        self._desk = desk
        self._intake = intake
        self._layout = model.layout
        self._training = settings.training()
        self._measuring: _Measuring | None = None
        self._opened: _Open | None = None
        self._started = 0.0

    def run_round(self, metrics: Mapping[str, float]) -> RoundReport:
        """Run the next round to its end, and step if enough clients answered."""
        opened = self._open_round(self._evaluate_in_time())
        started = finished = time.monotonic()
        not_sent = opened.sending.send(opened.asked)
        self._presence.ask_newcomers()
        for arrival in self._exchange.collect(self.settings.round_timeout, TRAIN):
            if self._hear(arrival, opened):
                finished = time.monotonic()
        missing = [*self._exchange.close(TRAIN), *not_sent]
        if self._note_missing(missing, opened):
            finished = time.monotonic()
        return self._conclude(opened, metrics, finished - started)

    def orders(self) -> list[Message]:
        """Return the orders of the next round, for somebody else to send."""
        self._opened = opened = self._open_round(Evaluation())
        self._started = time.monotonic()
        opened.messages.extend(opened.sending.write(opened.asked))
        return opened.messages

    def take_replies(self, replies: Iterable[Message], metrics: Mapping[str, float]) -> RoundReport:
        """Do what `run_round` does with the replies to `orders`.

        A client that lacks part of the model is sent it with the next round's order.
        """
        opened, self._opened = self._opened, None
        if opened is None:
            raise ConfigError("replies came for a round that was not begun with configure_train")
        missing = {message.metadata.dst_node_id for message in opened.messages}
        for arrival in self._arrivals(opened.messages, replies, TRAIN):
            missing.discard(arrival.sent.node)
            self._hear(arrival, opened, sends_again=False)
        self._note_missing(sorted(missing), opened)
        return self._conclude(opened, metrics, time.monotonic() - self._started)

    def evaluate(self) -> Evaluation:
        """Ask the clients to measure the current model."""
        self._presence.refresh()
        opened = self._open_evaluation()
        opened.sending.send(self._roster.present)
        for arrival in self._exchange.collect(self.settings.round_timeout, EVALUATE):
            self._hear_measured(arrival, opened)
        self._exchange.close(EVALUATE)
        return self._evaluation(opened)

    def evaluation_orders(self) -> list[Message]:
        """Return orders to measure the current model, for somebody else to send."""
        self._measuring = opened = self._open_evaluation()
        opened.messages.extend(opened.sending.write(self._roster.present))
        return opened.messages

    def take_evaluations(self, replies: Iterable[Message]) -> Evaluation:
        """Return what the replies to `evaluation_orders` say."""
        opened, self._measuring = self._measuring, None
        if opened is None:
            return Evaluation()
        for arrival in self._arrivals(opened.messages, replies, EVALUATE):
            self._hear_measured(arrival, opened, sends_again=False)
        return self._evaluation(opened)

    def _open_evaluation(self) -> _Measuring:
        self._equip_newcomers()
        return _Measuring(self._start_sending(EVALUATE), [], {})

    def _hear_measured(
        self, arrival: Arrival, opened: _Measuring, sends_again: bool = True
    ) -> None:
        """Take note of what a client measured."""
        node = arrival.sent.node
        client = self._roster.client_of(node)
        if arrival.sent.kind != EVALUATE or arrival.is_late or client is None:
            self._presence.hear(arrival)
            return
        try:
            content = records.content_of(arrival.reply, arrival.problem)
            found = records.unpack_metrics(content)
        except (MessageError, WireError) as error:
            level = logging.INFO if _NO_HANDLER in str(error) else logging.WARNING
            _logger.log(level, "client %d could not evaluate: %s", client, error)
            return
        if isinstance(found, records.Answer):
            if not sends_again:
                opened.sending.note_lost(client, found)
            elif opened.sending.is_sent_again(client, found):
                _logger.info("client %d is sent the model: %s", client, found.reply.lost)
                return
            _logger.warning("client %d could not evaluate: %s", client, found.reply.lost)
            return
        self._desk.equipped(client)
        self.book.note_followed(client)
        opened.found[client] = found
        warn_of_nan(client, node, found)

    def _evaluation(self, opened: _Measuring) -> Evaluation:
        """Return the means of what clients measured."""
        losses = np.full(self.settings.num_clients, np.nan)
        for client, found in opened.found.items():
            losses[client] = loss_in(found)
        if not have_diverged(losses, len(opened.sending.downloads)):
            for client in leave_out_absurd(losses):
                _logger.warning(
                    "the loss of client %d (node %d) is beyond all use, and left out",
                    client,
                    self._roster.node_of(client),
                )
        loss = self._intake.mean_loss(losses)
        return Evaluation(loss, self._mean_metrics(opened.found), opened.sending.downloads)

    def _mean_metrics(self, found: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
        """Return means weighted by examples, as far as clients say how many they measured on."""
        clients = sorted(found)
        if not clients:
            return {}
        weights = self.book.weights[clients]
        examples = np.array([found[client].get(EXAMPLES, 0.0) for client in clients])
        if self.settings.weighting == "samples" and (examples > 0).all():
            weights = cap_shares(examples, self.settings.largest_share)
        others = [{k: v for k, v in found[c].items() if k != EXAMPLES} for c in clients]
        return mean_metrics(list(zip(weights.tolist(), others, strict=True)))

    def _arrivals(
        self, messages: list[Message], replies: Iterable[Message], kind: str
    ) -> Iterator[Arrival]:
        """Yield the replies to messages that somebody else sent; each is of whom it went to."""
        sent = {m.metadata.message_id: m.metadata.dst_node_id for m in messages}
        for reply in replies:
            node = sent.pop(reply.metadata.reply_to_message_id, None)
            if node is not None:
                yield Arrival(Sent(node, kind, 0.0), reply, False, 0.0)

    def _evaluate_in_time(self) -> Evaluation:
        """Let clients evaluate the model of the last round, if it is time for that."""
        every, number = self.settings.client_eval_every, self.book.round
        if not every or number == 1 or (number - 1) % every:
            return Evaluation()
        self._presence.require(self.settings.needed_clients)
        return self.evaluate()

    def _open_round(self, evaluation: Evaluation) -> _Open:
        """Wait for enough clients, and choose whom to ask."""
        settings, number = self.settings, self.book.round
        self._presence.require(settings.needed_clients)
        self._equip_newcomers()
        self._intake.update_weights()
        away = self._training.unsampled(number, settings.num_clients, settings.seed)
        asked = [client for client in self._roster.present if not away[client]]
        sending = self._start_sending(TRAIN, (number - 1) % settings.eval_every == 0)
        return _Open(asked, sending, evaluation, [], {}, [])

    def _equip_newcomers(self) -> None:
        """Let clients that have no model of their own have the start with their first order."""
        for client in self._roster.present:
            if self._roster.is_plain(self._roster.node_of(client)) and not self._desk.knows(client):
                self._desk.unequipped.add(client)

    def _hear(self, arrival: Arrival, opened: _Open, sends_again: bool = True) -> bool:
        """Take note of what came in; return whether it belongs to the round."""
        node = arrival.sent.node
        client = self._roster.client_of(node)
        if arrival.sent.kind != TRAIN or arrival.is_late or client is None:
            self._presence.hear(arrival)
            return False
        self._roster.heard(node, answered=True)
        try:
            content = records.content_of(arrival.reply, arrival.problem)
            answer = records.unpack_reply(
                content,
                max_frame_bytes(len(self.book.parameters)),
                max_statistics_bytes(self._layout),
            )
        except records.ClientError as error:
            advice = ""
            if error.is_raised and not self._desk.knows(client):
                advice = "; does its app have mods=[aqg_mod]?"
            opened.incidents.append(Incident(client, node, "error", f"{error}{advice}"))
            self._roster.heard(node, answered=not error.is_unreachable)
        except (MessageError, WireError) as error:
            text = records.plain(str(error))
            opened.incidents.append(Incident(client, node, "rejected", text))
        else:
            if answer.reply.lost:
                if not self.book.is_new(client):
                    opened.incidents.append(Incident(client, node, "lost", answer.reply.lost))
                if sends_again:
                    opened.sending.is_sent_again(client, answer)
                else:
                    opened.sending.note_lost(client, answer)
                return True
            self._desk.equipped(client)
            self.book.note_holding(client, answer.reply)
            opened.replies[client] = answer
        return True

    def _note_missing(self, nodes: list[int], opened: _Open) -> bool:
        """Take note of who did not answer; return whether anyone did not."""
        found = False
        for node in nodes:
            self._roster.heard(node, answered=False)
            client = self._roster.client_of(node)
            if client is not None:
                opened.incidents.append(Incident(client, node, "missing"))
                found = True
        return found

    def _conclude(self, opened: _Open, metrics: Mapping[str, float], seconds: float) -> RoundReport:
        """Take the replies in, and step."""
        settings, book = self.settings, self.book
        opened.incidents.extend(self._presence.take_incidents())
        downloads = opened.sending.downloads + opened.evaluation.downloads
        for client in opened.sending.downloads:  # also where an order carried nothing
            downloads.setdefault(client, 0)
        answers = Answers(opened.replies, downloads, opened.incidents, seconds)
        report = self._intake.take(answers, metrics, opened.evaluation.metrics, len(opened.asked))
        if report.stepped:
            sampled = self._training.num_sampled(settings.num_clients) / settings.num_clients
            book.step(settings.step_size, settings.dropout, sampled, self._training.optimizer)
        else:
            book.skip_step()
        return report

    def _start_sending(self, kind: str, evaluate: bool = False) -> Sending:
        return Sending(self._desk, self._exchange, kind, evaluate, self.settings.round_timeout)
