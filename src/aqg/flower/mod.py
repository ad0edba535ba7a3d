"""The client's line: ``ClientApp(mods=[aqg_mod])``.

Before the app's handler runs, the mod puts the whole model into the message; after it, the mod
replaces the arrays of the reply by what the server does not know yet. The handler stays as it is.
It answers both ``Compressed(...)`` around a strategy and our own strategy, ``AQG``.

A node remembers its copy of a model, and the mirror of its updates (`NodeMemory`). Both are found
out to be old, damaged or missing by their digests, and repaired.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from aqg.channel.client import Held, Memory, OutOfReachError, receive, reply_to
from aqg.channel.tensors import Values
from aqg.core.recipe import Recipe
from aqg.errors import AqgError, ConfigError, MessageError, RunError
from aqg.flower.envelope import (
    RECORD,
    Envelope,
    is_readable,
    logger,
    loss_in,
    numbers_in,
    record_of,
    refusal,
    values_of,
)
from aqg.protocol.store import DirectoryVault, Vault, forget_old_runs

if TYPE_CHECKING:
    from flwr.clientapp.typing import ClientAppCallable

    Mod = Callable[[Message, Context, ClientAppCallable], Message]

STATE_DIR = "aqg-state-dir"
"""Key of a node's own configuration: the directory in which it remembers."""
SHARED_STATE_DIR = "client-state-dir"
"""Key of the run-config: a directory in which every node has one of its own."""
STATE_DAYS = "aqg-state-days"
"""Key of a node's own configuration: for how many days it remembers runs that do not go on."""
ENVIRONMENT = "AQG_STATE_DIR"
BY_PARTITION = "p"
"""Begins the names of runs whose clients are partitions, where nodes name one."""
IN_CONTEXT = "context"
"""In place of a directory: remember in Flower's context, for as long as the node lives."""
_DAYS = 30


class NodeMemory(Memory):
    """A node's memory, in a directory, or by default where `state_directory` says."""

    def __init__(self, context: Context, directory: Path | None = None) -> None:
        self._context = context
        found, is_own = (directory, False) if directory else state_directory(context)
        self.directory = found  # None where Flower's context remembers
        self._is_own = is_own

    def runs(self) -> Iterable[str]:
        if self.directory is None:
            names = [key[len("aqg-") : -len("-index")] for key in self._context.state]
        else:
            homes = {self._home(""), self._home(BY_PARTITION)}
            files = [f for home in homes if home for f in home.glob("*/state.json")]
            names = [file.parent.name for file in sorted(files, key=_age)]
        return dict.fromkeys(name for name in names if name.isalnum())

    def vault(self, run: str, name: str) -> Vault:
        home = self._home(run)
        if home is None or self.directory is None:
            return ContextVault(self._context.state, f"aqg-{name}")
        if name == run and not (home / run).exists():
            for node in {home, *self.directory.glob("*-*")}:  # also of nodes that are gone
                forget_old_runs(node, days_to_keep(self._context))
        return DirectoryVault(home / name)

    def forget(self, run: str) -> None:
        home = self._home(run)
        if home is not None and run.isalnum():
            for found in home.glob(f"{run}*"):
                shutil.rmtree(found, ignore_errors=True)

    def _home(self, run: str) -> Path | None:
        """Return a node's own directory.

        A client of our own server that comes back under another node id finds what it knew.
        """
        if self.directory is None or (self._is_own and run.startswith(BY_PARTITION)):
            return self.directory
        partition = partition_of(self._context) if run.startswith(BY_PARTITION) else None
        node = f"node-{self._context.node_id}"
        return self.directory / (node if partition is None else f"partition-{partition}")


class ContextVault:
    """The state of a Flower context: in memory, for as long as node and run live."""

    def __init__(self, records: RecordDict, prefix: str = "aqg") -> None:
        self._records = records
        self._index_name = f"{prefix}-index"
        self._prefix = f"{prefix}-vector-"

    def read_index(self) -> str | None:
        record = self._records.get(self._index_name)
        return str(record["json"]) if isinstance(record, ConfigRecord) else None

    def write_index(self, text: str) -> None:
        self._records[self._index_name] = ConfigRecord({"json": text})

    def read_vector(self, number: int) -> NDArray[Any]:
        record = self._records.get(f"{self._prefix}{number}")
        if not isinstance(record, ArrayRecord):
            raise RunError(f"the context has no vector {number}")
        return record["vector"].numpy()

    def write_vector(self, number: int, vector: NDArray[Any]) -> None:
        array = Array(np.ascontiguousarray(vector))
        self._records[f"{self._prefix}{number}"] = ArrayRecord({"vector": array})

    def keep_only(self, numbers: set[int]) -> None:
        kept = {f"{self._prefix}{number}" for number in numbers}
        for name in list(self._records):
            if name.startswith(self._prefix) and name not in kept:
                del self._records[name]


def _age(file: Path) -> float:
    try:
        return -file.stat().st_mtime
    except OSError:  # deleted just now
        return 0.0


def state_directory(context: Context) -> tuple[Path | None, bool]:
    """Return where nodes remember, None for Flower's own context; and whether one node owns it.

    That is the directory in the node's configuration (``aqg-state-dir``), in the run-config
    (``client-state-dir``), in the environment (``AQG_STATE_DIR``), Flower's context in a
    simulation, and otherwise ``~/.local/state/aqg``, or ``aqg`` in ``XDG_STATE_HOME``. Only the
    first is one node's own. ``context`` as a directory stands for Flower's context.
    """
    own = context.node_config.get(STATE_DIR)
    named = own or context.run_config.get(SHARED_STATE_DIR) or os.environ.get(ENVIRONMENT)
    if named == IN_CONTEXT:
        return None, False
    if named:
        return Path(os.path.expandvars(str(named))).expanduser(), bool(own)
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return None, False
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "aqg", False


def partition_of(context: Context) -> int | None:
    partition = context.node_config.get("partition-id")
    return partition if type(partition) is int else None


def days_to_keep(context: Context) -> float:
    days = context.node_config.get(STATE_DAYS, _DAYS)
    if isinstance(days, bool) or not isinstance(days, int | float) or not days > 0:
        raise ConfigError(f"{STATE_DAYS} is {days!r}; it must be a number above 0")
    return float(days)


UPDATE = "aqg-update"
"""A record of a reply whose arrays are updates, and not a trained model."""
ORDER = "aqg-order"
"""See `make_mod`."""
_LARGE = 1 << 25
"""Bytes of a model for whose memory a collection of garbage is worth its time."""
_SAID = "aqg-said"
"""A record of the node's context: that nothing is compressed was said before."""


def make_mod(
    state_dir: Path | str | None = None,
    recipe: Recipe | None = None,
    *,
    tells_order: bool = False,
    start: Callable[[Context], object] | None = None,
) -> Mod:
    """Return the mod with settings of your own.

    Args:
        state_dir: where a node remembers; by default see `aqg.flower.mod`.
        recipe: of your own, where the strategy `AQG` has one.
        tells_order: whether handlers find a record ``aqg-order`` beside the model, with the run's
            ``seed``, the number of the ``client``, the ``round`` and the policy for
            ``statistics``.
        start: makes the model that training starts from, where the node has it (a torch module, a
            ``state_dict`` or an ArrayRecord), so that with ``start="digest"`` on the server it
            need not travel.
    """
    directory = None if state_dir is None else Path(state_dir)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if not message.has_content() or RECORD not in message.content:
            _say_once(message, context)
            return call_next(message, context)
        try:
            envelope = Envelope.unpack(message.content)
            kinds = {kind for _, kind, _ in envelope.records}
            if Envelope.HELLO in kinds:
                partition = partition_of(context)
                said = str(-1 if partition is None else partition)
                return Envelope([(said, Envelope.HELLO, None)]).reply_to(message)
            memory = NodeMemory(context, directory)
            if Envelope.ENDED in kinds:
                for run, kind, _ in envelope.records:
                    if kind == Envelope.ENDED:
                        memory.forget(run)
                return Envelope().reply_to(message)
            own = (lambda: None) if start is None else (lambda: _tensors(start(context)))
            models = _receive(message, envelope, memory, recipe, own)
        except AqgError as error:
            return refusal(message, error)
        if isinstance(models, Envelope):  # what the server must know before anything can be done
            return models.reply_to(message)
        if tells_order:
            model = next(iter(models.values()))
            order, policy = model.order, model.beside().policy if model.is_stepping else ""
            told = {"seed": order.seed, "client": order.client, "round": order.round}
            message.content[ORDER] = ConfigRecord({**told, "statistics": policy})
        is_first = Envelope.FULL in kinds or any(model.order.first for model in models.values())
        is_held = not all(model.is_forgotten for model in models.values())
        del envelope
        started = time.perf_counter()
        reply = call_next(message, context)
        if not reply.has_content():
            return reply
        message.content = RecordDict()  # with the model, which the reply takes the place of
        try:
            envelope = _pack_reply(reply, models, memory, time.perf_counter() - started)
            if is_first and is_held and memory.directory is not None:
                envelope.add("", Envelope.ON_DISK)
            reply.content[RECORD] = envelope.pack()
        except AqgError as error:
            return refusal(message, error)
        return reply

    return mod


aqg_mod = make_mod()


def _say_once(message: Message, context: Context) -> None:
    """Say that the server sends whole models, once on each node."""
    if not message.has_content() or not message.content.array_records or _SAID in context.state:
        return
    context.state[_SAID] = ConfigRecord({"whole-models": True})
    logger.warning(
        "aqg: nothing is compressed: the server sends whole models; "
        "write Compressed(...) around its strategy"
    )


def _tensors(given: object) -> Values:
    from aqg.flower.task import is_module, values_in
    from aqg.weights import as_numpy

    if isinstance(given, ArrayRecord):
        return values_of(given)
    if is_module(given):
        return values_in(given)
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"start returned a {type(given).__name__}; it must be a torch module, its state_dict "
            "or an ArrayRecord"
        )
    return {name: as_numpy(tensor) for name, tensor in given.items()}


def _receive(
    message: Message,
    envelope: Envelope,
    memory: Memory,
    recipe: Recipe | None,
    start: Callable[[], Values | None],
) -> dict[str, Held] | Envelope:
    """Put the app's records into the message; return the models, or a reply that asks for one."""
    models: dict[str, Held] = {}
    content: dict[str, ArrayRecord | ConfigRecord | MetricRecord] = {}
    lost = Envelope(says_version=False)
    for name, kind, given in envelope.records:
        if kind in Envelope.WITH_PART:
            is_full = kind == Envelope.FULL
            record = message.content.get(name) if is_full else None
            if is_full and not (isinstance(record, ArrayRecord) and is_readable(record)):
                raise MessageError(f"the message has no model {name!r} of NumPy arrays")
            whole = values_of(record) if isinstance(record, ArrayRecord) else None
            try:
                model = receive(given, whole, memory, envelope.version, recipe, start)
            except OutOfReachError as error:
                lost.add(name, Envelope.COMPRESSED, error.reply)
                continue
            if not isinstance(record, ArrayRecord) or model.is_completed:
                record = record_of(model.values.items())
            content[name] = record
            models[name] = model._replace(values=values_of(record))
        elif kind == Envelope.BESIDE:
            content[name] = message.content[name]
        else:
            content[name] = envelope.small(kind, given)
    if lost.records:
        return lost
    message.content = RecordDict(content)
    return models


def _pack_reply(
    reply: Message, models: dict[str, Held], memory: Memory, seconds: float
) -> Envelope:
    """Take all that can be in one record out of a reply, and return it.

    Models are taken out of both before they are compressed: nothing here holds their tensors then.
    """
    envelope = Envelope(says_version=False)
    is_update = reply.content.pop(UPDATE, None) is not None
    loss = loss_in(numbers_in(reply.content))
    packed: dict[str, ArrayRecord | ConfigRecord | MetricRecord] = {}
    trained = [n for n, m in models.items() if m.is_trained and m.is_stepping]
    arrays = len(reply.content.array_records)
    if trained and arrays != 1:
        raise MessageError(
            f"the reply of the train handler has {arrays} ArrayRecords; AQG takes one"
        )
    for name in list(reply.content):
        record = reply.content[name]
        if not isinstance(record, ArrayRecord):
            envelope.add_small(name, record)
            continue
        answered = trained[0] if trained else name
        model = models.get(answered)
        if model is not None and model.is_trained and is_readable(record):
            difference = _difference(values_of(record), model)
            if not difference or is_update:
                before, after = [models.pop(answered)], [values_of(record)]
                del record, model, reply.content[name]
                if sum(tensor.nbytes for tensor in after[0].values()) > _LARGE:
                    gc.collect()  # Flower's records refer to themselves
                sent = reply_to(
                    before.pop(),
                    after.pop(),
                    memory,
                    is_update=is_update,
                    loss=loss,
                    seconds=seconds,
                )
                envelope.add(answered, Envelope.COMPRESSED, sent)
                continue
            if model.is_stepping:
                raise MessageError(difference)
        envelope.add(name, Envelope.BESIDE)
        packed[name] = record
    reply.content = RecordDict(packed)
    return envelope


def _difference(after: Values, model: Held) -> str:
    """Say how tensors differ from those of the model; empty where they do not."""
    for name, shape, dtype in model.schema.rows():
        found = after.get(name)
        if found is None:
            return f"the arrays have no {name!r}, which the model has"
        if (found.shape, str(found.dtype)) != (shape, dtype):
            return f"array {name!r} is {found.shape} {found.dtype}; the model has {shape} {dtype}"
    same = list(after) == list(model.schema.places)
    return "" if same else "the arrays are others than the model's, or in another order"
