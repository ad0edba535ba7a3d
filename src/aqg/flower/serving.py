"""A client's answer to a message of our own strategy: all that is not training itself.

An order leads to the model; a `Learner` trains it, be it a task or a handler of Flower's; and what
it learned goes back as the update that the server does not know yet.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from aqg.errors import ConfigError, GradientError, MessageError
from aqg.flower import records
from aqg.flower.memory import partition_of
from aqg.flower.statistics import (
    ClientStatistics,
    Keeper,
    check_agreement,
    max_statistics_bytes,
)
from aqg.protocol.client import (
    OutOfReachError,
    agree,
    follow_log,
    intact_base,
    key_of,
    log_reply,
    terms_of,
)
from aqg.protocol.follower import Holding
from aqg.protocol.messages import MAX_FAULT_LENGTH
from aqg.protocol.mirrors import answer, lost_reply, stale_reply

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flwr.app import Context, Message

    from aqg.core.recipe import Recipe
    from aqg.core.types import FloatArray
    from aqg.flower.envelope import Envelope
    from aqg.flower.memory import Memory
    from aqg.flower.records import Given
    from aqg.flower.statistics import TaskModel
    from aqg.protocol.messages import Order
    from aqg.protocol.store import ClientStore

_logger = logging.getLogger("flwr.aqg")

_NO_PARTITION = -1


@dataclass(frozen=True)
class Trained:
    """What came of training.

    Attributes:
        gradient: the vector to upload, ``(num_params,)``.
        loss: NaN where it is not known, or not wanted.
        num_samples: how many the client has.
        metrics: that training measured, by name.
        evaluated: that were measured of the model before training.

    """

    gradient: FloatArray
    loss: float
    num_samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluated: Mapping[str, float] = field(default_factory=dict)


class Learner(Protocol):
    """Trains and measures models.

    Attributes:
        model: the module that is trained, where its layout is known.

    """

    model: TaskModel | None

    def start(self) -> FloatArray | None:
        """Return the model that the run started from, where it is known here."""

    def train(self, order: Order, params: FloatArray, statistics: ClientStatistics) -> Trained:
        """Train a model."""

    def evaluate(
        self, order: Order, params: FloatArray, statistics: ClientStatistics
    ) -> Mapping[str, float]:
        """Measure a model."""


class Host(Protocol):
    """Has what trains on a node."""

    @property
    def num_samples(self) -> int | None:
        """How many samples it has; None where it says so with its replies."""

    def learner(
        self, message: Message, context: Context, given: Given, memory: Memory
    ) -> Learner | None:
        """Return what trains; None where it needs the starting model for that."""


def serve(
    message: Message,
    context: Context,
    envelope: Envelope,
    memory: Memory,
    host: Host,
    recipe: Recipe | None = None,
) -> Message:
    """Answer a message of our own strategy.

    Args:
        message: from the server.
        context: Flower's.
        envelope: in the message.
        memory: what the node remembers.
        host: has what trains.
        recipe: in place of the one that the server names.

    """
    if records.is_hello(envelope):
        return _introduce(message, context, host.num_samples)
    given = records.unpack_given(message.content, envelope)
    order = given.order
    learner = host.learner(message, context, given, memory)
    if learner is None:
        why = "the starting model is not held here"
        return records.pack_reply(message, lost_reply(order, Holding(), why), wants_start=True)
    del given  # it may hold the starting model
    client = Client(message, context, order, memory, recipe)
    if message.metadata.message_type == "train":
        return client.train(learner)
    return client.evaluate(learner)


def _introduce(message: Message, context: Context, num_samples: int | None) -> Message:
    partition = partition_of(context)
    return records.pack_hello(
        message,
        partition=_NO_PARTITION if partition is None else partition,
        samples=num_samples or 0,
        plain=int(num_samples is None),
    )


class Client:
    """A client while it answers one order.

    Args:
        message: from the server.
        context: Flower's.
        order: in the message.
        memory: what the client remembers.
        recipe: in place of the one that the server names.

    """

    def __init__(
        self,
        message: Message,
        context: Context,
        order: Order,
        memory: Memory,
        recipe: Recipe | None = None,
    ) -> None:
        self._message = message
        self._context = context
        self._order = order
        self._memory = memory
        self._recipe = recipe

    def train(self, learner: Learner) -> Message:
        """Return the reply to an order to train."""
        started = time.perf_counter()
        order, message = self._order, self._message
        agreed = agree(order, self._recipe)
        store = self._memory.clients(key_of(order))
        if order.serial <= store.answered:
            _logger.warning("order for round %d is stale; nothing done", order.round)
            return records.pack_reply(message, stale_reply(order))
        try:
            params = self._follow(agreed, store, learner)
        except OutOfReachError as lost:
            return records.pack_reply(message, lost.reply(order))
        base = intact_base(agreed, store, order)
        statistics = self._statistics(learner)
        if params is None:
            params = records.take_model(message.content, order.num_params, order.dtype)
        trained = learner.train(order, params, statistics)
        shape = params.shape
        del params  # large models: what is not needed any more makes room for the answer
        if trained.gradient.shape != shape:
            raise GradientError(
                f"train returned shape {trained.gradient.shape}; the model has {shape}"
            )
        changed, trouble = statistics.finish()
        if changed and not order.layout:
            raise ConfigError(
                "training changes buffers of the module, and the server was given a flat vector "
                "without them: give make_server_app the module"
            )
        gradient = trained.gradient.astype(order.dtype, copy=False)
        mirror, reply = answer(agreed, base, order, gradient, trained.loss)
        store.save(mirror)  # before the reply leaves: a crash from here on is a lost upload
        log_reply(order, reply)
        reply = replace(
            reply,
            loss=trained.loss,
            num_samples=trained.num_samples,
            work_seconds=time.perf_counter() - started,
            statistics=changed,
            fault=reply.fault or trouble[:MAX_FAULT_LENGTH],
        )
        return records.pack_reply(message, reply, trained.metrics, trained.evaluated)

    def evaluate(self, learner: Learner) -> Message:
        """Return the reply to an order to evaluate."""
        order, message = self._order, self._message
        store = self._memory.clients(key_of(order))
        try:
            params = self._follow(agree(order, self._recipe), store, learner)
        except OutOfReachError as lost:
            return records.pack_reply(message, lost.reply(order))
        if params is None:
            params = records.unpack_model(message.content, order.num_params, order.dtype)
        else:
            store.save()
        metrics = learner.evaluate(order, params, self._statistics(learner))
        return records.pack_metrics(message, metrics)

    def _follow(self, agreed: Recipe, store: ClientStore, learner: Learner) -> FloatArray | None:
        """Return the model that the log leads to, and store it; None where there is no log."""
        parcel = self._order.parcel
        if parcel is None:
            return None
        return follow_log(terms_of(self._order, agreed), parcel, store, learner.start)

    def _statistics(self, learner: Learner) -> ClientStatistics:
        """Check that both sides have the same model; return what it has beside its parameters."""
        order, frame = self._order, b""
        if learner.model is not None:
            check_agreement(learner.model, order.layout, order.constants)
            limit = max_statistics_bytes(learner.model.layout)
            frame = order.statistics
            if len(frame) > limit:
                raise MessageError(f"the statistics have {len(frame)} bytes; {limit} are the most")
        keeper = Keeper(self._memory.directory, self._context.state, key_of(order))
        return ClientStatistics(learner.model, frame, keeper)
