"""A plain Flower handler as a learner for our own strategy: the mod's part beside the drop-in's.

The handler is given what FedAvg would send it, ``arrays`` and ``config``, and answers as it would
FedAvg: with the trained arrays and metrics. Which tensors there are it learns from the starting
model, which the server sends once and the node keeps.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from aqg.errors import ConfigError, MessageError, RunError
from aqg.flower import records
from aqg.flower.client_metrics import EXAMPLES, loss_in
from aqg.flower.forms import Form, record_of, values_of
from aqg.flower.serving import Trained
from aqg.flower.statistics import TaskModel, signature
from aqg.objectives.layout import Buffers
from aqg.protocol.client import key_of
from aqg.protocol.store import ArrayStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flwr.app import Context, Message
    from flwr.clientapp.typing import ClientAppCallable
    from numpy.typing import NDArray

    from aqg.core.types import FloatArray
    from aqg.flower.memory import Memory
    from aqg.flower.records import Given
    from aqg.flower.statistics import ClientStatistics
    from aqg.protocol.messages import Order
    from aqg.protocol.store import Vault

_logger = logging.getLogger("flwr.aqg")

ARRAYS, CONFIG, ROUND = "arrays", "config", "server-round"
"""Names of records, and of the round, as FedAvg has them."""
_UNREADABLE = (RunError, MessageError, ConfigError, ValueError, KeyError, TypeError, AttributeError)


class HandlerHost:
    """A node with a handler of Flower's.

    Args:
        call_next: the handler.

    """

    num_samples = None

    def __init__(self, call_next: ClientAppCallable) -> None:
        self._call_next = call_next

    def learner(
        self, message: Message, context: Context, given: Given, memory: Memory
    ) -> HandlerLearner | None:
        """Return what trains; None where it needs the starting model for that."""
        order = given.order
        store = StartStore(memory.starts(key_of(order)), order.constants)
        if given.start is not None:
            store.save(*given.start)
            del message.content[records.START]  # it is as large as the model
        start = store.load()
        if start is None or signature(start.form.layout)[: len(order.layout)] != order.layout:
            return None
        return HandlerLearner(message, context, given.config, start, self._call_next)


class Start(NamedTuple):
    """The model that a run started from.

    Attributes:
        form: what its tensors are.
        params: returns ``θ``; it is large, and seldom needed.
        buffers: that travel beside it.
        constants: tensors that do not travel.
        digest: of those, as the server names it.

    """

    form: Form
    params: Callable[[], FloatArray]
    buffers: Buffers
    constants: dict[str, NDArray[Any]]
    digest: bytes


class StartStore:
    """Keeps the starting model of a run in a vault.

    Args:
        vault: where it lies.
        digest: of the tensors that do not travel; a model with others is not found.

    """

    def __init__(self, vault: Vault, digest: bytes) -> None:
        self._vault = vault
        self._digest = digest
        self._arrays = ArrayStore(vault)

    def load(self) -> Start | None:
        """Return the starting model; None where there is none, or none that can be read."""
        try:
            index = self._index()
            if index.get("digest") != self._digest.hex():
                return None
            read = self._arrays.read
            buffers = Buffers(read(index["values"]), read(index["counts"]))
            constants = {name: read(cell) for name, cell in index["constants"].items()}
            form = Form.from_json(index["form"])
            return Start(form, lambda: read(index["params"]), buffers, constants, self._digest)
        except _UNREADABLE as error:
            _logger.warning("the saved starting model cannot be used: %r", error)
            return None

    def save(self, record: ArrayRecord, form: Form) -> None:
        """Write the starting model, whole or not at all."""
        form.check(record)
        values = values_of(record)
        buffers = form.buffers(values)
        self._arrays.reserve(_numbers_in(self._index()))
        write = self._arrays.write
        index = {
            "digest": self._digest.hex(),
            "form": form.to_json(),
            "params": write(form.flatten(values)),
            "values": write(buffers.values),
            "counts": write(buffers.counts),
            "constants": {name: write(t) for name, t in form.constants(values).items()},
        }
        self._arrays.commit(json.dumps(index), _numbers_in(index))

    def _index(self) -> dict[str, Any]:
        try:
            found = json.loads(self._vault.read_index() or "{}")
            return found if isinstance(found, dict) else {}
        except _UNREADABLE:
            return {}


def _numbers_in(index: Mapping[str, Any]) -> set[int]:
    cells = [index.get(name, {}) for name in ("params", "values", "counts")]
    cells += index.get("constants", {}).values()
    return {int(cell["number"]) for cell in cells if "number" in cell}


class FailedError(Exception):
    """The handler answered with an error of its own."""

    def __init__(self, reply: Message) -> None:
        super().__init__("the handler failed")
        self.reply = reply


class HandlerLearner:
    """Trains and measures with a handler of Flower's.

    Args:
        message: from the server; the handler sees it with other content.
        context: Flower's.
        config: for the handler.
        start: the model that the run started from.
        call_next: the handler.

    """

    def __init__(
        self,
        message: Message,
        context: Context,
        config: ConfigRecord,
        start: Start,
        call_next: ClientAppCallable,
    ) -> None:
        self._message = message
        self._context = context
        self._config = config
        self._start = start
        self._call_next = call_next
        self._buffers = start.buffers
        layout = start.form.layout
        self.model: TaskModel | None = TaskModel(
            layout, start.digest, lambda: self._buffers, self._write
        )

    def start(self) -> FloatArray | None:
        """Return the model that the run started from."""
        return self._start.params()

    def train(self, order: Order, params: FloatArray, statistics: ClientStatistics) -> Trained:
        """Let the handler train, and return what it changed."""
        form = self._start.form
        statistics.load()
        before = form.fill(self._start.constants, params, self._buffers)
        update = form.flatten(before)  # rounded, where tensors are in half precision
        reply = self._call(order, before)
        del before
        trained = [r for r in reply.content.values() if isinstance(r, ArrayRecord)]
        if len(trained) != 1:
            raise ConfigError(
                f"the reply of the train handler has {len(trained)} ArrayRecords; AQG takes one"
            )
        form.check(trained[0])
        after = values_of(trained[0])
        self._warn_of_lost_changes(after)
        with np.errstate(over="ignore", invalid="ignore"):  # looked at by the recipe
            update -= form.flatten(after)
        self._buffers = form.buffers(after)
        statistics.take()
        metrics = _metrics_in(reply.content)
        num_samples = metrics.pop(EXAMPLES, 0.0)
        loss = loss_in(metrics)
        is_whole = num_samples >= 0 and float(num_samples).is_integer()
        return Trained(update, loss, int(num_samples) if is_whole else 0, metrics)

    def evaluate(
        self, order: Order, params: FloatArray, statistics: ClientStatistics
    ) -> Mapping[str, float]:
        """Let the handler measure the model."""
        statistics.load()
        values = self._start.form.fill(self._start.constants, params, self._buffers)
        return _metrics_in(self._call(order, values).content)

    def _call(self, order: Order, values: dict[str, NDArray[Any]]) -> Message:
        # What is evaluated before round k is the model that round k-1 made.
        is_training = self._message.metadata.message_type == "train"
        number = order.round if is_training else order.round - 1
        config = ConfigRecord({**self._config, ROUND: number})
        self._message.content = RecordDict({ARRAYS: record_of(values), CONFIG: config})
        reply = self._call_next(self._message, self._context)
        if not reply.has_content():
            raise FailedError(reply)
        return reply

    def _write(self, buffers: Buffers) -> None:
        self._buffers = buffers

    def _warn_of_lost_changes(self, after: dict[str, NDArray[Any]]) -> None:
        for name, tensor in self._start.constants.items():
            if name in after and not np.array_equal(after[name], tensor, equal_nan=False):
                _logger.warning("%r was trained, but does not travel: the change is lost", name)


def _metrics_in(content: RecordDict) -> dict[str, float]:
    """Return the numbers in all metrics of a handler's reply."""
    found: dict[str, float] = {}
    for record in content.values():
        if not isinstance(record, MetricRecord):
            continue
        for name, value in record.items():
            if isinstance(value, int | float):
                found[name] = float(value)
            else:
                _logger.warning("metric %r is a list, which AQG does not average", name)
    return found
