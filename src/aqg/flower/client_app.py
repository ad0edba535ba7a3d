"""The ClientApp: answers orders with frames, and remembers."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from aqg.errors import AqgError, ConfigError, GradientError, MessageError
from aqg.flower import records
from aqg.flower.envelope import refusal
from aqg.flower.memory import Memory, partition_of
from aqg.flower.statistics import (
    ClientStatistics,
    Keeper,
    check_agreement,
    max_statistics_bytes,
)
from aqg.protocol.client import (
    OutOfReachError,
    agree,
    intact_base,
    key_of,
    log_reply,
    own_recipe,
    terms_of,
)
from aqg.protocol.client import follow_log as follow_model
from aqg.protocol.messages import MAX_FAULT_LENGTH
from aqg.protocol.mirrors import answer, stale_reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from flwr.clientapp.typing import Mod

    from aqg.core.recipe import Recipe
    from aqg.core.types import FloatArray
    from aqg.flower.task import FlowerTask
    from aqg.protocol.messages import Order
    from aqg.protocol.store import ClientStore

    Handler = Callable[[Message, Context], Message]

_logger = logging.getLogger("flwr.aqg")

_MESSAGE_BYTES = 12_000
"""What Flower adds to a reply, up to a few hundred bytes: ``benchmarks/flower.py bytes``."""
_TASKS_KEPT = 8
_NO_PARTITION = -1


def make_client_app(
    task_factory: Callable[[Context], FlowerTask],
    *,
    recipe: Recipe | None = None,
    mods: list[Mod] | None = None,
) -> ClientApp:
    """Make the ClientApp of a deployment.

    Args:
        task_factory: makes a node's task from its context, with its own data.
        recipe: in place of the one that the server names; the server must have an equal one.
        mods: of Flower, around every handler. Before training begins the model is taken out of the
            message, to save memory: read it there before the handler runs, not after.

    The client's memory is on disk, where `aqg.flower.memory.state_directory` says, and survives the
    node's process; a client that has lost it starts again from zero. At the start of a run,
    memories of others that were not used for ``aqg-state-days``, 30, are deleted there.

    """
    app = ClientApp(mods=mods)
    tasks: OrderedDict[tuple[int, int], FlowerTask] = OrderedDict()

    def task_of(context: Context) -> FlowerTask:
        key = (context.run_id, context.node_id)
        if key not in tasks:
            tasks[key] = task_factory(context)
            while len(tasks) > _TASKS_KEPT:  # one process may serve many nodes of a simulation
                tasks.popitem(last=False)
        return tasks[key]

    def follow_log(
        context: Context, order: Order, agreed: Recipe, store: ClientStore
    ) -> FloatArray | None:
        """Return the model that the log leads to, and store it; None where there is no log."""
        parcel = order.parcel
        if parcel is None:
            return None

        def start() -> FloatArray | None:
            own = task_of(context).start
            found = None if own is None else own()
            if own is not None and found is None:  # training has changed the module: make another
                fresh = task_factory(context).start
                found = None if fresh is None else fresh()
            return found

        return follow_model(terms_of(order, agreed), parcel, store, start)

    @app.train()
    @_refusing
    def train(message: Message, context: Context) -> Message:
        started = time.perf_counter()
        order = records.unpack_order(message.content)
        task = task_of(context)
        agreed = agree(order, recipe)
        chosen = own_recipe(agreed, order, task.is_exact, _MESSAGE_BYTES)
        memory = Memory(context, follows_node=False)
        store = memory.clients(key_of(order))
        if order.serial <= store.answered:
            _logger.warning("order for round %d is stale; nothing done", order.round)
            return records.pack_reply(message, stale_reply(order))
        try:
            params = follow_log(context, order, agreed, store)
        except OutOfReachError as lost:
            return records.pack_reply(message, lost.reply(order))
        base = intact_base(chosen, store, order)
        statistics = _statistics(task, order, memory, context)
        if params is None:
            params = records.take_model(message.content, order.num_params, order.dtype)
        loss, gradient = _train(task, order, params, statistics)
        del params  # large models: what is not needed any more makes room for the answer
        changed, trouble = statistics.finish()
        if changed and not order.layout:
            raise ConfigError(
                "training changes buffers of the module, and the server was given a flat vector "
                "without them: give make_server_app the module"
            )
        mirror, reply = answer(chosen, base, order, gradient, loss)
        store.save(mirror)  # before the reply leaves: a crash from here on is a lost upload
        log_reply(order, reply)
        reply = replace(
            reply,
            loss=loss,
            num_samples=task.num_samples,
            work_seconds=time.perf_counter() - started,
            statistics=changed,
            fault=reply.fault or trouble[:MAX_FAULT_LENGTH],
        )
        return records.pack_reply(message, reply)

    @app.evaluate()
    @_refusing
    def evaluate(message: Message, context: Context) -> Message:
        order = records.unpack_order(message.content)
        memory = Memory(context, follows_node=False)
        store = memory.clients(key_of(order))
        try:
            params = follow_log(context, order, agree(order, recipe), store)
        except OutOfReachError as lost:
            return records.pack_reply(message, lost.reply(order))
        if params is None:
            params = records.unpack_model(message.content, order.num_params, order.dtype)
        else:
            store.save()
        task = task_of(context)
        _statistics(task, order, memory, context).load()
        loss = task.evaluate(params) if task.evaluate is not None else float("nan")
        return records.pack_metrics(message, loss=float(loss), num_examples=task.num_samples)

    @app.query()
    def introduce(message: Message, context: Context) -> Message:
        partition = partition_of(context)
        content = records.pack_fields(
            records.HELLO,
            partition=_NO_PARTITION if partition is None else partition,
            samples=task_of(context).num_samples,
        )
        return Message(content, reply_to=message)

    return app


def _refusing(handler: Handler) -> Handler:
    """Answer what cannot be used with one line, as the mod does."""

    @wraps(handler)
    def refuse(message: Message, context: Context) -> Message:
        try:
            return handler(message, context)
        except AqgError as error:
            return refusal(message, error)

    return refuse


def _statistics(
    task: FlowerTask, order: Order, memory: Memory, context: Context
) -> ClientStatistics:
    """Check that both sides have the same model, and return what it has beside its parameters."""
    frame = b""
    if task.model is not None:
        check_agreement(task.model, order.layout, order.constants)
        limit = max_statistics_bytes(task.model.layout)
        frame = order.statistics
        if len(frame) > limit:
            raise MessageError(f"the statistics have {len(frame)} bytes; {limit} are the most")
    keeper = Keeper(memory.directory, context.state, key_of(order))
    return ClientStatistics(task.model, frame, keeper)


def _train(
    task: FlowerTask, order: Order, params: FloatArray, statistics: ClientStatistics
) -> tuple[float, FloatArray]:
    """Return the loss where it is wanted, and the vector to upload."""
    key = (order.seed, order.client, order.round)
    statistics.load()
    loss, gradient = task.train(params, order.round, key)
    statistics.take()
    vector = np.asarray(gradient)
    if vector.shape != params.shape:
        raise GradientError(f"train returned shape {vector.shape}; the model has {params.shape}")
    if not order.evaluate:
        loss = float("nan")
    elif not task.train_measures and task.evaluate is not None:
        statistics.load()
        loss = task.evaluate(params)
    return float(loss), vector.astype(order.dtype, copy=False)
