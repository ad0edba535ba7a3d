"""Writes orders: what each client is told in a round, with all that leads it to the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flwr.app import ConfigRecord, Message

from aqg.flower import records
from aqg.protocol.mirrors import fingerprint

if TYPE_CHECKING:
    from flwr.app import ArrayRecord

    from aqg.flower.envelope import Payload
    from aqg.flower.models import ServerModel
    from aqg.flower.roster import Roster
    from aqg.flower.settings import Settings
    from aqg.protocol.book import MirrorBook
    from aqg.protocol.messages import Order

TRAIN, EVALUATE = "train", "evaluate"
"""Flower's types of messages."""


class Desk:
    """Writes the orders of a run.

    Args:
        settings: of the run.
        book: the model and all mirrors.
        model: what the model is made of.
        roster: which node is which client.
        run: names the run.
        incarnation: of this server.
        recipe_spec: what clients are told to make; empty where they bring their own.

    Attributes:
        configs: what clients' handlers are told, by type of message.
        unequipped: clients that need the starting model: they have none of their own.

    """

    def __init__(
        self,
        settings: Settings,
        book: MirrorBook,
        model: ServerModel,
        roster: Roster,
        run: str,
        incarnation: int,
        recipe_spec: str,
    ) -> None:
        self.book = book
        self.incarnation = incarnation
        self.configs: dict[str, ConfigRecord] = {}
        self.unequipped: set[int] = set()
        self._equipped: set[int] = set()
        self._settings = settings
        self._model = model
        self._roster = roster
        self._run = run
        self._recipe_spec = recipe_spec
        self._dtype = str(book.parameters.dtype)
        self._start: ArrayRecord | None = None
        self.fingerprint = fingerprint(
            book.recipe, len(book.parameters), self._dtype, settings.seed
        )

    def knows(self, client: int) -> bool:
        """Tell whether a client has been seen to have the starting model, or a later one."""
        return client in self._equipped or not (
            self.book.publisher is None or self.book.is_new(client)
        )

    def equipped(self, client: int) -> None:
        """Take note that a client has the starting model."""
        self.unequipped.discard(client)
        self._equipped.add(client)
        if not self.unequipped:  # it is as large as the model
            self._start = None

    def whole_model(self) -> Payload | None:
        """Return the model, where it travels whole: all orders of a round have it in common."""
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
        start = None
        if client in self.unequipped:
            if self._start is None:
                self._start = self._model.start_record()
            start = self._start
            self.book.note_start(client)
        order = self._order(client, kind, evaluate)
        form = self._model.form if start is not None else None
        message = Message(
            records.pack_order(order, model, self.configs.get(kind), start, form),
            dst_node_id=self._roster.node_of(client),
            message_type=kind,
            ttl=seconds,  # an order that was not picked up dies with its round
            group_id=str(self.book.round),
        )
        return message, records.carried_bytes(order, model, start)

    def _order(self, client: int, kind: str, evaluate: bool) -> Order:
        settings, model = self._settings, self._model
        return self.book.order(
            client,
            run=self._run,
            fingerprint=self.fingerprint,
            recipe=self._recipe_spec,
            bits=settings.bits,
            max_staleness=settings.max_staleness,
            seed=settings.seed,
            incarnation=self.incarnation,
            evaluate=evaluate,
            layout=model.signature,
            constants=model.constants_digest,
            statistics=model.broadcast() if kind == TRAIN else model.broadcast_fine(),
            exact=settings.exact,
        )
