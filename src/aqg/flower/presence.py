"""Who is connected: waiting for nodes, and letting them introduce themselves."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flwr.app import Message

from aqg.errors import MessageError, RunError, WireError
from aqg.flower import records
from aqg.flower.reports import Incident
from aqg.flower.settings import MOST_SAMPLES

if TYPE_CHECKING:
    from aqg.flower.exchange import Arrival, Exchange
    from aqg.flower.roster import Roster
    from aqg.flower.settings import Settings

_logger = logging.getLogger("flwr.aqg")

HELLO = "hello"
_TRAIN = "train"
"""Flower's type of message for introductions: every app has a handler for those."""
_NO_ROUND = "0"
_NO_CLIENT = -1
_HELLO_SECONDS = 5.0
"""How long nodes between two rounds may take to send an introduction that they have announced."""


class Presence:
    """Keeps a roster up to date over an exchange."""

    def __init__(self, exchange: Exchange, roster: Roster, settings: Settings) -> None:
        self.roster = roster
        self._exchange = exchange
        self._settings = settings
        self._asked: dict[int, float] = {}
        self._incidents: list[Incident] = []

    @property
    def asks_for_introductions(self) -> bool:
        """Whether nodes must say something about themselves before they count."""
        return self._settings.trust_partition_id or self._settings.weighting == "samples"

    def refresh(self) -> None:
        """Look who is connected."""
        self.roster.update(self._exchange.online())

    def introductions(self) -> list[Message]:
        """Return messages that ask newcomers to introduce themselves."""
        if not self.asks_for_introductions:
            return []
        now, patience = self._exchange.now(), self._settings.round_timeout
        asked = {node: at for node, at in self._asked.items() if now - at < patience}
        newcomers = [node for node in self.roster.strangers() if node not in asked]
        self._asked = asked | dict.fromkeys(newcomers, now)
        content = records.ask_hello()
        return [
            Message(content, node, _TRAIN, ttl=patience, group_id=_NO_ROUND) for node in newcomers
        ]

    def ask_newcomers(self) -> None:
        """Ask newcomers to introduce themselves."""
        self._exchange.send(self.introductions(), HELLO)

    def hear(self, arrival: Arrival) -> None:
        """Take in an introduction; count whatever else comes outside of its time."""
        node = arrival.sent.node
        if arrival.sent.kind != HELLO:
            client = self.roster.client_of(node)
            if arrival.reply is not None and arrival.reply.has_content():
                late = _NO_CLIENT if client is None else client
                self._incidents.append(Incident(late, node, "late"))
            return  # Flower's word that an order has expired is no news: it was missing before
        try:
            content = records.content_of(arrival.reply, arrival.problem)
            keys = ("partition", "samples", "plain")
            partition, samples, is_plain = records.unpack_hello(content, *keys)
        except (MessageError, WireError) as error:
            is_raised = isinstance(error, records.ClientError) and error.is_raised
            advice = "; does its app have mods=[aqg_mod]?" if is_raised else ""
            text = records.plain(f"could not introduce itself: {error}{advice}")
            _logger.warning("node %d %s", node, text)
            self._incidents.append(Incident(_NO_CLIENT, node, "error", text))
            return
        fewest = 1 if self._settings.weighting == "samples" and not is_plain else 0
        if not fewest <= samples <= MOST_SAMPLES:
            bound = f"{fewest} to {MOST_SAMPLES} are taken"
            self.roster.refuse(node, f"node {node} reports {samples} samples; {bound}")
            return
        self.roster.introduce(node, partition, samples, bool(is_plain))

    def wait_for(self, num_clients: int, seconds: float) -> bool:
        """Wait until so many clients are there; return whether they came in time."""
        started = self._exchange.now()
        waited = 0.0
        while True:
            self.refresh()
            self.ask_newcomers()
            for arrival in self._exchange.poll(min(max(0.0, seconds - waited), _HELLO_SECONDS)):
                self.hear(arrival)
            if len(self.roster.present) >= num_clients and self._all_introduced():
                return True
            waited = self._exchange.now() - started
            if waited >= seconds:
                return False
            self._exchange.rest(waited, seconds)

    def require(self, num_clients: int) -> None:
        """Wait until so many clients are there; raise `RunError` if they do not come."""
        seconds = self._settings.start_timeout
        if len(self.roster.present) < num_clients:
            _logger.info("waiting for %d clients", num_clients)
        if not self.wait_for(num_clients, seconds):
            raise RunError(
                f"{len(self.roster.present)} clients are connected after {seconds:g} s, and "
                f"{num_clients} are needed; start again with the same run-dir to go on"
            )

    def note(self, incident: Incident) -> None:
        """Keep an incident for the round's report."""
        self._incidents.append(incident)

    def take_incidents(self) -> list[Incident]:
        """Return what happened since the last call."""
        incidents, self._incidents = self._incidents, []
        for node, why in self.roster.take_refusals():
            incidents.append(Incident(_NO_CLIENT, node, "refused", why))
        return incidents

    def _all_introduced(self) -> bool:
        """Whether the clients' weights are known, where they matter."""
        if self._settings.weighting == "equal":
            return True
        roster = self.roster
        return all(
            roster.num_samples[client] or roster.is_plain(roster.node_of(client))
            for client in roster.present
        )
